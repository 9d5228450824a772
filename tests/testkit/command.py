"""Runs the command line inside the test's own process, as `main` would, and keeps what it printed."""

from __future__ import annotations

import gc
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.__main__ import main

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


class Command:
    """Types commands in the current folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *words: str) -> Outcome:
        """Type one command."""
        self._monkeypatch.setattr(sys, "argv", ["pipeline", *words])
        code = 0
        handlers = {number: signal.getsignal(number) for number in (signal.SIGPIPE, signal.SIGTERM, signal.SIGHUP)}
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            gc.enable()  # a command of its own process may leave it off
        captured = self._capsys.readouterr()
        return Outcome(code, captured.out, captured.err)
