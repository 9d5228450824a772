"""A script of the user's as the stage train of runs on a real cluster: limits of time and memory, several processes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.journal.run_status import State
from tests.testkit.cluster import Cluster
from tests.testkit.slurm_runs import Project, Run, make_project

pytestmark = pytest.mark.slurm

PYTHON = f"{shlex.quote(sys.executable)} -S own.py"
MIB = 1 << 20

SAVES = """\
import json, os, signal, sys, time
from pathlib import Path

told = []
signal.signal(signal.SIGUSR2, lambda number, frame: told.append(number))
saved = Path(sys.argv[1], "saved")
step = int(saved.read_text()) if saved.exists() else 0
Path("starts").open("a").write(f"{step} {os.environ.get('SLURM_RESTART_COUNT', '0')}\\n")
last = step + 10 if step else 1_000_000
while step < last:
    step += 1
    print("pipeline:", json.dumps({"step": step}), flush=True)
    time.sleep(0.1)
    if told:
        saved.write_text(str(step))
        sys.exit(75)
"""
EATS = f"held = b'x' * {600 * MIB}\nprint('held', len(held))\n"
MEETS = """\
import os, socket, sys
from pathlib import Path

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
came = [rank]
if rank == 0:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", place[1]))
        listener.listen()
        for _ in range(world - 1):
            with listener.accept()[0] as other:
                came.append(int(other.recv(9)))
else:
    for _ in range(600):
        try:
            with socket.create_connection(place, 1) as first:
                first.sendall(str(rank).encode())
                break
        except OSError:
            import time
            time.sleep(0.1)
    else:
        sys.exit("nobody there")
names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURMD_NODENAME")
Path(f"rank-{rank}").write_text(" ".join([str(sorted(came)), *(os.environ[name] for name in names)]))
"""
STARTS = """\
import os, sys
from pathlib import Path
said = [*sys.argv[1:], os.environ["SLURMD_NODENAME"], str("RANK" in os.environ)]
Path(f"node-{sys.argv[2]}").write_text(" ".join(said))
"""
HANGS = """\
import os, sys, time
if sys.argv[1] == "1":
    sys.exit()
if os.environ["RANK"] == "1":
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
time.sleep(600)
"""


@pytest.fixture(scope="module")
def begun(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """One run of each kind, all under way at once: a time limit takes its minute."""
    cluster.settle()
    place = tmp_path_factory.mktemp("scripted")
    two_nodes = {"cluster__train__nodes": 2, "cluster__train__ranks": 2, "train__effective_batch": 4}
    return {
        "time": submitted(place / "time", SAVES, "{output}", cluster__train__time="1m", cluster__train__mem="300MiB"),
        "hangs": submitted(
            place / "hangs", HANGS, "{micro_batch} {accumulation}", cluster__train__ranks=2, train__effective_batch=4,
            cluster__train__mem="500MiB",
        ),
        "memory": submitted(place / "memory", EATS, "", cluster__train__mem="400MiB"),
        "meets": submitted(place / "meets", MEETS, "", cluster__train__mem="500MiB", **two_nodes),
        "starts": submitted(
            place / "starts", STARTS, "{processes} {node} {nodes} {ranks} {rank}", cluster__train__mem="500MiB",
            **two_nodes,
        ),
    }  # fmt: skip


def submitted(folder: Path, script: str, arguments: str, **settings: Any) -> Run:
    """Submit a script, and nothing else."""
    project = make_project(folder, items=0, train__command=f"{PYTHON} {arguments}", **settings)
    (folder / "own.py").write_text(script)
    return project.submits("train", "--only")


def failures(run: Run) -> list[tuple[str, int]]:
    return [(one["cause"], one["number"]) for one in run.stage("train")["failures"]]


@pytest.mark.nightly
def test_a_script_that_heeds_the_warning_of_its_time_limit_goes_back_into_the_queue_and_ends(
    begun: dict[str, Run],
) -> None:
    run = begun["time"]
    run.ends()
    first, second = (line.split() for line in (run.project.folder / "starts").read_text().splitlines())
    assert (first, int(second[0]) > 100, second[1]) == (["0", "0"], True, "1")
    assert failures(run) == []
    assert run.stage("train")["census"]["figures"]["step"] == int(second[0]) + 10


@pytest.mark.nightly
def test_a_script_killed_at_the_limit_of_its_memory_begins_again_with_more(begun: dict[str, Run]) -> None:
    run = begun["memory"]
    run.ends()
    assert failures(run) == [("host_oom", 1)]
    assert run.stage("train")["failures"][0]["ask"]["mem_bytes"] == 400 * MIB
    assert "held 629145600" in run.project.types("logs", run.name, "--task", "0").out


@pytest.mark.nightly
def test_processes_on_two_nodes_are_told_where_to_meet_as_by_torchrun(begun: dict[str, Run]) -> None:
    run = begun["meets"]
    run.ends()
    found = [(run.project.folder / f"rank-{rank}").read_text() for rank in range(4)]
    assert found[0].startswith("[0, 1, 2, 3] 0 2 0 ")
    places = [text.split("] ")[1].split() for text in found]
    assert [place[:3] for place in places] == [["0", "2", "0"], ["1", "2", "0"], ["0", "2", "1"], ["1", "2", "1"]]
    nodes = [place[3] for place in places]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]


@pytest.mark.nightly
def test_a_command_that_starts_processes_itself_is_started_once_on_each_node(begun: dict[str, Run]) -> None:
    run = begun["starts"]
    run.ends()
    found = sorted((run.project.folder / name).read_text() for name in ("node-0", "node-1"))
    assert [text.split()[:5] for text in found] == [["2", "0", "2", "4", "0"], ["2", "1", "2", "4", "2"]]
    assert len({text.split()[5] for text in found}) == 2
    assert {text.split()[6] for text in found} == {"False"}


@pytest.mark.nightly
def test_a_process_whose_memory_ended_is_the_reason_though_another_hangs(begun: dict[str, Run]) -> None:
    run = begun["hangs"]
    run.ends()
    assert failures(run) == [("gpu_oom", 1)]
    assert run.stage("train")["census"]["micro_batch"] == 1


@pytest.mark.nightly
def test_a_script_that_fails_ends_the_run_with_its_last_lines(tmp_path: Path, healthy: Cluster) -> None:
    run = submitted(tmp_path / "project", "print('reading', flush=True)\nprint(1 / 0)\n", "")
    run.ends(State.FAILED)
    error = run.reported()["error"]
    assert "ZeroDivisionError" in error
    assert "| reading" in error
    assert failures(run) == [("failed", 1)]


@pytest.mark.nightly
def test_the_job_that_would_be_submitted_asks_for_what_a_node_has_at_most(tmp_path: Path, healthy: Cluster) -> None:
    project: Project = make_project(tmp_path / "project", items=0, train__command=PYTHON)
    done = project.types("submit", "--stage", "train", "--only", "--executor", "slurm", "--dry-run")
    assert done.code == 0, done.err
    assert "#SBATCH --mem=6000M" in done.out, "of the 8 GiB that are stated"
    assert "default: a script's memory is unknown" in done.out
