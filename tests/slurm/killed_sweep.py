"""A sweep of 20 points on the test cluster, of which tasks and supervisors are killed twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.journal.ledger import LedgerReader
from pipeline.records import EventKind
from tests.testkit.slurm_runs import Project, Run, kill, make_project, processes_of, until

EPOCHS, STEPS, POINTS, TRIALS = 4, 12, 20, 6
SWEEP = ("--sweep", "train.seed=0:5", "--sweep", "train.learning_rate=1e-4,3e-4,1e-3,3e-3")
SPACE = "{train.learning_rate: {low: 1e-5, high: 1e-2, log: true}, train.options.width: [4, 6]}"
SEARCH = {"search": "optuna", "space": SPACE, "trials": TRIALS, "at_once": 2}
SETTINGS: dict[str, Any] = {
    "embed__weights": "esm2_small.pt",
    "train__task": "pipeline.tasks.interface:Interface",
    "train__options": {"embedding_dim": 16, "width": 8, "layers": 1, "pair_width": 4, "dropout": 0.2},
    "train__effective_batch": 4,
    "train__epochs": EPOCHS,
    "train__checkpoints": {"every": 2},
    "train__log_every": 1,
    "train__sweep__parallel": 6,
}
SUPERVISOR, WORKER = "pipeline.engine.supervisor", "pipeline.engine.worker"


def ready_to_sweep(folder: Path) -> Project:
    """Return a project of which all is done that comes before training."""
    project = make_project(folder, 12, **SETTINGS)
    shape = ("--layers", "1", "--dim", "16", "--heads", "2", "--out", "esm2_small.pt")
    assert project.types("weights", "synth", *shape).code == 0
    project.submits("graph").ends()
    return project


def killed_sweep(project: Project) -> Run:
    """Return the run of the sweep, of which tasks were killed twice, and two supervisors that were to judge them."""
    run = project.submits("train", *SWEEP)
    for few in (3, 9):
        until(f"{few} trained points", lambda few=few: len(finished(run)) >= few, 900, run.story)
        until("some in training", lambda: processes_of(run, WORKER), 120, run.story)
        assert [pid for pid in processes_of(run, WORKER) if kill(pid)]
    ends_a_supervisor(run)
    tried_again = "what was killed to be tried again"
    until(tried_again, lambda: any(job.attempt == 2 for job in run.now().stages["train"].jobs.values()), 600, run.story)
    until("its end", lambda: not processes_of(run, SUPERVISOR), 120, run.story)
    ends_a_supervisor(run)
    run.ends(timeout_s=900)
    return run


def killed_search(project: Project) -> Run:
    """Return the run of a search, of which a task and the supervisor that was to judge it were killed."""
    words = [f"--set=train.sweep.{key}={value}" for key, value in SEARCH.items()]
    rows = [f"c{number},{'val' if number < 3 else 'train'}" for number in range(12)]
    (project.folder / "splits.csv").write_text("\n".join(["id,split", *rows, ""]))
    run = project.submits("train", "--set=data.splits=splits.csv", *words)
    until("a trained trial", lambda: finished(run), 900, run.story)
    until("another in training", lambda: processes_of(run, WORKER), 300, run.story)
    assert [pid for pid in processes_of(run, WORKER) if kill(pid)]
    ends_a_supervisor(run)
    run.ends(timeout_s=900)
    return run


def ends_a_supervisor(run: Run) -> None:
    """Kill the next visit of a supervisor as soon as it is there."""
    until("a supervisor at work", lambda: any(kill(pid) for pid in processes_of(run, SUPERVISOR)), 900, run.story)


def finished(run: Run) -> list[int]:
    """Return the tasks that have said that they are done, once for each time."""
    events = LedgerReader(run.folder).fresh()
    return [
        event.data["task"]
        for event in events
        if event.kind is EventKind.TASK_FINISHED and event.data["stage"] == "train"
    ]
