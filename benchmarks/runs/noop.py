"""What it costs to find that nothing is to do: `submit --stage all` again, and the demo from nothing.

python benchmarks/runs/noop.py [--complexes N,N...] [--rounds N] [--demos N] [--keep FOLDER] [--out FILE]

Of each: wall time, the processors' time of the command with all that it started, and whether it imported torch. The
complexes are made, no two alike, of 120 to 160 residues; the project is the demo's else. From 10,000 on they are those
of `scale.py`, of 60 to 120 residues, and the few that are not of split `later` are trained on, once: all of them are
scanned, embedded and made graphs of. What FILE holds of other numbers of complexes stays.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

from benchmarks.circumstances import write
from benchmarks.scale_parts import data as scale
from pipeline.structures.synthetic import complex_pdb

PIPELINE = Path(sys.executable).with_name("pipeline")
ALL = [str(PIPELINE), "submit", "--stage", "all", "--follow"]
LIMIT_S = 6 * 3_600
LARGE = 10_000  # complexes, from which on
FEW = {"train": 64, "val": 32, "test": 32}  # of them are trained on and judged
PROBE = """\
import sys
from pipeline.cli.main import main
sys.argv = ["pipeline", "submit", "--stage", "all", "--follow"]
try:
    main()
finally:
    print("torch" in sys.modules)
"""


@dataclass(frozen=True)
class Cost:
    """What a command cost."""

    wall_s: float
    cpu_s: float


def cost(command: list[str], folder: Path) -> Cost:
    """Return what a command costs with all that it starts and waits for."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=LIMIT_S)
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Cost(round(wall_s, 2), round(cpu_s, 2))


def enlarge(folder: Path, complexes: int) -> None:
    """Have a project's manifest name so many made complexes, no two of them alike."""
    data = folder / "data"
    with (data / "manifest.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("id", "path", "receptor_chains", "ligand_chains", "split"))
        for number in range(complexes):
            (data / f"made-{number}.pdb").write_bytes(complex_pdb(number, 60, 60 + number % 40))
            split = ("train", "train", "train", "val", "test")[number % 5]
            writer.writerow((f"made-{number}", f"made-{number}.pdb", "A", "B", split))


def make_large(folder: Path, complexes: int) -> None:
    """Make a project of small complexes, few of which are trained on."""
    scale.make_project(folder, complexes)
    splits = [split for split, count in FEW.items() for _ in range(count)]
    manifest = folder / "data" / "manifest.csv"
    header, *rows = manifest.read_text().splitlines()
    named = (f"{row.rpartition(',')[0]},{split}" for row, split in zip_longest(rows, splits, fillvalue="later"))
    manifest.write_text("\n".join([header, *named, ""]))


def idle(folder: Path, rounds: int, *, is_new: bool) -> dict[str, object]:
    """Run a project to its end, then again with nothing to do; return what that costs."""
    first = cost(ALL, folder) if is_new or not (folder / "models").exists() else None  # it is kept, and was run
    again = [cost(ALL, folder) for _ in range(rounds)]
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=folder, check=True, capture_output=True, timeout=LIMIT_S)
    return {
        **({"first": asdict(first)} if first else {}),
        "wall_s": statistics.median(each.wall_s for each in again),
        "cpu_s": statistics.median(each.cpu_s for each in again),
        "lowest_cpu_s": min(each.cpu_s for each in again),
        "imports_torch": b"True" in done.stdout,
    }


def main() -> int:
    """Make the demo, then larger projects of its files, and print what each costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--complexes", default="206", help="numbers of complexes, such as 206,10000,100000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--demos", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="where large projects are made and stay, for the next time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kept = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    idled: dict[str, dict[str, object]] = kept.get("idle", {})
    with tempfile.TemporaryDirectory() as place:
        demos = [cost([str(PIPELINE), "demo", f"demo-{number}"], Path(place)) for number in range(options.demos)]
        for complexes in map(int, filter(None, options.complexes.split(","))):
            is_large = complexes >= LARGE
            folder = Path((options.keep if is_large else None) or place, f"of-{complexes}")
            if is_large and not folder.exists():
                make_large(folder, complexes)
            elif not is_large:
                cost([str(PIPELINE), "demo", str(folder)], Path(place))
                enlarge(folder, complexes)
            idled[str(complexes)] = idle(folder, options.rounds, is_new=not is_large)
            print(f"{complexes:,} complexes, nothing to do: {idled[str(complexes)]}")
    result = {
        "what": "submit --stage all with nothing to do, by complexes; and a demo from nothing",
        "rounds": options.rounds,
        "idle": idled,
        **{f"idle_{complexes}_s": found["wall_s"] for complexes, found in idled.items()},
        "demo_s": min((each.wall_s for each in demos), default=kept.get("demo_s")),
        "demo": asdict(min(demos, key=lambda each: each.cpu_s)) if demos else kept.get("demo"),
    }
    print(json.dumps(result))
    write(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
