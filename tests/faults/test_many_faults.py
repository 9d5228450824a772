"""A thousand faults of every sort: no wrong record is served, none is lost, and nothing is accused wrongly.

`pytest tests/faults --junitxml=faults.xml` writes how many faults each test of kills, power losses, failures and damage
tried, as its property `faults`.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from pipeline.store.format.shard import ShardTable, read_table, row_keys
from pipeline.store.maintenance.shard_plans import check
from tests.faults.failing import complaints_about, failures, steps_of
from tests.faults.judged import KIND, served
from tests.faults.works import NAME, WORKS, fill
from tests.store.content import key_of

ROOT = Path(__file__).parents[2]
RECORDS, KILLS, FLIPS, CUTS = 6, 1000, 1000, 500
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


@pytest.mark.timeout(1800)
def test_damage_anywhere_is_found_and_names_only_the_record_it_hit(tmp_path: Path, record_property: Note) -> None:
    store, (shard,) = fill(tmp_path, range(RECORDS), index=False)
    table, chance, found = read_table(Disk(), shard), random.Random(1), list[str]()
    for number in range(FLIPS + CUTS):
        if number == FLIPS // 4:
            store.write_index()
        in_index = number >= FLIPS // 4 and number % 4 == 0
        victim, flips = store.layout.index if in_index else shard, number < FLIPS
        whole = victim.read_bytes()
        place = chance.randrange(len(whole))
        damaged = whole[:place]
        if flips:
            damaged += bytes([whole[place] ^ 1 << chance.randrange(8)]) + whole[place + 1 :]
        replace(victim, damaged)
        named = record_at(table, place) if flips and not in_index else None
        found += [f"{victim.name} at {place}: {one}" for one in wrong(tmp_path / NAME, named, in_index=in_index)]
        replace(victim, whole)
    record_property("faults", FLIPS + CUTS)
    assert found == []


def wrong(root: Path, named: bytes | None, *, in_index: bool) -> Iterator[str]:
    """Yield what is served wrongly, lost, not found or accused."""
    store = CacheFolder(root).kind(KIND)
    for key in map(key_of, range(RECORDS)):
        right = served(store, key)
        if right is False:
            yield f"wrong: {key.hex()}"
        if right is None and in_index:
            yield f"lost: {key.hex()}"
    findings = [finding for checked in check(store) for finding in checked.findings]
    keys = {finding.key for finding in findings}
    if not findings or (named and named.hex() not in keys):
        yield "not found"
    if named and keys - {"", named.hex()}:
        yield "accused another record"


def record_at(table: ShardTable, place: int) -> bytes | None:
    """Return the record that a byte of a shard belongs to."""
    at = int(table.rows["offset"].searchsorted(place, "right")) - 1
    return row_keys(table.rows)[at] if at >= 0 and place < table.table_start else None


def replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)
