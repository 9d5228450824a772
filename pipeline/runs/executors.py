"""Which executor a configuration means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.cluster.local import LocalExecutor
from pipeline.cluster.machine import Machine

if TYPE_CHECKING:
    from pipeline.cluster.spec import Executor
    from pipeline.config.schema import Config
    from pipeline.config.schema_cluster import Slots


def local_machine(slots: Slots) -> Machine:
    """Return what the configuration lends of this machine."""
    given = {"cpus": slots.cpus, "gpus": slots.gpus, "mem_bytes": slots.mem}
    return Machine.detect(**{name: value for name, value in given.items() if value != "auto"})


def stays(config: Config) -> bool:
    """Tell whether a supervisor is a process that stays until its run has ended; else it is jobs that pay visits."""
    return config.cluster.executor == "local" or config.cluster.supervisor.where == "login"


def open_executor(config: Config, poll_s: float | None = None) -> Executor:
    """Return what runs the tasks of a configuration; `poll_s` is how often a cluster is asked, if not as configured."""
    if config.cluster.executor == "slurm":
        from pipeline.cluster.slurm import SlurmExecutor

        return SlurmExecutor(config.cluster.slurm, poll_s=poll_s)
    return LocalExecutor(local_machine(config.cluster.slots))
