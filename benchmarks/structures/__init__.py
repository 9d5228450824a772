"""Scanning files and building graphs, against Biopython."""
