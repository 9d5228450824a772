"""A signal that comes while a step is traced ends the process as anywhere else."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

LIMIT_S = 60
PROGRAM = """
import os, signal, sys
import torch
from torch import nn
from pipeline.memory.footprint import MemoryChoice
from tests.memory.tracing.traced import Small, layers, tracer

class Ended(BaseException):
    pass

def end(*_):
    raise Ended

signal.signal(signal.SIGTERM, end)
traced = tracer(Small(lambda: layers(depth=200)))
traced.standing(MemoryChoice())
try:
    print("tracing", flush=True)
    for items in range(1, 1000):
        traced.micro(MemoryChoice(), {"items": items})
except Ended:
    print("ended", flush=True)
    os._exit(3)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("after_s", [0.05, 0.21, 0.37])
def test_a_signal_within_a_trace_is_raised_after_it(after_s: float) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "tracing\n"
            time.sleep(after_s)  # anywhere within a trace: nothing is judged by it
            child.send_signal(signal.SIGTERM)
            out, err = child.communicate(timeout=LIMIT_S)
        finally:
            child.kill()
    assert (out, child.returncode) == ("ended\n", 3), err
