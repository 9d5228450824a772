"""What it costs to find that nothing is to do: `submit --stage all` again, and the demo from nothing.

python benchmarks/runs/noop.py [--complexes N,N...] [--rounds N] [--demos N] [--out FILE]

Of each: wall time, the processors' time of the command with all that it started, and whether it imported torch. The
complexes are made, no two alike, of 120 to 160 residues; the project is the demo's else.
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
from pathlib import Path

from benchmarks.circumstances import write
from pipeline.structures.synthetic import complex_pdb

PIPELINE = Path(sys.executable).with_name("pipeline")
ALL = [str(PIPELINE), "submit", "--stage", "all", "--follow"]
LIMIT_S = 3_600
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


def idle(folder: Path, rounds: int) -> dict[str, object]:
    """Run a project to its end, then again with nothing to do; return what that costs."""
    first = cost(ALL, folder)
    again = [cost(ALL, folder) for _ in range(rounds)]
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=folder, check=True, capture_output=True, timeout=LIMIT_S)
    return {
        "first": asdict(first),
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
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    idled = dict[str, dict[str, object]]()
    with tempfile.TemporaryDirectory() as place:
        demos = [cost([str(PIPELINE), "demo", f"demo-{number}"], Path(place)) for number in range(options.demos)]
        for complexes in map(int, options.complexes.split(",")):
            folder = Path(place, f"of-{complexes}")
            Path(place, "demo-0").rename(folder)
            enlarge(folder, complexes)
            idled[str(complexes)] = idle(folder, options.rounds)
            print(f"{complexes:,} complexes, nothing to do: {idled[str(complexes)]}")
            folder.rename(Path(place, "demo-0"))
    result = {
        "what": "submit --stage all with nothing to do, by complexes; and a demo from nothing",
        "rounds": options.rounds,
        "idle": idled,
        **{f"idle_{complexes}_s": found["wall_s"] for complexes, found in idled.items()},
        "demo_s": min(each.wall_s for each in demos),
        "demo": asdict(min(demos, key=lambda each: each.cpu_s)),
    }
    print(json.dumps(result))
    write(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
