"""A run over very many items, as far as it is submitted: how it is cut, what that takes, what its ledger becomes."""

from __future__ import annotations

import csv
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.runs.status import TOLD, make_run, seconds
from benchmarks.scale_parts.apart import apart
from benchmarks.scale_parts.data import complex_of

if TYPE_CHECKING:
    from pipeline.journal.run_folder import RunFolder

FILES = 1_000  # that items share; what differs is their ids, so that each is looked up and listed
AT_ONCE = 64  # array tasks, as configured by default
CONFIG = """\
data: {source: manifest, path: manifest.csv}
cache: {root: cache}
cluster: {executor: slurm, runs: runs}
"""
STATUS_ROUNDS = 3


def scheduler_side(folder: Path, items: int) -> dict[str, Any]:
    """Plan a scan of so many items for a cluster without submitting it; write the events that its tasks would."""
    write_data(folder, items)
    (counts, tasks, largest, sizes), planned = apart(plan_scan, folder)
    assert counts["items"] == counts["missing"] == items, counts
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        run = make_run(Path(scratch), tasks)
        ledger_bytes = sum(path.stat().st_size for path in run.events.iterdir())
        status_s = min(seconds("status", str(run.path)) for _ in range(STATUS_ROUNDS))
    return {
        "items": items,
        "tasks": tasks,
        "items_of_largest_task": largest,
        "planned": planned,
        "list_bytes_per_item": round(sizes["items"] / items, 1),
        "todo_bytes_per_item": round(sizes["todo"] / items, 1),
        "shards_bytes": sizes["shards"],
        "events_per_task": TOLD + 3,
        "ledger_bytes": ledger_bytes,
        "status_s": round(status_s, 3),
    }


def write_data(folder: Path, items: int) -> None:
    """Write a manifest of so many items, and the files that they share."""
    (folder / "structures").mkdir()
    files = min(FILES, items)
    for number in range(files):
        (folder / f"structures/c{number:04d}.pdb").write_bytes(complex_of(number))
    with (folder / "manifest.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("id", "path", "receptor_chains", "ligand_chains", "split"))
        rows = (
            (f"item{number:08d}", f"structures/c{number % files:04d}.pdb", "A", "B", "train") for number in range(items)
        )
        writer.writerows(rows)
    (folder / "pipeline.yaml").write_text(CONFIG)


def plan_scan(folder: Path) -> tuple[dict[str, int], int, int, dict[str, int]]:
    """Do what a submission does before it asks the scheduler for anything; return counts, tasks, and sizes of lists."""
    from pipeline.config.load import read_config
    from pipeline.journal import run_folder as folders
    from pipeline.project.project import Project
    from pipeline.runs.workflow.scan_stage import ScanStage
    from pipeline.stage_names import StageName

    project = Project.open(read_config(folder / "pipeline.yaml", []).config)
    run: RunFolder = folders.create_folder(folder / "runs", StageName.SCAN, datetime.now(tz=UTC))
    found = ScanStage().survey(project, run, AT_ONCE)
    found.write_shards(run, StageName.SCAN)
    paths = {"items": run.items, "todo": run.todo(StageName.SCAN), "shards": run.shards(StageName.SCAN)}
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    return dict(found.counts), len(found.shards), max(shard.items for shard in found.shards), sizes
