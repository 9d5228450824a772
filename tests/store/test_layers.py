"""A private cache over shared ones that are only read: what is found where, and what is never touched."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import CacheDamaged, CacheUnusable, RecordMissing
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.cache_layout import MARKER
from pipeline.store.format.disk import Disk
from pipeline.store.shard_index import IndexState
from tests.store.content import is_right, key_of, put, rebuild_index
from tests.store.faulty_disks import CHANGES, os_error
from tests.store.maintenance.damage import spoil


class ReadOnlyBelow(Disk):
    """A folder in which this user may only read, root included."""

    def __init__(self, folder):
        self.folder = folder
        self.refused = []


def _refused_below(step):
    def taken(self, *arguments):
        if isinstance(arguments[-1], Path) and arguments[-1].is_relative_to(self.folder):
            self.refused.append(arguments[-1])
            raise os_error(errno.EACCES)
        return getattr(Disk, step)(self, *arguments)

    return taken


for _step in CHANGES:
    setattr(ReadOnlyBelow, _step, _refused_below(_step))


class Unmounted(Disk):
    """A file system that goes away while it is used."""

    def __init__(self, folder, number=errno.ESTALE):
        self.folder, self.number, self.gone = folder, number, False
        self.open_there = set()

    def _refuse(self, is_there):
        if self.gone and is_there:
            raise os_error(self.number)

    def open_read(self, path):
        self._refuse(path.is_relative_to(self.folder))
        fd = super().open_read(path)
        (self.open_there.add if path.is_relative_to(self.folder) else self.open_there.discard)(fd)
        return fd

    def list_folder(self, path):
        self._refuse(path.is_relative_to(self.folder))
        return super().list_folder(path)

    def size_of(self, path):
        self._refuse(path.is_relative_to(self.folder))
        return super().size_of(path)

    def read_at(self, fd, length, offset):
        self._refuse(fd in self.open_there)
        return super().read_at(fd, length, offset)


def fill(root, *numbers, kind="scan"):
    store = CacheFolder(root).kind(kind)
    with store.writer() as writer:
        put(writer, *numbers)
    return store


def files_below(root):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in root.rglob("*")}


@pytest.fixture
def shared(tmp_path):
    fill(tmp_path / "group", 0, 1, 2)
    fill(tmp_path / "institute", 2, 3)
    return [tmp_path / "group", tmp_path / "institute"]


@pytest.fixture
def private(tmp_path, shared):
    fill(tmp_path / "mine", 4)
    return CacheFolder.over(tmp_path / "mine", shared)


def test_what_any_layer_has_is_there(private):
    store = private.kind("scan")
    asked = [key_of(number) for number in range(6)]
    assert store.missing(asked) == [key_of(5)]
    assert list(store.keys()) == sorted(asked[:5])
    assert all(is_right(record, key) for record, key in zip(store.read(asked[:5]), asked, strict=False))
    assert key_of(0) in store
    assert store.has_whole(key_of(3))
    with pytest.raises(RecordMissing):
        store.get(key_of(5))


def test_layers_are_asked_in_order_and_the_private_one_first(private, shared, tmp_path):
    fill(tmp_path / "mine", 0)
    store = private.kind("scan")
    assert [[place.layer for place in places] for places in store.locate([key_of(n) for n in range(6)])] == [
        [0], [1], [1], [2], [0], [],
    ]  # fmt: skip


def test_only_the_private_cache_is_written_and_counted(shared, tmp_path):
    CacheFolder(shared[0]).kind("scan").write_index()
    fill(shared[0], 8)  # which its index does not know
    disk = ReadOnlyBelow(shared[0])
    before = [files_below(root) for root in shared]
    cache = CacheFolder.over(tmp_path / "mine", shared, disk)
    store = cache.kind("scan")
    with store.writer() as writer:
        put(writer, 7, 0)
    store.write_index()
    rebuild_index(store)
    cache.describe("scan", {"any": 1})
    assert all(is_right(store.get(key_of(number)), key_of(number)) for number in (0, 1, 2, 3, 7, 8))
    assert (store.stat().records, store.stat().index) == (2, IndexState.CURRENT)
    assert cache.kinds() == ["recipes", "scan"]
    assert disk.refused == []
    assert [files_below(root) for root in shared] == before
    assert CacheFolder(tmp_path / "mine").kind("scan").missing([key_of(7), key_of(0)]) == []


def test_shards_of_the_same_name_in_two_layers_are_told_apart(shared, tmp_path):
    """A copied cache has them; that one copy is damaged says nothing of the other."""
    shutil.copytree(shared[0], tmp_path / "mine")
    spoil(tmp_path / "mine", 1)
    store = CacheFolder.over(tmp_path / "mine", shared).kind("scan")
    assert is_right(store.get(key_of(1)), key_of(1))
    shard = store.locate([key_of(0)])[0][0].shard
    assert store.has_whole_elsewhere(key_of(0), {shard})  # beneath
    fill(tmp_path / "mine", 5)
    mine = CacheFolder(tmp_path / "mine").kind("scan").locate([key_of(5)])[0][0].shard
    assert not store.has_whole_elsewhere(key_of(5), {mine})


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOTCONN, errno.EACCES, errno.EIO])
def test_a_layer_that_goes_away_counts_as_empty(shared, tmp_path, number, caplog):
    disk = Unmounted(shared[0], number)
    fill(tmp_path / "mine", 4)
    store = CacheFolder.over(tmp_path / "mine", shared, disk).kind("scan")
    asked = [key_of(n) for n in range(5)]
    places = store.locate(asked)
    disk.gone = True
    assert is_right(store.get_at(asked[2], places[2]), asked[2])  # the next layer has it
    with pytest.raises((RecordMissing, CacheDamaged)):
        store.get_at(asked[0], places[0])
    store.refresh()
    assert store.missing(asked) == asked[:2]
    assert list(store.keys()) == sorted(asked[2:])
    assert caplog.text.count("counts as empty") == 1
    disk.gone = False
    store.refresh()
    assert asked[1] in store
    shutil.rmtree(shared[0])
    store.refresh()
    assert store.missing(asked) == asked[:2]


def test_the_one_ahead_is_read_first_and_never_written(private, tmp_path):
    fill(tmp_path / "scratch", 0, 4)
    before = files_below(tmp_path / "scratch")
    store = private.behind(CacheFolder(tmp_path / "scratch")).kind("scan")
    with store.writer() as writer:
        put(writer, 11)
    store.write_index()
    assert [places[0].layer for places in store.locate([key_of(n) for n in (0, 4, 11, 1, 3)])] == [0, 0, 1, 2, 3]
    assert files_below(tmp_path / "scratch") == before
    shutil.rmtree(tmp_path / "scratch")
    assert is_right(store.get(key_of(4)), key_of(4))


LAYS = {
    "nothing": lambda path: None,
    "a folder": Path.mkdir,
    "a file": lambda path: path.write_text("x"),
    "a later cache": lambda path: (path.mkdir(), (path / MARKER).write_text('{"format": 9}')),
    "something else": lambda path: (path.mkdir(), (path / "thesis.tex").write_text("x")),
    "a broken link": lambda path: path.symlink_to("nowhere"),
    "itself": lambda path: path.symlink_to("mine"),
}


@pytest.mark.parametrize("lay", LAYS.values(), ids=LAYS)
def test_what_cannot_be_shared_is_left_out_with_the_reason(tmp_path, shared, lay):
    lay(tmp_path / "bad")
    (shared[0] / MARKER).unlink()  # that one lost it, and is still a cache
    cache = CacheFolder.over(tmp_path / "mine", [tmp_path / "bad", *shared])
    (error,) = cache.left_out
    assert isinstance(error, CacheUnusable)
    assert str(tmp_path / "bad") in error.where
    assert error.remedy
    assert [layer.root for layer in cache.under] == shared
    assert key_of(0) in cache.kind("scan")


def test_a_layer_that_may_not_be_read_is_left_out_but_the_private_one_is_an_error(tmp_path, shared):
    for folder in (shared[0], tmp_path / "mine"):
        disk = Unmounted(folder, errno.EACCES)
        disk.gone = folder == shared[0]
        cache = CacheFolder.over(tmp_path / "mine", shared, disk)
        assert [error.where for error in cache.left_out] == [str(shared[0])] * disk.gone
        store = cache.kind("scan")
        disk.gone = True
        if folder == shared[0]:
            assert store.missing([key_of(1), key_of(2)]) == [key_of(1)]
        else:
            with pytest.raises(CacheUnusable):
                store.missing([key_of(1)])


def test_recipes_are_told_of_the_private_cache_alone(tmp_path):
    recipe = {"neighbours": 3}
    CacheFolder(tmp_path / "group").describe("scan", recipe)
    cache = CacheFolder.over(tmp_path / "mine", [tmp_path / "group"])
    cache.describe("scan", recipe)  # that another cache tells it too does not help this one
    assert list(CacheFolder(tmp_path / "mine").own("recipes").keys())
    assert cache.recipes("scan") == []  # nothing was made by it here


LAYERS = ("mine", "group", "institute")


@settings(max_examples=40, deadline=None)
@given(
    have=st.lists(st.sets(st.integers(0, 7)), min_size=3, max_size=3),
    damaged=st.lists(st.sets(st.integers(0, 7)), min_size=3, max_size=3),
    indexed=st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_a_record_is_served_right_exactly_if_some_layer_has_it_whole(have, damaged, indexed):
    root = Path(tempfile.mkdtemp())
    try:
        for name, numbers, bad, index in zip(LAYERS, have, damaged, indexed, strict=True):
            CacheFolder(root / name).prepare()
            store = fill(root / name, *numbers)
            for number in numbers & bad:
                spoil(root / name, number)
            if index:
                store.write_index()
        store = CacheFolder.over(root / "mine", [root / "group", root / "institute"]).kind("scan")
        there, whole = set().union(*have), set().union(*(some - bad for some, bad in zip(have, damaged, strict=True)))
        keys = [key_of(number) for number in range(8)]
        assert list(store.keys()) == sorted(key_of(number) for number in there)
        assert store.missing(keys) == [key_of(number) for number in range(8) if number not in there]
        for number, places in enumerate(store.locate(keys)):
            if number in whole:
                assert is_right(store.get_at(keys[number], places), keys[number])
            else:
                with pytest.raises(CacheDamaged if number in there else RecordMissing):
                    store.get_at(keys[number], places)
        assert store.missing(keys) == [key_of(number) for number in range(8) if number not in whole]
    finally:
        shutil.rmtree(root)
