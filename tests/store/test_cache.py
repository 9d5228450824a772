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


def test_a_folder_with_a_readme_can_become_a_cache(tmp_path):
    (tmp_path / "README.md").write_text("contents are disposable")
    (tmp_path / ".gitignore").write_text("*")
    with CacheFolder(tmp_path).kind("scan").writer() as writer:
        put(writer, 1)
    assert key_of(1) in CacheFolder(tmp_path).kind("scan")


def test_a_folder_with_something_else_is_not_a_cache(tmp_path):
    (tmp_path / "thesis.tex").write_text("do not touch")
    with pytest.raises(CacheUnusable, match="is not a cache"):
        CacheFolder(tmp_path)


def test_a_file_is_not_a_cache(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheUnusable):
        CacheFolder(tmp_path / "file")


def test_a_newer_format_is_not_touched(tmp_path):
    (tmp_path / MARKER).write_text('{"format": 7}')
    with pytest.raises(CacheUnusable, match=r"newer pipeline \(format 7\)"):
        CacheFolder(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "1"}', '{"format": true}', "{}", "[" * 4000, "\xff"])
def test_a_marker_that_cannot_be_read_is_no_marker(tmp_path, text):
    (tmp_path / MARKER).write_bytes(text.encode("latin1"))
    with pytest.raises(CacheUnusable, match="cannot be read"):
        CacheFolder(tmp_path)


def test_a_folder_that_cannot_be_read_says_so(tmp_path):
    with pytest.raises(CacheUnusable, match="Permission denied"):
        CacheFolder(tmp_path, FailingDisk("open_read", errno.EACCES))


def test_another_process_may_be_making_the_marker(tmp_path):
    (tmp_path / "20260101T000000Z-host-1-00.partial").write_text("")
    with CacheFolder(tmp_path).kind("scan").writer() as writer:
        put(writer, 1)
    assert key_of(1) in CacheFolder(tmp_path).kind("scan")


def test_two_processes_may_make_the_same_cache_at_once(tmp_path):
    one, other = CacheFolder(tmp_path / "cache"), CacheFolder(tmp_path / "cache")
    for cache, number in ((one, 1), (other, 2)):
        with cache.kind("scan").writer() as writer:
            put(writer, number)
    assert CacheFolder(tmp_path / "cache").kind("scan").missing([key_of(1), key_of(2)]) == []


def test_a_read_only_place_cannot_become_a_cache(tmp_path):
    cache = CacheFolder(tmp_path / "cache", FailingDisk("make_folder", errno.EROFS))
    with pytest.raises(CacheUnusable, match="cannot be written"):
        cache.kind("scan").writer()


@pytest.mark.parametrize("beside", [(), ("thesis.tex",)])
@pytest.mark.parametrize("text", ["", '{"form'])
def test_a_damaged_marker_of_a_cache_is_removed_and_nothing_is_computed_anew(tmp_path, text, beside):
    root = tmp_path / "cache"
    with CacheFolder(root).kind("scan").writer() as writer:
        put(writer, 1)
    for name in beside:
        (root / name).write_text("mine")
    (root / MARKER).chmod(0o644)
    (root / MARKER).write_text(text)
    with pytest.raises(CacheUnusable, match="looks like a cache") as caught:
        CacheFolder(root)
    assert "nothing is computed anew" in caught.value.remedy
    assert "submit" not in caught.value.remedy
    subprocess.run(caught.value.remedy.partition("   ")[0], shell=True, check=True)
    assert key_of(1) in CacheFolder(root).kind("scan")
