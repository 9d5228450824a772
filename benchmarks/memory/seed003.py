"""Seed 003's table with true numbers: what each batch of its guide takes, component by component, and what saves any.

    python benchmarks/memory/seed003.py [--only table,variants,measured] [--batches 96x1,48x2] [--out FILE]

- table: the guide's batches of 100 peaks and 30 residues, traced for its card (RTX 4090), in bf16 and fp32, spectra
  drawn near their peaks and at every bin;
- variants: 48 × 2 with what the guide names and what it does not: checkpointing, a coarser grid, chunks of the grid;
- measured: the peak that is planned beside the one that a byte-accurate allocator counts on this CPU, at three sizes.

A case is traced in some minutes; FILE is written after each, and cases that it has are not made again. The spectrum's
share is what a step takes more than one without that loss.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"  # some kernels take memory per thread; torch reads it at its start

from benchmarks.circumstances import write  # noqa: E402 - the project is found only now
from benchmarks.memory.planner import on  # noqa: E402

GIB, MIB = 1 << 30, 1 << 20
PARTS = ("table", "variants", "measured")
CARD = "rtx-4090"
ITEM = {"peaks": 100, "residues": 30}
LEAST = {"items": 1, "peaks": 12, "residues": 4}
BATCHES = ((96, 1), (48, 2), (32, 3), (64, 2))
SAYS = {"96x1": "24 GB, OOM", "48x2": "17 GB, safe", "32x3": "15 GB, safest", "64x2": "19 GB, risky"}
WORDS = {  # of the guide's budget
    "parameters": "1.5 GB with gradients",
    "gradients": "",
    "optimizer": "3 GB",
    "ema": "750 MB",
    "precursor's loss": "50 MB",
    "activations, temporaries": "2-3 GB",
    "spectrum's loss": "800 MB",
    "allocator's blocks": "1 GB",
}
GUIDE: dict[str, Any] = {"spectrum_loss": "drawn", "precursor_loss": "absolute"}
WITHOUT: dict[str, Any] = {**GUIDE, "spectrum_weight": 0.0}
EVERY: dict[str, Any] = {**GUIDE, "render_reach": 0.0}
TABLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": (GUIDE, {"precision": "bf16"}),
    "bf16, no spectrum loss": (WITHOUT, {"precision": "bf16"}),
    "bf16, drawn at every bin": (EVERY, {"precision": "bf16"}),
    "fp32": (GUIDE, {}),
    "fp32, no spectrum loss": (WITHOUT, {}),
    "fp32, drawn at every bin": (EVERY, {}),
}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16, checkpointing": (GUIDE, {"precision": "bf16", "checkpointing": True}),
    "bf16, checkpointing, drawn at every bin": (EVERY, {"precision": "bf16", "checkpointing": True}),
    "bf16, every bin, bin_size 0.2, max_mz 1500": (
        {**EVERY, "bin_size": 0.2, "max_mz": 1500.0},
        {"precision": "bf16"},
    ),
    "bf16, every bin, 1000 at a time": ({**EVERY, "render_chunk": 1000}, {"precision": "bf16"}),
    "bf16, no gradients through answers": ({**GUIDE, "detach": True}, {"precision": "bf16"}),
    "bf16, coverage": ({}, {"precision": "bf16"}),
}
SMALLEST = (2, 4, 8)  # items that are measured here


def options() -> argparse.Namespace:
    """Return what was typed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--cases", default="", help="cases of a part, with semicolons between; all unless told")
    parser.add_argument("--batches", default="", help="batches of the table such as 48x2, with commas between")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> int:
    """Trace and measure what is not known yet, write it all, and print the tables."""
    typed = options()
    import torch

    torch.set_num_threads(1)
    result = json.loads(typed.out.read_text()) if typed.out and typed.out.exists() else {}
    for name, rows in _made(typed, result):
        result.setdefault(name[0], {}).setdefault(name[1], {}).update(rows)
        result |= on()
        write(typed.out, result)
    print(json.dumps({name: result[name] for name in PARTS if name in result}))
    print(rendered(result))
    return 0


def _made(typed: argparse.Namespace, known: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """Yield the figures of each case: its part and name, and a row for each batch."""
    only, cases = typed.only.split(","), [one for one in typed.cases.split(";") if one]
    wanted = [one for one in typed.batches.split(",") if one] or [_name(one) for one in BATCHES]
    for part, table, batches in (("table", TABLE, wanted), ("variants", VARIANTS, ["48x2"])):
        for name, (changes, choice) in table.items() if part in only else ():
            had = known.get(part, {}).get(name, {})
            missing = [one for one in BATCHES if _name(one) in batches and _name(one) not in had]
            if missing and (not cases or name in cases):
                yield (part, name), _traced(name, changes, choice, missing)
    if "measured" in only:
        for name in cases or ("near", "every bin", "checkpointing"):
            if name not in known.get("measured", {}):
                yield ("measured", name), _measured(name)


def _traced(
    name: str, changes: Mapping[str, Any], choice: Mapping[str, Any], batches: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Return what batches take on the guide's card."""
    from benchmarks.planning.guides import components
    from pipeline.memory.footprint import MemoryChoice
    from pipeline.memory.hardware.gpus import device
    from pipeline.memory.planning.comparison import compare_configurations
    from pipeline.memory.planning.memory_plan import CardSpec
    from pipeline.runs.model.training_work import Work, target_of
    from pipeline.tasks.denovo_recursive import DenovoRecursive
    from pipeline.training.step.optimizers import StepSettings

    start, own = time.perf_counter(), device(CARD)
    card = CardSpec.of(own, 1)
    work = Work(DenovoRecursive(**changes), StepSettings(way="foreach", ema=0.999, clip=1.0))
    oracle = work.oracle(LEAST, target_of(own.capability), padded=True)
    rows = compare_configurations(oracle, batches, [card], ITEM, padded=True, choice=MemoryChoice(**choice))
    print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return {
        _name((row.items, row.accumulation)): {
            "live": row.live.value,
            "reserved": row.reserved.value,
            "total": row.total.value,
            "fits": bool(row.fits[card.name]),
            "budget": card.budget_bytes,
            "parts": components(row, own, 1),
        }
        for row in rows
    }


def _measured(name: str) -> dict[str, Any]:
    """Return planned and real peaks on this CPU, of the model at its real size."""
    from pipeline.memory.footprint import MemoryChoice, live_peak_bytes
    from pipeline.tasks.denovo_recursive import DenovoRecursive
    from tests.memory.tracing.traced import tracer, true_peak

    changes: dict[str, Any] = EVERY if name == "every bin" else GUIDE
    settings: dict[str, Any] = {"ema": 0.999, "clip": 1.0}
    task, choice = DenovoRecursive(**changes), MemoryChoice(checkpointing=name == "checkpointing")
    traced = tracer(task, least=LEAST, **settings)
    rows = {}
    for items in SMALLEST:
        sizes = {"items": items, **ITEM}
        planned = live_peak_bytes(traced.standing(choice), traced.micro(choice, sizes), accumulate=True)
        real = true_peak(task, sizes, 2, choice, **settings)
        rows[str(items)] = {"planned": planned, "measured": real, "error": round(planned / real - 1, 5)}
        print(f"measured, {name}, {items} items: {rows[str(items)]}", file=sys.stderr, flush=True)
    return rows


def rendered(result: Mapping[str, Any]) -> str:
    """Return all tables as Markdown, in MiB."""
    lines: list[str] = []
    for precision in ("bf16", "fp32"):
        for how in ("", ", drawn at every bin"):
            rows = result.get("table", {}).get(precision + how, {})
            without = result.get("table", {}).get(f"{precision}, no spectrum loss", {})
            if rows:
                lines += _table(precision + how, rows, without)
    for part in ("variants", "measured"):
        for name, rows in result.get(part, {}).items():
            lines += [f"- {part}: {name}: {_line(batch, row)}" for batch, row in rows.items()]
    return "\n".join(lines)


def _table(title: str, rows: Mapping[str, Any], without: Mapping[str, Any]) -> list[str]:
    """Return a table of components by batch."""
    columns = {batch: _components(row, without.get(batch)) for batch, row in rows.items()}
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    cells = {name: [f"{column[name] / MIB:,.1f}" for column in columns.values()] for name in names}
    cells[f"on {CARD}"] = ["fits" if row["fits"] else "does not fit" for row in rows.values()]
    cells["the guide's total"] = [SAYS[batch] for batch in rows]
    return [
        "",
        f"{title}, MiB",
        "",
        "| component | " + " | ".join(columns) + " | the guide |",
        "|---" * (2 + len(columns)) + "|",
        *("| " + " | ".join([name, *row, WORDS.get(name, "")]) + " |" for name, row in cells.items()),
    ]


def _components(row: Mapping[str, Any], without: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the guide's components: activations are those of a step without the spectrum's loss."""
    parts = (without or row)["parts"]
    told = {name: parts.get(name, 0) for name in ("parameters", "gradients", "optimizer", "ema", "inputs")}
    told["precursor's loss"] = parts.get("loss: precursor", 0)
    live = without["live"] if without else row["live"]
    told["activations, temporaries" if without else "activations, temporaries, spectrum's loss"] = live - sum(
        told.values()
    )
    if without:
        told["spectrum's loss"] = row["live"] - live
    told["allocator's blocks"] = row["reserved"] - row["live"]
    told["margin"] = row["total"] - row["reserved"]
    return told | {"total": row["total"], "of at most": row["budget"]}


def _line(batch: str, row: Mapping[str, Any]) -> str:
    if "planned" in row:
        planned, real = row["planned"] / MIB, row["measured"] / MIB
        return f"{batch} items: {planned:,.1f} MiB planned, {real:,.1f} measured"
    sizes = ", ".join(f"{name} {row[name] / GIB:.2f}" for name in ("live", "reserved", "total"))
    return f"{batch}: {sizes} GiB"


def _name(batch: tuple[int, int]) -> str:
    return f"{batch[0]}x{batch[1]}"


if __name__ == "__main__":
    sys.exit(main())
