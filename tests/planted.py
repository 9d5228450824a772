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
        "if hasher.digest() != digest:",
        "if hasher.digest() != digest and not rest:",
        "a record that is read in two stretches is not verified",
    ),
    Fault(
        "structures/atoms.py",
        "order_A = _by_preference(altloc_A, table.resname_A[rows_A], residue_A, chosen_R)",
        "pass",
        "the first alternative location is kept, whatever its occupancy",
    ),
    Fault(
        "graphs/contacts.py",
        "found_2E = neighbours.between(other_A3, pos_A3, radius=cutoff)",
        "found_2E = neighbours.between(other_A3, pos_A3, radius=cutoff - 0.1)",
        "contacts are counted up to 0.1 Å too near",
    ),
    Fault(
        "encoder/forward/esm_layer.py",
        "scale = 1 - MASKED_IN_TRAINING if token_dropout else 1.0",
        "scale = 1.0",
        "embeddings are not scaled as in training",
    ),
    Fault(
        "readers/spectra.py",
        "(relative_P >= self.least_intensity)",
        "(relative_P > self.least_intensity)",
        "a peak at the least intensity is lost",
    ),
    Fault(
        "tasks/docking/pose_quality.py",
        "if fnat >= least and (irmsd <= interface or lrmsd <= ligand):",
        "if fnat >= least and irmsd <= interface and lrmsd <= ligand:",
        "CAPRI's classes ask for both RMSDs",
    ),
    Fault(
        "training/random_state.py",
        "    random.setstate((version, tuple(words), gauss[0] if gauss else None))\n",
        "",
        "Python's random numbers are not restored after a kill",
    ),
    Fault(
        "memory/hardware/caching_allocator.py",
        "_LEAST = 512",
        "_LEAST = 256",
        "the simulated allocator rounds to half a block",
    ),
    Fault(
        "device/cgroups.py",
        "yield from (own, *(folder for folder in own.parents if folder.is_relative_to(root)))",
        "yield own",
        "the memory limit of a parent group is not seen",
    ),
    Fault(
        "cluster/verdict.py",
        "if peak and asked and peak >= NEARLY * asked:",
        "if peak and asked and peak >= asked:",
        "a kill near the memory limit counts as a crash",
    ),
    Fault(
        "runs/engine/repair.py",
        "GROWTH * max(ask.mem_bytes, peak_bytes or 0)",
        "max(GROWTH * ask.mem_bytes, peak_bytes or 0)",
        "a task whose peak was far above its request gets too little",
    ),
    Fault(
        "journal/run_status.py",
        "if (attempt.number, attempt.job) not in ((known.number, known.job) for known in task.ended):",
        "if attempt:",
        "an attempt that two visits report counts twice",
    ),
    Fault(
        "config/load.py",
        "for document, base in (*below, *written):",
        "for document, base in (*written, *below):",
        "a preset beats what the file says",
    ),
    Fault(
        "report/html/html_page.py",
        "autoescape=True",
        "autoescape=False",
        "text of an item's name becomes part of the page",
    ),
    Fault(
        "cli/cache_check.py",
        "if collected.summary.findings:",
        "if collected.summary.findings and not as_json:",
        "cache validate --json ends with 0 where there is damage",
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
