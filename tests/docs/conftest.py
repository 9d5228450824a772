"""A finished demo, made once for all tests and all workers, and copied."""

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
    pristine: Path  # a copy that no test changes
    printed: str


@pytest.fixture(scope="session")
def demo(shelf: Shelf) -> Demo:
    """Return the demo of this session; the worker that comes first makes it."""

    def make(folder: Path) -> None:
        words = ["make", "demo", f"DIR={folder / 'demo'}"] if made_by_make() else ["pipeline", "demo", folder / "demo"]
        done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        shutil.copytree(folder / "demo", folder / "pristine" / "demo")
        (folder / "printed").write_text(done.stdout)

    made = shelf.pristine("demo", make)
    return Demo(made / "demo", made / "pristine" / "demo", (made / "printed").read_text())


def made_by_make() -> bool:
    """Tell whether the environment was made by make and is up to date, so that make would not first make one."""
    question = subprocess.run(["make", "--question", ".venv/ready"], cwd=ROOT, capture_output=True, check=False)
    return (ROOT / ".venv" / "ready").exists() and question.returncode == 0
