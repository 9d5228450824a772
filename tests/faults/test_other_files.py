"""Damage to the files around the records: a cache is refused or serves what is right, and no lie is believed."""

from __future__ import annotations

import pytest

from pipeline.errors import CacheUnusable, ConfigError
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.cache_layout import MARKER, REPORTS, USERS
from pipeline.store.format.disk import Disk
from pipeline.store.maintenance.damage_report import (
    SUMMARY_BYTES,
    DamageFinding,
    Fault,
    ReportWriter,
    Summary,
    last_report,
    read_report,
)
from pipeline.store.users import User, recall, register, registered, remember_keys, sorted_keys
from tests.faults.judged import KIND, HastyDisk, complaints
from tests.faults.works import NAME, fill
from tests.store.content import key_of, put
from tests.store.maintenance.damage import overwrite

pytestmark = pytest.mark.fault
KEYS = [key_of(number) for number in range(3)]
FINDINGS = [DamageFinding(KIND, Fault.RECORD, "what", "shard", key.hex(), lost=True) for key in KEYS]


def harmed(content, stride=1):
    """Yield all that a flipped bit in a byte, or a cut, may make of a file."""
    for place in range(0, len(content), stride):
        yield content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]
        yield content[:place]


@pytest.fixture
def root(tmp_path):
    fill(tmp_path, range(3))
    return tmp_path / NAME


def test_a_damaged_marker_refuses_the_cache_or_changes_nothing(root):
    content, refused = (root / MARKER).read_bytes(), 0
    for one in harmed(content):
        overwrite(root / MARKER, one)
        try:
            assert CacheFolder(root).kind(KIND).missing(KEYS) == []
        except CacheUnusable as error:
            refused += str(root) in error.where and bool(error.remedy)
    assert refused > len(content)


def test_a_cache_that_lost_its_marker_is_made_one_again(root):
    (root / MARKER).unlink()
    assert complaints(root, KEYS, [*KEYS, key_of(7)]) == []
    assert (root / MARKER).exists()


def test_a_damaged_report_is_refused_or_names_findings(root):
    report = ReportWriter(HastyDisk(), root / REPORTS)
    for finding in FINDINGS:
        report.add(finding)
    path = report.publish(Summary("full", findings=3))
    content = path.read_bytes()
    used = [*range(200), *range(SUMMARY_BYTES - 2, len(content))]  # between them are spaces
    variants = [content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :] for place in used]
    refused = 0
    for one in variants + [content[:place] for place in used]:
        overwrite(path, one)
        last_report(Disk(), root)
        try:
            assert all(isinstance(finding, DamageFinding) for finding in read_report(path).findings())
        except ConfigError as error:
            refused += str(path) in error.where
    assert refused > len(used)


def test_a_damaged_list_of_users_never_says_that_less_is_used(root):
    user = User("/home/a/pipeline.yaml", "/home/a/runs", frozenset({(KIND, "0011"), ("graph", "2233")}), 5.0, "a")
    register(HastyDisk(), root, user)
    path = root / USERS / user.name
    for one in harmed(path.read_bytes()):
        overwrite(path, one)
        users, unreadable = registered(Disk(), root)
        if not unreadable:
            assert [(found.config, found.runs, found.tags) for found in users] == [(user.config, user.runs, user.tags)]


def test_a_damaged_list_of_wanted_keys_is_not_believed(root):
    remember_keys(HastyDisk(), root, KIND, {"data": 1}, [b"".join(KEYS)])
    (path,) = (path for path in (root / USERS).iterdir() if path.suffix == ".keys")
    for one in harmed(path.read_bytes(), 3):
        overwrite(path, one)
        found = recall(Disk(), root, KIND, {"data": 1})
        assert found is None or found.keys.tolist() == sorted_keys(b"".join(KEYS)).tolist()


class TestAnIndexFromAnotherTime:
    """A backup brought back an index, or shards, but not both."""

    def state(self, root):
        return {path.name: path.read_bytes() for path in (root / KIND / "shards").iterdir()}

    def bring_back(self, root, shards):
        for path in (root / KIND / "shards").iterdir():
            path.unlink()
        for name, content in shards.items():
            (root / KIND / "shards" / name).write_bytes(content)

    @pytest.fixture
    def index(self, root):
        return root / KIND / "index.bin"

    def test_an_older_index_hides_nothing_that_came_since(self, root, index):
        old = index.read_bytes()
        fill(root.parent, range(3, 6))
        overwrite(index, old)
        assert complaints(root, [key_of(number) for number in range(6)], [key_of(number) for number in range(7)]) == []

    def test_an_older_index_of_shards_that_were_rewritten_loses_nothing(self, root, index):
        from pipeline.store.maintenance.shard_plans import apply, plan_compaction

        store, _ = fill(root.parent, range(3, 6))
        old = index.read_bytes()
        list(apply(plan_compaction(store).small))
        overwrite(index, old)
        assert complaints(root, [key_of(number) for number in range(6)], [key_of(number) for number in range(7)]) == []

    def test_a_newer_index_serves_nothing_of_shards_that_are_not_back(self, root):
        old = self.state(root)
        fill(root.parent, range(3, 6))
        self.bring_back(root, old)
        store = CacheFolder(root).kind(KIND)
        assert store.missing([key_of(number) for number in range(6)]) == [key_of(number) for number in range(3, 6)]
        assert complaints(root, KEYS, [key_of(number) for number in range(6)]) == []

    def test_an_index_of_another_cache_adds_and_hides_nothing(self, root, index, tmp_path):
        (tmp_path / "other").mkdir()
        other, _ = fill(tmp_path / "other", range(10, 13))
        overwrite(index, other.layout.index.read_bytes())
        store = CacheFolder(root).kind(KIND)
        assert store.missing([*KEYS, key_of(10)]) == [key_of(10)]
        assert complaints(root, KEYS, KEYS) == []
        assert list(CacheFolder(root).kind(KIND).keys()) == sorted(KEYS)


@pytest.mark.parametrize("year", ["19700101T000001Z", "21060101T000000Z", "00000000T000000Z", "99999999T999999Z"])
def test_a_clock_that_was_wrong_changes_no_answer(root, year):
    _, (shard,) = fill(root.parent, range(3, 6))
    odd = shard.with_name(f"{year}-host-1-{'0' * 16}.safetensors")
    shard.rename(odd)
    keys = [key_of(number) for number in range(6)]
    assert complaints(root, keys, keys) == []
    with CacheFolder(root).kind(KIND).writer() as writer:
        put(writer, 0)
    assert complaints(root, keys, keys) == []
    assert CacheFolder(root).kind(KIND).stat().records == 6
