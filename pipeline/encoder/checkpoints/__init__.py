"""Checkpoints of the ESM families: found, identified, downloaded, read without running anything in them."""
