"""The executors that the contract is held against."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from pipeline.cluster.fork_server import CAN_FORK
from pipeline.cluster.local import LocalExecutor
from pipeline.cluster.machine import Machine
from pipeline.cluster.slurm import SlurmExecutor
from pipeline.config.schema_cluster import SlurmSection
from tests.slurm.conftest import cluster  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pipeline.cluster.job_spec import Executor, Job, JobId

needs_forks = partial(
    pytest.param, marks=pytest.mark.skipif(not CAN_FORK, reason="this system tells nobody how another's child ended")
)
FORKS = (
    sys.executable,
    "-c",
    "import sys; from pipeline.cluster.fork_server import serve; words = serve(int(sys.argv[1]), ['json'], ['csv']);"
    "sys.argv = ['-c', *words[1:]]; exec(words[0])",
)
SMALL = Machine(cpus=4, gpus=("0", "1"), mem_bytes=1 << 30)


def open_local() -> LocalExecutor:
    return LocalExecutor(SMALL, grace_s=0.3)


def open_slurm() -> SlurmExecutor:
    return SlurmExecutor(SlurmSection(), poll_s=0.1)


class ForkingExecutor(LocalExecutor):
    """A local executor that forks whatever program of Python it can."""

    def submit(self, job: Job) -> JobId:
        if job.argv[1:3] == ("-S", "-c") and not job.request.gpus:
            job = replace(job, fork_server=FORKS, fork_words=len(job.argv) - 3)
        return super().submit(job)


def open_forking() -> LocalExecutor:
    return ForkingExecutor(SMALL, grace_s=0.3)


EXECUTORS: dict[str, Callable[[], Executor]] = {"local": open_local, "forking": open_forking, "slurm": open_slurm}


@pytest.fixture(params=["local", needs_forks("forking"), pytest.param("slurm", marks=pytest.mark.slurm)])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Each implementation in turn: at least 4 cores and 2 GPUs in all, and less than 2 TiB of memory."""
    if request.param == "slurm":
        request.getfixturevalue("cluster")
    with EXECUTORS[request.param]() as opened:
        yield opened
        if isinstance(opened, SlurmExecutor):  # whose jobs outlive it
            opened.cancel(tuple(opened._jobs))


@pytest.fixture(params=[open_local, needs_forks(open_forking)], ids=["local", "forking"])
def local(request: pytest.FixtureRequest) -> Iterator[LocalExecutor]:
    """The local executor alone, with processes of their own and with forked ones."""
    with request.param() as opened:
        yield opened
