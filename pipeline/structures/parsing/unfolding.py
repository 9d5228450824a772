"""Refuses BinaryCIF columns and assemblies that would unfold to more than anybody means."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.records import Reason
from pipeline.structures.atoms import Unusable

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping

MOST_CHARACTERS = 32 << 20  # of a BinaryCIF file as text: 350,000 atoms


MOST_OPERATIONS = 100_000  # of an assembly; the largest of the PDB has 1,680


WIDEST_NUMBER = 8


RANGE = re.compile(r"(\d+)\s*-\s*(\d+)")


def check_columns(content: Mapping[str, Any], wanted: Container[str]) -> None:
    """Refuse a BinaryCIF file, as msgpack has it, whose columns would be too much; any mistake in it raises."""
    characters = sum(_characters(part) for part in _parts(content, wanted))
    if characters > MOST_CHARACTERS:
        what = f"unfolds to {characters:,} characters, more than {MOST_CHARACTERS:,}"
        raise Unusable(Reason.FILE_TOO_LARGE, what)


def check_operations(expressions: Iterable[str]) -> None:
    """Refuse expressions such as 1-60 or (1-60)(61-88) that stand for too many operations."""
    for expression in expressions:
        count = _operations(expression)
        if count > MOST_OPERATIONS:
            what = f"an assembly of {count:,} operations, more than {MOST_OPERATIONS:,}"
            raise Unusable(Reason.PARSE_ERROR, what)


def _parts(content: Mapping[str, Any], wanted: Container[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the data and the mask of every wanted column."""
    for block in content["dataBlocks"]:
        for category in block["categories"]:
            if category["name"].lstrip("_") in wanted:
                for column in category["columns"]:
                    yield from filter(None, (column["data"], column.get("mask")))


def _characters(part: Mapping[str, Any]) -> int:
    """Return how much text a column is."""
    encodings = part["encoding"]
    texts = next((one for one in encodings if one["kind"] == "StringArray"), None)
    if texts is None:
        return _count(encodings, part["data"]) * WIDEST_NUMBER
    if _count(texts["offsetEncoding"], texts["offsets"]) > MOST_CHARACTERS:
        return _count(texts["offsetEncoding"], texts["offsets"])
    return _count(texts["dataEncoding"], part["data"]) * (1 + _longest(texts))


def _count(encodings: Iterable[Mapping[str, Any]], data: bytes) -> int:
    """Return how many values there are at most, at any step of decoding."""
    return max(
        len(data), *(int(one["srcSize"]) for one in encodings if one["kind"] in ("RunLength", "IntegerPacking")), 0
    )


def _longest(texts: Mapping[str, Any]) -> int:
    """Return the length of the longest of the texts, which numpy gives to each."""
    from biotite.structure.io.pdbx.encoding import decode_stepwise, deserialize_encoding

    encodings = [deserialize_encoding(one) for one in texts["offsetEncoding"]]
    offsets = np.asarray(decode_stepwise(texts["offsets"], encodings), np.int64)
    return int(np.abs(np.diff(offsets)).max(initial=0))


def _operations(expression: str) -> int:
    """Return how many operations an expression stands for: the product of its groups."""
    product = 1
    for group in re.split(r"[()]+", expression):
        if group.strip(" '\","):
            spans = [int(last) - int(first) for first, last in RANGE.findall(group)]
            product *= max(1, group.count(",") + 1 + sum(span for span in spans if span > 0))
    return product
