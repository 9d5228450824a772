"""The largest micro-batch of a script: searched for by running it, on the smallest of its ranks, and remembered."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ConfigError, JobFailed, PlanInfeasible
from pipeline.script import batch_finding
from pipeline.script.batch_finding import CLOSE, largest_that_fits
from tests.testkit.command import Command

pytestmark = pytest.mark.timeout(300)
PLAIN = """\
import sys, time
size, room, steps = map(int, sys.argv[1:4])
print(size, file=open("tried", "a"))
if size > room:
    print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", file=sys.stderr)
    sys.exit(1)
for step in range(1, steps + 1):
    print('pipeline: {"step": %d}' % step, flush=True)
if steps > 5:
    time.sleep(600)
"""


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=80, unique=True).map(sorted), st.integers(0, 6000))
def test_the_largest_of_any_sizes_is_found_to_within_a_sixteenth(sizes: list[int], room: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= room

    found = largest_that_fits(sizes, fits)
    best = max((size for size in sizes if size <= room), default=None)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found <= best <= found * (1 + 1 / CLOSE)
        assert found in tried
    assert len(tried) == len(set(tried)), "nothing is tried twice"
    assert len(tried) <= 26
    endless = range(1, 10**15 + 1)  # which no list could hold
    assert largest_that_fits(endless, lambda size: size <= 1) == 1


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PLAIN)
    return lambda room, steps=1: ["--", sys.executable, "train.py", "{micro_batch}", str(room), str(steps)]


def tried(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "tried").read_text().split()]


def test_the_answer_is_printed_with_how_to_use_it_and_remembered(
    pipeline: Command, words: Callable[..., list[str]], tmp_path: Path
) -> None:
    done = pipeline("tune", "--max", "64", *words(20))
    assert tried(tmp_path) == [64, 32, 16, 24, 20, 22]
    assert "largest micro-batch that fits: 20" in done.out
    assert shlex.join([sys.executable, "train.py", "20", "20", "1"]) in done.out
    again = json.loads(pipeline("tune", "--max", "64", "--json", *words(20)).out)
    assert (again["micro_batch"], again["remembered"]) == (20, True)
    assert len(tried(tmp_path)) == 6
    pipeline("tune", "--max", "64", "--again", *words(20))
    assert len(tried(tmp_path)) == 12
    (tmp_path / "train.py").write_text(PLAIN + "# changed\n")
    assert "remembered" not in pipeline("tune", "--max", "64", *words(20)).out


def test_a_command_with_placeholders_is_tried_as_train_command_has_it_and_not_printed_to_type(
    pipeline: Command, words: Callable[..., list[str]], tmp_path: Path
) -> None:
    done = pipeline("tune", "--max", "8", *words(20), "{accumulation}", "{output}/model.pt")
    assert (done.code, tried(tmp_path)) == (0, [8])
    assert "train: {micro_batch: 8}" in done.out
    assert "train.py" not in done.out


def test_a_script_that_says_its_steps_is_ended_after_some_and_only_divisors_are_tried(
    pipeline: Command, words: Callable[..., list[str]], tmp_path: Path
) -> None:
    done = pipeline("tune", "--max", "64", "--divides", "96", *words(40, 9))
    assert "largest micro-batch that fits: 32" in done.out
    assert tried(tmp_path) == [48, 24, 32]


def test_a_script_that_prints_no_step_is_waited_for_with_a_word_and_fits_after_some_seconds(
    pipeline: Command, words: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_finding, "SILENT_S", 0.01)
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n")
    done = pipeline("tune", "--max", "1", "--seconds", "1", *words(20))
    assert "largest micro-batch that fits: 1" in done.out
    assert "--seconds" in done.err


def test_what_is_no_lack_of_memory_is_told_and_not_searched_around(
    pipeline: Command, words: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("raise KeyError('no such field')\n")
    done = pipeline("tune", "--max", "64", *words(20))
    assert done.code == JobFailed.exit_code
    assert "no such field" in done.err
    (tmp_path / "train.py").write_text(PLAIN)
    done = pipeline("tune", "--max", "64", *words(0))
    assert done.code == PlanInfeasible.exit_code
    done = pipeline("tune", "--max", "64", "--", "python", "train.py")
    assert done.code == ConfigError.exit_code
    assert "{micro_batch}" in done.err


def test_it_is_started_once_and_not_by_every_rank(
    pipeline: Command, words: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "0")
    done = pipeline("tune", "--max", "64", *words(20))
    assert done.code == ConfigError.exit_code
    assert "-- srun" in done.err
