"""A process with little memory left embeds a batch and a sequence that do not fit; started by test_oom.

Each result is compared with one that was computed while there was room.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import numpy as np
import torch

from pipeline.encoder.checkpoints.esm_checkpoint import load_esm_checkpoint
from pipeline.encoder.checkpoints.synth import write_random_checkpoint
from pipeline.encoder.embedding_recipe import EmbeddingRecipe
from pipeline.encoder.engine.embed_engine import Engine
from pipeline.encoder.engine.token_batches import EngineSettings

ROOM_BYTES = 100 << 20  # the queries, keys and values of the long one take 147 MB: it cannot fit as one
LONG, SHORT, MANY = 48_000, 700, 24


def main(folder: Path) -> None:
    """Embed twice, and say how it went."""
    torch.set_num_threads(1)
    write_random_checkpoint(folder / "esm2_wide.pt", layers=1, dim=256, heads=8)
    checkpoint = load_esm_checkpoint(folder / "esm2_wide.pt")
    letters = np.random.default_rng(0).choice(list("ACDEFGHIKLMNPQRSTVWY"), LONG + SHORT * MANY)
    text = "".join(letters)
    texts = [text[:LONG], *(text[at : at + SHORT] for at in range(LONG, len(text), SHORT))]

    wanted: dict[int, np.ndarray] = {}
    cut = EmbeddingRecipe("0", 1, "chain", "fp32", "fp16", long="windows")
    run(
        Engine(checkpoint, cut, EngineSettings("divisor", 1, 4096, "cpu")),
        texts,
        lambda one: wanted.update({one.index: one.rows_LD}),
    )

    same, metas, learned = 0, {}, []

    def sink(one):
        nonlocal same
        same += bool((wanted[one.index] == one.rows_LD).all())
        metas[one.index] = one.meta

    engine = Engine(
        checkpoint,
        EmbeddingRecipe("0", 1, "chain", "fp32", "fp16"),
        EngineSettings("divisor", MANY, 1 << 20, "cpu"),
        learned=learned.append,
    )
    run(engine, texts[1:2], lambda one: None)  # the encoder is built before the room is taken away
    resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes() + ROOM_BYTES, resource.RLIM_INFINITY))
    run(engine, texts, sink)
    sys.stdout.write(json.dumps({
        "same": same, "sequences": len(metas), "learned": learned, "long": metas[0]["cut"],
        "whole": sum(meta["cut"] is None for meta in metas.values()),
    }))  # fmt: skip


def run(engine: Engine, texts: list[str], sink) -> None:
    lengths = np.array([len(text) for text in texts], np.int64)
    for outcome in engine.run(lengths, lambda places: [texts[at] for at in places], sink):
        assert outcome.reason is None, outcome


def address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
