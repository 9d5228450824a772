"""What a report says of a model: its curves, thinned out, what was planned for it, and the steps that went wrong."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.training.figures import STEP, read_epochs, read_figures
from pipeline.training.prepared import ModelFolder, Prepared

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.config.schema import Config
    from pipeline.runs.folder import RunFolder
    from pipeline.runs.status import StageStatus
    from pipeline.training.figures import Epoch

TRAIN = "train"
POINTS = 500  # of a curve
SERIES = 16  # curves of a kind: terms of a loss, metrics
EPOCH_ROWS = 100
BUNDLES = 50
# As `training.bundles` names them, which cannot be imported without torch: a supervisor has no room for that.
_BUNDLE = re.compile(r"step-(?P<step>\d{8,})-(?P<kind>[a-z]+)-rank-(?P<rank>\d+)(?:-\d+)?")


def training_facts(folder: RunFolder, config: Config, stage: StageStatus | None) -> dict[str, Any] | None:
    """Return what is known of the training of a run; None where it has none that tells."""
    prepared = prepared_of(folder)
    if prepared is None:
        return None
    made = ModelFolder(config.train.models / prepared.name)
    epochs = read_epochs(made.path)
    on_gpu = bool(stage and any(job.gpus for job in stage.jobs.values())) or bool(config.cluster.train.gpus)
    settings = config.train.validation
    return {
        "model": prepared.name,
        "folder": str(made.path),
        "monitor": settings.monitor,
        "lower_is_better": settings.lower_is_better,
        "on_gpu": on_gpu,
        "planned": _planned(prepared),
        "epochs": [_epoch(one) for one in thinned(epochs, POINTS)],
        "rows": [_epoch(one) for one in epochs[-EPOCH_ROWS:]],
        "known_epochs": len(epochs),
        "losses": _names(one.loss for one in epochs),
        "metrics": _names(one.validation for one in epochs),
        "steps": _steps(read_figures(made.path)),
        "bundles": bundles_in(made.bundles),
    }


def prepared_of(folder: RunFolder) -> Prepared | None:
    """Return the plan that a run's training follows, if it has one that this version can read."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return Prepared.from_json(json.loads(folder.plan(TRAIN).read_text()))
    return None


def _planned(prepared: Prepared) -> dict[str, Any]:
    """Return what was decided before: of each stretch of epochs the memory, and up to which epoch it goes."""
    stretches, last = [], 0
    for one in prepared.stretches:
        last += one.epochs
        told = {name: getattr(one, name) for name in ("name", "live_bytes", "reserved_bytes", "budget_bytes")}
        stretches.append({"until": last, **told})
    return {
        "epochs": prepared.epochs,
        "stretches": stretches,
        "limit_bytes": prepared.limit_bytes,
        "margin": prepared.margin,
        "mem_bytes": prepared.mem_bytes,
        "mem_why": prepared.mem_why,
        "ranks": prepared.ranks,
        "precision": prepared.precision,
        "remedies": list(prepared.remedies),
        "skipped": len(prepared.skipped),
        "step_s": prepared.step_s,
    }


def _epoch(one: Epoch) -> dict[str, Any]:
    """Return what a row and the curves show of an epoch."""
    told = one.to_json()
    for name in ("loss", "validation"):
        told[name] = dict(list(told[name].items())[:SERIES])
    return told


def _names(told: Iterator[Mapping[str, Any]] | Any) -> list[str]:
    """Return the names that occur, in the order in which they came."""
    return list(dict.fromkeys(chain.from_iterable(told)))


def _steps(figures: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return each figure that was noted every few steps as a curve."""
    names = [name for name in _names(figures) if name != STEP][: 2 * SERIES]
    curves = {name: [(one[STEP], one[name]) for one in figures if one.get(name) is not None] for name in names}
    return {name: thinned(curve, POINTS) for name, curve in curves.items() if curve}


def thinned(values: Sequence[Any], most: int) -> list[Any]:
    """Return evenly spaced ones of many values; the first and the last are among them."""
    if len(values) <= most:
        return list(values)
    return [values[place * (len(values) - 1) // (most - 1)] for place in range(most)]


def bundles_in(folder: Path) -> dict[str, Any]:
    """Return the steps that left what it takes to run them again, by what went wrong."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    found = [match for match in map(_BUNDLE.fullmatch, names) if match]
    rows = [
        {"step": int(one["step"]), "kind": one["kind"], "rank": int(one["rank"]), "path": str(folder / one[0])}
        for one in found[-BUNDLES:]
    ]
    return {"rows": rows, "more": len(found) - len(rows)}
