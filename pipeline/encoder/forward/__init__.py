"""The forward pass of ESM-2 over packed sequences, and the proof that it equals fair-esm's."""
