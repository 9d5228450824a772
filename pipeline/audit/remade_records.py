"""Compares cached records with what is rebuilt: an item's inventory and graph, array by array.

Whole numbers, names and texts must be the same. Coordinates and distances may differ by `CLOSE`, which no digit of a
file is: the same numbers on another processor differ by less. Whether they are the same bit for bit is told, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.encoder.embedding_recipe import STORED, EmbeddingRecipe
from pipeline.encoder.engine.token_batches import EngineSettings
from pipeline.keys import content_digest
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.inventory import examine_item, item_key
from pipeline.structures.parsing.structure_files import File, read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pipeline.encoder.engine.embed_engine import Embedding, Engine
    from pipeline.encoder.engine.encoder_source import EncoderSource
    from pipeline.records import Inventory, Item
    from pipeline.store.format.record import Array, Record
    from pipeline.structures.inventory import Complex, ScanRecipe

CLOSE = 1e-4  # Å
CLOSE_SHARE = 1e-6  # and of the number itself: far from the origin float32 has fewer decimals


@dataclass(frozen=True, slots=True)
class RebuiltItem:
    """An item as its files are read now."""

    key: bytes
    inventory: Inventory
    read: Complex | None
    files: Mapping[str, File]


def read_again(item: Item, recipe: ScanRecipe) -> RebuiltItem | None:
    """Read an item from its files; None where they cannot be read, which is no fault of the record."""
    try:
        data = {path: read_file(Path(path), recipe.max_file_bytes) for path in recipe.paths(item)}
    except UnusableInput:
        return None
    files = {path: File(content, content_digest(content).hex()) for path, content in data.items()}
    key = item_key(item, recipe, {path: file.digest for path, file in files.items()})
    return RebuiltItem(key, *examine_item(item, files, recipe), files)


def differences(record: Record, arrays: Mapping[str, Array], meta: Mapping[str, Any]) -> Iterator[str]:
    """Yield where a record differs from what was rebuilt."""
    kept = record.meta
    if kept.get("reason") != meta.get("reason"):
        yield f"it says {kept.get('reason') or 'no rejection'}; rebuilt, {meta.get('reason') or 'no rejection'}"
        return
    for name in sorted((kept.keys() | meta.keys()) - {"detail"}):
        if kept.get(name) != meta.get(name):
            yield f"{name} is {_short(kept.get(name))}; rebuilt, {_short(meta.get(name))}"
    for name in sorted(record.arrays.keys() ^ arrays.keys()):
        yield f"{name} is {'there' if name in record.arrays else 'not there'}; rebuilt, it is the opposite"
    for name in sorted(record.arrays.keys() & arrays.keys()):
        yield from _array(name, record.arrays[name], arrays[name])


def same_bits(record: Record, arrays: Mapping[str, Array]) -> bool:
    """Tell whether the arrays are the same bit for bit."""
    return record.arrays.keys() == arrays.keys() and all(
        array.tobytes() == np.ascontiguousarray(arrays[name]).tobytes() for name, array in record.arrays.items()
    )


def _array(name: str, kept: Array, made: Array) -> Iterator[str]:
    """Yield where two arrays differ."""
    if kept.dtype != made.dtype or kept.shape != made.shape:
        yield f"{name} is {kept.dtype} {list(kept.shape)}; rebuilt, {made.dtype} {list(made.shape)}"
        return
    if kept.dtype.kind == "f":
        unlike = ~np.isclose(kept, made, rtol=CLOSE_SHARE, atol=CLOSE, equal_nan=True)
    else:
        unlike = kept != made
    if np.any(unlike):
        at = np.unravel_index(int(np.argmax(unlike)), unlike.shape)
        count = int(np.count_nonzero(unlike)) - 1
        more = f" (and {count} more)" if count else ""
        place = ", ".join(map(str, at))
        yield f"{name}[{place}] is {kept[at]}; rebuilt, {made[at]}{more}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class EncodedAgain:
    """Computes the embeddings of one encoder anew; each recipe of cutting needs an encoder of its own."""

    def __init__(self, load: Callable[[], EncoderSource], digest: str, threads: int) -> None:
        self._load, self._digest, self._threads = load, digest, threads
        self._engines: dict[EmbeddingRecipe, Engine] = {}
        self._source: EncoderSource | None = None

    def made(self, record: Record) -> Embedding | None:
        """Return the embedding in the storage precision of the record; None where memory does not suffice."""
        text, taken = record.meta["text"], list["Embedding"]()
        engine = self._engine(self._recipe(record))
        for _ in engine.run(np.array([len(text)]), lambda _places: [text], taken.append):
            pass
        return taken[0] if taken else None

    def _recipe(self, record: Record) -> EmbeddingRecipe:
        """Return the recipe of the record, in fp32."""
        meta, cut = record.meta, record.meta["cut"]
        how = {"long": cut["policy"], "length": cut["length"], "overlap": cut["overlap"]} if cut else {"long": "full"}
        return EmbeddingRecipe(
            weights=self._digest,
            layer=meta["layer"],
            context=meta["context"],
            precision="fp32",
            storage=STORED[record.arrays["rows"].dtype.name],
            on_oom="cpu",
            cls="cls" in record.arrays,
            **how,
        )

    def _engine(self, recipe: EmbeddingRecipe) -> Engine:
        from pipeline.encoder.engine import memory_ladder
        from pipeline.encoder.engine.embed_engine import Engine

        if recipe not in self._engines:
            settings = EngineSettings(policy="tokens", cap=1, budget="auto", device="cpu", threads=self._threads)
            settings = memory_ladder.on_its_device(settings)
            source = self._source = self._source or self._load()
            self._engines.clear()  # one at a time: each has its own copy of the weights
            self._engines[recipe] = Engine(source, recipe, settings)
        return self._engines[recipe]


def distance(mine_LD: Array, theirs_LD: Array, *, by_row: bool) -> float:
    """Return how far two embeddings are from each other, as a share of their length: of the worst row, or of all."""
    mine, theirs = (rows_LD.astype(np.float64) for rows_LD in (mine_LD, theirs_LD))
    axis = -1 if by_row else None
    length = np.maximum(np.linalg.norm(theirs, axis=axis), np.finfo(np.float64).tiny)
    return float(np.max(np.linalg.norm(mine - theirs, axis=axis) / length))


def allowed(cosine: float) -> float:
    """Return the distance of two vectors of one length whose cosine is this."""
    return math.sqrt(2 * (1 - cosine))
