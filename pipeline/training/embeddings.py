"""The embeddings of a partner's residues, read and verified when they are wanted, joined by the graph's row map.

Shapes: R residues of a partner, L residues of a text, D numbers a residue.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from itertools import chain
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from pipeline.errors import SUBMIT_AGAIN, CacheDamaged, DataError, RecordMissing
from pipeline.keys import TAG_BYTES
from pipeline.store.cache import ELSEWHERE
from pipeline.structures.sequences import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from pipeline.encoder.recipe import Recipe
    from pipeline.store.record import Record
    from pipeline.store.store import Place, Room, Store

    Rows = NDArray[Any]

EMBED_AGAIN = "pipeline submit --stage embed   (does only what is missing)"
REMEMBERED = 32_768  # places of embeddings: less than a kilobyte each
_DTYPES = {"fp32": ("float32", np.float32), "fp16": ("float16", np.float16), "bf16": ("bfloat16", np.uint16)}


class Copy(NamedTuple):
    """An embedding that the store has."""

    key: bytes
    places: Sequence[Place]


class Embeddings:
    """Finds and reads embeddings; several threads use it at once."""

    def __init__(self, store: Store, recipe: Recipe) -> None:
        self._store, self._recipe = store, recipe
        self.dtype, self._numpy = _DTYPES[recipe.storage]  # the name of the numbers' type, and what numpy holds them as
        self._width = 0
        self._found: dict[bytes, Copy] = {}  # by the digest of the text
        self._lock = Lock()

    @property
    def itemsize(self) -> int:
        """Return the bytes of a number."""
        return np.dtype(self._numpy).itemsize

    def texts(self, sequences: Sequence[str]) -> tuple[str, ...]:
        """Return what is encoded of a partner, given the sequences of its protein chains."""
        if self._recipe.context == "partner":
            return ("".join(sequences),) if sequences else ()
        return tuple(sequences)

    def find(self, wanted: Mapping[str, str]) -> dict[str, Copy]:
        """Find the best embedding of each text that the configuration accepts; the text's item is named if none is."""
        found = self._find_remembered(wanted)
        open_ = {text: self._recipe.accepted(len(text)) for text in wanted if text not in found}
        while open_:
            keys = [self._recipe.key(text, variants[0]) for text, variants in open_.items()]
            for text, key, places in zip(list(open_), keys, self._store.locate(keys), strict=True):
                if places:
                    found[text] = Copy(key, places)
                    del open_[text]
                elif not (rest := open_[text][1:]):
                    raise self._missing(text, key, wanted[text])
                else:
                    open_[text] = rest
        self._remember(found)
        return found

    def width(self, copies: Iterable[Copy]) -> int:
        """Return how many numbers a residue has: as in the first embedding that is met, and never another."""
        for copy in () if self._width else chain(copies, self._any()):
            with suppress(CacheDamaged, RecordMissing):  # whoever needs it is told
                self._width = self._store.get_at(copy.key, copy.places).arrays["rows"].shape[-1]
                break
        return self._width

    def join(
        self,
        copies: Sequence[tuple[str, Copy]],
        row_R: NDArray[np.int32],
        out_RD: Rows,
        encoded_R: NDArray[np.bool_],
        item: str,
        scratch: Callable[[int], memoryview],
    ) -> int:
        """Write the rows of a partner's residues, and which of them have one; return the bytes that were read.

        What has none (DNA, RNA, small molecules) is zeros, and `encoded` says so. `copies` are of the partner's texts.
        """
        total = sum(len(text) for text, _ in copies)
        if len(row_R) and (row_R.max() >= total or row_R.min() < NO_ROW):
            what = f"residues of {item} have rows {row_R.min()} to {row_R.max()}; its embeddings have {total}"
            keys = ", ".join(copy.key.hex() for _, copy in copies) or "none"
            raise CacheDamaged(what, where=f"embeddings {keys}", remedy=SUBMIT_AGAIN)
        first, read_bytes = 0, 0
        for text, copy in copies:
            into_LD = _straight(row_R, first, len(text), out_RD)
            rows_LD = self._rows(text, copy, out_RD.shape[1], item, _room(into_LD, scratch))
            if into_LD is None:
                _gather(rows_LD, row_R, first, out_RD)
            first += len(text)
            read_bytes += rows_LD.nbytes
        np.not_equal(row_R, NO_ROW, out=encoded_R)
        if not encoded_R.all():
            out_RD[~encoded_R] = 0
        return read_bytes

    def _rows(self, text: str, copy: Copy, width: int, item: str, room: Room) -> Rows:
        """Return the verified rows of a text [L, D]."""
        try:
            record = self._store.get_at(copy.key, copy.places, room)
        except (CacheDamaged, RecordMissing) as error:
            self._forget(text)
            what = f"the embedding of a sequence of {item}: {error.what}"
            raise type(error)(what, where=error.where, remedy=EMBED_AGAIN) from error
        rows_LD: Rows = record.arrays["rows"]
        if rows_LD.shape != (len(text), width) or rows_LD.dtype != self._numpy or not self._is_bits(record):
            raise self._unfit(text, copy.key, record, width, item)
        return rows_LD

    def _is_bits(self, record: Record) -> bool:
        """Say whether a record has bfloat16 where it should, and only there."""
        return ("rows" in record.bfloat16) == (self.dtype == "bfloat16")

    def _unfit(self, text: str, key: bytes, record: Record, width: int, item: str) -> CacheDamaged | DataError:
        shape, cut = list(record.arrays["rows"].shape), record.meta.get("cut")
        where = f"embedding {key.hex()} of {item}"
        variants = self._recipe.accepted(len(text))
        truncated = [one.cut for one in variants if one.cut and one.cut.policy == "truncate"]
        if truncated and shape == [truncated[0].length, width]:
            what = f"a sequence of {len(text):,} residues was truncated to {shape[0]:,}: the others have no embedding"
            return DataError(what, where=where, remedy="pipeline submit --stage embed --set embed.long.policy=windows")
        what = f"rows are {record.arrays['rows'].dtype} {shape}{f', cut {cut}' if cut else ''}"
        what += f"; of {len(text):,} residues, {self.dtype} [{len(text)}, {width}] was expected"
        return CacheDamaged(what, where=where, remedy=ELSEWHERE)

    def _missing(self, text: str, key: bytes, item: str) -> RecordMissing:
        what = f"a sequence of {item} ({len(text):,} residues) has no embedding: record {key.hex()} is not in the cache"
        return RecordMissing(what, where=self._store.kind, remedy=EMBED_AGAIN)

    def _find_remembered(self, texts: Iterable[str]) -> dict[str, Copy]:
        """Return those of the texts whose embeddings were found before."""
        with self._lock:
            return {text: copy for text in texts if (copy := self._found.get(_digest(text)))}

    def _remember(self, found: Mapping[str, Copy]) -> None:
        with self._lock:
            self._found |= {_digest(text): copy for text, copy in found.items()}
            while len(self._found) > REMEMBERED:
                del self._found[next(iter(self._found))]

    def _forget(self, text: str) -> None:
        with self._lock:
            self._found.pop(_digest(text), None)

    def _any(self) -> Iterable[Copy]:
        """Yield embeddings that a key of this recipe can be of, for when nothing of a batch is encoded."""
        tags = {self._recipe.key("", variant)[:TAG_BYTES] for variant in self._recipe.accepted(sys.maxsize)}
        for key in self._store.keys():  # noqa: SIM118 - a store is no mapping
            if key[:TAG_BYTES] in tags:
                yield Copy(key, self._store.locate([key])[0])


def _straight(row_R: NDArray[np.int32], first: int, length: int, out_RD: Rows) -> Rows | None:
    """Return where the rows of a text belong if every one does, in order, and nothing between them: mostly so."""
    starts = np.flatnonzero(row_R == first)
    if len(starts) != 1:
        return None
    here = slice(int(starts[0]), int(starts[0]) + length)
    return out_RD[here] if np.array_equal(row_R[here], np.arange(first, first + length)) else None


def _room(into_LD: Rows | None, scratch: Callable[[int], memoryview]) -> Room:
    """Return memory for a record: its rows straight to where they belong, as far as there is room, and what follows."""

    def room(length: int) -> tuple[memoryview, memoryview]:
        if into_LD is None or length <= into_LD.nbytes:
            return scratch(length), memoryview(b"")
        return into_LD.reshape(-1).view(np.uint8).data, scratch(length - into_LD.nbytes)

    return room


def _gather(rows_LD: Rows, row_R: NDArray[np.int32], first: int, out_RD: Rows) -> None:
    """Write the rows that lie in one text, whose first row has the number `first`, to where its residues are."""
    here = np.flatnonzero((row_R >= first) & (row_R < first + len(rows_LD)))
    out_RD[here] = rows_LD[row_R[here] - first]


def _digest(text: str) -> bytes:
    return xxhash.xxh3_128_digest(text.encode())
