"""Scan 10,000 made complexes with the real command, or make graphs of them, and watch the memory of all its processes.

    python benchmarks/structures/scan_memory.py [--stage scan|graph] [--complexes N] [--out FILE]

The second run, on unchanged files, must read none of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.circumstances import write
from pipeline.structures.synthetic import complex_pdb, draw_sequence

REACH_BYTES = {"scan": 600 << 20, "graph": 800 << 20}
ANTIGENS = 500
PIPELINE = Path(sys.executable).with_name("pipeline")
CONFIG = "data: {source: glob, path: data}\n"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def write_complex(folder: Path, number: int) -> None:
    """Write one complex; five hundred antigens return, as in real sets."""
    antigen = draw_sequence(np.random.default_rng(number % ANTIGENS), 60 + number % ANTIGENS % 140)
    receptor = draw_sequence(np.random.default_rng(1_000_000 + number % (2 * ANTIGENS)), 80 + number % 120)
    (folder / f"c{number:06d}.pdb").write_bytes(complex_pdb(number, receptor=receptor, ligand=antigen))


def tree_rss_bytes(root: int) -> tuple[int, int]:
    """Return the memory of a process and all its descendants: their sum, and the largest."""
    parents, sizes = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
                sizes[int(entry.name)] = int((entry / "statm").read_text().split()[1]) * PAGE_BYTES
            except (OSError, IndexError):
                continue
    family = {root}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    found = [sizes.get(pid, 0) for pid in family]
    return sum(found), max(found)


def run(folder: Path, stage: str = "scan") -> dict[str, float]:
    """Run the command and sample its memory twenty times a second."""
    command = [str(PIPELINE), "submit", "--stage", stage, "--executor", "local", "--follow"]
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    all_bytes = largest_bytes = 0
    while process.poll() is None:
        together, largest = tree_rss_bytes(process.pid)
        all_bytes, largest_bytes = max(all_bytes, together), max(largest_bytes, largest)
        time.sleep(0.05)
    seconds = time.perf_counter() - start
    text = process.stdout.read() if process.stdout else ""
    assert process.returncode == 0, text
    return {"seconds": round(seconds, 1), "all_processes_bytes": all_bytes, "largest_process_bytes": largest_bytes}


def state(folder: Path) -> dict[str, Any]:
    """Return what the newest run says of its last stage."""
    text = subprocess.run([str(PIPELINE), "status", "--json"], cwd=folder, check=True, capture_output=True).stdout
    stage: dict[str, Any] = json.loads(text)["stages"][-1]
    return stage


def main() -> int:
    """Make the files, scan them twice, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=REACH_BYTES, default="scan")
    parser.add_argument("--complexes", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        (folder / "pipeline.yaml").write_text(CONFIG)
        with ProcessPoolExecutor() as pool:
            list(pool.map(partial(write_complex, folder / "data"), range(options.complexes), chunksize=100))
        first = run(folder, options.stage)
        census = state(folder)["census"]
        assert census["accepted"] == options.complexes, census
        again = run(folder, options.stage)
        assert state(folder)["cached"] == options.complexes, state(folder)
    result = {
        "what": f"made complexes, `pipeline submit --stage {options.stage} --executor local --follow`",
        "complexes": options.complexes,
        "first": first,
        "again": again,
        "reach_bytes": REACH_BYTES[options.stage],
        "cores": os.cpu_count(),
    }
    for label, figures in (("first run", first), ("again, all cached", again)):
        mib = figures["all_processes_bytes"] / 2**20, figures["largest_process_bytes"] / 2**20
        print(f"{label:18} {figures['seconds']:7.1f} s   all processes {mib[0]:6.0f} MiB   largest {mib[1]:6.0f} MiB")
    print(json.dumps(result))
    write(options.out, result)
    return 0 if first["all_processes_bytes"] < REACH_BYTES[options.stage] else 1


if __name__ == "__main__":
    sys.exit(main())
