"""Train protein-structure models on a SLURM cluster without ever dying of memory."""

__version__ = "0.1.0"
