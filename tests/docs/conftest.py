"""A finished demo, made once for all tests and all workers, and copied."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.reader import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Demo:
    """What `make demo`, or where there is no environment of make's `pipeline demo`, made and printed."""

    made: Path  # where it was made
    pristine: Path  # a copy that nobody touches
    printed: str


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """Return the demo of this session; the worker that comes first makes it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    found = Demo(base / "made" / "demo", base / "pristine" / "demo", "")
    printed = base / "demo.txt"
    with (base / "demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not printed.exists():
            words = ["make", "demo", f"DIR={found.made}"] if made_by_make() else ["pipeline", "demo", str(found.made)]
            done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            shutil.copytree(found.made, found.pristine)
            printed.write_text(done.stdout)
    return Demo(found.made, found.pristine, printed.read_text())


def made_by_make() -> bool:
    """Tell whether the environment was made by make and is up to date, so that make would not first make one."""
    question = subprocess.run(["make", "--question", ".venv/ready"], cwd=ROOT, capture_output=True, check=False)
    return (ROOT / ".venv" / "ready").exists() and question.returncode == 0
