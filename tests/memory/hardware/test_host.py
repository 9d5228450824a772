"""What a node must have for training: arithmetic against the real things, predictions against real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from pipeline.keys import recipe_key
from pipeline.memory.footprint import Provenance
from pipeline.memory.hardware import host_memory
from pipeline.memory.hardware.host_memory import (
    STATED,
    HostNeed,
    HostPart,
    Period,
    TrainingJob,
    chunked_bytes,
    kept_bytes,
    measured_baseline,
    pinned_bytes,
    ring_bytes,
    train_need,
)
from pipeline.store.cache_folder import CacheFolder
from pipeline.training.items import loader
from pipeline.training.items.item_table import ItemTable, TableBuilder
from pipeline.units import GIB, MIB

BASE = HostPart(host_memory.BASELINE, 200 * MIB, Provenance.MEASURED, "made up")
TRAINED = """
import torch
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(2)))
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for _ in range(10):
    optimizer.zero_grad()
    model(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
"""
TRAINED_BYTES = 10 * 2048 * 2048 * 4  # two matrices, their gradients, two moments of each; two temporaries
IMPORTED = "import torch, torch._dynamo"
TOLD = '\nprint(open("/proc/self/status").read())'


@pytest.fixture(scope="module")
def baseline() -> HostPart:
    return measured_baseline()


def part(need: HostNeed, name: str) -> int:
    return sum(one.bytes for one in need.parts if one.name == name)


def taken(make: Callable[[], Any]) -> tuple[Any, int]:
    """Return what is made, and the memory that it keeps."""
    tracemalloc.start()
    made = make()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return made, kept


def status_of(script: str, name: str) -> int:
    """Return the bytes that the kernel tells of a process under a name, at the end of its script."""
    ran = subprocess.run([sys.executable, "-c", script + TOLD], capture_output=True, text=True, check=True)
    return int(ran.stdout.partition(f"{name}:")[2].split()[0]) << 10


def test_memory_for_batches_is_predicted_as_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def taking(size_bytes: int, **_: Any) -> torch.Tensor:
        taken.append(size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8)

    monkeypatch.setattr(loader, "bytes_on_host", taking)
    for batch in (1, MIB, 3 * MIB + 17, 8 * MIB):
        pinned, shared = loader.BatchMemory(pin=True), [loader.SharedRun() for _ in range(3)]
        for used in (batch // 3, batch, batch // 2):
            assert [len(pinned(used)) for _ in range(3)] == [used] * 3
        assert sum(taken[-3:]) == ring_bytes(3, batch, pin=True)
        assert all(pinned_bytes(size) == size for size in taken)
        assert [len(run(batch)) for run in shared] == [batch] * 3
        assert sum(os.fstat(run._file).st_size for run in shared) == ring_bytes(3, batch, pin=False)


def test_the_table_of_a_data_set_takes_what_is_predicted(tmp_path: Path) -> None:
    store, builder, count = CacheFolder(tmp_path / "cache").kind("sets"), TableBuilder(), 5000
    for number in range(count):
        name = f"complex-{number:08d}"
        builder.add(name, recipe_key("t", {"n": number}), "train", {"nodes": number, "edges": 20 * number}, None)
    key = builder.write(store)
    ItemTable.read(store, key)  # what is imported and opened once is not the table's
    _, kept = taken(lambda: [whole := ItemTable.read(store, key), whole.of_split("train")])
    predicted = host_memory.table_bytes(count, 2) - count * host_memory.DRAWN_BYTES
    assert kept == pytest.approx(predicted, rel=0.1)


def test_only_the_larger_phase_is_asked_for() -> None:
    kept = HostPart("kept", 100, Provenance.MEASURED, "")
    start, train = (
        HostPart("s", 60, Provenance.TRACED, "", Period.START),
        HostPart("t", 50, Provenance.TRACED, "", Period.TRAIN),
    )
    need = HostNeed((kept, start, train))
    assert (need.bytes, need.total_bytes) == (160, 168)
    assumed = replace(train, origin=Provenance.ASSUMED)  # with its margin it is larger
    assert HostNeed((kept, start, assumed)).bytes == 150


def test_every_rank_has_its_own_of_everything_but_files() -> None:
    run = TrainingJob(model_bytes=GIB, batch_bytes=10 * MIB, staged_bytes=3 * GIB, items=10**6, sizes=3)
    one, four = train_need(run, BASE), train_need(replace(run, ranks=4), BASE)
    for each in one.parts:
        assert part(four, each.name) == each.bytes * (1 if each.name == "page cache" else 4)


def test_a_checkpoint_is_staged_while_the_ring_is_full_but_the_model_was_given_back() -> None:
    run = TrainingJob(gpu=False, model_bytes=2 * GIB, resumed_bytes=GIB, staged_bytes=GIB, slots=2, batch_bytes=GIB)
    need = train_need(run, BASE)
    starts, trains = (sum(one.bytes for one in need.during(period)) for period in (Period.START, Period.TRAIN))
    always = sum(one.bytes for one in need.parts if one.period is Period.ALWAYS)
    assert (starts - always, trains - always) == (3 * GIB, 5.25 * GIB)  # the ring is 2.25, batches 2, the checkpoint 1


def test_a_gpu_brings_its_context_and_pinned_memory_and_a_cpu_its_step() -> None:
    run = TrainingJob(batch_bytes=MIB, offloaded_bytes=GIB, step_bytes=9 * GIB, several=True, slots=2)
    gpu, cpu = train_need(run, BASE), train_need(replace(run, gpu=False), BASE)
    assert part(gpu, host_memory.CONTEXT) == host_memory.CUDA_CONTEXT_BYTES
    assert (part(gpu, "offloaded"), part(gpu, "training step")) == (chunked_bytes(GIB), 0)
    assert (part(cpu, "offloaded"), part(cpu, "training step")) == (GIB, 9 * GIB)
    assert part(cpu, host_memory.CONTEXT) == part(cpu, "communicator") == 0 < part(gpu, "communicator")


@pytest.mark.parametrize(
    ("step", "spare", "kept"),
    [
        (9 * GIB, 9 * GIB, GIB),
        (300 * MIB, 9 * GIB, 300 * MIB),
        (9 * GIB, 200 * MIB, 200 * MIB),
        (9 * GIB, 20 * MIB, 0),  # no room
        (20 * MIB, 30 * MIB, 20 * MIB),
        (20 * MIB, 10 * MIB, 0),
        (9 * GIB, -GIB, 0),
    ],
)
def test_malloc_keeps_what_a_step_frees_as_far_as_there_is_room(step: int, spare: int, kept: int) -> None:
    assert kept_bytes(step, spare) == kept
    run = TrainingJob(gpu=False, ranks=2, step_bytes=step, kept_bytes=kept)
    need = train_need(run, BASE)
    assert (need.kept_bytes, part(need, host_memory.KEPT)) == (kept, 2 * kept)


@pytest.mark.nightly
def test_the_measured_baseline_is_what_a_process_with_torch_takes(baseline: HostPart) -> None:
    assert baseline.origin is Provenance.MEASURED
    assert status_of(IMPORTED, "VmRSS") == pytest.approx(baseline.bytes, rel=0.1)


def test_without_the_modules_the_baseline_is_a_stated_figure() -> None:
    assert measured_baseline("no_such_module") == STATED


@pytest.mark.nightly
def test_a_training_step_on_the_cpu_fits_what_is_predicted_and_nearly_fills_it(baseline: HostPart) -> None:
    need = train_need(TrainingJob(gpu=False, step_bytes=TRAINED_BYTES, threads=0), baseline)
    predicted = need.total_bytes - int(1.3 * host_memory.PAGE_CACHE_BYTES)  # which belongs to no process
    peak = median(status_of(TRAINED, "VmHWM") for _ in range(3))  # glibc lays its blocks by chance: 491 to 573 MiB
    assert 0.7 * predicted < peak < predicted
