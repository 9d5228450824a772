"""Checkpoints of ESM-2: found, identified, downloaded, read without running anything in them."""
