"""The executors that the contract is held against."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.cluster.allocation import AllocationExecutor
from pipeline.cluster.fork_server import CAN_FORK
from pipeline.cluster.local import LocalExecutor
from pipeline.cluster.machine import Machine
from pipeline.cluster.slurm import SlurmExecutor
from pipeline.config.schema_cluster import AllocationSection, SlotsSection, SlurmSection
from tests.slurm.conftest import cluster  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pipeline.cluster.job_spec import Executor, Job, JobId
    from tests.testkit.cluster import Cluster

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


def open_allocation() -> AllocationExecutor:
    """Return three nodes of a host file, all of them this machine, where `env` starts the agents in place of ssh."""
    folder = Path(tempfile.mkdtemp())
    hosts = folder / "hosts"
    hosts.write_text("".join(f"node{number} slots=2 gpus=1\n" for number in range(3)))
    section = AllocationSection(hosts=hosts, start=("env", "HOST={host}"), grace="1s")
    return AllocationExecutor(section, SlotsSection(mem=SMALL.mem_bytes), folder / "shared")


def open_in_slurm_job() -> AllocationExecutor:
    """Return the three nodes of a Slurm job; `executor` sets its variables."""
    return AllocationExecutor(AllocationSection(grace="2s"), SlotsSection(cpus=2, gpus=1), Path(tempfile.mkdtemp()))


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


EXECUTORS: dict[str, Callable[[], Executor]] = {
    "local": open_local,
    "forking": open_forking,
    "slurm": open_slurm,
    "hosts": open_allocation,
    "slurm job": open_in_slurm_job,
}
NIGHTLY_SLURM = (pytest.mark.slurm, pytest.mark.nightly)


@pytest.fixture(scope="package")
def slurm_job(cluster: Cluster) -> Iterator[None]:  # noqa: F811 - the fixture
    """Be in a job that has three nodes."""
    cluster.settle()
    size = ["--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=2", "--gres=gpu:1", "--mem=2G", "--time=30"]
    job = cluster.run("sbatch", "--parsable", *size, "--output=/dev/null", "--wrap=sleep 1800").stdout.strip()
    cluster.until(lambda: "R" in cluster.run("squeue", "-h", "-j", job, "-o", "%t").stdout, "a job of three nodes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", job)
        patch.setenv("SLURM_JOB_NODELIST", ",".join(cluster.nodes))
        yield
    cluster.run("scancel", job)


@pytest.fixture(
    params=[
        "local",
        needs_forks("forking"),
        pytest.param("slurm", marks=pytest.mark.slurm),
        pytest.param("hosts", marks=pytest.mark.nightly),
        pytest.param("slurm job", marks=NIGHTLY_SLURM),
    ]
)
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Each implementation in turn: at least 4 cores and 2 GPUs in all, and less than 2 TiB of memory."""
    if fixture := {"slurm": "cluster", "slurm job": "slurm_job"}.get(request.param):
        request.getfixturevalue(fixture)
    with EXECUTORS[request.param]() as opened:
        yield opened
        if isinstance(opened, SlurmExecutor):  # whose jobs outlive it
            opened.cancel(tuple(opened._jobs))


@pytest.fixture(params=[open_local, needs_forks(open_forking)], ids=["local", "forking"])
def local(request: pytest.FixtureRequest) -> Iterator[LocalExecutor]:
    """The local executor alone, with processes of their own and with forked ones."""
    with request.param() as opened:
        yield opened
