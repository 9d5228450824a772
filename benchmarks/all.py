"""Measure all that a machine of two cores can in less than 20 minutes, and write the page: `python benchmarks/all.py`.

    python benchmarks/all.py [--only NAME ...]

Each benchmark is a process of its own, one after the other; one that fails does not stop the others, but the exit code
tells. What takes longer, or needs Slurm, is in `make prove`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.figures import RESULTS  # noqa: E402 - the project is found only now
from benchmarks.page import PAGE, write_pages  # noqa: E402

LIMIT_S = 20 * 60


@dataclass(frozen=True)
class Bench:
    """A benchmark as it is run here: fewer rounds than by itself where it would take long."""

    name: str
    command: str  # after `python benchmarks/`
    result: str
    about_s: int  # on two cores that others use as well


BENCHES = (
    Bench("startup", "runs/startup.py", "startup.json", 10),
    Bench("noop", "runs/noop.py --rounds 1 --demos 1", "noop.json", 55),
    Bench("scan", "structures/scan.py", "scan.json", 20),
    Bench("store", "store/store.py", "store.json", 40),
    Bench("sampler", "training/sampler.py", "sampler.json", 10),
    Bench("graph", "structures/graph.py --runs 2", "graph.json", 70),
    Bench("loader", "training/loader.py --runs 3", "loader.json", 90),
    Bench("status", "runs/status.py --runs 3", "status.json", 60),
    Bench("validation", "store/cache.py --only validation --runs 3", "cache.json", 70),
    Bench("million", "store/cache.py --only million --runs 3", "cache.json", 60),
    Bench("embed", "encoder/embed.py --runs 2", "embed.json", 240),
    Bench("embed_memory", "encoder/embed_memory.py", "embed_memory.json", 80),
    Bench("large", "memory/planner.py --only large", "planner.json", 90),
    Bench("accuracy", "memory/planner.py --only accuracy", "planner.json", 300),
)


def main() -> int:
    """Measure, say how long each took, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [one.name for one in BENCHES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    only = parser.parse_args().only
    began = time.monotonic()
    failed = measured([one for one in BENCHES if one.name in only], run)
    write_pages()
    print(f"all: {time.monotonic() - began:.0f} s; {PAGE.relative_to(ROOT)} is written", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def measured(benches: Sequence[Bench], run: Callable[[Bench], int]) -> list[str]:
    """Run benchmarks one after the other; return the names of those that failed."""
    failed = []
    for one in benches:
        print(f"{one.name}: {one.command} (about {one.about_s} s)", flush=True)
        began, code = time.monotonic(), run(one)
        print(f"{one.name}: {time.monotonic() - began:.0f} s{f', exit code {code}' if code else ''}\n", flush=True)
        if code:
            failed.append(one.name)
    return failed


def run(one: Bench) -> int:
    """Run one as it is typed."""
    script, *words = one.command.split()
    command = [sys.executable, str(ROOT / "benchmarks" / script), *words, "--out", str(RESULTS / one.result)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
