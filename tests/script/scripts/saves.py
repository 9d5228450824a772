# ruff: noqa: T201
"""Counts steps; told to end it saves how far it came, which it goes on from when it is started again."""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--code", type=int, default=75)
parser.add_argument("--gate", type=Path, help="a file for which the saving waits")
given = parser.parse_args()
checkpoint = given.out / "checkpoint.json"
told = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: told.append(number))
step = json.loads(checkpoint.read_text())["step"] if checkpoint.exists() else 0
while step < given.steps:
    step += 1
    print("pipeline:", json.dumps({"step": step}), flush=True)
    if not (given.out / "ready").exists():
        (given.out / "pid").write_text(str(os.getpid()))
        (given.out / "pid").rename(given.out / "ready")
    time.sleep(0.001)
    if told:
        while given.gate and not given.gate.exists():
            time.sleep(0.01)
        checkpoint.write_text(json.dumps({"step": step, "told": told}))
        sys.exit(given.code)
