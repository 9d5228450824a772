"""The planner against the truth: predicted and real peaks, epochs under limits, a large model, the guides' own batches.

    python benchmarks/memory/planner.py [--only accuracy,limited,large,guides] [--members NAMES] [--out FILE]

- accuracy: the live peak of three steps, predicted and counted by a byte-accurate CPU allocator, for every model of
  tests/zoo at three sizes, with one and two micro-batches;
- limited: data sets of variable sizes, each planned for five limits; the planned epoch is really trained on a device
  that refuses the first byte above the limit, from the making of the model on;
- large: a plan for a transformer of 650M parameters and 10,000 lengths, in a process of its own;
- guides: the five guides' configurations at their real sizes, on cards of 24, 40, 80 and 141 GB.

With `--only`, the other parts of FILE stay; with `--members`, the other models.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"  # some kernels take memory per thread; torch reads it at its start

from benchmarks.circumstances import circumstances, write  # noqa: E402 - the project is found only now

PARTS = ("accuracy", "limited", "large", "guides")
BY_MEMBER = ("accuracy", "limited")  # the file is written after each


def on() -> dict[str, Any]:
    """Return what the figures were taken on."""
    import torch

    return {**circumstances(), "threads": torch.get_num_threads(), "torch": torch.__version__}


def options() -> argparse.Namespace:
    """Return what was typed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--members", default="", help="models of the zoo, with commas between; all unless told")
    parser.add_argument("--out", type=Path)
    typed = parser.parse_args()
    typed.only = typed.only.split(",")
    if unknown := set(typed.only) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return typed


def main() -> int:
    """Measure the parts, print their tables, write all figures; fail where nothing real was run."""
    typed = options()
    import torch

    from tests.testkit.limited.device import why_not
    from tests.zoo import ZOO

    members = [ZOO[name] for name in typed.members.split(",")] if typed.members else list(ZOO.values())
    if {"accuracy", "limited"} & set(typed.only) and (reason := why_not()):
        print(f"{reason}: nothing was measured", file=sys.stderr)
        return 1
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    result = json.loads(typed.out.read_text()) if typed.out and typed.out.exists() else {}
    for name in typed.only:
        for some in [[member] for member in members] if name in BY_MEMBER else [members]:
            result[name] = measured(name, some, typed.out, result.get(name, {}))
            write(typed.out, result)
    told = {part: {key: value for key, value in result[part].items() if key != "rows"} for part in typed.only}
    print(json.dumps(told))
    return 0


def measured(name: str, members: Sequence[Any], out: Path | None, before: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a part; what was measured before of other models stays."""
    part, start = importlib.import_module(f"benchmarks.planning.{name}"), time.perf_counter()
    rows = part.measured(members, out)
    assert rows, "nothing was measured"
    took_s, done = time.perf_counter() - start, {row["member"] for row in rows}
    rows = [{**row, "took_s": round(took_s / len(rows), 2)} for row in rows]
    rows = [*(row for row in before.get("rows", ()) if row["member"] not in done), *rows]
    return {**part.told(rows), "took_s": round(sum(row["took_s"] for row in rows)), **on(), "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
