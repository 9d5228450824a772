"""Pairs of tables: how columns are found, quotes, and rows without end."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import DataError
from pipeline.readers import table_rows
from pipeline.readers.pairs import Pairs
from pipeline.records import Entry, Rejection
from tests.readers.compared import columns_file, read_twice

TEXT = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=20)


def read(path: Path, content: str | bytes | None = None, **options: Any) -> list[Entry | Rejection]:
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_twice(Pairs(path, **options))


def texts(entry: Entry | Rejection) -> tuple[str, str]:
    """Return both sides."""
    assert isinstance(entry, Entry), entry
    return bytes(entry.arrays["left.token"]).decode(), bytes(entry.arrays["right.token"]).decode()


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    content = '\ufeffsplit\tcaption\tid\tsequence\r\nval\ta "quoted" é\tp 1\tMKV\r\n\r\n\ttwo\t\tGG'
    first, second = read(tmp_path / "x.tsv", content, left="sequence", right="caption")
    assert texts(first) == ("MKV", 'a "quoted" é')
    assert {name: (x.dtype, x.shape) for name, x in first.arrays.items()} == {
        "left.token": (np.uint8, (3,)),
        "right.token": (np.uint8, (13,)),
    }
    assert (first.id, first.split, first.origin) == ("p_1", "val", "x.tsv:2")
    assert (second.id, second.split, second.origin) == ("x.tsv-1", "", "x.tsv:4")
    assert texts(second) == ("GG", "two")


@pytest.mark.parametrize(
    ("header", "wrong", "hint"),
    [
        ("left,rigth", "no column 'right'; found: left, rigth", "; did you mean 'rigth'?"),
        ("left,image", "no column 'right'; found: left, image", ""),
        ("left,right,Spilt", "no column 'split'; found: left, right, Spilt", "; did you mean 'Spilt'?"),
        ("left,right,left", "2 columns 'left'", ""),
    ],
)
def test_a_column_that_is_missing_or_misspelt_is_named_with_the_one_that_is_meant(
    tmp_path: Path, header: str, wrong: str, hint: str
) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path / "x.csv", f"{header}\na,b\n")
    assert (caught.value.what, caught.value.where) == (wrong + hint, f"{tmp_path / 'x.csv'}:1")


@pytest.mark.parametrize("header", ["left,right,idx", "left,spilt,right", "left,right,split,spilt"])
def test_other_columns_may_have_similar_names(tmp_path: Path, header: str) -> None:
    found = read(
        tmp_path / "x.csv", f"{header}\n{','.join('abcd'[: header.count(',') + 1])}\n", right=header.split(",")[1]
    )
    assert isinstance(found[0], Entry)


def test_a_quoted_field_of_a_csv_may_hold_commas_quotes_and_line_ends(tmp_path: Path) -> None:
    content = 'id,left,right\n1,"a,b","say ""x"""\n2,"two\nlines","and\r\nthree\n"\n3,x,y\n'
    found = read(tmp_path / "x.csv", content)
    assert [texts(entry) for entry in found] == [("a,b", 'say "x"'), ("two\nlines", "and\r\nthree\n"), ("x", "y")]
    assert [entry.origin for entry in found] == ["x.csv:2", "x.csv:3", "x.csv:7"]


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
    columns_file(folder / "x.h5", left=[row[0] for row in rows], right=[row[1] for row in rows])
    assert [texts(entry) for entry in read(folder / "x.csv")] == rows
    assert [texts(entry) for entry in read(folder / "x.h5")] == rows
