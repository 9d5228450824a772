"""How memory, time and files grow with the data set: every stage of 1,000 and of 100,000 complexes.

    python benchmarks/growth.py [--sizes 1000,100000] [--stages scan,embed,graph,train] [--folder FOLDER] [--save]

Complexes are small, and the weights tiny, so that what is measured is the pipeline and not the encoder. Each stage is
`pipeline submit --only --follow` on this machine. 100,000 complexes take about two hours on two cores.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import Row, options, pipeline, publish, run, say
from benchmarks.projects import make_project

STAGES = {"scan": ("scan", "files"), "embed": ("embed",), "graph": ("graph",), "train": ()}  # kinds each writes
MEMORY, TIME, RECORDS = 1.2, 1.3, 200  # at most, at most, at least


@dataclass(frozen=True)
class Grown:
    """A stage at one size."""

    peak_bytes: int
    cpu_ms_per_item: float
    records_per_file: float | None


def measured(folder: Path, stage: str, items: int) -> Grown:
    """Run a stage to its end; see that nothing was left undone."""
    cost = run(pipeline("submit", "--stage", stage, "--only", "--executor", "local", "--follow"), folder)
    done = json.loads(run(pipeline("status", "--json"), folder).out)["stages"][-1]
    assert (done["name"], done["state"]) == (stage, "done"), done
    if stage in ("scan", "graph"):
        assert done["census"]["accepted"] == items, done["census"]
    grown = Grown(cost.peak_bytes, 1e3 * cost.cpu_s / items, records_per_file(folder, STAGES[stage]))
    say(f"{items:>9,} {stage:6} {grown}")
    return grown


def records_per_file(folder: Path, kinds: tuple[str, ...]) -> float | None:
    """Return how many records a file of the cache holds."""
    if not kinds:
        return None
    stats: list[dict[str, Any]] = json.loads(run(pipeline("cache", "stat", "--json"), folder).out)["kinds"]
    records = sum(kind["records"] for kind in stats if kind["kind"] in kinds)
    return records / sum(path.is_file() for kind in kinds for path in (folder / "cache" / kind).rglob("*"))


def main() -> int:
    """Measure each size, and compare the largest with the smallest."""
    typed = options(
        str(__doc__), 1,
        sizes={"default": "1000,100000", "help": "numbers of complexes, separated by commas"},
        stages={"default": ",".join(STAGES), "help": "the first of these stages, or all (default)"},
        folder={"type": Path, "help": "make the projects here"},
    )  # fmt: skip
    stages = {stage: STAGES[stage] for stage in typed.stages.split(",")}
    sizes, found = sorted(map(int, typed.sizes.split(","))), {}
    for size in sizes:
        folder = Path(tempfile.mkdtemp(prefix=f"growth-{size}-", dir=typed.folder))
        try:
            make_project(folder, size)
            found[size] = {stage: measured(folder, stage, size) for stage in stages}
        finally:
            shutil.rmtree(folder)
    small, large = found[sizes[0]], found[sizes[-1]]
    memory = {stage: large[stage].peak_bytes / small[stage].peak_bytes for stage in stages}
    time = [large[stage].cpu_ms_per_item / small[stage].cpu_ms_per_item for stage in stages]
    files = [large[stage].records_per_file for stage, kinds in stages.items() if kinds]
    worst = max(memory, key=memory.__getitem__)
    reached = memory[worst] <= MEMORY and max(time) <= TIME and min(files) >= RECORDS
    row = Row(
        "growth",
        f"{', '.join(stages)} of {sizes[-1]:,} complexes: memory of the largest process; CPU time of an item; "
        "records a file",
        f"the same of {sizes[0]:,}",
        f"≤ {MEMORY}×; ≤ {TIME}×; ≥ {RECORDS}",
        f"{', '.join(f'{ratio:.2f}×' for ratio in memory.values())}; {min(time):.2f} to {max(time):.2f}×; "
        f"{min(files):,.0f} to {max(files):,.0f}",
        "growth.py",
        "" if reached else f"The largest process of {worst} holds some tens of bytes of each item.",
    )
    return publish([row], save=typed.save)


if __name__ == "__main__":
    sys.exit(main())
