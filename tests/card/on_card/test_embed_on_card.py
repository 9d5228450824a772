"""Sequences are embedded on a card as on the CPU: in any batches, wherever its memory ends, however late copies are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pipeline.encoder.engine import memory_ladder
from pipeline.encoder.engine.embed_engine import Engine
from pipeline.encoder.engine.encoder_source import EsmSource
from pipeline.encoder.esm_checkpoint import EsmCheckpoint, load_esm_checkpoint
from pipeline.encoder.parity import check_parity
from pipeline.encoder.synth import write_random_checkpoint
from pipeline.errors import PlanInfeasible
from tests.card import card
from tests.encoder.engine.stand_ins import Shelf, recipe, run, settings, texts

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("quick")
GATE = {"fp32": 0.99999, "fp16": 0.999, "bf16": 0.999}  # the lowest cosine that an encoder may have
MANY = texts(*range(1, 60), 300, 200)
FEW = MANY[::5] + MANY[-2:]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> EsmCheckpoint:
    path = tmp_path_factory.mktemp("weights") / "esm2_t3_tiny.pt"
    write_random_checkpoint(path, layers=3, dim=32, heads=4, seed=1)
    return load_esm_checkpoint(path)


@pytest.fixture(scope="module")
def of_cpu(checkpoint: EsmCheckpoint) -> Shelf:
    """Return what the CPU makes of all sequences."""
    return embedded(checkpoint, MANY, device="cpu")[0]


@pytest.fixture(scope="module")
def of_cpu_few(checkpoint: EsmCheckpoint) -> Shelf:
    return embedded(checkpoint, FEW, device="cpu")[0]


def embedded(
    checkpoint: EsmCheckpoint, sequences: Sequence[str], choices: dict[str, Any] | None = None, **changes: Any
) -> tuple[Shelf, Engine]:
    """Embed sequences, all of which have to come out."""
    shelf = Shelf()
    the_recipe = recipe(**{"layer": 3, "length": 1022, "overlap": 256, **(choices or {})})
    engine = Engine(EsmSource(checkpoint), the_recipe, settings(**{"device": card.NAME, **changes}))
    outcomes = run(engine, sequences, shelf)
    assert [one for one in outcomes.values() if one.reason is not None] == []
    assert sorted(shelf.taken) == list(range(len(sequences)))
    return shelf, engine


def lowest_cosine(one: Shelf, other: Shelf) -> float:
    """Return how far apart the rows of two are that are furthest apart."""
    assert one.taken.keys() == other.taken.keys()
    cosines = []
    for index, made in one.taken.items():
        rows_LD, wanted_LD = made.rows_LD.astype(np.float64), other.taken[index].rows_LD.astype(np.float64)
        assert rows_LD.shape == wanted_LD.shape
        lengths_L = np.linalg.norm(rows_LD, axis=1) * np.linalg.norm(wanted_LD, axis=1)
        cosines.append(float(((rows_LD * wanted_LD).sum(1) / lengths_L).min()))
    return min(cosines)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_an_encoder_on_a_card_passes_the_gate(checkpoint: EsmCheckpoint, precision: str) -> None:
    assert check_parity(checkpoint, precision, 3, card.NAME)[0].passed


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    "batches",
    [
        {"cap": 4},
        {"cap": "auto", "budget": "auto"},
        {"cap": 64},
        {"policy": "tokens", "budget": "auto"},
        {"policy": "tokens", "budget": 90},
    ],
    ids=str,
)
def test_embeddings_of_any_batches_are_those_of_the_cpu(
    checkpoint: EsmCheckpoint, of_cpu: Shelf, batches: dict[str, Any], precision: str
) -> None:
    shelf, engine = embedded(checkpoint, MANY, {"precision": precision}, **batches)
    assert {made.variant.precision for made in shelf.taken.values()} == {precision}
    assert lowest_cosine(shelf, of_cpu) >= GATE[precision]
    assert engine.figures.device_peak_bytes > 0
    assert engine.figures.splits == 0


# Memory ends


def test_batches_that_do_not_fit_a_small_card_are_halved_and_the_budget_is_learned(checkpoint: EsmCheckpoint) -> None:
    sequences = texts(*[200] * 100)
    wanted, _ = embedded(checkpoint, sequences, device="cpu")
    with card.settings(total_bytes=20 * MIB):
        shelf, engine = embedded(checkpoint, sequences, policy="tokens", budget=30_000)
    assert engine.figures.splits > 0
    assert engine.figures.budget_tokens < 20_200
    assert lowest_cosine(shelf, wanted) >= GATE["fp32"]
    assert {made.variant.precision for made in shelf.taken.values()} == {"fp32"}


def test_a_budget_that_is_measured_on_a_small_card_fits_it(checkpoint: EsmCheckpoint) -> None:
    sequences = texts(*[200] * 100)
    with card.settings(total_bytes=memory_ladder.QUEUE_BYTES + 24 * MIB):
        _, engine = embedded(checkpoint, sequences, policy="tokens", budget="auto")
    assert 200 < engine.figures.budget_tokens < memory_ladder.CARD_TOKENS
    assert engine.figures.splits == 0


def test_a_sequence_that_does_not_fit_whole_goes_through_the_card_in_windows(checkpoint: EsmCheckpoint) -> None:
    sequences = texts(6000, 100)
    with card.settings(total_bytes=12 * MIB):
        shelf, engine = embedded(checkpoint, sequences, {"length": 200, "overlap": 50}, policy="tokens", budget=10_000)
    assert engine.figures.splits > 0
    cut = shelf.taken[0].variant.cut
    assert cut is not None
    assert cut.policy == "windows"
    wanted, _ = embedded(checkpoint, sequences, {"length": 200, "overlap": 50, "long": "windows"}, device="cpu")
    assert lowest_cosine(shelf, wanted) >= GATE["fp32"]


@pytest.mark.parametrize("policy", ["divisor", "tokens"])
def test_any_one_block_that_is_refused_costs_a_smaller_batch_and_no_embedding(
    checkpoint: EsmCheckpoint, of_cpu_few: Shelf, policy: str
) -> None:
    batches: dict[str, Any] = {"policy": policy, "budget": 400}
    before = card.allocations()
    embedded(checkpoint, FEW, **batches)
    blocks = card.allocations() - before
    splits = unbuilt = 0
    for number in range(0, blocks, max(1, blocks // 24)):
        refused = card.refused()
        with card.refusing(number):
            try:
                shelf, engine = embedded(checkpoint, FEW, **batches)
            except PlanInfeasible:  # there is no smaller encoder
                assert number < blocks / 4
                unbuilt += 1
                continue
        assert card.refused() == refused + 1
        assert lowest_cosine(shelf, of_cpu_few) >= GATE["fp32"], number
        splits += engine.figures.splits
    assert unbuilt
    assert splits > 12


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_card_whose_memory_is_gone_for_good_hands_the_rest_to_the_cpu(
    checkpoint: EsmCheckpoint, of_cpu_few: Shelf, precision: str
) -> None:
    before = card.allocations()
    embedded(checkpoint, FEW, {"precision": precision})
    blocks = card.allocations() - before
    with card.refusing(blocks // 2, times=1 << 40):
        shelf, engine = embedded(checkpoint, FEW, {"precision": precision, "on_oom": "cpu"})
    assert lowest_cosine(shelf, of_cpu_few) >= GATE[precision]
    assert engine.figures.splits > 0


# Rows come late


def test_what_does_not_fit_a_card_at_all_is_refused_with_what_helps_there(checkpoint: EsmCheckpoint) -> None:
    with card.settings(total_bytes=1 * MIB), pytest.raises(PlanInfeasible) as refused:
        embedded(checkpoint, FEW)
    assert "embed.device=cpu" in refused.value.remedy
    with card.settings(total_bytes=4 * MIB), pytest.raises(PlanInfeasible) as refused:
        check_parity(checkpoint, "fp16", 3, card.NAME)
    assert "embed.device=cpu" in refused.value.remedy
