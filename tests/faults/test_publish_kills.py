"""A process that dies at any step of publishing leaves nothing torn and loses nothing that it acknowledged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.store.cache import Cache
from tests.store.content import is_right, key_of

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.fault


@pytest.fixture(scope="module")
def deaths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deaths")
    program = [sys.executable, "-m", "tests.store.publisher", str(folder)]
    lines = subprocess.run(program, check=True, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    return [{**death, "root": folder / death["root"]} for death in map(json.loads, lines)]


def test_a_child_is_killed_at_every_step_of_publishing(deaths):
    killed = {death["step"] for death in deaths if death["killed"]}
    assert killed == {death["step"] for death in deaths}
    assert len(killed) > 30


def test_nothing_acknowledged_is_lost(deaths):
    for death in deaths:
        store = Cache(death["root"]).kind("scan")
        assert store.missing([bytes.fromhex(key) for key in death["safe"]]) == [], death
    assert any(death["safe"] for death in deaths)


def test_nothing_torn_is_served(deaths):
    for death in deaths:
        store = Cache(death["root"]).kind("scan")
        keys = list(store.keys())
        assert all(is_right(store.get(key), key) for key in keys), death
        assert set(keys) <= {key_of(number) for number in range(30)}
        assert store.stat().unreadable == ()
        assert all(verdict.whole for verdict in store.verify()), death


def test_the_next_process_finishes_the_work(deaths):
    wanted = [key_of(number) for first in (0, 10, 20) for number in range(first, first + 4)]
    for death in deaths[:: len(deaths) // 7]:
        subprocess.run([sys.executable, "-c", FINISH, str(death["root"])], check=True, cwd=ROOT)
        assert Cache(death["root"]).kind("scan").missing(wanted) == []


FINISH = """
import sys; from pathlib import Path; import numpy as np
from tests.store.content import arrays_of, key_of; from pipeline.store.cache import Cache
store = Cache(Path(sys.argv[1])).kind("scan")
with store.writer() as writer:
    for key in store.missing([key_of(f + n) for f in (0, 10, 20) for n in range(4)]):
        writer.put(key, arrays_of(key), {"name": key.hex()})
store.write_index()
"""
