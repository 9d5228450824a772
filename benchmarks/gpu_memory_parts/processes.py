"""Cases in processes of their own, which take the memory of the card in turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.memory.hardware.gpus import Device

CPU_S, CARD_S = 480.0, 90.0  # a process may take
DRY_S, LATE_S, LEAST_S = 240.0, 40.0, 10.0  # on the CPU; beyond the time that there is; whatever that is
SCRIPT = Path(__file__).parent.parent / "memory" / "gpu_memory.py"


class TimeOver(RuntimeError):
    """The benchmark's time was over before a case began."""


class Room:
    """The card's memory, which cases take in the order in which they come."""

    def __init__(self, total_bytes: int, until: float) -> None:
        self._free, self._total, self._until = total_bytes, total_bytes, until
        self._turns: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, wanted_bytes: int | None) -> Iterator[None]:
        """Have so much of it, or all."""
        size, turn = min(wanted_bytes or self._total, self._total), object()
        with self._changed:
            self._turns.append(turn)
            is_mine = self._changed.wait_for(
                lambda: self._turns[0] is turn and self._free >= size, self._until - time.monotonic()
            )
            self._turns.remove(turn)
            self._free -= size if is_mine else 0
            self._changed.notify_all()
        if not is_mine:
            raise TimeOver
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


@dataclass(frozen=True)
class Bench:
    """What all cases have alike."""

    card: Device
    gpu: str
    driver: str
    total_bytes: int
    dry: bool
    until: float
    room: Room
    context_bytes: int = 0  # that were in use when a process had only begun

    def ask(self, case: Mapping[str, Any], *, on_card: bool = False, room_bytes: int | None = None) -> dict[str, Any]:
        """Run a case in a new process; return what it said, or why it said nothing."""
        try:
            return self._asked(case, on_card=on_card, room_bytes=room_bytes)
        except TimeOver:
            return {"error": "left out: the time was over"}

    def _asked(self, case: Mapping[str, Any], *, on_card: bool, room_bytes: int | None) -> dict[str, Any]:
        if time.monotonic() > self.until:
            raise TimeOver
        with tempfile.TemporaryFile("w+") as log, Child(case, on_card and not self.dry, log) as child:
            said = child.line(min(CPU_S, max(1.0, self.until - time.monotonic())))
            if said == "ready":
                with self.room.taken(room_bytes):
                    child.go()
                    said = child.line(
                        DRY_S if self.dry else min(CARD_S, max(LEAST_S, self.until + LATE_S - time.monotonic()))
                    )
                    child.ended()  # then its context is gone, too
            if said:
                return dict(json.loads(said))
            log.seek(0)
            last = ([line for line in log.read().splitlines() if line.strip()] or [""])[-1]
            return {"error": f"{'it took too long' if child.late else 'its process ended'}: {last[-200:]}"}


class Child:
    """A process that reads a case, gets ready, waits to be told to go, and says what came of it."""

    def __init__(self, case: Mapping[str, Any], on_card: bool, log: Any) -> None:  # noqa: FBT001
        settings = str(case.get("allocator", ""))
        environment = {**os.environ, "OMP_NUM_THREADS": "2" if on_card else "1", "PYTHONUNBUFFERED": "1"}
        environment.pop("PYTORCH_ALLOC_CONF", None)
        environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)
        environment |= {"PYTORCH_CUDA_ALLOC_CONF": settings} if settings else {}
        if not on_card:
            environment["CUDA_VISIBLE_DEVICES"] = ""  # a trace must not touch the card
        command = [sys.executable, "-W", "ignore", str(SCRIPT), "--child"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment)
        self._case, self.late = case, False

    def __enter__(self) -> Child:
        self._write(json.dumps(self._case))
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def line(self, limit_s: float) -> str:
        """Return the next line; empty: it ended, or was ended for being late."""
        timer = threading.Timer(limit_s, self._end)
        timer.start()
        try:
            assert self._process.stdout is not None
            return self._process.stdout.readline().strip()
        finally:
            timer.cancel()

    def go(self) -> None:
        """Let it begin."""
        self._write("go")

    def ended(self) -> None:
        """Wait until it is gone."""
        self._process.wait(CARD_S)

    def _write(self, text: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died: that is said when its line is read

    def _end(self) -> None:
        self.late = True
        self._process.kill()
