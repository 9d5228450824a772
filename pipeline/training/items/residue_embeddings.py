"""Reads the embeddings of a partner's residues from the store, and joins them by the graph's row map.

With several encoders, a residue's row has the numbers of the first, then those of the next. A text is a sequence that
was embedded. Shapes: R residues of a partner, L residues of a text, D numbers a residue.
"""

from __future__ import annotations

from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from pipeline.command_line import Command
from pipeline.encoder.embedding_recipe import as_floats
from pipeline.errors import SUBMIT_AGAIN, CacheDamaged, DataError, RecordMissing
from pipeline.records import Kind
from pipeline.store.cache_folder import ELSEWHERE
from pipeline.store.store import ONLY_MISSING
from pipeline.structures.partners import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from pipeline.encoder.embedding_recipe import EmbeddingRecipe
    from pipeline.store.store import RecordPlace, Room, Store
    from pipeline.training.items.item_source import ItemArrays

    Array = NDArray[Any]
    Copies = Sequence[tuple["Text", "StoredEmbedding"]]

EMBED_AGAIN = Command.submit("embed", then=f"   ({ONLY_MISSING})")
REMEMBERED = 4096  # places of the newest embeddings: less than a kilobyte each
_NO_ROWS: Array = np.empty(0)  # of a record that has none
_DTYPES = {"fp32": ("float32", np.float32), "fp16": ("float16", np.float16), "bf16": ("bfloat16", np.uint16)}


class StoredEmbedding(NamedTuple):
    """The key of an embedding in the store, and its places there."""

    key: bytes
    places: Sequence[RecordPlace]


class Text(NamedTuple):
    """A sequence that an encoder embeds, as one of a partner's."""

    of: int  # the encoder, by its place
    sequence: str


class EmbeddedPartner(NamedTuple):
    """The embeddings of an item's partner."""

    place: int  # of the item in a batch
    item: ItemArrays
    role: str
    copies: Copies


class Embeddings:
    """Looks up and reads embeddings of one encoder or of several; used by several threads at once."""

    def __init__(self, store: Store, *encoders: tuple[EmbeddingRecipe, int]) -> None:
        """Take each encoder's recipe, and how many numbers it has for a residue."""
        self._store, self._recipes = store, [recipe for recipe, _ in encoders]
        self._widths = [width for _, width in encoders]
        self.width = sum(self._widths)
        storages = {recipe.storage for recipe in self._recipes}
        # The type of the numbers; fp32 can hold all that encoders store.
        self.dtype, _ = _DTYPES[storages.pop() if len(storages) == 1 else "fp32"]
        self._found: dict[bytes, StoredEmbedding] = {}  # by a digest of the text
        self._lock = Lock()

    def texts(self, sequences: Sequence[str]) -> tuple[Text, ...]:
        """Return the texts that are embedded for a partner, given the sequences of its protein chains."""
        joined = ("".join(sequences),) if sequences else ()
        return tuple(
            Text(of, sequence)
            for of, recipe in enumerate(self._recipes)
            for sequence in (joined if recipe.context == "partner" else sequences)
        )

    def partners(self, items: Sequence[ItemArrays]) -> list[EmbeddedPartner]:
        """Return the partners of some items with the best acceptable embeddings; raise if a text has none."""
        partners = [
            (place, item, partner["role"], self.texts(proteins(partner["chains"])))
            for place, item in enumerate(items)
            for partner in item.meta["partners"]
        ]
        wanted = {text: item.id for _, item, _, texts in partners for text in texts}
        stored, absent = self.look_up(wanted)
        for text, key in absent.items():
            what = f"a sequence of {wanted[text]} ({len(text.sequence):,} residues) has no embedding"
            what += f": record {key.hex()} is not in the cache"
            raise RecordMissing(what, where=self._store.kind, remedy=EMBED_AGAIN, item=wanted[text])
        return [
            EmbeddedPartner(place, item, role, [(text, stored[text]) for text in texts])
            for place, item, role, texts in partners
        ]

    def look_up(self, texts: Iterable[Text]) -> tuple[dict[Text, StoredEmbedding], dict[Text, bytes]]:
        """Return the best acceptable embedding of each text, and the keys of the texts that have none."""
        texts, tried = list(texts), dict[Text, bytes]()
        entries = {text: stored for text in texts if (stored := self._found.get(_digest(text)))}
        open_ = {
            text: list(self._recipes[text.of].accepted(len(text.sequence))) for text in texts if text not in entries
        }
        while open_:
            keys = {
                text: self._recipes[text.of].key(text.sequence, variants.pop(0)) for text, variants in open_.items()
            }
            located = zip(keys.items(), self._store.locate(list(keys.values())), strict=True)
            entries |= {text: StoredEmbedding(key, places) for (text, key), places in located if places}
            tried |= keys
            open_ = {text: variants for text, variants in open_.items() if variants and text not in entries}
        with self._lock:
            self._found |= {_digest(text): stored for text, stored in entries.items()}
            while len(self._found) > REMEMBERED:
                del self._found[next(iter(self._found))]
        return entries, {text: key for text, key in tried.items() if text not in entries}

    def join(self, copies: Copies, row_R: Array, out_RD: Array, encoded_R: Array, item: str) -> None:
        """Write the embedding of each residue of a partner, and which residues have one.

        Residues without one (DNA, RNA, small molecules) get zeros. `copies` are the embeddings of the partner's texts.
        """
        start = 0
        for of, width in enumerate(self._widths):
            mine = [(text, copy) for text, copy in copies if text.of == of]
            self._join_one(mine, row_R, out_RD[:, start : start + width], encoded_R, item)
            start += width

    def _join_one(self, copies: Copies, row_R: Array, out_RD: Array, encoded_R: Array, item: str) -> None:
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
            is_stored_so = _DTYPES[self._recipes[text.of].storage][0] == self.dtype
            reads_there = is_stored_so and into_LD.flags.c_contiguous
            rows_LD = self._rows(text, copy, out_RD.shape[1], item, into_LD if reads_there else _NO_ROWS)
            if not is_stored_so:
                rows_LD = as_floats(rows_LD)
            if not len(into_LD):  # some residues are missing, or in another order
                here = np.flatnonzero((row_R >= first) & (row_R < first + len(rows_LD)))
                out_RD[here] = rows_LD[row_R[here] - first]
            elif not reads_there:
                into_LD[:] = rows_LD
            first += len(text.sequence)

    def _check_rows(self, copies: Copies, row_R: Array, item: str) -> None:
        """Refuse a row map that goes beyond the embeddings."""
        total = sum(len(text.sequence) for text, _ in copies)
        if row_R.max() >= total or row_R.min() < NO_ROW:
            what = f"residues of {item} have rows {row_R.min()} to {row_R.max()}; its embeddings have {total}"
            keys = ", ".join(copy.key.hex() for _, copy in copies) or "none"
            raise CacheDamaged(what, where=f"embeddings {keys}", remedy=SUBMIT_AGAIN, item=item)

    def _rows(self, text: Text, copy: StoredEmbedding, width: int, item: str, into_LD: Array) -> Array:
        """Return the verified rows of a text [L, D], directly read into memory for just them, where that is given."""
        try:
            record = self._store.get_at(copy.key, copy.places, _room(into_LD))
        except (CacheDamaged, RecordMissing) as error:
            self._found.pop(_digest(text), None)
            what = f"the embedding of a sequence of {item}: {error.what}"
            raise type(error)(what, where=error.where, remedy=EMBED_AGAIN, item=item) from error
        rows_LD: Array = record.arrays.get("rows", _NO_ROWS)
        recipe, shape = self._recipes[text.of], (len(text.sequence), width)
        dtype, held_as = _DTYPES[recipe.storage]
        is_of_dtype = ("rows" in record.bfloat16) == (dtype == "bfloat16")
        if rows_LD.shape == shape and rows_LD.dtype == held_as and is_of_dtype:
            return rows_LD
        where = f"embedding {copy.key.hex()} of {item}"
        cuts = [variant.cut for variant in recipe.accepted(shape[0]) if variant.cut]
        if any(cut.policy == "truncate" and rows_LD.shape == (cut.length, width) for cut in cuts):
            what = f"a sequence of {shape[0]:,} residues was truncated to {len(rows_LD):,}: the rest has no embedding"
            remedy = Command.submit("embed").with_settings(("embed.long.policy", "windows"))
            raise DataError(what, where=where, remedy=remedy)
        what = f"rows are {rows_LD.dtype} {list(rows_LD.shape)}; expected: {dtype} {list(shape)}"
        raise CacheDamaged(what, where=where, remedy=ELSEWHERE, item=item)


def proteins(chains: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return the sequences of the protein chains, from the chains in a graph's record."""
    return [sequence for _, kind, sequence in chains if kind == Kind.PROTEIN.value]


def _straight(lengths: Sequence[int], row_R: Array, out_RD: Array) -> list[Array]:
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


def _room(into_LD: Array) -> Room:
    """Return memory for a record whose rows are read directly into the batch, if they fit there."""

    def room(length: int) -> tuple[memoryview, memoryview]:
        if not len(into_LD) or length <= into_LD.nbytes:
            return np.empty(length, np.uint8).data, memoryview(b"")
        return into_LD.reshape(-1).view(np.uint8).data, np.empty(length - into_LD.nbytes, np.uint8).data

    return room


def _digest(text: Text) -> bytes:
    return xxhash.xxh3_128_digest(f"{text.of} {text.sequence}".encode())
