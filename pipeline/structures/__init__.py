"""From files people have to residues and sequences, by an explicit policy."""
