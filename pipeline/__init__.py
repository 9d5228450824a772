"""Train protein-structure models on a SLURM cluster without ever dying of memory. Your code imports `pipeline.api`."""

__version__ = "0.1.0"
