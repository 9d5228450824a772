"""Processes killed with SIGKILL leave nothing torn, lose nothing that they acknowledged, and others go on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.fault


def deaths(folder, *arguments):
    program = [sys.executable, "-m", "tests.faults.deaths", str(folder), *map(str, arguments)]
    output = subprocess.run(program, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    return [json.loads(line) for line in output.splitlines()]


def test_a_process_killed_at_a_step_of_any_work_loses_and_tears_nothing(tmp_path, record_property):
    rounds = deaths(tmp_path, "steps", 5)
    assert [one for one in rounds if one["complaints"]] == []
    record_property("faults", killed := sum(one["killed"] for one in rounds))
    assert killed > 50
    assert len({one["work"] for one in rounds if one["killed"]}) >= 10


def test_processes_that_do_everything_at_once_are_killed_at_any_moment(tmp_path, record_property):
    rounds = deaths(tmp_path, "moments", 50, 1)
    assert [one for one in rounds if one["complaints"]] == []
    record_property("faults", killed := sum(one["killed"] for one in rounds))
    assert killed >= 50
    assert any(one["records"] for one in rounds)
