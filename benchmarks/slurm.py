"""Submit complexes to a real Slurm on this machine: what a person waits for, and what the supervisor's visits take.

    python benchmarks/slurm.py [--complexes 10000] [--stages scan,graph] [--folder FOLDER] [--rounds 3] [--save]

It starts the cluster of the tests (Debian, root), and ends it again. `submit` of scan is measured several times, into
an empty cache each; then every stage is run to its end, and Slurm's accounting is asked for its jobs. A million
complexes (`--complexes 1000000 --stages scan,embed,graph,train`) take five hours on two cores.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import Row, Spread, fail, options, pipeline, publish, run, say, wall
from benchmarks.projects import SLURM, SMALL, make_project
from tests.testkit.cluster import Cluster, why_not

SUBMIT_S, VISIT_S, ACCOUNTED_WITHIN_S, LOOK_EVERY_S = 5.0, 60.0, 120.0, 2.0
FIELDS = "JobID,JobName,State,ElapsedRaw,MaxRSS"


def await_end(folder: Path, complexes: int) -> None:
    """Wait until the newest run has ended; see that it did everything."""
    while True:
        state: dict[str, Any] = json.loads(run(pipeline("status", "--json"), folder).out)
        if state["state"] not in ("running", "waiting"):
            break
        time.sleep(LOOK_EVERY_S)
    last = state["stages"][-1]
    assert state["state"] == "done", state["error"]
    assert last["name"] not in ("scan", "graph") or last["census"]["accepted"] == complexes, last["census"]


def jobs(since: float) -> list[tuple[str, float, int]]:
    """Return name, seconds and bytes of every job that ended, once accounting has any supervisor's."""
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since))
    command = ["sacct", "--noheader", "--parsable2", "--noconvert", "-S", start, "-o", FIELDS]
    until = time.monotonic() + ACCOUNTED_WITHIN_S  # a run is done while its last supervisor still ends
    while True:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows = [line.split("|") for line in said.splitlines()]
        names = {row[0]: row[1] for row in rows if row[2] == "COMPLETED"}
        found = [
            (names[job], float(row[3]), int(row[4] or 0))
            for row in rows
            if row[0].endswith(".batch") and (job := row[0].removesuffix(".batch")) in names
        ]
        if any("supervise" in name for name, _, _ in found) or time.monotonic() > until:
            return found
        time.sleep(1.0)


def measured(folder: Path, complexes: int, stages: list[str], rounds: int) -> Row:
    """Submit, run every stage, and return the row."""
    make_project(folder, complexes, SMALL, SLURM)
    submits = []
    for number in range(rounds):
        if number:
            run(pipeline("cancel", "--yes"), folder)
        submits.append(run(pipeline("submit", "--stage", "scan", "--set", f"cache.root=cache{number}"), folder))
    run(pipeline("cancel", "--yes"), folder)
    since, walls = time.time(), dict[str, float]()
    for stage in stages:
        begun = time.monotonic()
        run(pipeline("submit", "--stage", stage, "--only"), folder)
        await_end(folder, complexes)
        walls[stage] = time.monotonic() - begun
        say(f"  {stage}: {walls[stage]:.0f} s")
    visits = [(seconds, peak) for name, seconds, peak in jobs(since) if "supervise" in name]
    tasks = [peak for name, _, peak in jobs(since) if "supervise" not in name]
    submit, longest, largest = Spread.of(wall(submits)), max(visits)[0], max(peak for _, peak in visits)
    each = ", ".join(f"{stage} {1e3 * seconds / complexes:.1f}" for stage, seconds in walls.items())
    return Row(
        "slurm" if complexes <= 10_000 else "slurm_million",
        f"`pipeline submit` of {complexes:,} complexes to a real Slurm, until it returns; a supervisor's longest visit",
        "",
        f"≤ {SUBMIT_S:g} s; ≤ {VISIT_S:g} s",
        f"{submit:.1f} s; {longest:.0f} s, {largest / 1e6:.0f} MB; a task {max(tasks) / 1e6:.0f} MB; ms each: {each}",
        "slurm.py" if complexes <= 10_000 else f"slurm.py --complexes {complexes} --stages {','.join(stages)}",
        "" if submit.median <= SUBMIT_S and longest <= VISIT_S else "Most of the wait is Slurm's own commands.",
    )


def main() -> int:
    """Start a cluster, measure, and end it."""
    typed = options(
        str(__doc__), 3,
        complexes={"type": int, "default": 10_000, "help": "complexes (default: 10000)"},
        stages={"default": "scan,graph", "help": "stages to run to their end, separated by commas"},
        folder={"type": Path, "help": "make the project here"},
    )  # fmt: skip
    if reason := why_not():
        fail(f"no Slurm here: {reason}")
    cluster = Cluster(Path("/var/lib/pipeline-slurm-bench"))
    cluster.start()
    os.environ.update(cluster.env())
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir=typed.folder))
    try:
        row = measured(folder, typed.complexes, typed.stages.split(","), typed.rounds)
    finally:
        cluster.stop()
        shutil.rmtree(folder)
    return publish([row], save=typed.save)


if __name__ == "__main__":
    sys.exit(main())
