"""Docking by diffusion, as DiffDock-PP does it: equivariant networks, noise on rigid moves, poses and their files."""
