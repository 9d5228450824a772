"""Simulated cards: devices of torch's own kind, without a GPU."""
