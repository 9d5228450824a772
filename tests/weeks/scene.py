"""What an event is played on: toy projects whose runs go to a cluster, their undisturbed twins, and what must hold."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

from pipeline.journal.run_status import State
from tests.testkit.cluster import Cluster
from tests.testkit.command import Typed
from tests.testkit.slurm_runs import Project, Run, make_project, strangers, until

ITEMS, EPOCHS, STEPS, EVERY = 12, 10, 30, 4
WAITS_S, ENDS_S = 900.0, 1800.0  # the machine may be busy with others
ENDS = (State.DONE, State.FAILED, State.STOPPED)
ACTS = "WEEKS_ACTS"
TASK = f'''\
"""The reference task, small; a file of acts may hold its first start at a step, or let its memory grow."""

import json
import os
import time
from pathlib import Path

from pipeline.tasks.interface import Interface

PLACE = Path(os.environ.get("{ACTS}", "/nonexistent"))
ACT = json.loads((PLACE / "acts.json").read_text()) if PLACE.is_dir() else {{}}
calls, kept = 0, []


def hold(name):
    """Tell that this process is here, and stay until it is let go; who comes second does not stay."""
    try:
        os.symlink(str(os.getpid()), PLACE / name)
    except FileExistsError:
        return
    while not (PLACE / f"{{name}}-go").exists():
        time.sleep(0.02)


class Held(Interface):
    def loss(self, model, batch):
        global calls
        calls += model.training
        if model.training and ACT.get("leak_bytes"):
            kept.append(os.urandom(ACT["leak_bytes"]))
        if model.training and calls in ACT.get("holds", ()):
            hold(f"step-{{calls}}")
        time.sleep(ACT.get("step_s", 0.0) if model.training else 0.0)
        return super().loss(model, batch)
'''
CLOCK = """\
import time

now, now_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: now() + {apart_s}, lambda: now_ns() + {apart_s} * 10**9
"""
SETTINGS: dict[str, Any] = {
    "embed__weights": "esm2_small.pt",
    "train__task": "held:Held",
    "train__options": {"embedding_dim": 32, "width": 8, "layers": 1, "pair_width": 4, "dropout": 0.2},
    "train__effective_batch": 4,
    "train__epochs": EPOCHS,
    "train__checkpoints": {"every": EVERY},
    "train__log_every": 1,
}


class Untrue(AssertionError):
    """Something did not hold that must hold after every event."""


def must(holds: object, what: str, story: Callable[[], str] = str) -> None:
    """Raise unless something holds, with the story so far."""
    if not holds:
        raise Untrue(f"{what}\n{story()}")


@dataclass
class Scene:
    """One event: its cluster, its random choices, and the runs that were begun for it."""

    cluster: Cluster
    template: Project  # of which all is done that comes before a training
    folder: Path  # empty, for this event alone
    rng: random.Random
    quiet: Mapping[str, bytes]  # the weights that an undisturbed training ends with
    runs: list[Run] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)  # what commands printed

    def project(self, folder: Path | None = None, **acts: Any) -> Project:
        """Return a copy of the project, whose training does some acts."""
        copy = Project((folder or self.folder) / "project")
        shutil.copytree(self.template.folder, copy.folder)
        place = copy.folder / "place"
        place.mkdir()
        (place / "acts.json").write_text(json.dumps(acts))
        (place / "sitecustomize.py").write_text(CLOCK.format(apart_s=acts.get("apart_s", 0)))
        return copy

    def settings(self, project: Project, **settings: str) -> list[str]:
        """Return settings as words, with the line that tells a task of its acts; __ stands for the dot."""
        place = project.folder / "place"
        setup = {"cluster__slurm__setup": json.dumps([f"export {ACTS}={place} PYTHONPATH={place}"])}
        return [f"--set={name.replace('__', '.')}={value}" for name, value in {**setup, **settings}.items()]

    def trains(self, project: Project, **settings: str) -> Run:
        """Submit a training."""
        return self.submits(project, "train", *self.settings(project, **settings))

    def submits(self, project: Project, stage: str, *words: str, **environment: str) -> Run:
        """Submit a stage, which must be taken."""
        done = self.types(project, "submit", "--stage", stage, "--executor", "slurm", *words, **environment)
        must(done.code == 0, f"submit ended with {done.code}", lambda: done.said)
        return self.follows(project.newest)

    def held(self, *steps: int, folder: Path | None = None, path: str = "", **acts: Any) -> Run:
        """Begin a training and wait until it is held at the first of some steps, by default one of the middle.

        `path` is where its commands import the package from.
        """
        holds = steps or (self.rng.randrange(EVERY + 1, STEPS - EVERY),)
        project = self.project(folder, holds=holds, **acts)
        environment = {"PYTHONPATH": path} if path else {}
        run = self.submits(project, "train", *self.settings(project), **environment)
        self.arrives(run, holds[0])
        return run

    def arrives(self, run: Run, at: int) -> int:
        """Wait until a training is held at a step; return its process."""
        link = run.project.folder / "place" / f"step-{at}"
        until(f"step {at}", link.is_symlink, WAITS_S, run.story)
        return int(link.readlink().name)

    def process(self, run: Run) -> int:
        """Return the process that is held."""
        (link,) = (path for path in (run.project.folder / "place").glob("step-*") if path.is_symlink())
        return int(link.readlink().name)

    def lets_go(self, run: Run) -> None:
        """Let what is held go on."""
        place = run.project.folder / "place"
        for link in [path for path in place.glob("step-*") if path.is_symlink()]:
            link.with_name(f"{link.name}-go").touch()

    def follows(self, run: Run) -> Run:
        """Take a run among those of which nothing may be left."""
        if run.name not in [other.name for other in self.runs]:
            self.runs.append(run)
        return run

    def types(self, project: Project, *words: str, **environment: str) -> Typed:
        """Type a command, and keep what it printed."""
        done = project.types(*words, **environment)
        self.heard.append(f"$ pipeline {' '.join(words)}\n{done.out}{done.err}(exit code {done.code})")
        must("Traceback" not in done.err, f"`pipeline {words[0]}` broke", lambda: done.err)
        return done

    def job(self, run: Run, kind: str = "train") -> str:
        """Wait for a job of a run that runs, and return its id."""

        def running() -> list[str]:
            return [row["job"] for row in run.jobs(self.cluster, kind) if row["state"] == "RUNNING"]

        until(f"a running {kind} job", running, WAITS_S, run.story)
        return running()[0]

    def slurm(self, *words: str) -> str:
        """Type a Slurm command that must work; return what it printed."""
        done = self.cluster.run(*words)
        must(done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def ends(self, run: Run, *states: State) -> str:
        """Wait for the end of a run, by default a good one; return what status and report say."""
        wanted = states or (State.DONE,)
        until(f"the end of {run.name}", lambda: run.now().state in ENDS or run.now().state in wanted, ENDS_S, run.story)
        must(run.now().state in wanted, f"{run.name} ended {run.now().state}", run.story)
        return self.told(run)

    def goes_on(self, run: Run, stage: str = "train") -> Run:
        """Submit again what is left of a run, as its user would: the same command, or `resume` where it was left."""
        if run.now().state is State.ABANDONED:
            done = self.types(run.project, "resume", run.name)
            if done.code == 0:
                return self.follows(run.project.newest)
            must("next: pipeline submit" in done.said, "resume failed", lambda: done.said)  # what is left has failed
        return self.submits(run.project, stage, *self.settings(run.project))

    def leaves(self) -> None:
        """Let all go that is held, and cancel what is left."""
        for run in self.runs:
            self.lets_go(run)
        if jobs := {row["array"] for run in self.runs for row in run.jobs(self.cluster)}:
            self.cluster.run("scancel", *jobs)

    def told(self, run: Run) -> str:
        """Return what status, its details and report say of a run now; what its failed tasks printed is kept, too."""
        views = (("status",), ("status", "-v"), ("report",))
        told = [self.types(run.project, *words, run.name).said for words in views]
        self.types(run.project, "logs", "--failed", run.name)
        return " ".join(told)

    def says(self, told: str, *patterns: str) -> None:
        """Check that something was said."""
        for pattern in patterns:
            must(re.search(pattern, told, re.I | re.S), f"nobody said {pattern!r}", lambda: told)

    def trained(self, run: Run) -> None:
        """Check that a model equals its undisturbed twin, bit for bit, and that no step is missing in its figures."""
        found = weights(run.project)
        wrong = [name for name in self.quiet if found.get(name) != self.quiet[name]]
        must(
            not wrong and found.keys() == self.quiet.keys(), f"{run.name}: other bits in {wrong or 'names'}", run.story
        )
        lines = (model(run.project) / "figures.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        must(steps == [*range(1, STEPS + 1)], f"{run.name}: the figures are of steps {steps}")

    def nothing_left(self) -> None:
        """Check that no job, process or half file is left of any run."""
        for run in self.runs:
            until(f"no job of {run.name}", lambda run=run: not run.jobs(self.cluster), WAITS_S, run.story)
            until(
                f"no process of {run.name}",
                lambda run=run: not strangers(run),
                30.0,
                lambda run=run: str(strangers(run)),
            )
        halves = [path for path in self.folder.rglob("*") if ".partial" in path.name]
        must(not halves, f"half files are left: {halves}")


def model(project: Project) -> Path:
    """Return the folder of the trained model."""
    (folder,) = (path for path in (project.folder / "models").iterdir() if path.is_dir() and path.name[0] != ".")
    return folder


def weights(project: Project) -> dict[str, bytes]:
    """Return the bits of the tensors of the last checkpoint: parameters and optimizer."""
    newest = max((model(project) / "checkpoints").glob("step-*"))
    is_last = re.fullmatch(rf"step-{STEPS:08}(-\d+)?", newest.name)  # -2 where it was killed as it had saved itself
    must(is_last, f"the last checkpoint is {newest.name}")
    return bits(model(project))


def bits(folder: Path) -> dict[str, bytes]:
    """Return the bits of the tensors of a model's last checkpoint."""
    newest = max((folder / "checkpoints").glob("step-*"))
    with safe_open(newest / "state.safetensors", "np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118 - it is no dict


def prepared(folder: Path) -> Project:
    """Make the project of which copies are trained: scanned, embedded, planned."""
    project = make_project(folder, ITEMS, data__path=str(folder / "data"), **SETTINGS)  # which no copy scans again
    (folder / "held.py").write_text(TASK)
    shape = ("--layers", "2", "--dim", "32", "--heads", "2", "--out", "esm2_small.pt")
    for words in (
        ("weights", "synth", *shape),
        *(("submit", "--stage", stage, "--executor", "local", "--follow") for stage in ("embed", "graph")),
        ("submit", "--stage", "train", "--executor", "slurm", "--dry-run"),  # the plan is kept
    ):
        done = project.types(*words)
        must(done.code == 0, f"{' '.join(words)} ended with {done.code}", lambda done=done: done.said)
    return project
