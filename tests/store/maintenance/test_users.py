"""Who uses a cache and what its data sets want: small files that come and go, and are never trusted blindly."""

from __future__ import annotations

import errno

from pipeline.store.users import User, forget, recall, register, registered, remember_keys, sorted_keys
from tests.store.content import key_of
from tests.store.faulty_disks import FailingDisk
from tests.store.maintenance.damage import overwrite

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
    later = User(ONE.config, ONE.runs, TAGS, 9.0, "ann")
    register(cache.disk, cache.root, later)
    assert registered(cache.disk, cache.root) == ([later], [])
    for text in ("", "{", "[]", '{"user": 2}', '{"user": 1}', '{"user": 1, "tags": 3}'):
        overwrite(cache.root / "_users" / ONE.name, text.encode())
        assert registered(cache.disk, cache.root) == ([], [ONE.name])


def test_a_cache_that_cannot_be_written_keeps_no_list_and_that_is_no_failure(cache):
    for number in (errno.EROFS, errno.ENOSPC, errno.EACCES):
        disk = FailingDisk("open_new", number)
        assert not register(disk, cache.root, ONE)
        assert not remember_keys(disk, cache.root, "graph", {}, [KEYS])


def test_what_is_wanted_is_recalled_for_the_same_question_alone(cache):
    assert remember_keys(cache.disk, cache.root, "graph", {"neighbours": 5}, [KEYS])
    found = recall(cache.disk, cache.root, "graph", {"neighbours": 5})
    assert found.keys.tolist() == sorted_keys(KEYS).tolist()
    assert found.at > 0
    assert recall(cache.disk, cache.root, "graph", {"neighbours": 6}) is None
    assert recall(cache.disk, cache.root, "scan", {"neighbours": 5}) is None
