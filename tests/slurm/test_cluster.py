"""The test cluster is a real one: it kills, counts, requeues and forgets as a site's does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testkit.cluster import Cluster, cgroups, processes
from tests.testkit.cluster.cluster import DEFAULT_FOLDER

pytestmark = pytest.mark.slurm

GREEDY = "srun python3 -c 'import time; held = bytearray(400 << 20); time.sleep(60)'"
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


def accounted(cluster: Cluster, *jobs: str) -> dict[str, tuple[str, str]]:
    """Return what accounting has on jobs and their steps, once all have ended: id → (state, node)."""
    rows: dict[str, tuple[str, str]] = {}

    def has_ended() -> bool:
        columns = "--format=JobID,State,NodeList"
        lines = cluster.run("sacct", "--noheader", "--parsable2", columns, "--jobs", ",".join(jobs)).stdout.splitlines()
        rows.update({job: (state.split()[0], node) for job, state, node in (line.split("|") for line in lines)})
        states = [rows.get(job, ("", ""))[0] for job in jobs]
        return not {"", "PENDING", "RUNNING"} & {*states}

    cluster.until(has_ended, f"the end of {jobs} in accounting")
    return rows


def test_a_job_runs_and_is_accounted(healthy: Cluster, tmp_path: Path) -> None:
    job = submit(healthy, f"--output={tmp_path}/out", script="echo ran")
    rows = accounted(healthy, job)
    assert rows[job][0] == "COMPLETED"
    assert (tmp_path / "out").read_text() == "ran\n"


def test_a_step_is_killed_above_its_memory_on_every_node(healthy: Cluster) -> None:
    jobs = [
        submit(healthy, f"--nodelist={n}", "--mem=100M", "--output=/dev/null", script=GREEDY) for n in healthy.nodes
    ]
    rows = accounted(healthy, *jobs)
    killed = "CANCELLED" if cgroups.detect() is cgroups.Cgroup.NONE else "OUT_OF_MEMORY"
    assert [rows[f"{job}.0"] for job in jobs] == [(killed, node) for node in healthy.nodes]


def test_three_nodes_with_two_tasks_each_have_a_gpu_per_task(healthy: Cluster) -> None:
    shape = ["--nodes=3", "--ntasks-per-node=2", "--gpus-per-task=1", "--cpus-per-task=2", "--mem=100M"]
    say = "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $SLURM_CPUS_PER_TASK"
    seen = healthy.run("srun", *shape, "bash", "-c", say).stdout.splitlines()
    assert sorted(seen) == [f"{node} {gpu} 2" for node in healthy.nodes for gpu in (0, 1)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--array=0-6"], "Invalid job array specification"),
        (["--qos=tiny", "--array=0-4"], "QOSMaxSubmitJobPerUserLimit"),
        (["--partition=short", "--time=3"], "Requested time limit is invalid"),
        (["--account=nobody"], "Invalid account"),
        (["--mem=7000M"], "Requested node configuration is not available"),
    ],
)
def test_what_a_site_refuses_is_refused(healthy: Cluster, options: list[str], words: str) -> None:
    done = healthy.run("sbatch", *options, "--output=/dev/null", "--wrap=true")
    assert done.returncode != 0
    assert words in done.stderr


@pytest.mark.nightly
def test_the_job_of_a_dead_node_is_put_back_in_the_queue(healthy: Cluster) -> None:
    node = healthy.nodes[-1]
    job = submit(healthy, f"--nodelist={node}", "--requeue", "--output=/dev/null", script="sleep 4321 & sleep 4321")
    wait_for(healthy, job, "JobState=RUNNING")
    healthy.kill_node(node)
    wait_for(healthy, job, "Restarts=1", 60)
    assert healthy.node_states()[node].startswith("down")
    healthy.revive_node(node)
    assert healthy.node_states()[node] == "idle"
    assert "NODE_FAIL" in healthy.run("sacct", "-D", "-n", "-P", "-o", "State", "-j", job).stdout


@pytest.mark.nightly
def test_a_job_of_higher_priority_puts_a_preemptible_one_back_in_the_queue(healthy: Cluster) -> None:
    place = [f"--nodelist={healthy.nodes[0]}", "--exclusive", "--output=/dev/null"]
    low = submit(healthy, "--partition=preempt", *place, script="sleep 4321")
    wait_for(healthy, low, "JobState=RUNNING")
    high = submit(healthy, "--partition=urgent", *place, script="sleep 4321")
    wait_for(healthy, high, "JobState=RUNNING")
    wait_for(healthy, low, "Restarts=1")
    assert "PREEMPTED" in healthy.run("sacct", "-D", "-n", "-P", "-o", "State", "-j", low).stdout


def test_jobs_run_while_accounting_is_down_and_are_told_later(healthy: Cluster) -> None:
    healthy.stop_accounting()
    assert healthy.run("sacct").returncode != 0
    job = submit(healthy, "--output=/dev/null", script="true")
    wait_for(healthy, job, "JobState=COMPLETED")
    healthy.start_accounting()
    assert accounted(healthy, job)[job][0] == "COMPLETED"


@pytest.mark.nightly
def test_jobs_outlive_the_controller(healthy: Cluster) -> None:
    job = submit(healthy, "--output=/dev/null", script="sleep 4321")
    wait_for(healthy, job, "JobState=RUNNING")
    healthy.stop_controller()
    assert healthy.run("scontrol", "ping").returncode != 0
    healthy.start_controller()
    wait_for(healthy, job, "JobState=RUNNING")


def test_starting_what_runs_and_mending_keep_the_jobs(healthy: Cluster) -> None:
    job = submit(healthy, f"--nodelist={healthy.nodes[0]}", "--output=/dev/null", script="sleep 4321")
    wait_for(healthy, job, "JobState=RUNNING")
    healthy.start()
    healthy.kill_node(healthy.nodes[1])
    healthy.stop_accounting()
    healthy.start()
    assert healthy.is_healthy()
    wait_for(healthy, job, "JobState=RUNNING")


@pytest.mark.nightly
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
