"""Embeddings, against fair-esm's own batching and model."""
