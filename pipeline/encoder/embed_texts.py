"""Stage embed: from the sequences of a data set to a verified embedding of each in the store.

Small records of the kind `parity` remember how close an encoder came to its reference. Nothing here imports torch
before there is something to encode.
"""

from __future__ import annotations

import logging
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import xxhash

from pipeline.command_line import Command
from pipeline.encoder.embedding_recipe import BF16_PRODUCTS, ENCODER_VERSION, Variant
from pipeline.errors import SUBMIT_AGAIN, CacheDamaged, JobFailed, RecordMissing
from pipeline.keys import recipe_key
from pipeline.records import LOWEST_COSINE
from pipeline.store.store import WholeRecords
from pipeline.waiting import signals_held

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pipeline.device.accelerator import TorchDevice
    from pipeline.encoder.embedding_recipe import EmbeddingRecipe
    from pipeline.encoder.engine.embed_engine import Embedding
    from pipeline.encoder.engine.encoder_source import EncoderSource
    from pipeline.encoder.engine.memory_ladder import Forward
    from pipeline.encoder.engine.token_batches import EngineSettings
    from pipeline.records import Reason, TaskContext
    from pipeline.store.store import Store, StoreWriter

log = logging.getLogger(__name__)

LOOKED_UP_AT_ONCE = 4096
MOST_READ = 1 << 16  # keys of which it is remembered that they were read
_IN_FULL = Command.submit("embed").with_settings(("embed.precision", "fp32"))


@dataclass(frozen=True, slots=True)
class EmbedShelves:
    """The stores this stage works on."""

    embeddings: Store
    weights: Store
    parity: Store
    shard_bytes: int


@dataclass(frozen=True, slots=True)
class Texts:
    """The sequences of a task: their lengths, and a way to read some of them."""

    lengths_N: NDArray[np.int64]
    read: Callable[[Sequence[int]], list[str]]


def sequence_name(text: str) -> str:
    """Return a short name of a sequence, for logs and lists."""
    return f"{text[:8]}…{len(text)} {xxhash.xxh3_64_hexdigest(text.encode())}"


class EmbeddingVerifier:
    """Looks texts up; a damaged copy counts as missing, and is rebuilt."""

    def __init__(self, recipe: EmbeddingRecipe, records: WholeRecords) -> None:
        self._recipe, self._records = recipe, records
        self._read: set[bytes] = set()  # keys: the same sequence is in many items

    def look_up(self, texts: Iterable[str]) -> dict[str, Variant | None]:
        """Return the best variant of each text that the store has undamaged; None where it must be computed."""
        if len(self._read) > MOST_READ:
            self._read.clear()
        best: dict[str, Variant | None] = dict.fromkeys(texts)
        unresolved = [(text, self._recipe.accepted(len(text))) for text in best]
        while unresolved:
            keys = [self._recipe.key(text, variants[0]) for text, variants in unresolved]
            metas = self._records.metas([key for key in keys if key not in self._read])
            self._read.update(key for key, meta in metas.items() if meta)
            tried, unresolved = unresolved, []
            for key, (text, variants) in zip(keys, tried, strict=True):
                if key in self._read or key in metas:
                    best[text] = variants[0]
                elif len(variants) > 1:
                    unresolved.append((text, variants[1:]))
        return best


def embed_texts(
    texts: Texts,
    load: Callable[[], EncoderSource],
    recipe: EmbeddingRecipe,
    settings: EngineSettings,
    shelves: EmbedShelves,
    context: TaskContext,
) -> Generator[Reason | None, None, None]:
    """Encode the sequences of a task that are not in the store yet, and publish them at least every minute."""
    todo_N = _missing(texts, recipe, shelves.embeddings)
    yield from repeat(None, len(texts.lengths_N) - len(todo_N))
    if len(todo_N) == 0:
        return
    from pipeline.encoder.engine import memory_ladder
    from pipeline.encoder.engine.embed_engine import Engine

    settings, source = memory_ladder.on_its_device(settings), load()
    gate = _Gate(source, recipe, shelves)
    precision, lowest = gate.precision(settings.device)
    context.report.figures[f"{LOWEST_COSINE} {source.reference}"] = lowest

    def name(texts: Sequence[str]) -> None:
        context.on([sequence_name(text) for text in texts])

    engine = Engine(gate, recipe, settings, precision=precision, on=name)

    def read(places: Sequence[int]) -> list[str]:
        return texts.read(todo_N[list(places)].tolist())

    with shelves.embeddings.writer(shard_bytes=shelves.shard_bytes) as writer:
        try:
            with closing(engine.run(texts.lengths_N[todo_N], read, _Sink(writer, recipe))) as outcomes:
                for outcome in outcomes:
                    context.report.figures |= asdict(engine.figures)
                    if outcome.reason is not None:
                        (text,) = read([outcome.index])
                        context.refuse(recipe.key(text, recipe.wanted(len(text))).hex(), outcome.reason, outcome.detail)
                    yield outcome.reason
        finally:
            with signals_held():  # a signal that comes now must not lose finished embeddings
                writer.flush()


def _missing(texts: Texts, recipe: EmbeddingRecipe, store: Store) -> NDArray[np.int64]:
    """Return which sequences the store lacks; a killed task thus continues where it stopped."""
    import numpy as np

    verifier = EmbeddingVerifier(recipe, WholeRecords(store))  # damaged records are still in the store
    absent: list[int] = []
    for start in range(0, len(texts.lengths_N), LOOKED_UP_AT_ONCE):
        places = range(start, min(start + LOOKED_UP_AT_ONCE, len(texts.lengths_N)))
        read = texts.read(places)
        variants = verifier.look_up(read)
        absent += [at for at, text in zip(places, read, strict=True) if variants[text] is None]
    return np.array(absent, np.int64)


class _Sink:
    """Stores embeddings, and flushes them now and then; only the writing thread calls it."""

    def __init__(self, writer: StoreWriter, recipe: EmbeddingRecipe) -> None:
        self._writer, self._recipe = writer, recipe

    def __call__(self, made: Embedding) -> None:
        """Store one embedding with what it was made from."""
        recipe = self._recipe
        meta = {
            **made.meta,
            "text": made.text,
            "weights": recipe.weights,
            "layer": recipe.layer,
            "context": recipe.context,
        }
        bfloat16 = tuple(made.arrays) if recipe.storage == "bf16" else ()
        self._writer.put(recipe.key(made.text, made.variant), made.arrays, meta, bfloat16=bfloat16)
        if self._writer.is_due:
            self._writer.flush()


class _Gate:
    """Builds encoders, and first compares each with its reference, on its device and in its precision."""

    def __init__(self, source: EncoderSource, recipe: EmbeddingRecipe, shelves: EmbedShelves) -> None:
        self.name, self.dim = source.name, source.dim
        self._source, self._recipe, self._shelves = source, recipe, shelves
        self._compared: dict[tuple[str, str], Forward] = {}  # built for a comparison, and used afterwards

    def precision(self, device: str) -> tuple[str, float]:
        """Return the precision that comes close enough to the reference, and its lowest cosine."""
        wanted = self._recipe.precision
        try:
            return wanted, self._pass(device, wanted)
        except JobFailed as error:
            if wanted == "fp32" or not self._recipe.half_fallback:
                raise
            log.warning("%s; using fp32 instead", error.what)
            return "fp32", self._pass(device, "fp32")

    def build(self, *, layer: int, precision: str, device: TorchDevice) -> Forward:
        """Return an encoder, if the checkpoint still has the weights that the keys name."""
        self._pass(device.type, precision)
        encoder = self._compared.pop((device.type, precision), None)
        encoder = encoder or self._source.build(layer=layer, precision=precision, device=device)
        if self._source.digest(self._shelves.weights) != self._recipe.weights:
            what = "the checkpoint changed after this run started; no further records were written"
            raise JobFailed(what, where=self._source.place, remedy=SUBMIT_AGAIN)
        return encoder

    def _pass(self, device: str, precision: str) -> float:
        """Return how close the encoder comes to the reference; raise where that is not close enough."""
        from pipeline.encoder import esm2, parity
        from pipeline.encoder.engine.memory_ladder import device_name

        if precision == BF16_PRODUCTS and not esm2.bf16_products_here():
            what = "this processor has neither AVX512-BF16 nor AMX, which embed.precision: bf16 needs on a CPU"
            raise JobFailed(what, where="embed.precision", remedy=_IN_FULL)
        source, recipe, store = self._source, self._recipe, self._shelves.parity
        made_from = {
            "version": [ENCODER_VERSION, parity.VERSION],
            "weights": recipe.weights,
            "layer": recipe.layer,
            "precision": precision,
            "device": device_name(device),
        } | ({"cls": True} if recipe.cls else {})
        key = recipe_key("parity", made_from)
        with suppress(RecordMissing, CacheDamaged):
            return float(store.get(key).meta["lowest"])  # only a pass is kept: a failure may be one card's fault
        verdict, encoder = source.compared(precision, recipe.layer, device, cls=recipe.cls)
        if not verdict.passed:
            what = (
                f"{precision} is not close enough to the reference: lowest cosine {verdict.lowest:.6f},"
                f" below {verdict.threshold}; no record was written"
            )
            raise JobFailed(what, where=source.place, remedy=source.remedy if precision == "fp32" else _IN_FULL)
        with store.writer() as writer:
            writer.put(key, {}, {**made_from, **asdict(verdict)})
        self._compared[device, precision] = encoder
        return verdict.lowest
