"""What a person waits for: --help, status of 10,000 tasks, and 20,000 items with nothing or almost nothing to do.

    python benchmarks/latency.py [--only help,status,items] [--items 20000] [--snakemake PATH] [--rounds 5] [--save]
    python benchmarks/latency.py --only nothing --sizes 206,100000

`items` runs scan and graph of a synthetic data set once (two to ten minutes). Then it types `submit` with nothing to
do, `plan`, `submit --dry-run`, and `submit` after one file has changed or was touched. `nothing` types only `submit`
with nothing to do, of data sets of several sizes; it makes 100,000 items in about half an hour. The peer is
`snakemake -n` of one rule per item whose outputs are all there. Install it in an environment of its own
(`python -m venv V; V/bin/pip install snakemake`), and name it: --snakemake V/bin/snakemake. Without it only our side
is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import Cost, Row, Spread, by_turns, cpu, options, pipeline, publish, run, say, wall
from benchmarks.projects import complex_of, make_project, name_of
from pipeline.cluster.verdict import Cause
from pipeline.journal import run_folder
from pipeline.journal.attempts import Ask, Attempt

PARTS = "help,status,items"
HELP_CPU_S, STATUS_S, NOOP_CPU_S, CHANGED_CPU_S, PLAN_CPU_S = 0.1, 1.0, 2.0, 3.0, 2.5
NOTHING_CPU_S = {206: 1.2, 100_000: 15.0}
TASKS, ARRAY, ITEMS, REPORTS = 10_000, 1000, 100, 12  # tasks of a job, items of a task, times that a task reports
ASK = {"mem_bytes": 2 << 30, "time_s": 3600}
SNAKEFILE = """\
ITEMS = [line.split(",")[0] for line in open("items.csv")]
PATH = dict(line.strip().split(",") for line in open("items.csv"))
rule all:
    input: expand("out/{item}.npz", item=ITEMS)
rule graph:
    input: lambda wildcards: "data/" + PATH[wildcards.item]
    output: "out/{item}.npz"
    shell: "touch {output}"
"""


# ---- --help ----


def of_help(rounds: int) -> list[Row]:
    """Time `pipeline --help`, and an interpreter that does nothing."""
    ways = {"help": partial(run, pipeline("--help")), "empty": partial(run, [sys.executable, "-c", "pass"])}
    spent = by_turns(ways, 3 * rounds)
    ours, empty = Spread.of(cpu(spent["help"])), Spread.of(cpu(spent["empty"]))
    missed = "" if ours.median <= HELP_CPU_S else "Most of it is importing the command line's libraries."
    measured, against = f"{ours:.3f s} of CPU", f"an empty interpreter, {empty.median:.3f} s"
    return [Row("help", "`pipeline --help`", against, f"≤ {HELP_CPU_S} s", measured, "latency.py --only help", missed)]


# ---- status of 10,000 tasks ----


def make_run(runs: Path) -> Path:
    """Write a run whose graph stage is nearly over: every hundredth task failed once, the last ones still run."""
    folder = run_folder.create_folder(runs, datetime.now(tz=UTC))
    folder.stages.write_text('["graph"]')
    began, over = time.time() - 3600, TASKS - TASKS // 20

    def write(writer: str, events: Iterator[dict[str, Any]]) -> None:
        lines = (json.dumps({"at": began, **event}, separators=(",", ":")) + "\n" for event in events)
        (folder.events / f"{writer}.jsonl").write_text("".join(lines))

    for task in range(TASKS):
        write(f"graph-{task:06d}", worker_events(task, began, is_over=task < over))
    write("supervisor-000001", supervisor_events(began, over))
    return folder.path


def worker_events(task: int, began: float, *, is_over: bool) -> Iterator[dict[str, Any]]:
    """Yield what a worker reports."""
    facts = {"stage": "graph", "task": task, "attempt": 1}
    reported = {"rejected": {"no_contacts": 1}, "figures": {"host_peak_bytes": 300 << 20}}
    yield {"kind": "task_started", **facts, "host": "n1"}
    for number in range(REPORTS):
        done = number * ITEMS // REPORTS
        yield {"at": began + number / 2, "kind": "progress", **facts, "done": done, **reported}
    if is_over:
        yield {"at": began + 7, "kind": "task_finished", **facts, "done": ITEMS, **reported}


def supervisor_events(began: float, over: int) -> Iterator[dict[str, Any]]:
    """Yield what a supervisor reports."""
    who, number = {"host": "elsewhere", "pid": 1}, count()
    items = TASKS * ITEMS
    counts = {"items": items, "missing": items, "tasks": TASKS, "refused": 0, "cached": 0, "cost": 0.0}
    yield {"kind": "run_started", "stages": ["graph"], **who}
    yield {"kind": "visit", "number": 1, **who}
    yield {"kind": "stage_submitted", "stage": "graph", **counts}
    for first in range(0, TASKS, ARRAY):
        yield submitted(next(number), f"{first}-{first + ARRAY - 1}", 1)
    for task in range(over):
        yield ended(began, task, 1, is_killed=task % 100 == 0)
        if task % 100 == 0:
            yield submitted(next(number), f"{task}", 2)
            yield ended(began, task, 2, is_killed=False)
    yield {"at": began + 60, "kind": "handed_over", "jobs": ["7001", "7002"]}


def submitted(number: int, tasks: str, attempt: int) -> dict[str, Any]:
    """Return the event of a submitted job."""
    asked = {"attempt": attempt, "ask": ASK, "cpus": 2, "gpus": 0, "partition": "", "constraint": "", "card": ""}
    kind = {"kind": "job_submitted", "tag": f"run-graph-{number}", "stage": "graph", "tasks": tasks}
    return {**kind, **asked, "id": f"{8000 + number}", "why": "from 41 tasks: 99th percentile 1.6 GiB + 20%"}


def ended(began: float, task: int, attempt: int, *, is_killed: bool) -> dict[str, Any]:
    """Return the event of an attempt that ended."""
    cause, state = (Cause.HOST_OOM, "OUT_OF_MEMORY") if is_killed else (Cause.DONE, "COMPLETED")
    job = f"{8000 + task // ARRAY}"
    attempted = Attempt(
        task=task, number=attempt, ask=Ask(**ASK), cause=cause, state=state, reason="", job=job, node="n1",
        log=f"/runs/logs/{job}_{task}.err", exit_code=0, peak_rss_bytes=1 << 30, ended_at=began + 8, elapsed_s=7.0,
        cpu_s=6.0, done=ITEMS,
    )  # fmt: skip
    return {"at": began + 8, "kind": "task_ended", "stage": "graph", **attempted.to_event()}


def of_status(rounds: int) -> list[Row]:
    """Time the table and the document."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_run(Path(scratch))
        words = {"table": ("status", folder), "json": ("status", folder, "--json")}
        spent = by_turns({name: partial(run, pipeline(*typed)) for name, typed in words.items()}, rounds)
        assert str(TASKS) in spent["table"][0].out.replace(",", "")
    shown, document = Spread.of(wall(spent["table"])), Spread.of(wall(spent["json"]))
    used = Spread.of(cpu(spent["table"]))
    missed = "" if shown.median <= STATUS_S else "A third is the interpreter's start, a quarter 10,000 small files."
    return [
        Row("status", f"`pipeline status` of {TASKS:,} tasks, {TASKS * (REPORTS + 3):,} events", "", f"≤ {STATUS_S} s",
            f"{shown:.2f s}, {used.median:.2f} s of it CPU; `--json` {document.median:.2f} s",
            "latency.py --only status", missed),
    ]  # fmt: skip


# ---- 20,000 items ----


class Items:
    """A data set whose graphs are all there, and the same as files of Snakemake."""

    def __init__(self, folder: Path, items: int) -> None:
        self.folder, self.items, self.changes = make_project(folder / "project", items), items, count(items)
        self.submit = pipeline("submit", "--stage", "graph", "--executor", "local", "--follow")
        run(self.submit, self.folder)
        done = json.loads(run(pipeline("status", "--json"), self.folder).out)
        assert done["stages"][-1]["census"]["accepted"] == items, done["stages"]

    def changed(self) -> Cost:
        """Write another complex to one file; submit again."""
        (self.folder / "data" / name_of(self.items // 2)).write_bytes(complex_of(next(self.changes)))
        return self._after_change()

    def touched(self) -> Cost:
        """Touch one file; submit again."""
        (self.folder / "data" / name_of(self.items // 3)).touch()
        return self._after_change()

    def _after_change(self) -> Cost:
        time.sleep(0.1)  # so that the file's time proves the change
        return run(self.submit, self.folder)

    def snakes(self) -> Path:
        """Write the same items as one rule of Snakemake, with all outputs there."""
        folder = self.folder.parent / "snakemake"
        (folder / "out").mkdir(parents=True)
        (folder / "data").symlink_to(self.folder / "data")
        (folder / "Snakefile").write_text(SNAKEFILE)
        names = [Path(name_of(number)).stem for number in range(self.items)]
        rows = (f"{name},{name_of(number)}\n" for number, name in enumerate(names))
        (folder / "items.csv").write_text("".join(rows))
        for name in names:
            (folder / "out" / f"{name}.npz").touch()
        return folder


def of_items(rounds: int, items: int, snakemake: str) -> list[Row]:
    """Time our commands and Snakemake's by turns."""
    if found := shutil.which(snakemake):
        peer = [str(Path(found).absolute()), "-n", "-s", "Snakefile"]
    else:
        say(f"{snakemake} is not there: only our side is measured (see --help)")
    with tempfile.TemporaryDirectory() as scratch:
        data = Items(Path(scratch), items)
        ways = {
            "nothing": partial(run, data.submit, data.folder),
            "changed": data.changed,
            "touched": data.touched,
            "plan": partial(run, pipeline("plan", "--stage", "graph"), data.folder),
            "dry run": partial(run, [*data.submit[:-1], "--dry-run"], data.folder),
        }
        if found:
            ways["snakemake"] = partial(run, peer, data.snakes(), env={"HOME": scratch, "XDG_CACHE_HOME": scratch})
        spent = {name: Spread.of(cpu(costs)) for name, costs in by_turns(ways, rounds).items()}
    against = f"`snakemake -n`, {spent['snakemake']:.1f s}" if found else "`snakemake -n`, not installed"
    limits = {"nothing": NOOP_CPU_S, "changed": CHANGED_CPU_S, "touched": CHANGED_CPU_S}
    limits |= {"plan": PLAN_CPU_S, "dry run": PLAN_CPU_S}
    missed = [name for name, most in limits.items() if spent[name].median > most]
    return [
        Row("items", f"scan and graph of {items:,} files, CPU time: nothing to do; one changed file; one touched file;"
            " `pipeline plan`; `submit --dry-run`",
            against, "; ".join(f"≤ {most} s" for most in limits.values()),
            "; ".join(f"{spent[name]:.1f s}" for name in limits), "latency.py --only items",
            f"Missed: {', '.join(missed)}." if missed else ""),
    ]  # fmt: skip


def of_nothing(rounds: int, sizes: list[int]) -> list[Row]:
    """Time `submit` with nothing to do, of data sets of several sizes."""
    spent = {}
    for items in sizes:
        with tempfile.TemporaryDirectory() as scratch:
            data = Items(Path(scratch), items)
            spent[items] = Spread.of(
                cpu(by_turns({"nothing": partial(run, data.submit, data.folder)}, rounds)["nothing"])
            )
    missed = [items for items in sizes if spent[items].median > NOTHING_CPU_S[items]]
    return [
        Row("nothing", f"scan and graph of {'; '.join(f'{items:,}' for items in sizes)} files: `submit` with "
            "nothing to do, CPU time", "", "; ".join(f"≤ {NOTHING_CPU_S[items]:g} s" for items in sizes),
            "; ".join(f"{one:.2f s}" for one in spent.values()), "latency.py --only nothing",
            f"Missed: {', '.join(map(str, missed))}." if missed else ""),
    ]  # fmt: skip


def main() -> int:
    """Measure the parts that were asked for."""
    typed = options(
        str(__doc__), 5,
        only={"default": PARTS, "help": f"parts, separated by commas (default: {PARTS})"},
        items={"type": int, "default": 20_000, "help": "items (default: 20000)"},
        sizes={"default": "206,100000", "help": "items of each data set of `nothing` (default: 206,100000)"},
        snakemake={"default": os.environ.get("SNAKEMAKE", "snakemake"), "help": "Snakemake's program"},
    )  # fmt: skip
    parts = typed.only.split(",")
    rows = of_help(typed.rounds) if "help" in parts else []
    rows += of_status(typed.rounds) if "status" in parts else []
    rows += of_items(min(3, typed.rounds), typed.items, typed.snakemake) if "items" in parts else []
    rows += of_nothing(typed.rounds, list(map(int, typed.sizes.split(",")))) if "nothing" in parts else []
    return publish(rows, save=typed.save)


if __name__ == "__main__":
    sys.exit(main())
