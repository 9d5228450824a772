"""Matching pairs: towers for images, texts and rows, CLIP's names, and what is nearest to what."""
