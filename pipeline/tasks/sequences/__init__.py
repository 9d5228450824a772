"""Proteins by their sequences: ESM-2 as a network that is trained, by LoRA or its top layers, and its names."""
