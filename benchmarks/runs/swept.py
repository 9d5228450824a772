"""Sweep 20 points on a real Slurm of this machine, kill tasks and supervisors twice, and count what was done twice.

    python benchmarks/runs/swept.py [RUN_FOLDER] [--cluster FOLDER] [--out FILE]

Counted are the ledger's ends of each point and the steps of which its model kept figures; of a sweep that was run
before, where its folder is named. tests/slurm/test_sweeps.py asserts the same, and that each model is the one that a
plain training makes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.circumstances import write
from pipeline.journal.ledger import LedgerReader
from pipeline.journal.run_folder import RunFolder
from pipeline.journal.run_status import StatusReader
from pipeline.records import EventKind
from tests.slurm.killed_sweep import killed_sweep, ready_to_sweep
from tests.testkit.cluster import Cluster, why_not


def swept_figures(folder: RunFolder) -> dict[str, int | float]:
    """Return the counts of a sweep's run."""
    stage = StatusReader(folder).read().stages["train"]
    events = [event for event in LedgerReader(folder).fresh() if event.data.get("stage") == "train"]
    finished = Counter(event.data["task"] for event in events if event.kind is EventKind.TASK_FINISHED)
    points = (stage.census or {}).get("points", [])
    kept = [_steps_of(folder.points / point["name"]) for point in points if point["model"]]
    return {
        "points": len(points),
        "done": sum(point["state"] == "done" for point in points),
        "models": len({point["model"] for point in points if point["model"]}),
        "attempts": sum(len(task.ended) for task in stage.work.values()),
        "attempts that were killed": len(stage.failures),
        "visits of supervisors": StatusReader(folder).read().visits,
        "points done twice": sum(times > 1 for times in finished.values()),
        "steps": sum(len(steps) for steps in kept),
        "steps kept twice": sum(len(steps) - len(set(steps)) for steps in kept),
        "seconds": round(stage.ended_at - stage.started_at, 1),
    }


def _steps_of(model: Path) -> list[int]:
    """Return the steps of which a training kept figures."""
    lines = (model / "figures.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def swept_here(cluster: Cluster) -> dict[str, int | float]:
    """Sweep on a cluster that was started for it, and return the counts."""
    cluster.start()
    os.environ.update(cluster.env())
    try:
        with tempfile.TemporaryDirectory(prefix="swept-") as folder:
            return swept_figures(killed_sweep(ready_to_sweep(Path(folder) / "project")).folder)
    finally:
        cluster.stop()


def main() -> int:
    """Count, and fail where anything was done twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="of a sweep that was run before")
    parser.add_argument("--cluster", type=Path, default=Path("/var/lib/pipeline-slurm-swept"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.run is None and (reason := why_not()):
        sys.exit(f"no Slurm here: {reason}")
    figures = swept_figures(RunFolder(options.run.absolute())) if options.run else swept_here(Cluster(options.cluster))
    print(json.dumps(figures, indent=1))
    write(options.out, {"what": "a sweep on a real Slurm, tasks and supervisors killed twice", **figures})
    return 1 if figures["points done twice"] or figures["steps kept twice"] else 0


if __name__ == "__main__":
    sys.exit(main())
