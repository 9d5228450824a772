"""Jobs of several processes that work together, on several nodes of a real cluster: however one of them ends."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster import slurm_commands
from pipeline.cluster.job_spec import Job, TaskState, TaskStatus
from pipeline.cluster.site import Site
from pipeline.cluster.slurm import SlurmExecutor
from pipeline.cluster.verdict import GO_ON, PEER_LOST, Cause, TaskVerdict, Word, judge_attempt
from pipeline.config.schema_cluster import SlurmSection
from pipeline.errors import SubmissionRefused
from tests.cluster.programs import MIB, finish, python, step_until
from tests.slurm.test_executor import opened
from tests.testkit.cluster import Cluster
from tests.testkit.cluster.config import GPUS_PER_NODE

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("cluster")]

WAIT_S = 60.0  # as sbatch/train.sbatch has it
BEGAN = Word(started=True)
RANK = f"""
import json, os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["SLURM_PROCID"])
again = os.environ.get("SLURM_RESTART_COUNT")
def write(name, text=""):
    draft = folder / f"draft-{{rank}}"
    draft.write_text(str(text))
    draft.rename(folder / f"{{name}}-{{rank}}")
def until(true):
    deadline = time.monotonic() + 150
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
def is_there(name, other):
    return (folder / f"{{name}}-{{other}}").exists()
def lose(other):
    until(lambda: is_there("pid", other))
    pid = (folder / f"pid-{{other}}").read_text()
    until(lambda: not os.path.exists(f"/proc/{{pid}}"))
    sys.exit({PEER_LOST})
def told(number, frame):
    write("told", number)
    sys.exit(ends(number))
ends = lambda number: {GO_ON}
for number in (signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, told)
write("pid", os.getpid())
"""
TELLS = "write('began')\nwhile not again: time.sleep(0.05)\nwrite('ended')"
KILLED = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.fixture
def executor(healthy: Cluster) -> Iterator[SlurmExecutor]:
    with opened() as executor:
        yield executor


def ranks(folder: Path, body: str, *, nodes: int = 2, **more: Any) -> Job:
    """Return a job of 2 ranks on each node that run a program."""
    (folder / "ranks").mkdir(parents=True)
    return python(folder, RANK + body, str(folder / "ranks"), nodes=nodes, ranks=2, **more)


def written(folder: Path, name: str) -> dict[int, str]:
    """Return what ranks have written under a name."""
    return {int(path.name.rpartition("-")[2]): path.read_text() for path in (folder / "ranks").glob(f"{name}-*")}


def judged(task: TaskStatus, spec: Job) -> TaskVerdict:
    """Judge a task by its status and its log."""
    return judge_attempt(task, BEGAN, Path(task.stderr).read_text(), asked_bytes=spec.request.mem_bytes)


@pytest.mark.nightly
@pytest.mark.parametrize("site", [{}, {"memory": "mem-per-cpu", "gpus": "gpus-per-node"}], ids=["mem", "mem-per-cpu"])
def test_ranks_know_who_they_are_and_see_all_gpus_of_their_node(
    executor: SlurmExecutor, tmp_path: Path, site: dict[str, Any]
) -> None:
    executor.site = Site(SlurmSection(**site))
    body = "write('knows', json.dumps({**os.environ, 'cores': len(os.sched_getaffinity(0))}))"
    spec = ranks(tmp_path, body, gpus=GPUS_PER_NODE, cpus=2, mem_bytes=100 * MIB)
    (task,) = finish(executor, executor.submit(spec))
    assert task.state is TaskState.COMPLETED, Path(task.stderr).read_text()
    known = {rank: json.loads(text) for rank, text in written(tmp_path, "knows").items()}
    assert sorted(known) == [0, 1, 2, 3]
    names = ("SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    assert [tuple(known[rank][name] for name in names) for rank in range(4)] == [
        ("0", "0", "4", "0,1", "2"),
        ("1", "0", "4", "0,1", "2"),
        ("0", "1", "4", "0,1", "2"),
        ("1", "1", "4", "0,1", "2"),
    ]
    limits = {(known[rank].get("SLURM_MEM_PER_NODE"), known[rank].get("SLURM_MEM_PER_CPU")) for rank in range(4)}
    assert limits == {(None, "25") if site else ("100", None)}, "of 4 cores on a node"
    assert len({known[rank]["SLURMD_NODENAME"] for rank in range(4)}) == 2


@pytest.mark.nightly
def test_ranks_that_stop_in_order_one_after_the_other_all_come_to_their_end_and_go_on(
    executor: SlurmExecutor, tmp_path: Path
) -> None:
    """The others end only when srun has reported the first one's exit code."""
    log = "pathlib.Path(sys.argv[2])"
    slow = f"def ends(number):\n    until(lambda: rank == 0 or 'task 0: Exited' in {log}.read_text())\n"
    slow += f"    write('stopped')\n    return {GO_ON}\n"
    spec = ranks(tmp_path, slow + TELLS)
    spec = replace(spec, argv=(*spec.argv[:-1], f"{tmp_path}/log", spec.argv[-1]))
    job = executor.submit(spec)
    (tmp_path / "log").symlink_to(executor.status([job])[0].stderr)
    step_until(executor, lambda: len(written(tmp_path, "began")) == 4)
    slurm_commands.run_command(["scancel", "--signal=USR2", job])
    (task,) = finish(executor, job)
    assert (task.state, task.restarts) == (TaskState.COMPLETED, 1), Path(task.stderr).read_text()
    assert sorted(written(tmp_path, "stopped")) == sorted(written(tmp_path, "ended")) == [0, 1, 2, 3]


@pytest.mark.nightly
@pytest.mark.parametrize(("nodes", "eater"), [(1, 1), (2, 3)])
def test_a_rank_over_the_memory_of_its_node_is_out_of_memory(
    executor: SlurmExecutor, tmp_path: Path, nodes: int, eater: int
) -> None:
    """Of two nodes the step's highest exit code may hide it, then only the log tells; nor is what they took sampled."""
    held = "held = bytearray(b'x') * (20 << 20)\ntime.sleep(2.5)\n"  # at least two samples
    eats = f"if rank == {eater}: held = bytearray(b'x') * (200 << 20)\n"
    spec = ranks(tmp_path, f"{held}{eats}lose({eater})", nodes=nodes, mem_bytes=100 * MIB)
    (task,) = finish(executor, executor.submit(spec))
    assert task.state is TaskState.OUT_OF_MEMORY or (nodes, task.state) == (2, TaskState.FAILED)
    verdict = judged(task, spec)
    assert (verdict.cause, verdict.peak_bytes) == (Cause.HOST_OOM, 100 * MIB)
    assert verdict.node in task_nodes(task)
    if nodes == 1:
        assert (task.peak_rss_bytes or 0) > 20 * MIB


@pytest.mark.nightly
def test_cancelled_ranks_are_told_each_and_do_not_come_back(executor: SlurmExecutor, tmp_path: Path) -> None:
    job = executor.submit(ranks(tmp_path, TELLS))
    step_until(executor, lambda: len(written(tmp_path, "began")) == 4)
    executor.cancel([job])
    (task,) = finish(executor, job)
    assert (task.state, task.restarts) == (TaskState.CANCELLED, 0)
    assert written(tmp_path, "told") == {rank: str(int(signal.SIGTERM)) for rank in range(4)}


class TestLimits:
    @pytest.mark.nightly
    def test_more_nodes_or_cores_than_there_are_are_refused(
        self, executor: SlurmExecutor, healthy: Cluster, tmp_path: Path
    ) -> None:
        spec, there = ranks(tmp_path, "pass"), len(healthy.nodes)
        for asked, remedy in (
            ({"nodes": there + 1}, f"cluster.test.nodes={there}"),
            ({"cpus": 3}, "cluster.test.cpus=2"),
            ({"ranks": 5}, "cluster.test.ranks=4"),
        ):
            with pytest.raises(SubmissionRefused) as refused:
                executor.check(spec.asking(**asked))
            assert refused.value.remedy.endswith(remedy)

    @pytest.mark.nightly
    def test_job_of_several_nodes_can_be_tested_for_when_it_would_start(
        self, executor: SlurmExecutor, tmp_path: Path
    ) -> None:
        start = executor.starts(ranks(tmp_path, "pass", nodes=3, gpus=GPUS_PER_NODE, time_s=60))
        assert start is not None
        assert abs(start - time.time()) < 600


@pytest.fixture(scope="module")
def slow(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, TaskStatus]]]:
    """Return the folder and the end of two jobs that take more than a minute, side by side."""
    cluster.settle()
    specs = {
        "deaf": ranks(tmp_path_factory.mktemp("deaf"), KILLED + "until(lambda: False)"),
        "limited": ranks(tmp_path_factory.mktemp("limited"), TELLS, time_s=60),
    }
    with opened() as executor, pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.cluster.programs.DEADLINE_S", 180.0)
        jobs = {executor.submit(spec): name for name, spec in specs.items()}
        yield {jobs[task.job]: (Path(specs[jobs[task.job]].log_dir), task) for task in finish(executor, *jobs)}


@pytest.mark.nightly
def test_ranks_that_do_not_notice_that_one_is_gone_are_ended_by_srun(slow: dict[str, tuple[Path, TaskStatus]]) -> None:
    folder, task = slow["deaf"]
    assert task.started is not None
    assert task.ended is not None
    assert task.ended - task.started >= WAIT_S - 1
    assert task.state is TaskState.FAILED
    verdict = judge_attempt(task, BEGAN, Path(task.stderr).read_text())
    assert verdict.cause is Cause.CRASHED
    assert "rank 1 on" in verdict.reason, verdict
    assert 1 not in written(folder, "told")


@pytest.mark.nightly
def test_time_limit_is_told_to_every_rank_and_they_go_on(slow: dict[str, tuple[Path, TaskStatus]]) -> None:
    folder, task = slow["limited"]
    assert (task.state, task.restarts) == (TaskState.COMPLETED, 1)
    assert written(folder, "told") == {rank: str(int(signal.SIGUSR2)) for rank in range(4)}
    assert sorted(written(folder, "ended")) == [0, 1, 2, 3]


def task_nodes(task: TaskStatus) -> list[str]:
    """Return the nodes of a task."""
    return slurm_commands.run_command(["scontrol", "show", "hostnames", task.node]).split()
