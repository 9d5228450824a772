"""Runs whose pages are looked at: written as supervisors, workers and trainings write them."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from pipeline.cluster.verdict import Cause
from pipeline.config.load import dump_resolved, read_config
from pipeline.journal.attempts import Ask, Attempt
from pipeline.planning.trainings import Training, write_trainings
from pipeline.records import EventKind
from pipeline.training.loop.metrics_log import Epoch, MetricRange, MetricsLog
from pipeline.training.prepared import ModelFolder, PhasePlan, Prepared
from tests.journal.ledgers import Told

GIB = 1 << 30
SMALL, LARGE = Ask(4 * GIB, 3600), Ask(8 * GIB, 3600)
HOSTILE = '<script>document.title="taken"</script><img src="http://192.0.2.1/x" onerror="document.title=1">'
CONFIG = """\
data: {source: glob, path: data}
train: {task: "pipeline.tasks.interface:Interface"}
"""


def begun(folder: Path, stage: str = "embed", tasks: int = 4) -> Told:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "pipeline.yaml").write_text(CONFIG)
    told = Told(folder / "runs", stage, tasks)
    told.folder.config.write_text(dump_resolved(read_config(folder / "pipeline.yaml").config))
    told.folder.again.write_text(f"pipeline submit {stage}\n")
    return told


def failed(folder: Path, said: str = "the worker's own words") -> Told:
    """Return a run that failed: one task is done, one is done since it got more memory, one was given up."""
    told = begun(folder)
    told.job("7", [0, 1, 2, 3], ask=SMALL, why="planned")
    told.ended(_attempt(0, Cause.DONE, ended_at=1010.0, elapsed_s=10.0, peak_rss_bytes=3 * GIB, done=10))
    told.ended(_attempt(1, Cause.HOST_OOM, reason="killed by the kernel", state="OUT_OF_MEMORY", node="n7"))
    told.job("8", [1], attempt=2, ask=LARGE, why="twice as much memory")
    told.ended(_attempt(1, Cause.DONE, number=2, ask=LARGE, job="8", peak_rss_bytes=5 * GIB, elapsed_s=20.0, done=10))
    told.ended(_attempt(2, Cause.GPU_OOM, reason="CUDA out of memory", gpu_peak_bytes=20 * GIB, elapsed_s=3.0))
    told.job("9", [2], attempt=2, ask=Ask(4 * GIB, 3600, shrink=1), why="half the batch")
    told.ended(_attempt(2, Cause.DONE, number=2, job="9", done=10, elapsed_s=30.0))
    log = str(told.folder.logs / "7_3.err")
    told.ended(
        _attempt(
            3, Cause.FAILED, reason="exit code 1\n  next: look into it", said=said, log=log, exit_code=1, on=(said,)
        )
    )
    told.supervisor.emit(EventKind.TASK_GIVEN_UP, stage="embed", task=3, attempt=1, why="the same again ends the same")
    told.supervisor.emit(
        EventKind.LEFT_OUT, stage="embed", names=[said, "b"], reason="killed_its_task", why="task 3 died of it"
    )
    lines = [{"id": said, "reason": "parse_error", "detail": said, "origin": "manifest.csv:3", "split": "train"}]
    told.folder.rejected.write_text("".join(json.dumps(line) + "\n" for line in lines))
    census = {
        "items": 40, "accepted": 39, "rejected": {"parse_error": 1}, "examples": {"parse_error": said}, "undone": 10,
        "first_undone": "x", "unnamed": 0, "sequences": 30, "residues": 900, "longest": 40, "rejected_fraction": 0.025,
    }  # fmt: skip
    error = f"runs: 10 of 40 items are not done\n  task 3: FAILED: {said}\n  next: look into it\n    log: {log}"
    error += "\n  next: pipeline submit --again"
    told.supervisor.emit(
        EventKind.STAGE_ENDED, stage="embed", state="failed", census=census, warnings=[said], error=error
    )
    told.over("failed", 7, error)
    return told


def _attempt(task: int, cause: Cause, **more: object) -> Attempt:
    given = {"number": 1, "ask": SMALL, "state": "COMPLETED", "job": "7", "ended_at": 1040.0, "elapsed_s": 5.0}
    return Attempt(task=task, cause=cause, **{**given, **more})  # type: ignore[arg-type]


def trained(folder: Path, epochs: int = 30, later: int = 0) -> Told:
    """Return a run that trains on GPUs: in its third epoch a step ran out of memory, and one was never finite.

    Another run has trained the model for `later` epochs more.
    """
    told = begun(folder, "train", tasks=1)
    told.job("7", [0], ask=LARGE, gpus=1, why="planned")
    phase = PhasePlan("all items", epochs, 5 * GIB, GIB, 6 * GIB, 10 * GIB, {"item": 1.0})
    prepared = Prepared(
        "own-0123", {}, "00", "bf16", 0, False, False, (phase,), 20 * GIB, 0.02, 1, 4, 8 * GIB, "planned", ""
    )  # fmt: skip
    write_trainings(told.folder, (Training("", prepared),))
    config = read_config(folder / "pipeline.yaml").config
    made = ModelFolder(config.train.models / prepared.name)
    with closing(MetricsLog(made.path)) as figures:
        for step in range(1, 10 * (epochs + later) + 1):
            figures.log(step, {"loss.distance": 10.0 / step, "learning_rate": 1e-3})
            if step % 10 == 0:
                figures.epoch(_epoch(step // 10))
    (made.bundles / "step-00000023-oom-rank-0").mkdir(parents=True)
    return told


def _epoch(number: int) -> Epoch:
    return Epoch(
        epoch=number, step=10 * number, steps=10, loss={"distance": 1.0 / number}, learning_rate=1e-3,
        batch=MetricRange(8, 8, 8), items=80, items_per_s=100.0 - number, allocated_bytes=4 * GIB,
        reserved_bytes=9 * GIB, peak_bytes=(9 * GIB if number != 3 else 11 * GIB), ooms=int(number == 3),
        micro_batches=2, rejected=0, cropped=0, wall_s=1.0, remedied={"smaller": 5} if number == 3 else {},
        seconds={"forward": 0.5, "collate": 0.125 * (number > 1), "read": 0.375, "copy": 0.001},
        validation={"loss.distance": None if number == 5 else 1.1 / number, "auroc": 0.5 + number / 100},
    )  # fmt: skip


def many(folder: Path, tasks: int) -> Told:
    """Return a run of many tasks, of which every tenth failed once; one file of events each."""
    told = begun(folder, "scan", tasks)
    told.job("7", list(range(tasks)), ask=SMALL)
    for task in range(tasks):
        at = 1000.0 + task
        head = {"stage": "scan", "task": task, "attempt": 1}
        events = [
            {"at": at, "kind": "task_started", **head, "host": "n1"},
            {"at": at + 4, "kind": "progress", **head, "done": 5, "rejected": {}, "figures": {}},
            {"at": at + 9, "kind": "task_finished", **head, "done": 10, "rejected": {"parse_error": 1}, "figures": {}},
        ]
        lines = "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events)
        (told.folder.events / f"scan-{task:06d}.jsonl").write_text(lines)
        bad = task % 10 == 0
        cause, reason = (Cause.HOST_OOM, "killed " + "x" * 2000) if bad else (Cause.DONE, "")
        told.ended(_attempt(task, cause, reason=reason, ended_at=at + 9, elapsed_s=9.0, peak_rss_bytes=GIB, done=10))
    rejected = {"id": "y" * 3000, "reason": "parse_error", "detail": "z" * 3000, "origin": "m.csv:1", "split": "train"}
    told.folder.rejected.write_text((json.dumps(rejected) + "\n") * 1000)
    return told
