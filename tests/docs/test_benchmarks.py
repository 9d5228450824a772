"""Every script of benchmarks/ starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if "def main" in path.read_text()]


@pytest.mark.nightly
def test_every_script_says_how_it_is_used() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    failed = []
    for script in SCRIPTS:
        words = [sys.executable, script, "--help"]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        failed += [script.name] if done.returncode or "usage:" not in done.stdout else []
    assert failed == []
