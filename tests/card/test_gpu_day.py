"""The day on a GPU, `benchmarks/gpu.py`, from end to end on the simulated card."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.card import card

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 3 * 3600  # of shared machines


@pytest.mark.nightly
@pytest.mark.timeout(LIMIT_S + 60)
def test_the_whole_day_is_rehearsed_and_a_second_day_does_nothing_twice(tmp_path: Path) -> None:
    if reason := card.why_not():
        pytest.skip(f"no simulated card here: {reason}")
    words = ["--rehearse", "--minutes", "180", "--device", "simcard", "--out", str(tmp_path)]
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    cases = json.loads((tmp_path / "results.json").read_text())["cases"]
    assert {name.split()[0] for name in cases} == {"smoke", "products", "weights", "embed", "memory", "train"}
    page = (tmp_path / "README.md").read_text()
    assert "A day on Simulated Card" in page
    assert "rehearsal" in page
    again = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=LIMIT_S)
    assert "done (" not in again.stdout
    assert json.loads((tmp_path / "results.json").read_text())["cases"] == cases
