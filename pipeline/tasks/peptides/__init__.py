"""Peptides from spectra, as pepTRM finds them: a recursive network, its losses, and peptides as tables."""
