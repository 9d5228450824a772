"""The cases of each part: what is predicted first, then what measures it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_memory_parts.processes import Bench
from pipeline.memory.hardware.gpus import Device, device
from pipeline.memory.history.step_history import torch_version
from pipeline.memory.planning.memory_plan import CardSpec
from pipeline.memory.planning.step_estimates import SETTINGS

PRECISIONS = ("fp32", "bf16", "fp16")
SOLD = {"24 GB": "rtx-3090", "40 GB": "a100-40gb", "80 GB": "a100-80gb-sxm"}  # cards that are played
SHARES = (0.85, 0.25, 0.5)  # of them that the three sizes fill: 20, 9 and 39 GB
PLANNED = dict(zip(SOLD, PRECISIONS, strict=True))  # the precision of the plan for each
PLANNED_DRY = dict(zip(SOLD, ("fp32", "bf16", "bf16"), strict=True))  # a CPU takes minutes in fp16
HISTORIES = ("mlp", "gnn", "transformer_pre")
SHRINK = 256  # cards are so many times smaller with --dry


def played(bench: Bench) -> dict[str, Device]:
    """Return the cards that this one can play."""
    card, found = bench.card, {}
    for name, sold in SOLD.items():
        like = device(sold)
        if bench.dry:
            usable, reserved = like.usable_bytes // SHRINK + card.workspace_bytes, 0
            found[name] = replace(card, name=name, usable_bytes=usable, reserve_bytes=reserved, context_bytes=0)
        elif like.usable_bytes <= bench.total_bytes:
            found[name] = replace(card, name=name, usable_bytes=like.usable_bytes, reserve_bytes=like.reserve_bytes)
    return found


def common(bench: Bench, member: str, precision: str) -> dict[str, Any]:
    """Return what every case says."""
    capability = list(bench.card.capability)
    return {"member": member, "precision": precision, "dry": bench.dry, "capability": capability, "limit_bytes": 0}


def compare_cases(bench: Bench, member: str, precision: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """Predict the sizes of a model, then yield what measures each."""
    cards, case = played(bench), common(bench, member, precision)
    targets = [(name, int(share * CardSpec.of(card, 1).budget_bytes)) for share, (name, card) in _shared(cards)]
    told = bench.ask({**case, "kind": "predict", "targets": targets})
    failed = [{"card": "", "error": told["error"]}] if "error" in told else []
    for one in told.get("rows", failed):
        row = {"part": "compare", "member": member, "precision": precision, "model": told.get("model", ""), **one}
        yield lambda row=row: _compared(bench, cards, case, told, row)


def _shared(cards: Mapping[str, Device]) -> Iterator[tuple[float, tuple[str, Device]]]:
    return zip(SHARES, (list(cards.items()) * len(SHARES))[: len(SHARES)], strict=True)


def _compared(
    bench: Bench, cards: Mapping[str, Device], case: Mapping[str, Any], told: Mapping[str, Any], row: dict[str, Any]
) -> dict[str, Any]:
    if "error" in row:
        return row
    card = cards[row["card"]]
    workspace = 0 if bench.dry else card.workspace_bytes
    usable = card.usable_bytes - (card.workspace_bytes if bench.dry else 0)
    more = {"kind": "compare", "choice": told["choice"], "sizes": row["sizes"], "allocator": row["allocator"]}
    found = bench.ask({**case, **more, "usable_bytes": usable}, on_card=True)
    row |= {"workspace_bytes": workspace, "context_bytes": card.context_bytes}
    row["predicted_bytes"] = row["reserve_bytes"] + workspace + card.context_bytes
    if "error" in found:
        return row | found
    row |= found
    row["measured_bytes"] = row["reserved_bytes"] + row["outside_bytes"]
    row["first"] = round(row["predicted_bytes"] / row["measured_bytes"] - 1, 4)
    row["live"] = round((row["live_bytes"] + workspace) / max(1, row["allocated_bytes"]) - 1, 4)
    if row["died"]:
        row["error"] = f"out of memory: {row['died']}"
    return row


def plan_cases(bench: Bench, member: str, card: Device) -> Iterator[Callable[[], dict[str, Any]]]:
    """Plan for a card, then yield what trains as planned."""
    case = common(bench, member, (PLANNED_DRY if bench.dry else PLANNED)[card.name])
    row = {"part": "plan", "member": member, "card": card.name, "precision": case["precision"]}
    start = time.perf_counter()
    told = bench.ask({**case, "kind": "plan", "device": asdict(card)})
    row |= {name: value for name, value in told.items() if name != "cost"}
    row["planned_s"] = round(time.perf_counter() - start, 1)
    limit = card.usable_bytes - (card.workspace_bytes if bench.dry else bench.context_bytes)

    def run() -> dict[str, Any]:
        if "error" in told:
            return row
        asked = {**case, **told, "kind": "train", "limit_bytes": limit}
        found = bench.ask(asked, on_card=True, room_bytes=card.usable_bytes)
        if "error" in found:
            return row | found
        return row | found | {"used": round(found["reserved_bytes"] / found["limit_bytes"], 4)}

    yield run


def history_cases(bench: Bench, member: str, folder: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yield what records a model under both settings, and one whose limit makes torch give its cache back."""
    case = common(bench, member, "fp32")
    about = {"gpu": bench.gpu, "driver": bench.driver, "torch": torch_version(), "dry": bench.dry}

    def run(text: str, limit_bytes: int = 0) -> dict[str, Any]:
        name = f"{member}_{'expandable' if text else 'default'}{'_tight' if limit_bytes else ''}.npz"
        asked = {**case, "kind": "history", "history": True, "allocator": text, "about": about}
        asked |= {"path": str(folder / name), "limit_bytes": limit_bytes, "usable_bytes": bench.total_bytes}
        found = bench.ask(asked, on_card=True)
        return {"part": "history", "member": member, "file": name, **found}

    def tight() -> dict[str, Any]:
        free = run("")
        if "error" in free:
            return free
        between = (free["allocated_bytes"] + free["reserved_bytes"]) // 2
        return run("", between)

    if member == HISTORIES[-1]:
        yield tight
    for one in SETTINGS:
        yield lambda text=one.text: run(text)
