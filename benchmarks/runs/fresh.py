"""What a stranger waits for, in a fresh clone of the last commit: installation, `make demo`, `make check`, `make test`.

python benchmarks/runs/fresh.py [--without-test] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.circumstances import write

ROOT = Path(__file__).resolve().parents[2]
ENDED = re.compile(r"^=+ (.*\d+ passed.*) in [\d.]+s")
STEPS = {  # in this order: each finds what those before it have made, as it does for people
    "install": ".venv/ready",
    "demo": "demo",
    "tools": ".venv/tools slurm-packages browser-packages",
    "check": "check",
    "test": "test",
}


@contextmanager
def fresh_clone() -> Iterator[Path]:
    """Clone the last commit into a folder beside which the real structures are, where they are beside this one."""
    with tempfile.TemporaryDirectory() as folder:
        clone, shared = Path(folder) / "pipeline", ROOT.parent / "shared"
        if shared.is_dir():
            (Path(folder) / shared.name).symlink_to(shared)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        yield clone


def made(clone: Path, targets: str) -> tuple[float, str]:
    """Run make in a clone, in nobody's environment; return its wall time and what it printed."""
    environment = {name: text for name, text in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environment["PATH"] = environment["PATH"].replace(f"{ROOT / '.venv' / 'bin'}:", "")
    start = time.perf_counter()
    words, both = ["make", *targets.split()], subprocess.STDOUT
    done = subprocess.run(words, cwd=clone, env=environment, stdout=subprocess.PIPE, stderr=both, text=True)
    if done.returncode:
        sys.exit(f"`make {targets}` failed with {done.returncode}:\n{done.stdout[-5_000:]}")
    return time.perf_counter() - start, done.stdout


def main() -> int:
    """Make everything once, in the order of a stranger, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-test", action="store_true", help="all but `make test`, and nothing is kept")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.without_test and options.out:
        parser.error("a result without the tests is not one to keep: leave --out or --without-test out")
    result: dict[str, float | str] = {"what": "wall time of the targets of make in a fresh clone, one after the other"}
    until_s = 0.0
    with fresh_clone() as clone:
        for name, targets in STEPS.items():
            if name == "test" and options.without_test:
                continue
            seconds, printed = made(clone, targets)
            result[f"{name}_s"] = round(seconds, 1)
            print(f"{name}: {seconds:.0f} s", flush=True)
            if name == "test":
                result["tests"] = next(found[1] for line in printed.splitlines() if (found := ENDED.match(line)))
            until_s += seconds
            if name == "demo":
                result["until_demo_s"] = round(until_s, 1)
    print(json.dumps(result))
    write(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
