"""A case in a process of its own: told in one line what to do, it says in one line what came of it.

One that crashes or hangs costs itself only: with its time over it goes, and all that it has started. What it printed
is kept where it failed.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.device.kinds import VISIBLE, VISIBLE_TO
from pipeline.memory.hardware.allocator_variables import VARIABLES, allocator_settings

ROOT = Path(__file__).resolve().parents[2]
SIMULATED = "simcard"  # the device that the tests simulate
HIDING = dict.fromkeys(VISIBLE_TO, "")  # cards, from what only predicts
CHILD = "--child"
LINES_KEPT, LETTERS_TOLD = 200, 300
_running = set["subprocess.Popen[str]"]()


def child() -> None:
    """Do what the first line says, and say what came of it."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to the log
    asked = json.loads(sys.stdin.readline())
    module, _, name = asked["call"].partition(":")
    try:
        said = getattr(importlib.import_module(module), name)(asked["given"])
    except Exception as error:  # noqa: BLE001 - a failing case is a row
        import traceback

        traceback.print_exc()
        said = {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
    print(json.dumps(said), file=told, flush=True)
    sys.stderr.flush()
    os._exit(0)  # the card is free sooner


def environment(given: Mapping[str, Any], *, allocator: str, on_card: bool) -> dict[str, str]:
    """Return the environment of a case: with the allocator's settings as told, and without a card if it needs none."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in VARIABLES:
        variables.pop(name, None)
    variables |= allocator_settings(allocator, variables)
    if given.get("device") == SIMULATED and on_card:
        from tests.card import card

        variables |= card.environment(card.Cards()) | {VISIBLE: "0"}  # for what the case starts, too
    return variables | (HIDING if not on_card else {}) | {"PYTHONUNBUFFERED": "1"}


def ask(
    call: str, given: Mapping[str, Any], limit_s: float, log: Path, *, allocator: str = "", on_card: bool = True
) -> dict[str, Any]:
    """Run `module:function` in a new process; return what it said, or why it said nothing."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "gpu.py"), CHILD]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as lines:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=lines,
            text=True,
            cwd=ROOT,
            env=environment(given, allocator=allocator, on_card=on_card),
            start_new_session=True,  # so that all of it can be ended
        )
        late, said = False, ""
        _running.add(process)
        try:
            said, _ = process.communicate(json.dumps({"call": call, "given": dict(given)}) + "\n", timeout=limit_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _running.discard(process)
            end_all(process)
    found = _read(said) or {"error": _why(log, process.returncode, limit_s if late else 0.0)}
    if "error" not in found:
        log.unlink()
    return found


def end_all(process: subprocess.Popen[str]) -> None:
    """End a process and whatever it has started."""
    _kill(process)
    process.communicate()


def end_running() -> None:
    """End the processes of all cases: somebody wants the day to be over."""
    for process in tuple(_running):
        _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _read(said: str) -> dict[str, Any]:
    try:
        return dict(json.loads(said.strip().splitlines()[-1]))
    except (IndexError, ValueError):
        return {}


def _why(log: Path, code: int, limit_s: float) -> str:
    """Say why nothing was said, with the last line that was printed."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-LINES_KEPT:]
    why = f"it took more than {limit_s:.0f} s" if limit_s else f"its process ended with {code}"
    return f"{why}: {lines[-1][-LETTERS_TOLD:]}" if lines else why
