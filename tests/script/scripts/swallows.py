# ruff: noqa: T201
"""Prints that memory ended, goes on, and ends as it was told."""

import argparse
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--code", type=int, default=0)
parser.add_argument("--steps_after", type=int, default=0)
parser.add_argument("--says", default="WARNING: CUDA out of memory. Skipping this batch.")
given = parser.parse_args()
print(given.says)
for step in range(given.steps_after):
    print("step", step)
sys.exit(given.code)
