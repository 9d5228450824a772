"""Structures in, graphs out: neighbours, residue and atom graphs, their encoding, and a view for PyG."""
