"""Who uses a cache and what its data sets want: small files that come and go, and are never trusted blindly."""

from __future__ import annotations

import errno

import pytest

from pipeline.store.cache_folder import CacheFolder
from pipeline.store.key_lists import key_list_name, recall, remember_keys, sorted_pairs
from pipeline.store.maintenance.leftovers import User, forget, register, registered
from tests.store.content import key_of, put
from tests.store.faulty_disks import FailingDisk

TAGS = frozenset({("graph", "00ff00ff"), ("scan", "12345678")})
ONE = User("/a/pipeline.yaml", "/a/runs", TAGS, 5.0, "ann")
KEYS = bytearray(b"".join(map(key_of, range(5))))


def test_users_are_known_until_they_are_forgotten(cache):
    other = User("/b/pipeline.yaml", "/b/runs", frozenset(), 6.0, "bob")
    for user in (other, ONE):
        assert register(cache.disk, cache.root, user)
    assert registered(cache.disk, cache.root) == ([ONE, other], [])
    forget(cache.disk, cache.root, [other, other])
    assert registered(cache.disk, cache.root) == ([ONE], [])


def test_a_user_that_asks_for_the_same_again_is_known_once_by_the_last_time(cache):
    later = User(ONE.config, ONE.runs, TAGS, 9.0, "ann")
    for user in (ONE, later):
        register(cache.disk, cache.root, user)
    assert registered(cache.disk, cache.root) == ([later], [])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"user": 2}', '{"user": 1}', '{"user": 1, "tags": 3}'])
def test_a_file_that_says_nothing_is_named(cache, text):
    register(cache.disk, cache.root, ONE)
    path = cache.root / "_users" / ONE.name
    path.unlink()
    path.write_text(text)
    assert registered(cache.disk, cache.root) == ([], [ONE.name])


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_cache_that_cannot_be_written_keeps_no_list_and_that_is_no_failure(cache, number):
    disk = FailingDisk("open_new", number)
    assert not register(disk, cache.root, ONE)
    assert not remember_keys(disk, cache.root, "graph", {}, KEYS)


def test_what_is_wanted_is_recalled_for_the_same_question_alone(cache):
    assert remember_keys(cache.disk, cache.root, "graph", {"neighbours": 5}, KEYS)
    found = recall(cache.disk, cache.root, "graph", {"neighbours": 5})
    assert found.pairs.tolist() == sorted_pairs(KEYS).tolist()
    assert found.at > 0
    assert recall(cache.disk, cache.root, "graph", {"neighbours": 6}) is None
    assert recall(cache.disk, cache.root, "scan", {"neighbours": 5}) is None


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "head"])
def test_what_is_wanted_is_not_recalled_from_a_damaged_file(cache, damage):
    remember_keys(cache.disk, cache.root, "graph", {}, KEYS)
    path = cache.root / "_users" / key_list_name("graph", {})
    content = bytearray(path.read_bytes())
    content[-1 if damage == "flip" else 3] ^= 1
    cut = {"flip": content, "cut": content[:-16], "empty": b"", "head": content}[damage]
    path.unlink()
    path.write_bytes(cut)
    assert recall(cache.disk, cache.root, "graph", {}) is None


def test_a_tally_counts_by_tag_and_finds_what_is_absent(cache):
    store = cache.kind("scan")
    for numbers in ((0, 1, 2), (2, 3)):
        with store.writer() as writer:
            put(writer, *numbers)
        store.write_index()
    tag = key_of(2)[:4]
    found = CacheFolder(cache.root).kind("scan").tally([tag, b"none"], sorted_pairs(KEYS))
    assert found.stat == CacheFolder(cache.root).kind("scan").stat()
    assert found.stat.records == 4
    mine = [key for key in store.keys() if key.startswith(tag)]  # noqa: SIM118 - a store is no mapping
    size_bytes = sum(copies[0].length for copies in store.locate(mine))
    assert found.tagged == {tag: (len(mine), size_bytes), b"none": (0, 0)}
    assert found.absent.tolist() == sorted_pairs(key_of(4)).tolist()
