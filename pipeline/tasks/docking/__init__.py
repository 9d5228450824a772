"""Docking by diffusion, as DiffDock-PP does it: equivariant networks, noise on rigid moves, a sampler of poses."""
