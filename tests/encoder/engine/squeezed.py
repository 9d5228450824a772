"""A process with little memory left embeds a batch and a sequence that do not fit; started by test_oom."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import numpy as np
import torch

from pipeline.encoder.embedding_recipe import EmbeddingRecipe
from pipeline.encoder.engine.embed_engine import Engine
from pipeline.encoder.engine.encoder_source import EsmSource
from pipeline.encoder.engine.token_batches import EngineSettings
from pipeline.encoder.synth import write_random_checkpoint

ROOM_BYTES = 160 << 20  # rows, queries, keys and values of the long one take 197 MB: it cannot fit as one
LONG, SHORT, MANY = 48_000, 700, 40


def main(folder):
    """Embed with room and without, and print how it went."""
    torch.set_num_threads(1)
    write_random_checkpoint(folder / "esm2_wide.pt", layers=1, dim=256, heads=8)
    source = EsmSource.at(folder / "esm2_wide.pt")
    text = "".join(np.random.default_rng(0).choice(list("ACDEFGHIKLMNPQRSTVWY"), LONG + SHORT * MANY))
    texts = [text[:LONG], *(text[at : at + SHORT] for at in range(LONG, len(text), SHORT))]
    with_room = Engine(source, recipe(long="windows"), EngineSettings("divisor", 1, 4096, "cpu"))
    wanted = run(with_room, texts)
    engine = Engine(source, recipe(), EngineSettings("divisor", MANY, 1 << 20, "cpu"))
    run(engine, texts[1:2])  # the encoder is built before the room is taken away
    address_space_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes + ROOM_BYTES, resource.RLIM_INFINITY))
    made = run(engine, texts)
    same = sum(bool((wanted[index].rows_LD == one.rows_LD).all()) for index, one in made.items())
    cuts = [made[index].meta["cut"] for index in sorted(made)]
    sys.stdout.write(json.dumps({"same": same, "budget": engine.figures.budget_tokens, "cuts": cuts}))


def recipe(**how):
    return EmbeddingRecipe("0", 1, "chain", "fp32", "fp16", **how)


def run(engine, texts):
    made, lengths = {}, np.array([len(text) for text in texts], np.int64)
    for outcome in engine.run(lengths, lambda at: [texts[i] for i in at], lambda one: made.update({one.index: one})):
        assert outcome.reason is None, outcome
    return made


if __name__ == "__main__":
    main(Path(sys.argv[1]))
