"""Train protein-structure models on a Slurm cluster with planned memory. Your code imports `pipeline.api`."""

__version__ = "0.1.0"
