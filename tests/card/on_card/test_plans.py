"""Every remedy is planned within 2% of what a card's allocator counts, host and card apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pipeline.memory.footprint import EVERY_BLOCK, MemoryChoice
from pipeline.protocol import ITEMS
from pipeline.tasks.complex_docking import ComplexDocking
from pipeline.tasks.denovo_recursive import DenovoRecursive
from pipeline.tasks.interface import Interface
from pipeline.tasks.spectra_finetune import SpectraFinetune
from tests.card.on_card.planned import CARD, WITHIN, measured, off, planned
from tests.memory.tracing.traced import tracer
from tests.zoo import ZOO

NONE, AGAIN, AWAY = MemoryChoice(), MemoryChoice(checkpointing=EVERY_BLOCK), MemoryChoice(offload=True)
BOTH = MemoryChoice(checkpointing=EVERY_BLOCK, offload=True)
BF16, FP16 = MemoryChoice("bf16"), MemoryChoice("fp16")
ALL = MemoryChoice("bf16", checkpointing=EVERY_BLOCK, offload=True)

INTERFACE = Interface(embedding_dim=64, width=64, layers=3, pair_width=32)
DOCKING = ComplexDocking(embedding_dim=64, scalars=16, vectors=4, layers=3)
SPECTRA = SpectraFinetune(targets=2, layers=3, heads=4, d_fourier=232, d_peak=24, fourier_width=128, max_peaks=60)
DENOVO = DenovoRecursive(
    width=128, heads=4, encoder_layers=2, decoder_layers=2, latent_steps=2, supervision_steps=3,
    max_peaks=40, longest=16, bin_size=0.5, sigma=0.3,
)  # fmt: skip
FAMILIES: dict[str, tuple[Any, Mapping[str, int]]] = {
    "mlp": (ZOO["mlp"].build(), {"rows": 1500, "items": 3}),
    "large mlp": (ZOO["mlp"].build(), ZOO["mlp"].sizes[1]),
    "small mlp": (ZOO["mlp"].build(), {"rows": 400, "items": 2}),
    "transformer": (ZOO["transformer_pre"].build(), ZOO["transformer_pre"].sizes[0]),
    "gnn": (ZOO["gnn"].build(), ZOO["gnn"].sizes[1]),
    "interface": (INTERFACE, {"nodes": 300, "edges": 6000, "pairs": 60_000, ITEMS: 3}),
    "docking": (DOCKING, {"nodes": 1800, "pairs": 30_000, ITEMS: 2}),
    "spectra": (SPECTRA, {"peaks": 60, ITEMS: 8}),
    "denovo": (DENOVO, {"peaks": 40, "residues": 16, ITEMS: 96}),
}
CASES = {
    "mlp": [NONE, AGAIN, AWAY, BOTH, BF16],
    "large mlp": [ALL],  # of a few MiB, one segment of small blocks is more than 2%
    "small mlp": [FP16],
    "transformer": [NONE, AWAY, BOTH, BF16],
    "gnn": [NONE, AWAY, BF16],
    "interface": [NONE, AGAIN, AWAY],
    "docking": [NONE, AWAY, ALL],
    "spectra": [NONE, AWAY, BF16],
    "denovo": [NONE, AGAIN, AWAY],
}


def named(choice: MemoryChoice) -> str:
    words = [choice.precision, "again" * (choice.checkpointing > 0), "away" * choice.offload]
    return " ".join(filter(None, words))


@pytest.mark.parametrize(
    ("family", "choice"),
    [pytest.param(family, choice, id=f"{family}-{named(choice)}") for family in CASES for choice in CASES[family]],
)
def test_a_plan_is_what_the_card_takes(family: str, choice: MemoryChoice) -> None:
    task, sizes = FAMILIES[family]
    plan = planned(tracer(task, CARD, sizes, clip=1.0), choice, sizes)
    truth = measured(task, choice, sizes, clip=1.0)
    assert {name: share for name, share in off(plan, truth).items() if abs(share) > WITHIN} == {}
    assert bool(truth.host_bytes[0]) is choice.offload


@pytest.mark.parametrize(
    ("family", "choice"),
    [("mlp", AGAIN), ("interface", BF16), ("transformer", BOTH), ("spectra", AGAIN)],
    ids=["mlp", "interface", "transformer", "spectra"],
)
def test_a_plan_is_what_the_card_takes_in_segments_that_grow(family: str, choice: MemoryChoice) -> None:
    task, sizes = FAMILIES[family]
    plan = planned(tracer(task, CARD, sizes, clip=1.0), choice, sizes, expandable=True)
    truth = measured(task, choice, sizes, expandable=True, clip=1.0)
    assert {name: share for name, share in off(plan, truth).items() if abs(share) > WITHIN} == {}
