"""What is remembered in a folder: many writers, torn and foreign lines, more than is read, folders that refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.memory import history
from pipeline.memory.history import Profiles, Suggestion, measurement_line
from tests.memory.history.tasks import GIB, MIB, measured

ROOT = Path(__file__).parents[3]
NAME, OWN = "tasks.jsonl", f"tasks-{os.getuid()}.jsonl"
WRITER = """
import sys; from pathlib import Path
from pipeline.memory.history import Profiles; from tests.memory.history.tasks import *
folder, name = Path(sys.argv[1]), sys.argv[2]
for number in range(20):
    profiles = Profiles(folder / 'tasks.jsonl')
    assert profiles.record("run", [measured(number, cluster=name), measured(number, recipe=name)])
    assert profiles.suggest("embed", name, "north", planned_bytes=GIB).tasks == number + 1
"""


def ask(folder: Path, recipe: str = "ab12", cluster: str = "north") -> Suggestion:
    return Profiles(folder / NAME).suggest("embed", recipe, cluster, planned_bytes=GIB)


def remember(folder: Path, tasks: range, run: str = "run") -> None:
    assert Profiles(folder / NAME).record(run, [measured(task) for task in tasks])


def test_what_one_run_measured_the_next_one_asks_for(tmp_path: Path) -> None:
    assert (ask(tmp_path).mem_bytes, ask(tmp_path).tasks) == (GIB, 0), "what was planned"
    assert Profiles(tmp_path / NAME).pace("embed", "ab12", "north") is None
    assert list(tmp_path.iterdir()) == []
    remember(tmp_path, range(41))
    assert (ask(tmp_path).mem_bytes, ask(tmp_path).tasks) == (640 * MIB, 41)
    assert Profiles(tmp_path / NAME).pace("embed", "ab12", "north") == 0.25


def test_the_same_recipe_elsewhere_counts_before_other_recipes_here(tmp_path: Path) -> None:
    profiles = Profiles(tmp_path / NAME)
    profiles.record("a", [measured(task, cluster="south", peak_bytes=4 * GIB) for task in range(9)])
    alone = ask(tmp_path, recipe="other")
    profiles.record("b", [measured(task, recipe="cd34", peak_bytes=3 * GIB) for task in range(5)])
    assert (alone.tasks, ask(tmp_path).tasks, ask(tmp_path, recipe="other").tasks) == (9, 9, 5)
    assert ask(tmp_path).mem_bytes > 4 * GIB
    assert profiles.suggest("graph", "ab12", "north", planned_bytes=GIB).tasks == 0
    assert profiles.pace("embed", "ab12", "north") is None


def test_a_task_told_twice_counts_once_and_with_its_larger_peak(tmp_path: Path) -> None:
    for _ in range(2):
        remember(tmp_path, range(9))
    Profiles(tmp_path / NAME).record("run", [measured(0, peak_bytes=600 * MIB), measured(0, peak_bytes=MIB)])
    assert (ask(tmp_path).mem_bytes, ask(tmp_path).tasks) == (768 * MIB, 9)


def test_processes_record_and_ask_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    children = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name], cwd=ROOT) for name in "abcd"]
    assert [child.wait() for child in children] == [0] * 4
    for name in "abcd":
        assert ask(tmp_path, cluster=name).tasks == ask(tmp_path, recipe=name).tasks == 20
    assert [path for path in tmp_path.iterdir() if "partial" in path.name] == []


@pytest.mark.parametrize("hole", [slice(500, 900), slice(-100, None)])
def test_bytes_still_to_come_are_looked_for_again_although_the_size_is_the_same(tmp_path: Path, hole: slice) -> None:
    remember(tmp_path, range(6))
    path = tmp_path / OWN
    lines = path.read_bytes()
    holed = bytearray(lines)
    holed[hole] = bytes(len(holed[hole]))
    path.write_bytes(holed)
    assert ask(tmp_path).tasks < 6
    path.write_bytes(lines)
    assert ask(tmp_path).tasks == 6


LINE = json.loads(measurement_line("other", measured(77)))
FOREIGN = [
    b"\xff\xfe garbage",
    b"[]",
    b"{}",
    b"[" * 100_000,
    json.dumps({**LINE, "peak_bytes": "12"}).encode(),
    json.dumps({**LINE, "peak_bytes": -1}).encode(),
    json.dumps({**LINE, "peak_bytes": 1 << 80}).encode(),
    json.dumps({**LINE, "killed": 1}).encode(),
    json.dumps({**LINE, "at": float("nan")}).encode(),
    json.dumps({**LINE, "at": float("inf")}).encode(),
    json.dumps({**LINE, "at": 0}).encode().replace(b'"at": 0', b'"at": 1e999'),
    json.dumps({**LINE, "run": "\ud800"}).encode(),
]


def test_foreign_lines_are_passed_over_and_fields_of_a_newer_version(tmp_path: Path) -> None:
    for number, line in enumerate(FOREIGN):
        folder = tmp_path / str(number)
        remember(folder, range(6))
        path = folder / OWN
        path.write_bytes(path.read_bytes() + line + b"\n" + json.dumps({**LINE, "energy_j": 7}).encode() + b"\n")
        assert ask(folder).tasks == 7, line[:60]


def test_a_full_disk_is_told_and_the_torn_line_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiles, real = Profiles(tmp_path / NAME), os.write
    profiles.record("run", [measured(0)])

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 100:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[:200])

    with monkeypatch.context() as patch:
        patch.setattr(history.os, "write", full)
        assert not profiles.record("run", [measured(1)])
    assert profiles.record("run", [measured(2)])
    assert ask(tmp_path).tasks == 2


def test_a_folder_that_cannot_be_written_is_read_all_the_same(unprivileged: Path) -> None:
    folder = unprivileged / "memory"
    remember(folder, range(9))
    profiles = Profiles(folder / NAME)
    for path in (folder / OWN, folder):
        path.chmod(0o555)
    assert [profiles.suggest("embed", "ab12", "north", planned_bytes=GIB).tasks for _ in range(2)] == [9, 9]
    assert not profiles.record("run", [measured(50)])
    assert [path.name for path in folder.iterdir()] == [OWN]
    folder.chmod(0o755)  # so that it can be removed


def test_records_of_others_count_unless_they_keep_them_to_themselves(unprivileged: Path) -> None:
    remember(unprivileged, range(9))
    theirs = unprivileged / "tasks-4242.jsonl"
    theirs.write_bytes((unprivileged / OWN).read_bytes().replace(b'"run":"run"', b'"run":"theirs"'))
    assert ask(unprivileged).tasks == 18
    theirs.chmod(0)
    assert ask(unprivileged).tasks == 9


def test_a_look_up_reads_no_more_of_a_file_the_longer_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for run in ("older", "old", "new"):
        remember(tmp_path, range(9), run=run)
    size = (tmp_path / OWN).stat().st_size
    for share, tasks in ((1 / 3, 9), (1 / 2, 9 + 4), (1, 27)):  # a part of a file loses its first line
        monkeypatch.setattr(history, "MOST_BYTES", int(size * share))
        assert ask(tmp_path).tasks == tasks


def test_a_rare_stage_is_found_behind_very_many_tasks_of_another(tmp_path: Path) -> None:
    profiles = Profiles(tmp_path / NAME)
    profiles.record("a", [measured(task, stage="graph", recipe="cd34") for task in range(9)])
    profiles.record("b", [measured(task) for task in range(20_000)])
    assert profiles.suggest("graph", "cd34", "north", planned_bytes=GIB).tasks == 9
    assert profiles.suggest("graph", "other", "south", planned_bytes=GIB).tasks == 9
