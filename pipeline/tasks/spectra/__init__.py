"""DreaMS: spectra, its network and heads, losses, metrics, published names, and libraries to search."""
