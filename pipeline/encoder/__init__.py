"""Sequences in, embeddings out: checkpoints, the packed ESM-2 forward pass, batches, what to do when memory ends."""
