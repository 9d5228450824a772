"""Each file of `on_card` passes in a process whose torch has simulated cards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.card import card

FILES = sorted(Path(__file__).with_name("on_card").glob("test_*.py"))
WITHIN_S = 900


def test_there_is_a_compiler_in_ci() -> None:
    assert os.environ.get("CI") != "true" or not card.why_not()


@pytest.mark.timeout(WITHIN_S + 60)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem.removeprefix("test_"))
def test_on_card(file: Path, tmp_path: Path) -> None:
    if reason := card.why_not():
        pytest.skip(f"no simulated card here: {reason}")
    options = ["-q", "-x", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inner'}"]
    command = [sys.executable, "-m", "pytest", *options, str(file)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {card.INSIDE: "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=WITHIN_S, check=False, cwd=file.parents[3]
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
