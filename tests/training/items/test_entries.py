"""What a reader may give, and that it is the same when it is read again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from pipeline.dataset.reader_items import EntriesTaken, take_entries
from pipeline.errors import DataError
from pipeline.records import Entry, Reason, Rejection
from pipeline.store.cache_folder import CacheFolder
from pipeline.training.items.batch import ItemBatch
from pipeline.training.items.item_source import NUMBERS, ReaderItems, arrays_digest
from pipeline.training.items.item_table import ItemTable
from pipeline.training.items.loader import Loader
from tests.training.items.content import Micros

FLOAT, INT, BOOL = np.float32, np.int64, np.bool_


class Given:
    """A reader of what it is given."""

    def __init__(self, *items: dict[str, Any]) -> None:
        self.items = list(items)

    def files(self) -> list[Path]:
        return []

    def entries(self) -> Iterator[Entry]:
        for number, arrays in enumerate(self.items):
            yield Entry(f"i{number}", [number], arrays, "train", f"line {number}")

    def read(self, place: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.items[place[0]]
        return found


def taken(*items: dict[str, Any]) -> tuple[EntriesTaken, list[Rejection]]:
    found = EntriesTaken()
    return found, list(take_entries(Given(*items).entries(), found))


def loaded(reader: Given, table: ItemTable, *numbers: int) -> ItemBatch:
    """Return some items as one batch."""
    sampler: Any = Micros([list(numbers)])
    (batch,) = Loader(ReaderItems(reader, table), None, sampler)
    assert isinstance(batch, ItemBatch)
    return batch


def peaks(count: int, dtype: Any = FLOAT) -> dict[str, Any]:
    return {"peaks.mz": np.arange(count).astype(dtype)}


def test_items_have_the_rows_along_each_axis_and_all_their_numbers_as_sizes() -> None:
    found, rejected = taken({**peaks(3), "ions.kind": np.zeros((2, 4), INT), "mass": FLOAT(1.0)}, peaks(5))
    assert not rejected
    sizes = {name: list(values) for name, values in found.table.sizes.items()}
    assert sizes == {NUMBERS: [12, 5], "peaks": [3, 5], "ions": [2, 0]}


UNJOINABLE: list[tuple[str, list[dict[str, Any]]]] = [  # what is named, and items of which the last is rejected
    ("no arrays", [{}]),
    ("peaks has", [{"peaks.mz": np.zeros(3, FLOAT), "peaks.of": np.zeros(2, FLOAT)}]),
    ("peaks.mz", [{"peaks.mz": FLOAT(1)}]),
    ("peaks mz", [{"peaks mz": np.zeros(3, FLOAT)}]),
    ("receptor", [{"receptor.mz": np.zeros(3, FLOAT)}]),
    ("items", [{"items.mz": np.zeros(3, FLOAT)}]),
    ("name", [{"name": np.array("text")}]),
    ("peaks.mz", [{"peaks.mz": np.zeros(3, np.complex64)}]),
    ("peaks.mz", [{"peaks.mz": np.zeros(3, ">f4")}]),
    ("float64", [peaks(2), peaks(2, np.float64)]),
    ("mass", [{"mass": FLOAT(1)}, {"mass": np.zeros(2, FLOAT)}]),
    ("charge", [{**peaks(1), "charge": INT(1)}, peaks(1)]),
    ("charge", [peaks(1), {**peaks(1), "charge": INT(1)}]),
    ("peaks.kind", [{**peaks(1), "peaks.kind": np.zeros(1, INT)}, peaks(2)]),
]


def test_arrays_that_cannot_be_joined_are_rejected_with_the_reason() -> None:
    for named, items in UNJOINABLE:
        found, (one,) = taken(*items)
        assert len(found.table) == len(items) - 1, named
        last = len(items) - 1
        assert (one.id, one.reason, one.origin) == (f"i{last}", Reason.BAD_ENTRY, f"line {last}"), named
        assert one.split == "train"
        assert named in one.detail


def test_what_something_can_stand_for_may_be_absent() -> None:
    whole = {**peaks(2), "peaks.kept": np.ones(2, BOOL), "ions.kind": np.zeros(1, INT), "mass": FLOAT(1)}
    found, rejected = taken(whole, peaks(3), whole)
    assert not rejected
    table = found.table.table()
    batch = loaded(Given(whole, peaks(3), whole), table, 0, 1, 2)
    assert batch["peaks.kept"].tolist() == [True, True, False, False, False, True, True]
    assert batch["ions.kind"].tolist() == [0, 0]
    assert batch["mass"].isnan().tolist() == [False, True, False]


def test_an_item_that_could_not_be_found_again_is_rejected() -> None:
    strange: Any = (("", 0), ("a\nb", 0), (7, 0), ("a", None), ("a", np.int64(3)))
    entries = [*(Entry(name, place, peaks(1)) for name, place in strange), Entry("a", 0, peaks(1), cast("Any", 3))]
    found = EntriesTaken()
    reasons = [one.reason for one in take_entries(entries, found)]
    assert reasons == [Reason.BAD_ID] * 3 + [Reason.BAD_ENTRY] * 3
    assert not len(found.table)


def test_no_more_is_read_than_the_limit() -> None:
    asked = []

    def entries() -> Iterator[Entry]:
        for number in range(10):
            asked.append(number)
            yield Entry(f"i{number}", number, peaks(1))

    found = EntriesTaken()
    assert list(take_entries(entries(), found, limit=4)) == []
    assert len(found.table) == 4
    assert asked == [0, 1, 2, 3]


def test_a_table_comes_back_with_the_places(tmp_path: Path) -> None:
    found, _ = taken(peaks(2), peaks(3))
    store = CacheFolder(tmp_path / "cache").kind("sets")
    table = ItemTable.read(store, found.table.write(store))
    assert [table.place(number) for number in range(2)] == [[0], [1]]
    assert table.key(1) == arrays_digest(peaks(3))
    assert json.loads(table.take(np.array([1])).items[0]) == [1]  # type: ignore[index]


def test_arrays_that_are_not_what_they_were_are_an_error_that_names_the_item() -> None:
    """Another type, length, name, number."""
    renamed, other = {"peaks.m": np.arange(3).astype(FLOAT)}, {"peaks.mz": np.array([0, 1, 3], FLOAT)}
    for changed in (peaks(3, np.float64), peaks(4), renamed, other):
        reader = Given(peaks(2), peaks(3))
        found, _ = taken(*reader.items)
        source = ReaderItems(reader, found.table.table())
        assert [one.id for one in source.read([1, 0])] == ["i1", "i0"]
        reader.items[1] = changed
        with pytest.raises(DataError, match="i1") as caught:
            list(source.read([0, 1]))
        assert "pipeline submit scan" in caught.value.remedy


def test_unsigned_numbers_become_those_that_torch_computes_with() -> None:
    item = {"peaks.kind": np.array([1, 65535], np.uint16), "charge": np.uint16(3)}
    found, _ = taken(item)
    batch = loaded(Given(item), found.table.table(), 0)
    assert batch["peaks.kind"].tolist() == [1, 65535]
    assert str(batch["peaks.kind"].dtype) == str(batch["charge"].dtype) == "torch.int32"


def test_an_item_that_is_rejected_has_no_id_that_another_could_double_and_no_split() -> None:
    bad = Entry("a", 0, {}, "test")
    found = EntriesTaken()
    rejected = list(take_entries([bad, Entry("a", 0, peaks(1), "train"), bad, Entry("b", 0, {}, "val")], found))
    assert [one.reason for one in rejected] == [Reason.BAD_ENTRY] * 3
    assert (found.leaks, len(found.table), list(found.table.splits)) == (0, 1, ["train"])
