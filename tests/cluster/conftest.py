"""The executors that the contract is held against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pipeline.cluster.local import LocalExecutor
from pipeline.cluster.machine import Machine
from pipeline.cluster.slurm import SlurmExecutor
from pipeline.config.schema_cluster import SlurmSection
from tests.slurm.conftest import cluster  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pipeline.cluster.job_spec import Executor

SMALL = Machine(cpus=4, gpus=("0", "1"), mem_bytes=1 << 30)


def open_local() -> LocalExecutor:
    """Return a local executor with a small machine and little patience."""
    return LocalExecutor(SMALL, grace_s=0.3)


def open_slurm() -> SlurmExecutor:
    """Return an executor on the cluster that SLURM_CONF names, which looks often."""
    return SlurmExecutor(SlurmSection(), poll_s=0.1)


EXECUTORS: dict[str, Callable[[], Executor]] = {"local": open_local, "slurm": open_slurm}


@pytest.fixture(params=["local", pytest.param("slurm", marks=pytest.mark.slurm)])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Each implementation in turn: at least 4 cores and 2 GPUs in all, and less than 2 TiB of memory."""
    if request.param == "slurm":
        request.getfixturevalue("cluster")
    with EXECUTORS[request.param]() as opened:
        yield opened
        if isinstance(opened, SlurmExecutor):  # whose jobs outlive it
            opened.cancel(tuple(opened._jobs))


@pytest.fixture
def local() -> Iterator[LocalExecutor]:
    """The local executor alone."""
    with open_local() as opened:
        yield opened
