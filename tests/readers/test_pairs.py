"""Pairs of tables and HDF5 files: every one is read or rejected, and is the same when it is read again."""

from __future__ import annotations

import csv
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ConfigError, DataError
from pipeline.readers import table_rows
from pipeline.readers.pairs import Pairs
from pipeline.records import Entry, Reason, Rejection
from tests.readers.compared import assert_same

TEXT = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=20)


def read(path: Path, content: str | bytes | None = None, **options: Any) -> list[Entry | Rejection]:
    """Return what is in a file, each entry read a second time as well, by another process' reader."""
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    reader = Pairs(path, **options)
    other = pickle.loads(pickle.dumps(reader))
    found = list(reader.entries())
    for entry in found:
        if isinstance(entry, Entry):
            assert_same(other.read(entry.place), entry.arrays)
    return found


def texts(entry: Entry | Rejection) -> tuple[str, str]:
    """Return both sides."""
    assert isinstance(entry, Entry), entry
    return bytes(entry.arrays["left.token"]).decode(), bytes(entry.arrays["right.token"]).decode()


def hdf5_file(path: Path, **columns: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file[name] = values
    return path


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    content = '\ufeffsplit\tcaption\tid\tsequence\r\nval\ta "quoted" é\tp 1\tMKV\r\n\r\n\ttwo\t\tGG'
    first, second = read(tmp_path / "x.tsv", content, left="sequence", right="caption")
    assert texts(first) == ("MKV", 'a "quoted" é')
    assert isinstance(first, Entry)
    assert {name: (x.dtype, x.shape) for name, x in first.arrays.items()} == {
        "left.token": (np.uint8, (3,)),
        "right.token": (np.uint8, (13,)),
    }
    assert (first.id, first.split, first.origin) == ("p_1", "val", "x.tsv:2")
    assert (second.id, second.split, second.origin) == ("x.tsv-1", "", "x.tsv:4")
    assert texts(second) == ("GG", "two")


def test_a_quoted_field_of_a_csv_may_hold_commas_quotes_and_line_ends(tmp_path: Path) -> None:
    content = 'id,left,right\n1,"a,b","say ""x"""\n2,"two\nlines","and\r\nthree\n"\n3,x,y\n'
    found = read(tmp_path / "x.csv", content)
    assert [texts(entry) for entry in found] == [("a,b", 'say "x"'), ("two\nlines", "and\r\nthree\n"), ("x", "y")]
    assert [entry.origin for entry in found] == ["x.csv:2", "x.csv:3", "x.csv:7"]


BAD = {
    "empty side": (b"b\t\tx\n", "the left side is empty"),
    "too long": (b"b\tx\t" + b"y" * 11 + b"\n", "the right side is longer than most: 11 > 10"),
    "too few columns": (b"b\tx\n", "2 columns, the header has 3"),
    "too many columns": (b"b\tx\ty\tz\n", "4 columns, the header has 3"),
    "not UTF-8": (b"b\tx\t\xff\n", "not UTF-8 text: byte 4 is 0xff"),
}


@pytest.mark.parametrize(("line", "detail"), BAD.values(), ids=BAD)
def test_a_bad_row_is_rejected_and_the_next_one_read(tmp_path: Path, line: bytes, detail: str) -> None:
    bad, good = read(tmp_path / "x.tsv", b"id\tleft\tright\n" + line + b"good\tx\ty\n", most=10)
    assert isinstance(bad, Rejection)
    assert (bad.reason, bad.origin) == (Reason.BAD_ENTRY, "x.tsv:2")
    assert detail in bad.detail
    assert (good.id, good.origin) == ("good", "x.tsv:3")


@pytest.mark.parametrize("side", ['"x"y', '"x', 'x\n"'])
def test_quotes_that_do_not_fit_are_a_rejection(tmp_path: Path, side: str) -> None:
    found = read(tmp_path / "x.csv", f"left,right\nx,{side}\n")
    assert [type(entry) for entry in found] == [Rejection] or isinstance(found[0], Entry)
    assert isinstance(found[-1], Rejection)


def test_a_row_without_end_is_rejected_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_rows, "MOST_ROW_BYTES", 100)
    endless, good = read(tmp_path / "x.tsv", "left\tright\n" + "x" * 1000 + "\na\tb\n")
    assert isinstance(endless, Rejection)
    assert "a row of more than 100 bytes" in endless.detail
    assert (texts(good), good.origin) == (("a", "b"), "x.tsv:3")
    unclosed, *rest = read(tmp_path / "x.csv", 'left,right\n"x,y\n' + "a,b\n" * 40)
    assert isinstance(unclosed, Rejection)
    assert unclosed.origin == "x.csv:2"
    assert 0 < len(rest) < 40
    assert rest[-1].origin == "x.csv:42"


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]) -> None:
    folder = tmp_path_factory.mktemp("x")
    with (folder / "x.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerows([("left", "right"), *rows])
    hdf5_file(folder / "x.h5", left=[row[0] for row in rows], right=[row[1] for row in rows])
    assert [texts(entry) for entry in read(folder / "x.csv")] == rows
    assert [texts(entry) for entry in read(folder / "x.h5")] == rows


@given(st.binary(max_size=200), st.sampled_from([".csv", ".tsv"]))
@settings(max_examples=150, deadline=None)
def test_whatever_the_bytes_are_each_row_is_read_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str
) -> None:
    header = b"left,right\n" if suffix == ".csv" else b"left\tright\n"
    found = read(tmp_path_factory.mktemp("x") / f"x{suffix}", header + content)
    assert bool(found) == bool(content.strip(b"\r\n"))


HEADERS = {
    "empty": ("", "it is: empty"),
    "other names": ("id\tsequence\n", "needs one column 'left'; it is: id, sequence"),
    "twice": ("left\tright\tleft\n", "needs one column 'left'"),
    "bytes": (b"\xff\n", "the header is not UTF-8"),
}


@pytest.mark.parametrize(("header", "what"), HEADERS.values(), ids=HEADERS)
def test_a_header_without_the_columns_is_an_error(tmp_path: Path, header: str | bytes, what: str) -> None:
    with pytest.raises(DataError, match=what):
        read(tmp_path / "x.tsv", header)


def test_rows_of_numbers_are_vectors(tmp_path: Path) -> None:
    patches = np.arange(24, dtype=np.float64).reshape(2, 3, 4)
    path = hdf5_file(tmp_path / "x.h5", image=patches, text=["a", "bc"], id=["p", "q"], split=["train", "val"])
    first, second = read(path, left="image", right="text")
    assert isinstance(first, Entry)
    assert_same(first.arrays, {"left.vector": patches[0].astype(np.float32), "right.token": np.array([97], np.uint8)})
    assert (second.id, second.split, second.origin, second.place) == ("q", "val", "x.h5:1", [1])


BAD_ROWS = {
    "NaN": (np.full((1, 2, 3), np.nan), ["x"], "the left side has numbers that are not finite"),
    "too large": (np.full((1, 2, 3), 1e60), ["x"], "the left side has numbers that are not finite"),
    "no rows": (np.ones((1, 0, 3)), ["x"], "the left side is empty"),
    "too many rows": (np.ones((1, 11, 3)), ["x"], "the left side is longer than most: 11 > 10"),
    "no text": (np.ones((1, 2, 3)), [""], "the right side is empty"),
}


@pytest.mark.parametrize(("left", "right", "detail"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_pair_of_an_hdf5_file_is_rejected(tmp_path: Path, left: Any, right: Any, detail: str) -> None:
    (bad,) = read(hdf5_file(tmp_path / "x.h5", left=left, right=right), most=10)
    assert isinstance(bad, Rejection)
    assert (bad.origin, bad.reason) == ("x.h5:0", Reason.BAD_ENTRY)
    assert detail in bad.detail


@pytest.mark.parametrize("left", [np.ones(2), np.ones((2, 3)), [["a"], ["b"]], ["a", "b", "c"]])
def test_datasets_that_are_no_sides_are_an_error(tmp_path: Path, left: Any) -> None:
    with pytest.raises(DataError, match=r"wanted are texts \[N\] or numbers \[N, R, D\]|different lengths"):
        read(hdf5_file(tmp_path / "x.h5", left=left, right=["x", "y"]))


def test_missing_files_and_options_out_of_range_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text("left\tright\n")
    for bad, options, what in ((path, {"most": 0}, "data.options.most"), (tmp_path / "y.csv", {}, "no such file")):
        with pytest.raises(ConfigError, match=what):
            Pairs(bad, **options)
    (tmp_path / "x.json").write_text("")
    with pytest.raises(ConfigError, match="pairs are read from"):
        Pairs(tmp_path / "x.json")


def test_a_table_that_became_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    (entry,) = read(path, "left\tright\nab\tcd\n")
    assert isinstance(entry, Entry)
    reader = Pairs(path)
    path.write_text("left\tright\nab\tc")
    with pytest.raises(DataError, match="the file ends before"):
        reader.read(entry.place)
