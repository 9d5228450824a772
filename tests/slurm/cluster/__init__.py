"""A throw-away real Slurm cluster on one machine: `python -m tests.slurm.cluster up`."""

from tests.slurm.cluster.cluster import Cluster, ClusterBroken, why_not

__all__ = ["Cluster", "ClusterBroken", "why_not"]
