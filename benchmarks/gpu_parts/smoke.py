"""Does everything run: each recipe in two precisions and more, by the commands that people type, on made data.

Each is read, embedded, built, trained for two epochs, evaluated and its predictions written, as small as tests run it.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.day import Asking, Cases, Part, Row
from benchmarks.gpu_parts.memory import RECIPES
from pipeline.device.kinds import CPU

PRECISIONS = ("fp32", "bf16", "fp16")  # of which a rehearsal has the first two
AT_ONCE = 2  # nothing is timed
LIMIT_S, COMMAND_S = 420.0, 300.0
STAGES = ("all", "predict")


def recipe_runs(case: Mapping[str, Any]) -> dict[str, Any]:
    """Run a recipe in some precisions, one after the other in one project; return what came of each."""
    from tests.recipes.projects import ALL, write

    recipe, folder = ALL[case["recipe"]], Path(case["folder"])
    folder.mkdir(parents=True)
    write(recipe, folder)
    rows = {precision: _run(recipe, folder, case, precision) for precision in case["precisions"]}
    return {
        "runs": {name: row for name, row in rows.items() if "why" not in row},
        "failed": {name: row["why"] for name, row in rows.items() if "why" in row},
    }


def _run(recipe: Any, folder: Path, case: Mapping[str, Any], precision: str) -> Row:
    from tests.recipes.projects import as_words

    gpus = 0 if case["device"] == CPU else 1
    sets = recipe.sets(f"train.precision={precision}", gpus=gpus)
    if gpus:
        card = f"cluster.slurm.cards=[{{gres: here, mem: {case['about']['total_bytes'] >> 20}MiB}}]"
        sets += as_words(card, *(f"cluster.{stage}.gpus=1" for stage in ("embed", "evaluate", "predict")))
    began, before = time.perf_counter(), set(folder.glob("models/*"))
    for stage in STAGES:
        done = _typed(folder, ["submit", "--stage", stage, "--follow", "--executor", "local", *sets])
        if done.returncode:
            last = [line for line in done.stderr.splitlines() if line.strip()][-3:]
            print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
            return {"why": f"stage {stage}: exit code {done.returncode}: {' | '.join(last)}"}
    return {**_outcome(folder, before), "seconds": round(time.perf_counter() - began, 1)}


def _typed(folder: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Type a command."""
    command = [sys.executable, "-m", "pipeline.cli.main", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=COMMAND_S, check=False)


def _outcome(folder: Path, before: set[Path]) -> Row:
    """Return what a training, its evaluation and its predictions have left behind; raise where any is missing."""
    (model,) = set(folder.glob("models/*")) - before
    epochs = [json.loads(line) for line in (model / "epochs.jsonl").read_text().splitlines()]
    assert len(epochs) == 2, epochs
    assert all(math.isfinite(term) for one in epochs for term in one["loss"].values()), epochs
    (kept,) = model.glob("evaluations/test-*.json")
    loss = json.loads(kept.read_text())["evaluation"]["figures"]["loss"]
    assert math.isfinite(loss), loss
    predictions = max(folder.glob("predictions/*/predictions.json"), key=lambda path: path.stat().st_mtime_ns)
    items = json.loads(predictions.read_text())["items"]
    assert items > 0, predictions
    return {"loss": loss, "predicted_items": items, "reserved_bytes": max(one["reserved_bytes"] for one in epochs)}


def run(asking: Asking) -> None:
    """Run every recipe in two precisions, then in the others."""
    wanted = [PRECISIONS[:2]] if asking.rehearsal else [PRECISIONS[:2], PRECISIONS[2:]]
    for precisions in wanted:
        asking.side_by_side((partial(_recipe, asking, name, precisions) for name in RECIPES), AT_ONCE)


def _recipe(asking: Asking, name: str, precisions: Sequence[str]) -> None:
    label = f"{name} {' '.join(precisions)}"
    folder = asking.day.scratch / "smoke" / label.replace(" ", "-")
    given = {"recipe": name, "precisions": list(precisions), "folder": str(folder)}
    asking.ask(label, f"{__name__}:recipe_runs", LIMIT_S, alone=False, **given)


def figures(cases: Cases) -> dict[str, Any]:
    """Return how many of the runs were whole."""
    runs, failed = (
        {f"{label.split()[0]} {kind}": row for label, told in cases.items() for kind, row in told[what].items()}
        for what in ("runs", "failed")
    )
    wanted = {f"{recipe} {kind}" for recipe in RECIPES for kind in PRECISIONS[:2]} | set(failed)
    return {"runs": runs, "whole": len(runs), "missing": len(wanted - set(runs)), "without": sorted(wanted - set(runs))}


PART = Part(
    "smoke",
    "every recipe trained, evaluated and predicted with, in two precisions",
    0.2,
    run,
    figures,
    needs=("pytest", "xdist", "h5py", "e3nn"),
)
