"""Work in a process of its own, so that its memory is told apart from everything else's."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

KIB = 1024


def apart(work: Callable[..., Any], *given: Any) -> tuple[Any, dict[str, float]]:
    """Do something in a fresh process; return what it returned, and what it took beyond its imports."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, work, given))
    process.start()
    theirs.close()
    try:
        answer, took = ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"{work.__name__} ended with {process.exitcode}") from None
    process.join()
    return answer, took


def _serve(pipe: Connection, work: Callable[..., Any], given: tuple[Any, ...]) -> None:
    base, wall, cpu = _high_water(), time.perf_counter(), time.process_time()
    answer = work(*given)
    took = {
        "seconds": round(time.perf_counter() - wall, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
        "base_mb": round(base / 1e6, 1),
        "peak_mb": round(_high_water() / 1e6, 1),
    }
    pipe.send((answer, took))


def _high_water() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * KIB
