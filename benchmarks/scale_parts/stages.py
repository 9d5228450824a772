"""One stage of a project by the real command: what it took, and what it left on disk."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.scale_parts.data import PIPELINE
from benchmarks.scale_parts.watch import Watched, watched
from pipeline.journal.ledger import LedgerReader
from pipeline.journal.run_folder import runs_in
from pipeline.records import EventKind

KINDS = {"scan": ("scan", "files"), "embed": ("embed",), "graph": ("graph",), "train": ()}
STAGES = tuple(KINDS)
AFTER = {  # what is typed when all is done; each must have nothing to do, or take nothing that is needed
    "submit again": ("submit", "--stage", "graph", "--executor", "slurm"),
    "cache stat": ("cache", "stat"),
    "cache validate": ("cache", "validate"),
    "cache clean": ("cache", "clean", "--yes"),
}
TELLING = (EventKind.PROGRESS, EventKind.TASK_FINISHED)


def measure(folder: Path, stage: str, complexes: int) -> dict[str, Any]:
    """Run a stage that has not been run in this project, and return its figures."""
    command, began = (
        [str(PIPELINE), "submit", "--stage", stage, "--only", "--executor", "local", "--follow"],
        time.time(),
    )
    return figures_of(watched(command, folder, folder / f"{stage}.log"), folder, stage, complexes, began)


def figures_of(found: Watched, folder: Path, stage: str, complexes: int, began: float) -> dict[str, Any]:
    """Return the figures of a stage that was watched."""
    figures = found.to_json()
    figures |= {
        "wall_ms_per_item": round(1e3 * figures["wall_s"] / complexes, 3),
        "cpu_ms_per_item": round(1e3 * figures["cpu_s"] / complexes, 3),
        **_outcome(folder, stage, complexes),
        **_stored(folder, KINDS[stage]),
    }
    return figures | (_trained(folder, began) if stage == "train" else {})


def _outcome(folder: Path, stage: str, complexes: int) -> dict[str, Any]:
    """Return how many tasks there were, and see that nothing was left undone."""
    done = asked(folder, "status")["stages"][-1]
    assert (done["name"], done["state"]) == (stage, "done"), done
    if stage in ("scan", "graph"):
        assert done["census"]["accepted"] == complexes, done["census"]
    return {"tasks": done["tasks"]}


def _stored(folder: Path, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Return what the stage left in the cache: files of all sorts, and the fewest records a shard has on average."""
    if not kinds:
        return {}
    stats = [one for one in asked(folder, "cache", "stat")["kinds"] if one["kind"] in kinds]
    files = [path for kind in kinds for path in (folder / "cache" / kind).rglob("*") if path.is_file()]
    records = sum(one["records"] for one in stats)
    return {
        "records": records,
        "files": len(files),
        "bytes_per_record": round(sum(path.stat().st_size for path in files) / records),
        "records_per_file": round(records / len(files)),
    }


def _trained(folder: Path, began: float) -> dict[str, Any]:
    """Return how long it took until a step was done, from the command and from the worker's start; and every step."""
    events = [
        event for event in LedgerReader(runs_in(folder / "runs")[-1]).fresh() if event.data.get("stage") == "train"
    ]
    started = next(event.at for event in events if event.kind is EventKind.TASK_STARTED)
    moved = next(event for event in events if event.data.get("done") and event.kind in TELLING)
    last = next(event.data["census"]["last"] for event in events if event.kind is EventKind.STAGE_ENDED)
    return {
        "first_step_s": round(moved.at - began, 2),
        "worker_first_step_s": round(moved.at - started, 2),
        "steps": last["steps"],
        "step_ms": round(1e3 * last["wall_s"] / last["steps"], 2),
        "items_per_s": round(last["items_per_s"], 1),
    }


def asked(folder: Path, *verb: str) -> dict[str, Any]:
    """Return what a verb says as JSON."""
    text = subprocess.run([PIPELINE, *verb, "--json"], cwd=folder, check=True, capture_output=True).stdout
    answer: dict[str, Any] = json.loads(text)
    return answer
