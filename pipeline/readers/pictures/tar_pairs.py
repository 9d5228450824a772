"""Webdataset tars: `NAME.jpg` and `NAME.txt` one after the other, each with its place in the file."""

from __future__ import annotations

import tarfile
from itertools import groupby
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from pipeline.errors import DataError
from pipeline.readers.entry import cannot_read
from pipeline.readers.pictures.images import SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

SUFFIX, TEXT = ".tar", ".txt"


class TarPair(NamedTuple):
    """An image and its text in a tar: where the bytes of each begin, and how many they are."""

    name: str
    member: int  # its number in the tar
    image: tuple[int, int] = (0, 0)
    text: tuple[int, int] = (0, 0)
    problem: str = ""


def tar_pairs(path: Path) -> Iterator[TarPair]:
    """Yield the pairs of a tar in order; one that lacks its image or its text says so."""
    try:
        with tarfile.open(path, "r:") as tar:
            members = (pair for pair in enumerate(tar) if pair[1].isfile())
            for stem, parts in groupby(members, lambda pair: str(_stem(pair[1].name))):
                yield _pair(stem, list(parts))
    except tarfile.TarError as error:
        remedy = "write it again: it must be a tar that is not compressed"
        raise DataError(f"no whole tar: {error}", where=str(path), remedy=remedy) from error
    except OSError as error:
        raise cannot_read(path, error) from error


def _stem(name: str) -> PurePosixPath:
    """Return a member's name up to the first dot of its last part, which is what makes a pair."""
    path = PurePosixPath(name)
    return path.with_name(path.name.partition(".")[0] or path.name)


def _pair(stem: str, parts: Iterable[tuple[int, tarfile.TarInfo]]) -> TarPair:
    image = text = (0, 0)
    first = -1
    for number, member in parts:
        first = number if first < 0 else first
        suffix = PurePosixPath(member.name).suffix.lower()
        place = (member.offset_data, member.size)
        image = place if suffix in SUFFIXES else image
        text = place if suffix == TEXT else text
    problem = "there is no image of this name" if image == (0, 0) else ""
    return TarPair(stem, first, image, text, problem or ("there is no text of this name" if text == (0, 0) else ""))
