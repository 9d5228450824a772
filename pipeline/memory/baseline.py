"""What a process takes before it does anything, measured on one: `host` predicts the rest.

Memory is counted as what a job can be killed for: anonymous and shared pages by proportional set size, and the files
that are mapped in full, whoever else on this machine has them: that says nothing of the node where the job will run.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from functools import cache

from pipeline.memory.footprint import Origin

IMPORT_BYTES = 322_040 << 10  # of torch 2.2 for CUDA 11.8 (https://github.com/pytorch/pytorch/issues/113326)
TRAINING = ("torch", "torch._dynamo")  # the first optimizer imports the second: 68 MiB [measured, torch 2.13.0]
IMPORT_S = 120.0  # from a cold network file system
_IMPORT = """
import os, sys
for name in sys.argv[1:]:
    __import__(name)
for file in "smaps_rollup", "status":
    sys.stdout.write(open(f"/proc/self/{file}").read())
sys.stdout.flush()
os._exit(0)  # taking torch down again would take another half a second
"""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a process takes before it does anything."""

    bytes: int
    origin: Origin
    why: str


STATED = Baseline(IMPORT_BYTES, Origin.ASSUMED, "as others measured it (pytorch#113326)")


@cache  # it takes seconds
def measured_baseline(*modules: str) -> Baseline:
    """Return what a process takes that has imported some modules, measured on one; stated where that cannot be."""
    modules = modules or TRAINING
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _IMPORT, *modules], capture_output=True, text=True, timeout=IMPORT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return STATED
    size = held_bytes(ran.stdout)
    return Baseline(size, Origin.MEASURED, f"a process that imported {', '.join(modules)}") if size else STATED


def held_bytes(text: str) -> int:
    """Return what a process holds, by its `smaps_rollup` and `status`: what only its end would free, and files."""
    held = sum(_kilobytes(text, name) for name in ("Pss_Anon", "Pss_Shmem"))
    return ((held or _kilobytes(text, "Pss")) + _kilobytes(text, "RssFile")) << 10


def _kilobytes(text: str, name: str) -> int:
    _, found, rest = text.partition(f"{name}:")
    return int(rest.split(maxsplit=1)[0]) if found else 0
