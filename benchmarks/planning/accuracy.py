"""Live peaks of training steps, predicted without running them, and counted byte by byte while they ran."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pipeline.memory.footprint import MemoryChoice, Oracle
from pipeline.memory.planning.oracle_cache import OracleCache
from pipeline.protocol import ITEMS
from pipeline.runs.model.training_work import Work, target_of
from tests.memory.planning.planned import work_of
from tests.testkit.limited.device import LimitedDevice
from tests.zoo import ZOO, Member

REACH = 0.01
STEPS = 3


def measured(members: Sequence[Member], _: Path | None) -> list[dict[str, Any]]:
    """Return every figure; print them as they come."""
    print(f"{'member':34}{'micros':>7}{'predicted':>15}{'real':>15}{'ratio':>10}  origin")
    return [row for member in (*members, *_beside(members)) for row in rows_of(member)]


def told(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the figures come to."""
    counted = [row for row in rows if row["origin"] == "traced" and not row["beside"]]
    return {
        "what": f"predicted live peak of {STEPS} steps over the one that a byte-accurate CPU allocator counted; bytes",
        "reach": f"within {REACH:.0%}",
        "members": len({row["member"] for row in counted}),
        "worst": max((round(abs(row["ratio"] - 1), 5) for row in counted), default=None),
        "missed": sorted({row["member"] for row in counted if abs(row["ratio"] - 1) > REACH}),
    }


def _beside(members: Sequence[Member]) -> list[Member]:
    """Return what is shown beside: a way to run a model that the CPU's kernels treat unlike a GPU's."""
    if not any(member.name == "convolution" for member in members):
        return []
    return [replace(ZOO["convolution"], name="convolution, not channels_last", small={"channels_last": False})]


def rows_of(member: Member) -> list[dict[str, Any]]:
    """Compare one model at its sizes."""
    work, choice = work_of(member), MemoryChoice(checkpointing=bool(member.settings.get("checkpointing")))
    least = min(member.sizes, key=lambda sizes: sizes[ITEMS])
    oracle = work.oracle(least, target_of(None), padded=member.padded)
    return [
        _row(member, work, oracle, choice, sizes, accumulate=accumulate)
        for sizes in member.sizes
        for accumulate in (False, True)
    ]


def _row(
    member: Member, work: Work, oracle: Oracle, choice: MemoryChoice, sizes: Mapping[str, int], *, accumulate: bool
) -> dict[str, Any]:
    start = time.perf_counter()
    questions = OracleCache(oracle, tuple(sizes))
    predicted = questions.peak_bytes(choice, tuple(sizes.values()), accumulate=accumulate)
    took = time.perf_counter() - start
    origin = questions.micro(choice, tuple(sizes.values())).origin.value
    real = real_peak(work, choice, sizes, 1 + accumulate)
    row = {
        "member": member.name,
        "sizes": dict(sizes),
        "micro_batches": 1 + accumulate,
        "predicted": predicted,
        "real": real,
        "ratio": round(predicted / real, 5),
        "origin": origin,
        "beside": member.name not in ZOO,
        "asked_s": round(took, 2),
    }
    print(f"{member.name:34}{1 + accumulate:7}{predicted:15,}{real:15,}{predicted / real:10.5f}  {origin}", flush=True)
    return row


def real_peak(work: Work, choice: MemoryChoice, sizes: Mapping[str, int], micros: int, *, steps: int = STEPS) -> int:
    """Train some steps of such micro-batches; return the most that was live, the making of the model included."""
    torch.manual_seed(0)
    gc.collect()
    with LimitedDevice() as device:
        step = work.step(choice)
        for _ in range(steps):
            for _ in range(micros):
                step.accumulate(work.example(sizes))
            step.update()
        del step
    return device.peak_bytes
