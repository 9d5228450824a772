"""Spectra as DreaMS reads them: its network and heads, losses, figures, published names, and libraries to search."""
