"""What the other proofs rest on: nothing changes a cache but the steps of a disk, which they record and make fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.works import WORKS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.fault


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    program = [sys.executable, "-m", "tests.faults.audited", str(tmp_path_factory.mktemp("audited"))]
    output = subprocess.run(program, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    return {told.pop("work"): told for told in map(json.loads, output.splitlines())}


@pytest.mark.parametrize("name", [work.name for work in WORKS])
def test_nothing_changes_a_cache_but_the_steps_of_a_disk(audited, name):
    assert audited[name]["bypassing"] == []
    assert audited[name]["by_the_disk"] > 5 or name == "read"


def test_who_goes_past_the_disk_is_convicted(audited):
    assert len(audited["cheat"]["bypassing"]) == 1
