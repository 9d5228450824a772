"""A thousand processes are killed, and each step of the disk fails at each time: nothing is lost or wrong.

`pytest tests/faults --junitxml=faults.xml` writes how many faults each test tried, as its property `faults`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.failing import complaints_about, failures, steps_of
from tests.faults.works import WORKS

ROOT = Path(__file__).parents[2]
KILLS = 1000
Note = Callable[[str, object], None]
pytestmark = [pytest.mark.fault, pytest.mark.nightly]


@pytest.mark.timeout(1800)
def test_a_thousand_processes_killed_at_any_moment_lose_and_tear_nothing(tmp_path: Path, record_property: Note) -> None:
    program = [sys.executable, "-m", "tests.faults.deaths", str(tmp_path), "moments", str(KILLS), "1"]
    output = subprocess.run(program, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    rounds = [json.loads(line) for line in output.splitlines()]
    assert [said for one in rounds for said in one["complaints"]] == []
    record_property("faults", killed := sum(one["killed"] for one in rounds))
    assert killed >= KILLS


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_every_step_of_the_disk_that_fails_at_every_time_loses_nothing(
    work, tmp_path: Path, record_property: Note
) -> None:
    tried = list(failures(steps_of(work, tmp_path / "counted"), every=True))
    found = [complaints_about(work, failure, tmp_path / f"{number}") for number, failure in enumerate(tried)]
    assert [said for one in found for said in one] == []
    record_property("faults", len(tried))
    assert len(tried) > 10
