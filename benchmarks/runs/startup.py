"""How long a person waits for `pipeline --help`, against an interpreter that does nothing.

python benchmarks/runs/startup.py [--runs N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.circumstances import write

REACH_S = 0.3
PIPELINE = Path(sys.executable).with_name("pipeline")


def seconds(command: list[str]) -> float:
    """Return the wall time of one whole process."""
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> int:
    """Time both in turns and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    helped, empty = [str(PIPELINE), "--help"], [sys.executable, "-c", "pass"]
    seconds(helped)
    rounds = [(seconds(helped), seconds(empty)) for _ in range(options.runs)]
    ours, floor = (statistics.median(column) for column in zip(*rounds, strict=True))
    result = {
        "what": "pipeline --help, wall time of the whole process",
        "runs": options.runs,
        "help_s": round(ours, 3),
        "empty_interpreter_s": round(floor, 3),
        "reach_s": REACH_S,
    }
    print(f"pipeline --help {ours:.3f} s, an empty interpreter {floor:.3f} s, to reach {REACH_S} s")
    print(json.dumps(result))
    write(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
