"""Submit complexes to a real Slurm on this machine: what a person waits for, and how much memory each stage takes.

    python benchmarks/slurm.py [--complexes 10000] [--stages scan,graph] [--folder FOLDER] [--rounds 3] [--save]
    python benchmarks/slurm.py --complexes 1000000 --stages scan,embed,graph,train --against 10000

It starts the cluster of the tests (Debian, root), and ends it again. `submit` of scan is measured several times, into
an empty cache each; then every stage is run to its end, and Slurm's accounting is asked for its jobs. With --against,
a smaller data set goes the same way first, and memory is compared. A million complexes take 2.5 hours on two cores; in
a --folder of your own, which is kept, a second call goes on after the last stage that was measured.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import Row, Spread, fail, options, pipeline, publish, run, say, wall
from benchmarks.projects import SLURM, SMALL, make_project
from tests.testkit.cluster import Cluster, why_not

SUBMIT_S, VISIT_S, STATUS_S, ACCOUNTED_WITHIN_S, LOOK_EVERY_S, MEMORY = 5.0, 60.0, 1.0, 120.0, 2.0, 1.2
STATUS_ROUNDS = 3
FIELDS = "JobID,JobName,State,ElapsedRaw,MaxRSS"


@dataclass(frozen=True)
class Ran:
    """A stage that was run to its end."""

    ms_each: float
    visit_s: float  # the longest
    visit_bytes: int
    task_bytes: int
    status_s: float


@dataclass(frozen=True)
class Measured:
    """A data set that went through all stages."""

    submit: Spread
    submit_bytes: int
    stages: dict[str, Ran]

    @property
    def status_s(self) -> float:
        """The longest `pipeline status`, after any of the stages."""
        return max(stage.status_s for stage in self.stages.values())


def await_end(folder: Path, stage: str, complexes: int) -> str:
    """Wait until the newest run has ended; see that it did everything; return its name."""
    while True:
        state: dict[str, Any] = json.loads(run(pipeline("status", "--json"), folder).out)
        if state["state"] not in ("running", "waiting"):
            break
        time.sleep(LOOK_EVERY_S)
    last = state["stages"][-1]
    assert (state["state"], last["name"]) == ("done", stage), state["error"]
    assert stage not in ("scan", "graph") or last["census"]["accepted"] == complexes, last["census"]
    return str(state["name"])


def jobs(run_name: str, since: float) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """Return seconds and bytes of a run's visits of supervisors and of its tasks, once accounting has any visit."""
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since))
    command = ["sacct", "--noheader", "--parsable2", "--noconvert", "-S", start, "-o", FIELDS]
    until = time.monotonic() + ACCOUNTED_WITHIN_S  # a run is done while its last supervisor still ends
    while True:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows = [line.split("|") for line in said.splitlines()]
        done = {row[0]: (row[1], float(row[3])) for row in rows if row[2] == "COMPLETED" and run_name in row[1]}
        peaks = dict.fromkeys(done, 0)  # a task runs in a step of its job
        for row in rows:
            job, _, step = row[0].partition(".")
            if step and job in peaks:
                peaks[job] = max(peaks[job], int(row[4] or 0))
        visits = [(seconds, peaks[job]) for job, (name, seconds) in done.items() if "supervise" in name]
        tasks = [(seconds, peaks[job]) for job, (name, seconds) in done.items() if "supervise" not in name]
        if visits or time.monotonic() > until:
            return visits, tasks
        time.sleep(1.0)


def measured(folder: Path, complexes: int, stages: list[str], rounds: int) -> Measured:
    """Submit several times, and then run every stage; what the folder has from an earlier call is not done again."""
    if not (folder / "weights").exists():  # made last
        make_project(folder, complexes, SMALL, SLURM)
    submits = once(folder / "submit.json", lambda: submits_of(folder, rounds))
    ran = {stage: Ran(**once(folder / f"{stage}.json", partial(ran_of, folder, stage, complexes))) for stage in stages}
    say(f"{complexes:,}: {submits}, {ran}")
    return Measured(Spread.of(submits["wall_s"]), submits["peak_bytes"], ran)


def once(kept: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what is in a file, or measure it and keep it there."""
    if not kept.exists():
        kept.write_text(json.dumps(measure()))
    found: dict[str, Any] = json.loads(kept.read_text())
    return found


def submits_of(folder: Path, rounds: int) -> dict[str, Any]:
    """Submit scan several times, into an empty cache each."""
    submits = []
    for number in range(rounds):
        submits.append(run(pipeline("submit", "--stage", "scan", "--set", f"cache.root=cache{number}"), folder))
        run(pipeline("cancel", "--yes"), folder)
    return {"wall_s": wall(submits), "peak_bytes": max(cost.peak_bytes for cost in submits)}


def ran_of(folder: Path, stage: str, complexes: int) -> dict[str, Any]:
    """Run a stage to its end, and ask Slurm's accounting for its jobs."""
    since, begun = time.time(), time.monotonic()
    run(pipeline("submit", "--stage", stage, "--only"), folder)
    name = await_end(folder, stage, complexes)
    ms_each, (visits, tasks) = 1e3 * (time.monotonic() - begun) / complexes, jobs(name, since)
    status_s = Spread.of(wall([run(pipeline("status"), folder) for _ in range(STATUS_ROUNDS)])).median
    ran = Ran(ms_each, max(visits)[0], max(peak for _, peak in visits), max(peak for _, peak in tasks), status_s)
    say(f"  {complexes:,} {stage}: {ran}")
    return asdict(ran)


def small_row(complexes: int, found: Measured) -> Row:
    """Return the row of what a person waits for."""
    longest = max(stage.visit_s for stage in found.stages.values())
    return Row(
        "slurm", f"`pipeline submit` of {complexes:,} complexes to a real Slurm, until it returns; longest visit of a "
        "supervisor", "", f"≤ {SUBMIT_S:g} s; ≤ {VISIT_S:g} s", f"{found.submit:.1f} s; {longest:.0f} s", "slurm.py",
        "" if found.submit.median <= SUBMIT_S and longest <= VISIT_S else "Most of the wait is Slurm's own commands.",
    )  # fmt: skip


def grown_row(complexes: int, found: Measured, fewer: int, small: Measured) -> Row:
    """Return the row of how memory grows."""
    tasks = {name: stage.task_bytes / small.stages[name].task_bytes for name, stage in found.stages.items()}
    visits = {name: stage.visit_bytes / small.stages[name].visit_bytes for name, stage in found.stages.items()}
    reached = max(tasks.values()) <= MEMORY and found.status_s <= STATUS_S
    shown = "; ".join(
        f"{name} {tasks[name]:.2f}×, supervisor {visits[name]:.2f}× ({stage.visit_bytes / 1e6:.0f} MB, visit "
        f"{stage.visit_s:.0f} s), {stage.ms_each:.1f} ms each"
        for name, stage in found.stages.items()
    )
    return Row(
        "slurm_grown", f"{complexes:,} complexes on a real Slurm: memory of the largest task of each stage; `pipeline "
        "status`", f"the same of {fewer:,}", f"≤ {MEMORY}×; ≤ {STATUS_S:g} s",
        f"{shown}; status {found.status_s:.2f} s; "
        f"submit {found.submit.median:.0f} s, {found.submit_bytes / 1e6:.0f} MB",
        f"slurm.py --complexes {complexes} --stages {','.join(found.stages)} --against {fewer}",
        "" if reached else "See docs/explanation/scale.md.",
    )  # fmt: skip


def main() -> int:
    """Start a cluster, measure, and end it."""
    typed = options(
        str(__doc__), 3,
        complexes={"type": int, "default": 10_000, "help": "complexes (default: 10000)"},
        stages={"default": "scan,graph", "help": "stages to run to their end, separated by commas"},
        against={"type": int, "default": 0, "help": "compare memory with so many complexes"},
        folder={"type": Path, "help": "make the projects here, and keep them"},
    )  # fmt: skip
    if reason := why_not():
        fail(f"no Slurm here: {reason}")
    cluster = Cluster(Path("/var/lib/pipeline-slurm-bench"))
    cluster.start()
    os.environ.update(cluster.env())
    stages, found = typed.stages.split(","), {}
    parent = typed.folder or Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        for complexes in filter(None, (typed.against, typed.complexes)):
            found[complexes] = measured(parent / f"{complexes}", complexes, stages, typed.rounds)
    finally:
        cluster.stop()
        if not typed.folder:
            shutil.rmtree(parent)
    whole = found[typed.complexes]
    if typed.against:
        return publish([grown_row(typed.complexes, whole, typed.against, found[typed.against])], save=typed.save)
    return publish([small_row(typed.complexes, whole)], save=typed.save)


if __name__ == "__main__":
    sys.exit(main())
