"""A million complexes on a real Slurm: every stage, and the verbs that people type while it goes on and after it.

    python benchmarks/runs/scale_slurm.py [--sizes 10000,1000000] [--dir FOLDER] [--keep] [--out FILE]

Complexes are small (two chains of 10 to 16 residues, no two sequences alike), so that what is measured is the pipeline.
Each stage is submitted to the test cluster; every process that names the folder of its run is looked at until that has
ended, for the high water that the kernel keeps of it. FILE is written after each stage, and keeps what it holds of
benchmarks/runs/scale.py; with `--dir` and `--keep`, a stage that it has is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.circumstances import circumstances  # noqa: E402 - the project is found only now
from benchmarks.runs.slurm import visits  # noqa: E402
from benchmarks.scale_parts.data import ON_SLURM, PIPELINE, SMALL, make_project  # noqa: E402
from benchmarks.scale_parts.stages import AFTER, STAGES, asked, figures_of  # noqa: E402
from benchmarks.scale_parts.watch import Watched, look_at_run, watched  # noqa: E402
from pipeline.files import write_whole  # noqa: E402
from pipeline.journal.active_runs import status_of  # noqa: E402
from pipeline.journal.run_folder import runs_in  # noqa: E402
from pipeline.journal.run_status import RunState  # noqa: E402
from tests.testkit.cluster import Cluster, why_not  # noqa: E402

FOLDER = Path("/var/lib/pipeline-slurm-scale")
ROLES = ("supervisor", "worker")
GOES_ON = (RunState.WAITING, RunState.RUNNING)
LOOK_EVERY_S, STATE_EVERY_S, VISIT_POLL = 0.5, 5.0, "--set=cluster.slurm.poll=5s"


def main() -> int:
    """Measure, and write the figures down as they come."""
    typed = options()
    if reason := why_not():
        sys.exit(f"no Slurm here: {reason}")
    cluster = Cluster(FOLDER)
    cluster.start()
    os.environ.update(cluster.env())
    whole = json.loads(typed.out.read_text()) if typed.out and typed.out.exists() else {}
    sizes = whole.setdefault("slurm", {}).setdefault("sizes", {})

    def keep() -> None:
        if typed.out:
            write_whole(typed.out, json.dumps(whole, indent=1) + "\n")

    try:
        for size in typed.sizes:
            measure_size(typed, size, sizes.setdefault(str(size), {}), keep)
    finally:
        cluster.stop()
    whole["slurm"] |= {"growth": growth(sizes), **circumstances()}
    keep()
    print(json.dumps(whole["slurm"]))
    return 0


def measure_size(typed: argparse.Namespace, size: int, parts: dict[str, Any], keep: Callable[[], None]) -> None:
    """Measure all stages of a data set, then the verbs."""
    folder = (typed.dir or Path(tempfile.gettempdir())) / f"slurm-{size}"
    if not (folder / "pipeline.yaml").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_project(folder, size, SMALL, ON_SLURM)
    for stage in STAGES:
        if stage not in parts:
            parts[stage] = measure_stage(folder, stage, size) | circumstances()
            keep()
            print(f"{size:>9,} {stage:6} {json.dumps(parts[stage])}", file=sys.stderr, flush=True)
    if "verbs" not in parts:
        parts["verbs"] = {name: verb(folder, *words) for name, words in AFTER.items()} | circumstances()
        keep()
    if not typed.keep:
        shutil.rmtree(folder)


def measure_stage(folder: Path, stage: str, size: int) -> dict[str, Any]:
    """Submit a stage, watch all that its run does until it has ended, and return what it took."""
    began = time.time()
    submitted = verb(folder, "submit", "--stage", stage, "--only", VISIT_POLL)
    run = runs_in(folder / "runs")[-1]
    found = Watched()
    looked = time.monotonic()
    while True:
        look_at_run(run.path, found)
        if time.monotonic() - looked > STATE_EVERY_S:
            looked = time.monotonic()
            if status_of(run).state not in GOES_ON:
                break
        time.sleep(LOOK_EVERY_S)
    found.wall_s = time.time() - began
    ended = status_of(run)
    assert ended.state is RunState.DONE, (ended.state, ended.error)
    figures = figures_of(found, folder, stage, size, began)
    paid, told = visits(began), asked(folder, "report")["stages"][0]
    del figures["cpu_s"], figures["cpu_ms_per_item"]  # jobs are no children of ours
    return figures | {
        "submit": submitted,
        "status": verb(folder, "status"),
        "report": verb(folder, "report"),
        "visits": len(paid),
        "longest_visit_s": max(seconds for seconds, _ in paid),
        "run_folder_bytes": sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file()),
        "ledger_bytes": sum(path.stat().st_size for path in run.events.iterdir()),
        "run_folder_files": sum(path.is_file() for path in run.path.rglob("*")),
        "attempts": told["attempts"],
        "tasks_cpu_ms_per_item": round(told["core_hours"] * 3.6e6 * (told["cpu_used"] or 0) / size, 3),
    }


def verb(folder: Path, *words: str) -> dict[str, float]:
    """Type a command that must work; return its seconds, processor seconds, and memory."""
    took = watched([str(PIPELINE), *words], folder, folder / "verbs.log")
    return {"wall_s": round(took.wall_s, 2), "cpu_s": round(took.cpu_s, 2), "mb": took.to_json()["largest_mb"]}


def growth(sizes: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return how the largest size stands to the smallest, stage by stage: memory of a worker and of a supervisor."""
    small, large = (sizes[str(size)] for size in (min(map(int, sizes)), max(map(int, sizes))))
    return {
        stage: {
            **{role: round(large[stage]["peak_mb"][role] / small[stage]["peak_mb"][role], 3) for role in ROLES},
            "wall_per_item": round(large[stage]["wall_ms_per_item"] / small[stage]["wall_ms_per_item"], 3),
        }
        for stage in STAGES
        if stage in small and stage in large
    }


def options() -> argparse.Namespace:
    """Return what was typed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10000,1000000", help="complexes, with commas between")
    parser.add_argument("--dir", type=Path, help="where projects are made")
    parser.add_argument("--keep", action="store_true", help="leave projects there, and go on in those that are")
    parser.add_argument("--out", type=Path)
    typed = parser.parse_args()
    typed.sizes = [int(size) for size in typed.sizes.split(",")]
    return typed


if __name__ == "__main__":
    sys.exit(main())
