"""Tracing of a training step on fake tensors, as if on the card: every allocation, without data or GPU."""
