"""Checkpoints and weights: written whole, verified when read, claimed by one writer."""
