"""RNA pockets and their ligands, as RNA-3E-FFI has them: force fields read, an equivariant network, ligands ranked."""
