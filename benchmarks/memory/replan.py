"""Planning the de-novo recipe: the CPU time of a first plan, of a second one, and of one for a like card.

    python benchmarks/memory/replan.py [--spectra N] [--out FILE]

The recipe is taken as it stands, with made spectra; each plan is a `pipeline plan` of its own process. It exits 0 only
if the three plans were made, and the second says the same as the first.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.circumstances import circumstances, write  # noqa: E402 - the project is found only now

PIPELINE = str(Path(sys.executable).with_name("pipeline"))
PLAN = ("plan", "--stage", "train", "--json")
LIMIT_S = 3600
REACH = {"first": 60.0, "second": 3.0}  # seconds of CPU


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(folder: Path, *words: str) -> tuple[dict[str, float], str]:
    """Run a command; return its seconds of CPU and of the clock, and what it printed."""
    before_s, begun_s = cpu_s(), time.perf_counter()
    ran = subprocess.run([PIPELINE, *words], cwd=folder, check=True, capture_output=True, text=True, timeout=LIMIT_S)
    return {"cpu_s": round(cpu_s() - before_s, 1), "wall_s": round(time.perf_counter() - begun_s, 1)}, ran.stdout


def main() -> int:
    """Plan three times in a new project."""
    from tests.recipes.projects import DENOVO
    from tests.recipes.projects import write as write_project

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spectra", type=int, default=400)
    parser.add_argument("--out", type=Path)
    typed = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = write_project(DENOVO, Path(name), items=typed.spectra // 4)
        timed(folder, "submit", "--stage", "scan", "--executor", "local", "--follow")
        first, plan = timed(folder, *PLAN, "--gpu", "rtx4090")
        second, again = timed(folder, *PLAN, "--gpu", "rtx4090")
        other, _ = timed(folder, *PLAN, "--gpu", "l40s")
    assert plan == again, "the second plan is another one"
    questions = sum(stage["questions"] for stage in json.loads(plan)[0]["plans"].values())
    result: dict[str, Any] = {"first": first, "second": second, "like_card": other, "questions": questions}
    write(typed.out, {**result, "reach_cpu_s": REACH})
    print(json.dumps({**result, **circumstances()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
