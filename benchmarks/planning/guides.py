"""The five guides' own batches at their real sizes: what each takes, of what, and on which cards it fits."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.circumstances import write
from pipeline.errors import PipelineError
from pipeline.memory.footprint import Category, MemoryChoice, MemoryPart, Oracle
from pipeline.memory.hardware.gpus import Device, device
from pipeline.memory.planning.comparison import Configuration, compare_configurations
from pipeline.memory.planning.memory_plan import CardSpec
from pipeline.protocol import ITEMS
from pipeline.runs.model.training_work import Work, target_of
from pipeline.training.step.optimizers import StepSettings
from tests.zoo.guides import GUIDES, Guide

CARDS = {"24 GB": "rtx-4090", "40 GB": "a100-40gb", "80 GB": "a100-80gb", "141 GB": "h200-141gb"}
GIB = 1 << 30
LEAST = 1 << 20  # bytes of a component that is shown
SHOWN = 6  # modules whose activations are told one by one


def measured(_: object, out: Path | None) -> list[dict[str, Any]]:
    """Return every figure, after writing them beside the other results where there is a place for them."""
    rows = [_guide(guide) for guide in GUIDES.values()]
    if out is not None:
        write(out.parent / "guides.json", {"guides": rows})
        (out.parent / "guides.md").write_text(rendered(rows))
    print(rendered(rows))
    return [
        {
            "member": row["seed"],
            "traced_s": row["took_s"],
            "totals_gib": [round(batch["total"] / GIB, 2) for batch in row["batches"] if "total" in batch],
        }
        for row in rows
    ]


def told(_: object) -> dict[str, Any]:
    """Return what the figures are of."""
    return {
        "what": "the batches that the guides name, traced at their real sizes; in guides.json and guides.md",
        "cards": CARDS,
    }


def _guide(guide: Guide) -> dict[str, Any]:
    start = time.perf_counter()
    card = device(guide.device)
    choice = MemoryChoice(precision=guide.precision)
    oracle = oracle_of(guide, card)
    batches = [_batch(guide, oracle, choice, place) for place in range(len(guide.batches))]
    took = round(time.perf_counter() - start, 1)
    print(f"{guide.seed} {guide.name}: {took} s", flush=True)
    return {
        "seed": guide.seed,
        "name": guide.name,
        "precision": guide.precision,
        "card": card.name,
        "item": dict(guide.item),
        "parameters": oracle.standing(choice).parameters,
        "batches": batches,
        "notes": [*guide.notes, *oracle.standing(choice).notes],
        "took_s": took,
    }


def oracle_of(guide: Guide, card: Device) -> Oracle:
    """Return what answers for a guide's step on its card."""
    settings = {name: value for name, value in guide.settings.items() if name != "foreach"}
    work = Work(guide.build(), StepSettings(way="foreach", **settings))
    least = {name: max(1, size // 8) for name, size in guide.item.items()} | {ITEMS: 1}
    return work.oracle(least, target_of(card.capability), padded=guide.padded)


def _batch(guide: Guide, oracle: Oracle, choice: MemoryChoice, place: int) -> dict[str, Any]:
    batch = guide.batches[place]
    cards = {name: device(card) for name, card in CARDS.items()}
    told = {
        "items": batch.micro,
        "accumulation": batch.accumulation,
        "gpus": batch.gpus,
        "effective": batch.effective,
        "says": batch.says,
    }
    try:
        (row,) = compare_configurations(
            oracle,
            [(batch.micro, batch.accumulation)],
            [CardSpec.of(card, batch.gpus) for card in cards.values()],
            guide.item,
            padded=guide.padded,
            choice=choice,
        )
    except PipelineError as error:
        return told | {"refused": error.what}
    fits = dict(zip(cards, row.fits.values(), strict=True))
    own = device(guide.device)
    return told | {
        "live": row.live.value,
        "reserved": row.reserved.value,
        "total": row.total.value,
        "origins": [row.live.origin.value, row.reserved.origin.value, row.total.origin.value],
        "parts": components(row, own, batch.gpus),
        "modules": modules(row.parts),
        "fits": fits,
        "fits_its_card": row.total.value <= CardSpec.of(own, batch.gpus).budget_bytes,
    }


def components(row: Configuration, card: Device, gpus: int) -> dict[str, int]:
    """Return the bytes of each component, as guides list them; overhead is what is no tensor's."""
    named: dict[str, int] = {}
    for part in row.parts:
        name = f"loss: {part.name or 'any'}" if part.category is Category.LOSS else part.category.value
        named[name] = named.get(name, 0) + part.bytes
    live = sum(named.values())
    return named | {
        "allocator: blocks and segments that are not full": int(row.reserved.value) - live,
        "margin": int(row.total.value - row.reserved.value),
        f"outside torch on {card.name}: context, cuBLAS, NCCL, reserve": card.usable_bytes
        - CardSpec.of(card, gpus).budget_bytes,
    }


def modules(parts: Sequence[MemoryPart]) -> dict[str, int]:
    """Return the activations of the modules that keep most."""
    kept = sorted((part for part in parts if part.category is Category.ACTIVATIONS), key=lambda part: -part.bytes)
    rest = sum(part.bytes for part in kept[SHOWN:])
    return {part.name: part.bytes for part in kept[:SHOWN]} | ({"others": rest} if rest else {})


def rendered(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return all tables as Markdown."""
    return "\n".join(
        (
            "# The guides' own configurations, with true numbers",
            "",
            "Made by `python benchmarks/memory/planner.py --only guides`. All in GiB.",
            "Live: the peak of a step's tensors, traced. Reserved: what torch's caching allocator holds for them,",
            "simulated. Total: with the margin of a first contact. A card fits when the total is at most what torch",
            "can have of it. All items of a batch are as large as the one told. Nothing here was measured on a card.",
            "",
            *(line for row in rows for line in _section(row)),
        )
    )


def _section(row: Mapping[str, Any]) -> list[str]:
    item = ", ".join(f"{size:,} {name}" for name, size in row["item"].items())
    lines = [
        f"## Seed {row['seed']}: {row['name']}",
        "",
        f"{row['parameters'] / 1e6:.1f}M parameters, {row['precision']}, traced for {row['card']}; an item: {item}.",
        "",
        "| batch | live | reserved | total | " + " | ".join(CARDS) + f" | its card ({row['card']}) | the guide says |",
        "|---" * (6 + len(CARDS)) + "|",
    ]
    lines += [_line(batch) for batch in row["batches"]]
    first = next((batch for batch in row["batches"] if "parts" in batch), None)
    if first is not None:
        lines += ["", f"What {_text(first)} is made of, at its live peak:", "", "| component | GiB |", "|---|---|"]
        lines += [f"| {name} | {size / GIB:.3f} |" for name, size in first["parts"].items() if size >= LEAST]
        modules = f"Activations by module: {_list(first['modules'])}." if first["modules"] else "It is the optimizer's."
        lines += ["", modules]
    return [*lines, "", *(f"- {note}" for note in row["notes"]), ""]


def _line(batch: Mapping[str, Any]) -> str:
    if "refused" in batch:
        return f"| {_text(batch)} | " + " | " * (4 + len(CARDS)) + f" {batch['refused']} |"
    sizes = " | ".join(f"{batch[name] / GIB:.2f}" for name in ("live", "reserved", "total"))
    fits = " | ".join("yes" if is_so else "no" for is_so in (*batch["fits"].values(), batch["fits_its_card"]))
    return f"| {_text(batch)} | {sizes} | {fits} | {batch['says']} |"


def _text(batch: Mapping[str, Any]) -> str:
    gpus = f" × {batch['gpus']} GPUs" if batch["gpus"] > 1 else ""
    return f"{batch['items']} × {batch['accumulation']}{gpus} = {batch['effective']}"


def _list(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB:.3f}" for name, size in sizes.items())
