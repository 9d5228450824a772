"""The test cluster: it mends itself without losing jobs, and leaves nothing behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testkit.cluster import Cluster, processes
from tests.testkit.cluster.cluster import DEFAULT_FOLDER

pytestmark = [pytest.mark.slurm, pytest.mark.nightly]

PROOF_FOLDER = DEFAULT_FOLDER.with_name("pipeline-slurm-proof")


@pytest.fixture
def another() -> Iterator[Cluster]:
    """Return a second cluster, not started, beside the one that all tests share."""
    cluster = Cluster(PROOF_FOLDER)
    yield cluster
    cluster.stop()


def submit(cluster: Cluster, *options: str, script: str) -> str:
    """Submit a script of one line and return the job's number."""
    done = cluster.run("sbatch", "--parsable", *options, f"--wrap={script}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_for(cluster: Cluster, job: str, word: str, timeout_s: float = 30.0) -> None:
    """Wait until the controller's words about a job contain some."""
    cluster.until(lambda: word in cluster.run("scontrol", "show", "job", job).stdout, f"{word} of job {job}", timeout_s)


def test_starting_what_runs_and_mending_keep_the_jobs(healthy: Cluster) -> None:
    job = submit(healthy, f"--nodelist={healthy.nodes[0]}", "--output=/dev/null", script="sleep 4321")
    wait_for(healthy, job, "JobState=RUNNING")
    healthy.start()
    healthy.kill_node(healthy.nodes[1])
    healthy.stop_accounting()
    healthy.start()
    assert healthy.is_healthy()
    wait_for(healthy, job, "JobState=RUNNING")


def test_what_an_earlier_cluster_left_does_not_matter_and_stopping_leaves_nothing(another: Cluster) -> None:
    another.start()
    job = submit(another, "--output=/dev/null", script="sleep 4321")
    wait_for(another, job, "JobState=RUNNING")
    (munged,) = [pid for pid, name in processes.daemons(another.folder).items() if name == "munged"]
    processes.end(munged, signal.SIGKILL, lambda _: True)
    another.conf.write_text("half a")
    another.start()
    assert another.is_healthy()
    assert not another.run("squeue", "-h").stdout
    another.stop()
    assert not another.is_running()
    assert not another.folder.exists()
    assert not list(Path("/sys/fs/cgroup").glob(f"*/slurm_{another.nodes[0]}"))
