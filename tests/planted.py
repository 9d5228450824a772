"""Plants one plausible fault in each of 15 rooms and says which of them the gate catches.

    python -m tests.planted [--only ROOM ...] [--json FILE]

Each fault is planted in a copy of the working tree; then the tests of the gate that the change can reach run until the
first failure, those of the room first. It exits with 1 where fewer than 13 of 15 are caught.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.testkit.changed import module_of, reached_by

ROOT = Path(__file__).resolve().parents[1]
REACH = 13


# For each: a file and the meaning of the fault, a text that stands once in the file, and what takes its place.
FAULTS = """\
store/format/shard.py: the table of a shard is not verified
- if xxhash.xxh3_128_digest(table) != digest:
+ if not table:
structures/partners.py: a chain that another item names counts twice
- free = tuple(chain for chain in structure.chains if chain not in taken)
+ free = tuple(structure.chains)
structures/atoms.py: a virtual CB lies on the wrong side
- CB_WEIGHTS = (0.56802827, -0.58273431, -0.54067466)
+ CB_WEIGHTS = (0.56802827, -0.58273431, 0.54067466)
encoder/engine/token_batches.py: a batch of sequences may be twice its budget
- if last - first == 1 or sums_N[last] - sums_N[first] <= budget:
+ if last - first == 1 or sums_N[last] - sums_N[first] <= 2 * budget:
readers/peptides.py: a modification has the wrong mass
- Modification("+25.979265", 0, 43.005813655 - 17.026549101, "")
+ Modification("+25.979265", 0, 43.005813655 - 18.026549101, "")
tasks/peptides/published_peptides.py: residues after the first error are not compared from the end
- stop_true = min(stop, len(true_R))
+ stop_true = len(true_R)
training/step/step.py: gradients are divided by a guess of the weight
- self.settle(self._totals)
+ pass
memory/runtime/recovery.py: an out-of-memory does not lower the budget
- BACKOFF = 0.9
+ BACKOFF = 1.0
device/accelerator.py: out of host memory counts as another error
- for text in HOST_IS_FULL + CARD_IS_FULL
+ for text in CARD_IS_FULL
cluster/site.py: the loosest of several limits counts
- caps.sort(key=attrgetter("value"))
+ caps.sort(key=attrgetter("value"), reverse=True)
engine/repair.py: a node stays excluded though a task has ended well there since
- if attempt.cause in (Cause.NODE, Cause.DONE))
+ if attempt.cause is Cause.NODE)
journal/budget.py: a budget that is used up pays for one task more
- max(0, min(tasks,
+ max(1, min(tasks,
config/masking.py: short secrets are shown
- SHORTEST = 6
+ SHORTEST = 40
report/charts.py: axes of memory are wrong by 7% in GiB
- KILO = 1024
+ KILO = 1000
cli/run_verbs.py: --json submits jobs
- if as_json and (emit is not None or not dry_run):
+ if as_json and emit is not None:
"""


class Fault(NamedTuple):
    """A fault to plant in a file of the package."""

    file: str
    meaning: str
    right: str
    wrong: str

    @property
    def room(self) -> str:
        return self.file.partition("/")[0]


def faults() -> list[Fault]:
    """Return the faults that the text describes."""
    found = re.findall(r"(.+): (.+)\n- (.+)\n\+ (.+)\n", FAULTS)
    return [Fault(*fault) for fault in found]


def catch(fault: Fault, tree: Path) -> str:
    """Return the first test of the gate that fails with a fault, or nothing."""
    path = tree / "pipeline" / fault.file
    text = path.read_text()
    assert text.count(fault.right) == 1, f"{fault.file} has changed: plant another fault there"
    path.write_text(text.replace(fault.right, fault.wrong))
    found = next(filter(None, (first_failure(tree, files) for files in gate_files(f"pipeline/{fault.file}"))), "")
    path.write_text(text)
    return found


def first_failure(tree: Path, files: list[str]) -> str:
    """Return the first test of some files that fails in a tree."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "-n", "3", "-m", "not nightly and not slurm"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}  # for the commands that tests type
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    return next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")


def gate_files(changed: str) -> tuple[list[str], list[str]]:
    """Return the test files that a change can reach: those of its own room, and the others."""
    reached = reached_by([changed]) or set()
    tests = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py") if module_of(path) in reached)
    room = changed.split("/")[1]
    return [str(one) for one in tests if room in one.parts], [str(one) for one in tests if room not in one.parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ROOM", default=[fault.room for fault in faults()])
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "demo", "build"))
        for fault in faults():
            if fault.room in asked.only:
                caught = catch(fault, tree)
                rows.append({"room": fault.room, "fault": fault.meaning, "caught_by": caught})
                sys.stdout.write(f"{fault.room}: {fault.meaning}: {caught or 'NOT CAUGHT'}\n")
                sys.stdout.flush()
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    caught = sum(bool(row["caught_by"]) for row in rows)
    sys.stdout.write(f"{caught} of {len(rows)} caught\n")
    sys.exit(caught < min(REACH, len(rows)))


if __name__ == "__main__":
    main()
