"""What a sweep's run did, by its ledger and its models: how often each point was finished, and each step kept.

    python benchmarks/runs/swept.py RUN_FOLDER

tests/slurm/test_sweeps.py asserts the same of 20 points of which tasks and supervisors were killed twice.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.journal.ledger import LedgerReader
from pipeline.journal.run_folder import RunFolder
from pipeline.journal.run_status import StatusReader
from pipeline.records import EventKind


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


if __name__ == "__main__":
    print(json.dumps(swept_figures(RunFolder(Path(sys.argv[1]).absolute())), indent=1))
