"""Executors: they run jobs on Slurm, on this machine, or on the nodes of an allocation."""
