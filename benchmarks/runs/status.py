"""How long `pipeline status` takes for a run with many tasks: events as workers and supervisors write them.

python benchmarks/runs/status.py [--tasks N] [--runs N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.circumstances import write
from pipeline.cluster.verdict import Cause
from pipeline.journal import run_folder as folders
from pipeline.journal.attempts import Ask, Attempt
from pipeline.journal.run_folder import RunFolder

REACH_S = 1.0
PIPELINE = Path(sys.executable).with_name("pipeline")
TOLD = 12  # times that a worker tells how far it is: twice a second, of a short task
ARRAY = 1000  # tasks of a job
ITEMS = 100  # of a task
ASK = {"mem_bytes": 2 << 30, "time_s": 3600}
SAID = {"rejected": {"no_contacts": 1}, "figures": {"host_peak_bytes": 300 << 20}}


def make_run(runs: Path, tasks: int) -> RunFolder:
    """Write a run whose graph stage is nearly over: every hundredth task failed once, the last ones still run."""
    folder = folders.create_folder(runs, "graph", datetime.now(tz=UTC))
    folder.stages.write_text('["graph"]')
    now = time.time() - 3600
    for task in range(tasks):
        _write(folder, f"graph-{task:06d}", _worker(task, now, over=task < tasks - tasks // 20))
    _write(folder, "supervisor-000001", _supervisor(tasks, now))
    return folder


def _write(folder: RunFolder, writer: str, events: list[dict[str, Any]]) -> None:
    lines = (json.dumps(event, separators=(",", ":")) + "\n" for event in events)
    (folder.events / f"{writer}.jsonl").write_text("".join(lines))


def _worker(task: int, now: float, *, over: bool) -> list[dict[str, Any]]:
    """Return what a worker tells."""
    facts = {"stage": "graph", "task": task, "attempt": 1}
    told: list[dict[str, Any]] = [{"at": now, "kind": "task_started", **facts, "host": "n1"}]
    for number in range(TOLD):
        done = {
            "done": number * ITEMS // TOLD,
            "rejected": {"no_contacts": 1},
            "figures": {"host_peak_bytes": 300 << 20},
        }
        told.append({"at": now + number / 2, "kind": "progress", **facts, **done})
    if over:
        done = {"done": ITEMS, **SAID}
        told.append({"at": now + 7, "kind": "task_finished", **facts, **done})
    return told


def _supervisor(tasks: int, now: float) -> list[dict[str, Any]]:
    """Return what a supervisor tells."""
    who = {"host": "elsewhere", "pid": 1}
    counts = {"items": tasks * ITEMS, "missing": tasks * ITEMS, "tasks": tasks, "refused": 0, "cached": 0, "cost": 0.0}
    told: list[dict[str, Any]] = [
        {"at": now, "kind": "run_started", "stages": ["graph"], **who},
        {"at": now, "kind": "visit", "number": 1, **who},
        {"at": now, "kind": "stage_submitted", "stage": "graph", **counts},
    ]
    sequence = count()
    told += [_job(now, next(sequence), f"{first}-{first + ARRAY - 1}", 1) for first in range(0, tasks, ARRAY)]
    for task in range(tasks - tasks // 20):
        told.append(_ended(now, task, 1, killed=task % 100 == 0))
        if task % 100 == 0:
            told += [_job(now, next(sequence), f"{task}", 2), _ended(now, task, 2, killed=False)]
    return [*told, {"at": now + 60, "kind": "handed_over", "jobs": ["7001", "7002"]}]


def _job(now: float, number: int, tasks: str, attempt: int) -> dict[str, Any]:
    kind = {"at": now, "kind": "job_submitted", "tag": f"run-graph-{number}", "stage": "graph", "tasks": tasks}
    asked = {"attempt": attempt, "ask": ASK, "cpus": 2, "gpus": 0, "partition": "", "constraint": "", "card": ""}
    return {**kind, **asked, "id": f"{8000 + number}", "why": "from 41 tasks: 99th percentile 1.6 GiB + 20%"}


def _ended(now: float, task: int, attempt: int, *, killed: bool) -> dict[str, Any]:
    how = (Cause.HOST_OOM, "OUT_OF_MEMORY", "killed at its memory limit") if killed else (Cause.DONE, "COMPLETED", "")
    job = f"{8000 + task // ARRAY}"
    ended = Attempt(
        task=task,
        number=attempt,
        ask=Ask(**ASK),
        cause=how[0],
        state=how[1],
        reason=how[2],
        job=job,
        node="n1",
        log=f"/runs/logs/{job}_{task}.err",
        exit_code=0,
        peak_rss_bytes=1 << 30,
        ended_at=now + 8,
        elapsed_s=7.0,
        cpu_s=6.0,
        done=ITEMS,
    )
    return {"at": now + 8, "kind": "task_ended", "stage": "graph", **ended.to_event()}


def seconds(*words: str) -> float:
    """Return the wall time of one whole process."""
    start = time.perf_counter()
    subprocess.run([str(PIPELINE), *words], check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> int:
    """Time the table and the document, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = str(make_run(Path(scratch), options.tasks).path)
        rounds = [(seconds("status", run), seconds("status", run, "--json")) for _ in range(options.runs)]
    shown, as_json = (statistics.median(column) for column in zip(*rounds, strict=True))
    result = {
        "what": "pipeline status, wall time of the whole process",
        "tasks": options.tasks,
        "events": options.tasks * (TOLD + 3),
        "runs": options.runs,
        "status_s": round(shown, 3),
        "json_s": round(as_json, 3),
        "reach_s": REACH_S,
    }
    print(f"pipeline status of {options.tasks:,} tasks {shown:.3f} s, --json {as_json:.3f} s, to reach {REACH_S} s")
    print(json.dumps(result))
    write(options.out, result)
    return 0 if shown <= REACH_S else 1


if __name__ == "__main__":
    sys.exit(main())
