"""Sorted rows in pieces are merged as if they were one table; an index can be written from pieces of any size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from pipeline.store.format.cache_layout import KindLayout
from pipeline.store.format.disk import Disk
from pipeline.store.shard_index import BLOCK_ROWS, ROW, ShardIndex, merged, sort_in_place, write_index

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.store.shard_index import Rows


def made(seed: int, count: int, numbers: int) -> Rows:
    """Return sorted rows whose first numbers are few, so that they repeat within and between pieces."""
    rng = np.random.default_rng(seed)
    rows = np.zeros(count, ROW)
    rows["hi"], rows["lo"] = rng.integers(0, numbers, (2, count), np.uint64)
    rows["offset"] = np.arange(count) + 1000 * seed
    return sort_in_place(rows)


def pieces(rows: Rows, size: int) -> list[Rows]:
    """Cut rows, with an empty piece on the way."""
    return [rows[:0], *(rows[start : start + size] for start in range(0, len(rows), size)), rows[:0]]


def as_set(rows: Rows) -> list[tuple[int, ...]]:
    return sorted(zip(*(rows[name].tolist() for name in ("hi", "lo", "offset")), strict=True))


@pytest.mark.parametrize("numbers", [1, 3, 50, 2**63])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 40), (40, 0), (1, 60), (60, 61), (100, 3)])
def test_two_streams_are_merged_whatever_their_pieces_and_repeated_numbers(
    first: int, second: int, size: int, numbers: int
) -> None:
    left, right = made(1, first, numbers), made(2, second, numbers)
    found = np.concatenate([np.zeros(0, ROW), *merged(pieces(left, size), pieces(right, 2 * size))])
    keys = list(zip(found["hi"].tolist(), found["lo"].tolist(), strict=True))
    assert keys == sorted(keys)
    assert as_set(found) == as_set(np.concatenate([left, right]))


@pytest.mark.parametrize("size", [1, BLOCK_ROWS - 1, BLOCK_ROWS, 3 * BLOCK_ROWS + 5, 10_000])
def test_an_index_is_the_same_byte_for_byte_however_its_rows_come(tmp_path: Path, size: int) -> None:
    rows, disk = made(3, 1000, 2**63), Disk()
    written = []
    for name, parts in (("whole", [rows]), ("pieces", pieces(rows, size))):
        layout = KindLayout(tmp_path / name)
        write_index(disk, layout, ["one"], np.array([7]), parts, len(rows))
        written.append(layout.index.read_bytes())
    assert written[0] == written[1]
    assert np.array_equal(ShardIndex(disk, layout.index).rows(), rows)


def test_rows_that_fail_on_the_way_leave_no_index_and_no_draft(tmp_path: Path) -> None:
    def failing():  # type: ignore[no-untyped-def]
        yield made(3, 100, 2**63)
        raise OSError("the index went away")

    layout = KindLayout(tmp_path / "kind")
    with pytest.raises(OSError, match="went away"):
        write_index(Disk(), layout, ["one"], np.array([7]), failing(), 200)
    assert not layout.index.exists()
    assert list(layout.partials.iterdir()) == []
