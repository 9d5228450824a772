"""A finished demo, made once for all tests and all workers."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.reader import ENVIRONMENT
from tests.testkit.once import Shelf

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Demo:
    """What `make demo`, or where there is no environment of make's `pipeline demo`, made and printed."""

    made: Path  # where it was made
    pristine: Path  # a copy that no test touches
    printed: str


def make_demo(folder: Path) -> None:
    """Make the demo, a copy of it, and a file of what was printed."""
    made = folder / "demo"
    words = ["make", "demo", f"DIR={made}"] if made_by_make() else ["pipeline", "demo", str(made)]
    done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.copytree(made, folder / "pristine" / "demo")
    (folder / "demo.txt").write_text(done.stdout)


@pytest.fixture(scope="session")
def demo(shelf: Shelf) -> Demo:
    """Return the demo of this session."""
    base = shelf.pristine("demo", make_demo)
    return Demo(base / "demo", base / "pristine" / "demo", (base / "demo.txt").read_text())


def made_by_make() -> bool:
    """Say whether make's environment is up to date, so that `make demo` would not build one first."""
    question = subprocess.run(["make", "--question", ".venv/ready"], cwd=ROOT, capture_output=True, check=False)
    return (ROOT / ".venv" / "ready").exists() and question.returncode == 0
