"""Runs the command line inside the test's own process, as `main` would, and keeps what it printed."""

from __future__ import annotations

import gc
import json
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.__main__ import main

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True)
class Typed:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """All output, each run of whitespace as one blank."""
        return " ".join((self.out + self.err).split())

    def json(self) -> Any:
        """Return the document that a command with --json printed."""
        return json.loads(self.out)


class Command:
    """Types commands in the current folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *words: str) -> Typed:
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
        return Typed(code, captured.out, captured.err)
