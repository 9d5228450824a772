"""The forward pass of the ESM families over packed sequences, and the proof that it equals its references."""
