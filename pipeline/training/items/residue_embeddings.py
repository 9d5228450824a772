"""Reads the embeddings of a partner's residues from the store, and joins them by the graph's row map.

With several encoders, a residue's row has the numbers of the first, then those of the next. A text is a sequence that
was embedded. Shapes: R residues of a partner, L residues of a text, D numbers a residue.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, chain
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from pipeline.command_line import Command
from pipeline.encoder.embedding_recipe import as_floats
from pipeline.errors import SUBMIT_AGAIN, CacheDamaged, DataError, RecordMissing
from pipeline.keys import TAG_BYTES
from pipeline.records import Kind
from pipeline.store.cache_folder import ELSEWHERE
from pipeline.store.store import ONLY_MISSING
from pipeline.structures.partners import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from pipeline.encoder.embedding_recipe import EmbeddingRecipe
    from pipeline.store.format.record import Record
    from pipeline.store.store import RecordPlace, Room, Store

    Rows = NDArray[Any]

EMBED_AGAIN = Command.submit("embed", then=f"   ({ONLY_MISSING})")
REMEMBERED = 32_768  # places of embeddings: less than a kilobyte each
_NO_ROWS: Rows = np.empty(0)  # of a record that has none
_DTYPES = {"fp32": ("float32", np.float32), "fp16": ("float16", np.float16), "bf16": ("bfloat16", np.uint16)}


class StoredEmbedding(NamedTuple):
    """The key of an embedding in the store, and its places there."""

    key: bytes
    places: Sequence[RecordPlace]


class Text(NamedTuple):
    """A sequence that an encoder embeds, as one of a partner's."""

    of: int  # the encoder, by its place
    sequence: str


class Embeddings:
    """Looks up and reads embeddings of one encoder or of several; used by several threads at once."""

    def __init__(self, store: Store, *recipes: EmbeddingRecipe) -> None:
        self._store, self._recipes = store, recipes
        storages = {recipe.storage for recipe in recipes}
        # The type of the numbers, and numpy's type for it; fp32 can hold all that encoders store.
        self.dtype, self._numpy = _DTYPES[storages.pop() if len(storages) == 1 else "fp32"]
        self._widths = [0] * len(recipes)
        self._found: dict[bytes, StoredEmbedding] = {}  # by the digest of the text
        self._lock = Lock()

    def texts(self, sequences: Sequence[str]) -> tuple[Text, ...]:
        """Return the texts that are embedded for a partner, given the sequences of its protein chains."""
        joined = ("".join(sequences),) if sequences else ()
        return tuple(
            Text(of, sequence)
            for of, recipe in enumerate(self._recipes)
            for sequence in (joined if recipe.context == "partner" else sequences)
        )

    def find(self, wanted: Mapping[Text, str]) -> dict[Text, StoredEmbedding]:
        """Return the best acceptable embedding of each text (text → item id); raises if one has none."""
        stored, absent = self.look_up(wanted)
        for text, key in absent.items():
            what = f"a sequence of {wanted[text]} ({len(text.sequence):,} residues) has no embedding"
            what += f": record {key.hex()} is not in the cache"
            raise RecordMissing(what, where=self._store.kind, remedy=EMBED_AGAIN, item=wanted[text])
        return stored

    def look_up(self, texts: Iterable[Text]) -> tuple[dict[Text, StoredEmbedding], dict[Text, bytes]]:
        """Return the best acceptable embedding of each text, and the keys of the texts that have none."""
        texts, absent = list(texts), dict[Text, bytes]()
        entries = {text: stored for text in texts if (stored := self._found.get(_digest(text)))}
        open_ = {text: self._recipes[text.of].accepted(len(text.sequence)) for text in texts if text not in entries}
        while open_:
            keys = [self._recipes[text.of].key(text.sequence, variants[0]) for text, variants in open_.items()]
            for text, key, places in zip(list(open_), keys, self._store.locate(keys), strict=True):
                if places:
                    entries[text] = StoredEmbedding(key, places)
                    del open_[text]
                elif not (other_variants := open_[text][1:]):
                    absent[text] = key
                    del open_[text]
                else:
                    open_[text] = other_variants
        with self._lock:
            self._found |= {_digest(text): stored for text, stored in entries.items()}
            while len(self._found) > REMEMBERED:
                del self._found[next(iter(self._found))]
        return entries, absent

    def width(self, copies: Mapping[Text, StoredEmbedding]) -> int:
        """Return how many numbers a residue has: read once, from any readable embedding of each encoder."""
        for of, known in enumerate(self._widths):
            mine = (copy for text, copy in copies.items() if text.of == of)
            for copy in () if known else chain(mine, self._any(self._recipes[of])):
                with suppress(CacheDamaged, RecordMissing):  # raised when it is read for an item
                    rows_LD = self._store.get_at(copy.key, copy.places).arrays.get("rows", _NO_ROWS)
                    self._widths[of] = rows_LD.shape[-1]
                    break
        return sum(self._widths)

    def join(
        self,
        copies: Sequence[tuple[Text, StoredEmbedding]],
        row_R: NDArray[np.int32],
        out_RD: Rows,
        encoded_R: NDArray[np.bool_],
        item: str,
        scratch: Callable[[int], memoryview],
    ) -> None:
        """Write the embedding of each residue of a partner, and which residues have one.

        Residues without one (DNA, RNA, small molecules) get zeros. `copies` are the embeddings of the partner's texts.
        """
        ends = list(accumulate(self._widths))
        for of, (width, end) in enumerate(zip(self._widths, ends, strict=True)):
            mine = [(text, copy) for text, copy in copies if text.of == of]
            self._join_one(mine, row_R, out_RD[:, end - width : end], encoded_R, item, scratch)

    def _join_one(
        self,
        copies: Sequence[tuple[Text, StoredEmbedding]],
        row_R: NDArray[np.int32],
        out_RD: Rows,
        encoded_R: NDArray[np.bool_],
        item: str,
        scratch: Callable[[int], memoryview],
    ) -> None:
        """Write the part of one encoder, which may be a part of each row."""
        straight = _straight([len(text.sequence) for text, _ in copies], row_R, out_RD)
        if sum(map(len, straight)) < len(row_R):
            self._check_rows(copies, row_R, item)
            np.not_equal(row_R, NO_ROW, out=encoded_R)
            out_RD[~encoded_R] = 0
        else:
            encoded_R[:] = True
        first = 0
        for (text, copy), into_LD in zip(copies, straight, strict=True):
            reads_there = into_LD.flags.c_contiguous and self._is_stored_so(text)
            room = _room(into_LD if reads_there else _NO_ROWS, scratch)
            rows_LD = self._rows(text, copy, out_RD.shape[1], item, room)
            if not self._is_stored_so(text):
                rows_LD = as_floats(rows_LD)
            if not len(into_LD):  # some residues are missing, or in another order
                here = np.flatnonzero((row_R >= first) & (row_R < first + len(rows_LD)))
                out_RD[here] = rows_LD[row_R[here] - first]
            elif not reads_there:
                into_LD[:] = rows_LD
            first += len(text.sequence)

    def _is_stored_so(self, text: Text) -> bool:
        """Whether a text's numbers are stored in the type of the joined ones."""
        return _DTYPES[self._recipes[text.of].storage][0] == self.dtype

    def _check_rows(self, copies: Sequence[tuple[Text, StoredEmbedding]], row_R: NDArray[np.int32], item: str) -> None:
        """Refuse a row map that goes beyond the embeddings."""
        total = sum(len(text.sequence) for text, _ in copies)
        if row_R.max() >= total or row_R.min() < NO_ROW:
            what = f"residues of {item} have rows {row_R.min()} to {row_R.max()}; its embeddings have {total}"
            keys = ", ".join(copy.key.hex() for _, copy in copies) or "none"
            raise CacheDamaged(what, where=f"embeddings {keys}", remedy=SUBMIT_AGAIN, item=item)

    def _rows(self, text: Text, copy: StoredEmbedding, width: int, item: str, room: Room) -> Rows:
        """Return the verified rows of a text [L, D]."""
        try:
            record = self._store.get_at(copy.key, copy.places, room)
        except (CacheDamaged, RecordMissing) as error:
            self._found.pop(_digest(text), None)
            what = f"the embedding of a sequence of {item}: {error.what}"
            raise type(error)(what, where=error.where, remedy=EMBED_AGAIN, item=item) from error
        rows_LD: Rows = record.arrays.get("rows", _NO_ROWS)
        dtype, held_as = _DTYPES[self._recipes[text.of].storage]
        is_of_dtype = ("rows" in record.bfloat16) == (dtype == "bfloat16")
        if rows_LD.shape != (len(text.sequence), width) or rows_LD.dtype != held_as or not is_of_dtype:
            raise self._unfit(text, copy.key, record, width, item)
        return rows_LD

    def _unfit(self, text: Text, key: bytes, record: Record, width: int, item: str) -> CacheDamaged | DataError:
        rows_LD, cut = record.arrays.get("rows", _NO_ROWS), record.meta.get("cut")
        shape, residues, dtype = list(rows_LD.shape), len(text.sequence), _DTYPES[self._recipes[text.of].storage][0]
        where = f"embedding {key.hex()} of {item}"
        variants = self._recipes[text.of].accepted(residues)
        truncated = [variant.cut for variant in variants if variant.cut and variant.cut.policy == "truncate"]
        if truncated and shape == [truncated[0].length, width]:
            what = f"a sequence of {residues:,} residues was truncated to {shape[0]:,}: the rest has no embedding"
            remedy = Command.submit("embed").with_settings(("embed.long.policy", "windows"))
            return DataError(what, where=where, remedy=remedy)
        what = f"rows are {rows_LD.dtype} {shape}{f', cut {cut}' if cut else ''}"
        what += f"; of {residues:,} residues, {dtype} [{residues}, {width}] was expected"
        return CacheDamaged(what, where=where, remedy=ELSEWHERE, item=item)

    def _any(self, recipe: EmbeddingRecipe) -> Iterable[StoredEmbedding]:
        """Yield any embeddings of a recipe, for the width of a batch without embedded residues."""
        tags = {recipe.key("", variant)[:TAG_BYTES] for variant in recipe.variants()}
        for key in self._store.keys():  # noqa: SIM118 - a store is no mapping
            if key[:TAG_BYTES] in tags:
                yield StoredEmbedding(key, self._store.locate([key])[0])


def proteins(chains: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return the sequences of the protein chains, from the chains in a graph's record."""
    return [sequence for _, kind, sequence in chains if kind == Kind.PROTEIN.value]


def _straight(lengths: Sequence[int], row_R: NDArray[np.int32], out_RD: Rows) -> list[Rows]:
    """Return, for each text, the slice of `out_RD` its rows fill in order (the usual case), else an empty one."""
    pieces, first, start = [], 0, 0
    for length in lengths:
        stop = start + length
        counting = row_R[start:stop] - first if first else row_R[start:stop]
        if length and counting.tobytes() == _count(length):  # as bytes: for so few, numpy is slow
            pieces.append(out_RD[start:stop])
            start = stop
        else:
            pieces.append(out_RD[:0])
        first += length
    return pieces


@lru_cache(maxsize=4096)
def _count(length: int) -> bytes:
    """Return the bytes of 0 … length - 1, cached."""
    return np.arange(length, dtype=np.int32).tobytes()


def _room(into_LD: Rows, scratch: Callable[[int], memoryview]) -> Room:
    """Return the memory for a record: its rows directly into the batch if they go there, the rest into scratch."""

    def room(length: int) -> tuple[memoryview, memoryview]:
        if not len(into_LD) or length <= into_LD.nbytes:
            return scratch(length), memoryview(b"")
        return into_LD.reshape(-1).view(np.uint8).data, scratch(length - into_LD.nbytes)

    return room


def _digest(text: Text) -> bytes:
    return xxhash.xxh3_128_digest(f"{text.of} {text.sequence}".encode())
