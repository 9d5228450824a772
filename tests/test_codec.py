"""Values come back from their JSON as they were, and from no other."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest

from pipeline.codec import memo, plain, read_if_whole, rebuilt, write_plain


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Inner:
    sizes: tuple[int, ...]
    share: float


@dataclass(frozen=True, slots=True)
class Outer:
    name: str
    inner: Inner
    where: Path
    colour: Colour | None = None
    names: set[str] = field(default_factory=set)


VALUE = Outer("a", Inner((1, 2), float("inf")), Path("/x"), Colour.RED, {"b"})
DATA = plain(VALUE)


def test_a_value_comes_back_as_it_was():
    assert rebuilt(Outer, DATA) == VALUE
    assert plain({"count": np.int64(3)}) == {"count": 3}


@pytest.mark.parametrize(
    "other",
    [
        {**DATA, "more": 1},
        {name: value for name, value in DATA.items() if name != "inner"},
        {**DATA, "name": 1},
        {**DATA, "inner": {"sizes": [1.5], "share": 1.0}},
        {**DATA, "inner": {"sizes": [True], "share": 1.0}},
        {**DATA, "colour": "blue"},
        [],
        b"",
        b'{"name": "a"',
        b"{},{}",
    ],
    ids=str,
)
def test_what_is_missing_unknown_of_another_type_or_torn_is_no_value(other):
    with pytest.raises(ValueError):  # noqa: PT011 - whatever is wrong with it
        rebuilt(Outer, other)


def test_what_was_asked_before_is_remembered_until_it_is_torn_or_of_another_type(tmp_path):
    made: list[int] = []

    def make() -> Inner:
        made.append(len(made))
        return Inner((len(made),), 0.5)

    def asked(question: str) -> Inner:
        return memo(tmp_path / "memo", "inner", {"of": question}, make, Inner)

    assert asked("a") == asked("a") == Inner((1,), 0.5)
    assert asked("b") == Inner((2,), 0.5)
    for path in (tmp_path / "memo").iterdir():
        write_plain(path, VALUE)
    assert asked("a") == Inner((3,), 0.5)
    assert read_if_whole(tmp_path / "none", Inner) is None


def test_where_nothing_can_be_written_it_is_found_out_each_time(tmp_path):
    assert [memo(tmp_path / "no" / "memo", "number", {}, lambda: 7, int) for _ in range(2)] == [7, 7]
    assert not (tmp_path / "no").exists()
