"""Embed 1,000 and 20,000 sequences with the real command and a tiny model: the memory must not grow with them.

python benchmarks/encoder/embed_growth.py [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.circumstances import write
from benchmarks.structures.scan_memory import run
from pipeline.encoder.checkpoints.synth import write_random_checkpoint
from pipeline.structures.synthetic import draw_sequence

REACH_BYTES = 100 << 20
COUNTS = (1_000, 20_000)
STAGE = "embed"
CONFIG = """\
data: {source: fasta, path: data.fasta}
embed: {weights: esm2_tiny.pt}
cluster: {embed: {items_per_task: 1000000}}
"""


def measure(count: int) -> dict[str, float]:
    """Embed that many different sequences in one task."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pipeline.yaml").write_text(CONFIG)
        write_random_checkpoint(folder / "esm2_tiny.pt", layers=2, dim=32, heads=4)
        random = np.random.default_rng(1)
        with (folder / "data.fasta").open("w") as file:
            for number in range(count):
                file.write(f">s{number}\n{draw_sequence(random, int(random.integers(50, 400)))}\n")
        return run(folder, STAGE)


def main() -> int:
    """Measure both, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {count: measure(count) for count in COUNTS}
    few, many = (found[count]["all_processes_bytes"] for count in COUNTS)
    result = {
        "what": "`pipeline submit --stage embed --executor local --follow` of FASTA sequences, 50 to 400 residues",
        "runs": {str(count): figures for count, figures in found.items()},
        "growth_bytes": many - few,
        "reach_bytes": REACH_BYTES,
        "cores": os.cpu_count(),
    }
    for count, figures in found.items():
        everything, largest = figures["all_processes_bytes"] / 2**20, figures["largest_process_bytes"] / 2**20
        took = f"{figures['seconds']:6.1f} s"
        print(f"{count:6,} sequences {took}   all processes {everything:5.0f} MiB   largest {largest:5.0f} MiB")
    print(json.dumps(result))
    write(options.out, result)
    return 0 if many - few <= REACH_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
