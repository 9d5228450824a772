"""How the stages grow with the data set: made complexes by the thousand, the real command, memory, time and files.

    python benchmarks/runs/scale.py [--sizes 1000,10000,100000] [--stages scan,embed,graph,train] [--million N]
                               [--metadata] [--dir FOLDER] [--keep] [--out FILE]

For each size a project is made, and each stage is run by `pipeline submit --only --follow` on this machine. Of all its
processes the high water of memory is looked at ten times a second. `--million` measures what grows on the other side:
an index of so many records, and the lists, tasks and events of a run over so many items, in which no work is done.
`--metadata` counts what an item costs the servers of a parallel file system.

What FILE holds of other sizes stays, so that sizes can be measured one by one; so does what it holds of other stages of
a project that is kept by `--dir` and `--keep`. FILE is written after each stage.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.circumstances import circumstances  # noqa: E402 - the project is found only now
from benchmarks.scale_parts.data import make_project  # noqa: E402
from benchmarks.scale_parts.stages import STAGES, measure  # noqa: E402

SIZES = "1000,10000,100000"
REACH = {"memory": 1.2, "time": 1.3, "records_per_file": 200}  # of the largest size against the smallest


def main() -> int:
    """Measure, and write the figures down as they come."""
    typed = options()
    results = Results(typed.out)
    for size in typed.sizes:
        with project_folder(typed, size) as folder:
            if not (folder / "pipeline.yaml").exists():
                make_project(folder, size)
            for stage in typed.stages:
                figures = measure(folder, stage, size)
                results.put("sizes", str(size), stage, figures)
                print(f"{size:>9,} {stage:6} {json.dumps(figures)}", file=sys.stderr, flush=True)
    if typed.million:
        measure_million(typed, results)
    if typed.metadata:
        measure_metadata(typed, results)
    results.compare()
    print(json.dumps(results.data))
    return 0


def measure_million(typed: argparse.Namespace, results: Results) -> None:
    """Measure an index, and what a scheduler is told, of so many items."""
    from benchmarks.scale_parts.index_side import index_side
    from benchmarks.scale_parts.scheduler_side import scheduler_side

    for name, side in (("index", index_side), ("scheduler", scheduler_side)):
        with tempfile.TemporaryDirectory(dir=typed.dir, prefix="scale-") as scratch:
            figures = side(Path(scratch), typed.million)
        results.put(name, str(typed.million), None, figures)
        print(f"{typed.million:>9,} {name:9} {json.dumps(figures)}", file=sys.stderr, flush=True)


def measure_metadata(typed: argparse.Namespace, results: Results) -> None:
    """Count what an item costs the servers of a file system."""
    from benchmarks.scale_parts.metadata import metadata_side

    with tempfile.TemporaryDirectory(dir=typed.dir, prefix="scale-") as scratch:
        figures = metadata_side(Path(scratch)) | circumstances()
    results.read()
    results.data["metadata"] = figures
    results.write()
    print(json.dumps(figures), file=sys.stderr, flush=True)


class project_folder:  # noqa: N801 - used as a function
    """The folder of a project of a size: kept where asked for, else removed."""

    def __init__(self, typed: argparse.Namespace, size: int) -> None:
        parent = Path(typed.dir or tempfile.gettempdir())
        self.path, self.keep = parent / f"scale-{size}", typed.keep
        if self.path.exists() and not typed.keep:
            raise SystemExit(f"{self.path} is there already; --keep goes on in it")
        self.path.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_exception: object) -> None:
        if not self.keep:
            shutil.rmtree(self.path)


class Results:
    """The figures, in a file if there is one."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.data: dict[str, Any] = {}
        self.read()

    def read(self) -> None:
        """Take in what others have measured meanwhile."""
        if self.path and self.path.exists():
            self.data = json.loads(self.path.read_text())

    def put(self, part: str, size: str, stage: str | None, figures: dict[str, Any]) -> None:
        """Take figures in, and write all down."""
        self.read()
        figures = {**figures, **circumstances()}
        of_size = self.data.setdefault(part, {})
        if stage is None:
            of_size[size] = figures
        else:
            of_size.setdefault(size, {})[stage] = figures
        self.data[part] = dict(sorted(of_size.items(), key=lambda one: int(one[0])))
        self.write()

    def compare(self) -> None:
        """Put the largest size beside the smallest, stage by stage."""
        self.read()
        sizes = self.data.get("sizes", {})
        self.data["growth"] = {
            stage: growth({int(size): stages[stage] for size, stages in sizes.items() if stage in stages})
            for stage in STAGES
            if sum(stage in stages for stages in sizes.values()) > 1
        }
        self.data["reach"] = REACH
        self.write()

    def write(self) -> None:
        """Replace the file."""
        if self.path:
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(self.data, indent=1) + "\n")
            partial.replace(self.path)


def growth(by_size: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return how a stage's figures of the largest size stand to those of the smallest."""
    small, large = by_size[min(by_size)], by_size[max(by_size)]
    older = min(small, large, key=lambda one: str(one["date"]))
    return {
        "from": min(by_size),
        "to": max(by_size),
        "memory": round(large["largest_mb"] / small["largest_mb"], 3),
        "cpu_per_item": round(large["cpu_ms_per_item"] / small["cpu_ms_per_item"], 3),
        "wall_per_item": round(large["wall_ms_per_item"] / small["wall_ms_per_item"], 3),
        **{name: older[name] for name in ("machine", "date")},
    }


def options() -> argparse.Namespace:
    """Return what was typed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=SIZES, help="complexes, with commas between; empty: none")
    parser.add_argument("--stages", default=",".join(STAGES), help="stages in order, with commas between")
    parser.add_argument("--million", type=int, default=0, metavar="N", help="also an index and a run of N items")
    parser.add_argument("--metadata", action="store_true", help="also count calls that name a path, by strace")
    parser.add_argument("--dir", type=Path, help="where projects are made")
    parser.add_argument("--keep", action="store_true", help="leave projects there, and go on in those that are")
    parser.add_argument("--out", type=Path)
    typed = parser.parse_args()
    typed.sizes = [int(size) for size in typed.sizes.split(",") if size]
    typed.stages = typed.stages.split(",")
    if unknown := set(typed.stages) - set(STAGES):
        parser.error(f"no stage is called {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    return typed


if __name__ == "__main__":
    sys.exit(main())
