# ruff: noqa: T201
"""Holds host memory until it is let go."""

import argparse
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--mib", type=int, required=True)
parser.add_argument("--until", type=Path)
given = parser.parse_args()
held = b"x" * (given.mib << 20)
while given.until and not given.until.exists():
    time.sleep(0.01)
print("held", len(held))
