"""Embeddings computed again, by the encoder that makes them: on the CPU in full precision, one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.encoder.embedding_recipe import STORED, EmbeddingRecipe
from pipeline.encoder.engine.sequence_work import EngineSettings

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from pipeline.encoder.engine.embed_engine import Engine
    from pipeline.encoder.engine.sequence_work import Embedding
    from pipeline.store.format.record import Record

    Floats = NDArray[np.floating[Any]]

BFLOAT16_SHIFT = np.uint32(16)


class EncodedAgain:
    """Computes the rows of records of one checkpoint anew; an encoder is built for each way of cutting that is met."""

    def __init__(self, path: Path, digest: str, threads: int) -> None:
        self._path, self._digest, self._threads = path, digest, threads
        self._engines: dict[EmbeddingRecipe, Engine] = {}
        self._checkpoint: Any = None

    def rows(self, record: Record) -> Floats | None:
        """Return the rows in the storage precision of the record; None where memory does not suffice."""
        text, taken = record.meta["text"], list["Embedding"]()
        engine = self._engine(self._recipe(record))
        for _ in engine.run(np.array([len(text)]), lambda _places: [text], taken.append):
            pass
        return taken[0].rows_LD if taken else None

    def _recipe(self, record: Record) -> EmbeddingRecipe:
        """Return how the record was made, but for its precision."""
        meta, cut = record.meta, record.meta["cut"]
        how = {"long": cut["policy"], "length": cut["length"], "overlap": cut["overlap"]} if cut else {"long": "full"}
        return EmbeddingRecipe(
            weights=self._digest,
            layer=meta["layer"],
            context=meta["context"],
            precision="fp32",
            storage=STORED[record.arrays["rows"].dtype.name],
            on_oom="cpu",
            **how,
        )

    def _engine(self, recipe: EmbeddingRecipe) -> Engine:
        from pipeline.encoder.checkpoints.esm_checkpoint import load_checkpoint
        from pipeline.encoder.engine import token_budget
        from pipeline.encoder.engine.embed_engine import Engine

        if recipe not in self._engines:
            settings = EngineSettings(policy="tokens", cap=1, budget="auto", device="cpu", threads=self._threads)
            token_budget.prepare_device(settings)
            self._checkpoint = self._checkpoint or load_checkpoint(self._path)
            self._engines.clear()  # one at a time: each has its own copy of the weights
            self._engines[recipe] = Engine(self._checkpoint, recipe, settings)
        return self._engines[recipe]


def as_floats(rows_LD: NDArray[Any]) -> Floats:
    """Return stored rows as numbers; bfloat16 is stored as its bits."""
    is_bits = rows_LD.dtype == np.uint16
    floats_LD: Floats = (rows_LD.astype(np.uint32) << BFLOAT16_SHIFT).view(np.float32) if is_bits else rows_LD
    return floats_LD
