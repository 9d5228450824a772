"""A training step run on fake tensors as if on the card: every allocation, to the byte, without data or GPU."""
