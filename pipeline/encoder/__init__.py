"""Sequences in, ESM-2 embeddings out."""
