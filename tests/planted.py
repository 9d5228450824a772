"""Plants one plausible fault in each of 15 rooms and says which of them the gate catches.

    python -m tests.planted [--only ROOM ...] [--json FILE]

Each fault is planted in a copy of the working tree; then the tests of the gate that the change can reach run until the
first failure, those of the room first. It exits with 1 where fewer than 13 of 15 are caught.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.testkit.changed import module_of, reached_by

ROOT = Path(__file__).resolve().parents[1]
REACH = 13


@dataclass(frozen=True)
class Fault:
    """A text that stands once in a file of the package, what takes its place, and what goes wrong then."""

    file: str
    right: str
    wrong: str
    meaning: str

    @property
    def room(self) -> str:
        return self.file.partition("/")[0]


FAULTS = (
    Fault(
        "store/format/shard.py",
        "if xxhash.xxh3_128_digest(table) != digest:",
        "if not table:",
        "the table of a shard is not verified",
    ),
    Fault(
        "structures/partners.py",
        "free = tuple(chain for chain in structure.chains if chain not in taken)",
        "free = tuple(structure.chains)",
        "a chain that another item names counts twice",
    ),
    Fault(
        "structures/atoms.py",
        "CB_WEIGHTS = (0.56802827, -0.58273431, -0.54067466)",
        "CB_WEIGHTS = (0.56802827, -0.58273431, 0.54067466)",
        "a virtual CB lies on the wrong side",
    ),
    Fault(
        "encoder/engine/token_batches.py",
        "if last - first == 1 or sums_N[last] - sums_N[first] <= budget:",
        "if last - first == 1 or sums_N[last] - sums_N[first] <= 2 * budget:",
        "a batch of sequences may be twice its budget",
    ),
    Fault(
        "readers/peptides.py",
        'Modification("+25.979265", 0, 43.005813655 - 17.026549101, "")',
        'Modification("+25.979265", 0, 43.005813655 - 18.026549101, "")',
        "a modification has the wrong mass",
    ),
    Fault(
        "tasks/peptides/peptide_scores.py",
        "stop_true = min(stop, len(true_R))",
        "stop_true = len(true_R)",
        "residues after the first error are not compared from the end",
    ),
    Fault(
        "training/step/step.py",
        "            self.settle(self._totals)\n",
        "            pass\n",
        "gradients are divided by a guess of the weight",
    ),
    Fault(
        "memory/runtime/recovery.py",
        "BACKOFF = 0.9",
        "BACKOFF = 1.0",
        "an out-of-memory does not lower the budget",
    ),
    Fault(
        "device/accelerator.py",
        "for text in HOST_IS_FULL + CARD_IS_FULL",
        "for text in CARD_IS_FULL",
        "out of host memory counts as another error",
    ),
    Fault(
        "cluster/site.py",
        'caps.sort(key=attrgetter("value"))',
        'caps.sort(key=attrgetter("value"), reverse=True)',
        "the loosest of several limits counts",
    ),
    Fault(
        "engine/repair.py",
        "if attempt.cause in (Cause.NODE, Cause.DONE))",
        "if attempt.cause is Cause.NODE)",
        "a node stays excluded though a task has ended well there since",
    ),
    Fault(
        "journal/budget.py",
        "max(0, min(tasks,",
        "max(1, min(tasks,",
        "a budget that is used up pays for one task more",
    ),
    Fault(
        "config/masking.py",
        "SHORTEST = 6",
        "SHORTEST = 40",
        "short secrets are shown",
    ),
    Fault(
        "report/html/charts.py",
        "KILO = 1024",
        "KILO = 1000",
        "axes of memory are wrong by 7% in GiB",
    ),
    Fault(
        "cli/run_verbs.py",
        "if as_json and (emit is not None or not dry_run):",
        "if as_json and emit is not None:",
        "--json submits jobs",
    ),
)


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
    parser.add_argument("--only", nargs="+", metavar="ROOM", default=[fault.room for fault in FAULTS])
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "demo", "build"))
        for fault in FAULTS:
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
