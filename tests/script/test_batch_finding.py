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
from pipeline.script.batch_finding import CLOSE, largest_that_fits
from tests.testkit.command import Command

pytestmark = pytest.mark.timeout(300)
PLAIN = """\
import sys, time
size, room, steps = map(int, sys.argv[1:])
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


def test_however_large_the_largest_is_said_to_be_it_is_searched_from_in_few_tries() -> None:
    sizes = range(1, 10**15 + 1)  # which no list could hold
    assert 900 < (largest_that_fits(sizes, lambda size: size <= 1000) or 0) <= 1000


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


def test_a_script_that_says_its_steps_is_ended_after_some_and_only_divisors_are_tried(
    pipeline: Command, words: Callable[..., list[str]], tmp_path: Path
) -> None:
    done = pipeline("tune", "--max", "64", "--divides", "96", *words(40, 9))
    assert "largest micro-batch that fits: 32" in done.out
    assert tried(tmp_path) == [48, 24, 32]


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


RANKED = """\
import os, sys

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.testkit.limited.device import LimitedDevice

size = int(sys.argv[1])
torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
limits = [4 << 20, 1 << 20]  # of unequal cards
with LimitedDevice(limits[torch.distributed.get_rank()]):
    for step in range(2):
        model(torch.randn(size, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
torch.distributed.destroy_process_group()
"""


@pytest.mark.nightly
def test_on_ranks_of_unequal_memory_the_smallest_decides(
    pipeline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.testkit.limited import device

    device.need()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    (tmp_path / "train.py").write_text(RANKED)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    given = ["--max", "512", "--divides", "512", "--json", "--", *start, "train.py", "{micro_batch}"]
    found = json.loads(pipeline("tune", *given).out)["micro_batch"]
    # 1 MiB: a row takes 256 · 4 B as it is, its tanh and their gradient, and 64 · 4 B of its own
    assert found in (128, 256)
