"""The cache folder: when it is one, when it can become one, and when neither."""

from __future__ import annotations

import errno
import json
import subprocess

import pytest

from pipeline.errors import CacheUnusable
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.cache_layout import MARKER
from tests.store.content import key_of, put
from tests.store.faulty_disks import FailingDisk


def test_opening_a_cache_that_is_not_there_makes_nothing(tmp_path):
    cache = CacheFolder(tmp_path / "deep/cache")
    assert cache.kinds() == []
    assert cache.kind("scan").stat().records == 0
    assert not (tmp_path / "deep").exists()


def test_the_first_write_makes_the_folder_a_cache(tmp_path):
    with CacheFolder(tmp_path / "deep/cache").kind("scan").writer() as writer:
        put(writer, 1)
    assert json.loads((tmp_path / "deep/cache" / MARKER).read_text())["format"] == 1
    assert CacheFolder(tmp_path / "deep/cache").kinds() == ["scan"]


@pytest.mark.parametrize("name", ["README.md", ".gitignore", "20260101T000000Z-host-1-00.partial"])
def test_a_folder_with_notes_or_of_a_process_that_is_making_the_marker_can_become_a_cache(tmp_path, name):
    (tmp_path / name).write_text("contents are disposable")
    caches = [CacheFolder(tmp_path), CacheFolder(tmp_path)]  # two processes may do so at once
    for number, cache in enumerate(caches):
        with cache.kind("scan").writer() as writer:
            put(writer, number)
    assert CacheFolder(tmp_path).kind("scan").missing([key_of(0), key_of(1)]) == []


UNREADABLE = ("", "{", "[]", '{"format": "1"}', '{"format": true}', "{}", "[" * 4000, "\xff", '{"format": 7}')


@pytest.mark.parametrize(("name", "text"), [("thesis.tex", "do not touch"), *((MARKER, text) for text in UNREADABLE)])
def test_a_folder_of_something_else_or_of_a_later_version_is_not_touched(tmp_path, name, text):
    (tmp_path / name).write_bytes(text.encode("latin1"))
    with pytest.raises(CacheUnusable) as caught:
        CacheFolder(tmp_path)
    assert caught.value.remedy
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with pytest.raises(CacheUnusable):
        CacheFolder(tmp_path / name)  # a file


def test_a_place_that_cannot_be_read_or_made_is_refused(tmp_path):
    with pytest.raises(CacheUnusable):
        CacheFolder(tmp_path, FailingDisk("open_read", errno.EACCES))
    with pytest.raises(CacheUnusable):
        CacheFolder(tmp_path / "cache", FailingDisk("make_folder", errno.EROFS)).kind("scan").writer()


@pytest.mark.parametrize("beside", [(), ("thesis.tex",)])
@pytest.mark.parametrize("text", ["", '{"form'])
def test_the_remedy_for_a_damaged_marker_loses_no_record(tmp_path, text, beside):
    root = tmp_path / "cache"
    with CacheFolder(root).kind("scan").writer() as writer:
        put(writer, 1)
    for name in beside:
        (root / name).write_text("mine")
    (root / MARKER).chmod(0o644)
    (root / MARKER).write_text(text)
    with pytest.raises(CacheUnusable) as caught:
        CacheFolder(root)
    subprocess.run(caught.value.remedy.partition("   ")[0], shell=True, check=True)
    assert key_of(1) in CacheFolder(root).kind("scan")
