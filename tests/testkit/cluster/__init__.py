"""A throw-away real Slurm cluster on one machine: `python -m tests.testkit.cluster up`."""

from tests.testkit.cluster.cluster import Cluster, ClusterBroken, why_not

__all__ = ["Cluster", "ClusterBroken", "why_not"]
