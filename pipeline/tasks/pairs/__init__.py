"""Matching pairs: towers for images, texts and rows, CLIP's names, and the nearest of each side."""
