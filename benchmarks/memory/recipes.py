"""The five recipes against the truth: plans and real peaks, epochs under limits, memory that stays, 128 negatives.

    python benchmarks/memory/recipes.py [--only accuracy,limited,epochs,negatives] [--recipes NAMES] [--out FILE]

- accuracy: the live peak of real steps at the recipe's own sizes, predicted and counted by a byte-accurate CPU
  allocator, at three sizes of micro-batches, with one and two of them;
- limited: each recipe planned for the memory of its guide, scaled down with its model where this machine is too small,
  and trained for an epoch on a device that refuses the first byte above; and what is said where nothing fits;
- epochs: bytes that are live between steps of long trainings, by the loop and loader of the product;
- negatives: gradients of 128 pairs, however they are cut, beside those of one batch.

Seed 003's table is made by `benchmarks/memory/seed003.py`. With `--only`, the other parts of FILE stay; with
`--recipes`, the other recipes. FILE is written after each figure.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"  # some kernels take memory per thread; torch reads it at its start

from benchmarks.circumstances import write  # noqa: E402 - the project is found only now
from benchmarks.memory.planner import on  # noqa: E402

PARTS = ("accuracy", "limited", "epochs", "negatives")


def options() -> argparse.Namespace:
    """Return what was typed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--recipes", default="", help="recipes, with commas between; all unless told")
    parser.add_argument("--out", type=Path)
    typed = parser.parse_args()
    typed.only = typed.only.split(",")
    if unknown := set(typed.only) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return typed


def main() -> int:
    """Measure the parts, print their tables, write all figures; fail where nothing real can be run."""
    typed = options()
    import torch

    from tests.testkit.limited.device import why_not

    if reason := why_not():
        print(f"{reason}: nothing was measured", file=sys.stderr)
        return 1
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    result = json.loads(typed.out.read_text()) if typed.out and typed.out.exists() else {}
    for name in typed.only:
        part = importlib.import_module(f"benchmarks.recipes_parts.{name}")
        for recipe in [one for one in part.RECIPES if not typed.recipes or one in typed.recipes.split(",")]:
            for made in measured(part, recipe, result.get(name, {})):
                result[name] = made
                write(typed.out, result)
    told = {part: {key: one for key, one in result.get(part, {}).items() if key != "rows"} for part in typed.only}
    print(json.dumps(told))
    return 0


def measured(part: Any, recipe: str, before: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure a recipe, and yield all figures after each of its rows; what was measured before of others stays."""
    rows, start = [row for row in before.get("rows", ()) if row["recipe"] != recipe], time.perf_counter()
    for row in part.measured(recipe):
        rows.append({"recipe": recipe, **row, "took_s": round(time.perf_counter() - start, 2)})
        took_s, start = round(sum(one["took_s"] for one in rows)), time.perf_counter()
        yield {**part.told(rows), "took_s": took_s, **on(), "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
