"""What a stranger waits for, in a fresh clone of the last commit: installation, `make demo`, `make check`, `make test`.

    python benchmarks/runs/fresh.py [--without-test | --test-all] [--out FILE]

With `--test-all` the slow tests, too, which take more than an hour. FILE is written after each step. Tests that fail
are counted, not hidden: the exit code is 1 then.
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
from typing import Any

from benchmarks.circumstances import write

ROOT = Path(__file__).resolve().parents[2]
ENDED = re.compile(r"^=+ (.*\d+ passed.*) in [\d.]+s")
FAILED = re.compile(r"\d+ (?:failed|error)")
STEPS = {  # in this order: each finds what those before it have made, as it does for people
    "install": ".venv/ready",
    "demo": "demo",
    "tools": ".venv/tools slurm-packages browser-packages",
    "check": "check",
    "test": "test",
    "test_all": "test-all",
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
        print(f"`make {targets}` failed with {done.returncode}:\n{done.stdout[-20_000:]}", file=sys.stderr)
        if not targets.startswith("test"):
            sys.exit(1)
    return time.perf_counter() - start, done.stdout


def main() -> int:
    """Make everything once, in the order of a stranger, and print the times."""
    typed = options()
    result: dict[str, Any] = {"what": "wall time of the targets of make in a fresh clone, one after the other"}
    until_s, failed = 0.0, False
    with fresh_clone() as clone:
        for name, targets in STEPS.items():
            if name in typed.left_out:
                continue
            seconds, printed = made(clone, targets)
            result[f"{name}_s"] = round(seconds, 1)
            print(f"{name}: {seconds:.0f} s", flush=True)
            if name.startswith("test"):
                told = next(found[1] for line in printed.splitlines() if (found := ENDED.match(line)))
                result[f"{name}_told"] = told
                failed = failed or FAILED.search(told) is not None
            until_s += seconds
            if name == "demo":
                result["until_demo_s"] = round(until_s, 1)
            write(typed.out, result)
    print(json.dumps(result))
    return int(failed)


def options() -> argparse.Namespace:
    """Return what was typed, and which steps are left out for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--without-test", action="store_true", help="all but `make test`, and nothing is kept")
    which.add_argument("--test-all", action="store_true", help="also `make test-all`")
    parser.add_argument("--out", type=Path)
    typed = parser.parse_args()
    if typed.without_test and typed.out:
        parser.error("a result without the tests is not one to keep: leave --out or --without-test out")
    typed.left_out = {"test", "test_all"} if typed.without_test else set() if typed.test_all else {"test_all"}
    return typed


if __name__ == "__main__":
    sys.exit(main())
