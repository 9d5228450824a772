"""Docking: how fast poses are sampled."""
