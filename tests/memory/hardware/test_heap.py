"""What the C library keeps of freed memory: fewer page faults, and no leak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from pipeline.device.host import VARIABLES
from pipeline.memory.leak_detector import malloc_counter
from pipeline.units import MIB

BLOCKS, ROUNDS = 100, 5
STEPS = f"""
import json, resource, sys
from pipeline.device.host import keep_freed_memory
from pipeline.memory.leak_detector import malloc_counter, resident_bytes
keeps = keep_freed_memory(int(sys.argv[1]))
count = malloc_counter()
def step():
    blocks = [bytearray(b"1") * {MIB} for _ in range({BLOCKS})]
step()
before = count(), resident_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({ROUNDS}):
    step()
after = count(), resident_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
counted, grown, faults = (now - then for then, now in zip(before, after))
print(json.dumps({{"keeps": keeps, "resident": before[1], "counted": counted, "grown": grown, "faults": faults}}))
"""

pytestmark = pytest.mark.skipif(malloc_counter() is None, reason="glibc from 2.33 on counts what malloc has given out")


def steps(size: int, **variables: str) -> dict[str, Any]:
    """Return what a process says of steps that allocate and free the same blocks."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | variables
    command = [sys.executable, "-c", STEPS, str(size)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(ran.stdout)
    return result


def test_kept_memory_saves_page_faults_and_does_not_count_as_a_leak() -> None:
    default, kept = steps(0), steps(1 << 30)
    assert (default["keeps"], kept["keeps"]) == (False, True)
    assert kept["faults"] < 0.01 * default["faults"]
    assert kept["resident"] > default["resident"] + BLOCKS // 2 * MIB, "it stays with the process"
    assert kept["counted"] < MIB, "and what the leak detector counts does not have it"
    assert kept["grown"] < MIB


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_environment_win(name: str) -> None:
    assert not steps(1 << 30, **{name: "131072" if name.startswith("MALLOC") else "glibc.malloc.arena_max=4"})["keeps"]
