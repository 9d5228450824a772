"""From structures to graphs: neighbours, residue and atom graphs, their encoding, and a view for PyG."""
