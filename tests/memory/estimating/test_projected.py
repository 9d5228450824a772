"""Sizes that are computed from traced ones: as exact as a trace, or not used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from pipeline.memory.estimating import traced
from pipeline.memory.estimating.traced import LEAST_KNOWN, NOTE, TracedOracle
from pipeline.memory.footprint import MemoryChoice, Tape
from pipeline.memory.planning.memory_plan import PlanRequest
from pipeline.memory.planning.planner import plan_memory
from tests.memory.planning.oracles import MIB, Model, card, data

CHOICE = MemoryChoice()


def pairs(sizes: Mapping[str, int]) -> float:
    """Return what padded pairs of two kinds take."""
    items, left, right = (sizes[name] for name in ("items", "left", "right"))
    return items * (4096 * left * right + 65536 * left + 1000 * right) + 512 * left


def rows(count: int, seed: int = 0) -> list[dict[str, int]]:
    rng = np.random.default_rng(seed)
    drawn = rng.integers([1, 20, 20], [64, 400, 400], (count, 3)).tolist()
    return [dict(zip(("items", "left", "right"), row, strict=True)) for row in ([64, 400, 400], *drawn)]


def asked(model: Model) -> int:
    return len({sizes for _, sizes in model.asked})


def test_sizes_among_known_ones_are_computed_and_right() -> None:
    model = Model(pairs)
    oracle = TracedOracle(lambda: model)
    for sizes in rows(60):
        micro, true = oracle.micro(CHOICE, sizes), Model(pairs).micro(CHOICE, sizes)
        assert micro.is_like(true), sizes
        assert micro.flops == pytest.approx(true.flops, rel=1e-3)
    assert LEAST_KNOWN <= asked(model) < 30


def test_larger_sizes_than_known_ones_are_asked() -> None:
    model = Model(pairs)
    oracle = TracedOracle(lambda: model)
    for sizes in rows(40):
        oracle.micro(CHOICE, sizes)
    before = asked(model)
    larger = oracle.micro(CHOICE, {"items": 64, "left": 800, "right": 20})
    assert asked(model) == before + 1
    assert NOTE not in larger.notes


def test_what_was_computed_wrongly_ends_computing_for_good() -> None:
    """One size takes ten times as much, as where a kernel switches: nobody can know that from the others."""
    odd = {"items": 33, "left": 333, "right": 133}
    model = Model(lambda sizes: pairs(sizes) * (10 if sizes == odd else 1))
    oracle = TracedOracle(lambda: model)
    for sizes in rows(40):
        oracle.micro(CHOICE, sizes)
    assert NOTE in oracle.micro(CHOICE, odd).notes
    assert oracle.confirmed(CHOICE, odd).again.peak_bytes > 9 * pairs(odd)
    before = asked(model)
    for sizes in rows(10, seed=1)[1:]:
        assert NOTE not in oracle.micro(CHOICE, sizes).notes
    assert asked(model) == before + 10


@pytest.mark.parametrize("steep", [False, True])
def test_a_plan_is_the_same_as_where_every_size_is_asked(steep: bool) -> None:
    def taken(sizes: Mapping[str, int]) -> float:
        return pairs(sizes) * (1.5 if steep and sizes["items"] * sizes["left"] > 3000 else 1)

    rng = np.random.default_rng(3)
    sizes = {name: rng.integers(20, 300, 400) for name in ("left", "right")}
    request, cards = PlanRequest(batch=64, precisions=("fp32",), checkpointing=0, offload=False), [card(3000 * MIB)]
    own, whole = Model(taken), Model(taken)
    plan = plan_memory(TracedOracle(lambda: own), data(sizes, 64, padded=True), request, cards)
    true = plan_memory(whole, data(sizes, 64, padded=True), request, cards)
    assert plan.live.value == Model(taken).peak(CHOICE, plan.worst.sizes) <= plan.limit_bytes
    assert sum(part.bytes for part in plan.parts) == plan.live.value
    assert plan.epoch_s.value == pytest.approx(true.epoch_s.value, rel=0.05)
    assert asked(own) <= asked(whole)


# Traces that are kept in files


SIZES = {"items": 4, "nodes": 300}
CHOICES = [MemoryChoice(), MemoryChoice(precision="bf16", checkpointing=6), MemoryChoice(offload=True)]


def model() -> Model:
    return Model(lambda sizes: 1000.0 * sizes["nodes"])


def never_asked() -> Model:
    pytest.fail("the model was asked")


@pytest.mark.parametrize("choice", CHOICES)
def test_what_was_asked_is_read_as_it_was_and_not_asked_again(tmp_path: Path, choice: MemoryChoice) -> None:
    first = TracedOracle(model, folder=tmp_path / "model")
    answers = first.standing(choice), first.micro(choice, SIZES)
    again = TracedOracle(never_asked, folder=tmp_path / "model")
    for kept, answer in zip((again.standing(choice), again.micro(choice, SIZES)), answers, strict=True):
        for name in type(answer).__dataclass_fields__:
            value, same = getattr(kept, name), getattr(answer, name)
            if isinstance(value, Tape):
                assert (value.block_E == same.block_E).all()
                assert (value.bytes_E == same.bytes_E).all()
            else:
                assert value == same, name


def test_other_sizes_choices_and_models_are_asked(tmp_path: Path) -> None:
    TracedOracle(model, folder=tmp_path / "model").micro(CHOICES[0], SIZES)
    for folder, choice, sizes in (
        ("model", CHOICES[0], {**SIZES, "nodes": 301}),
        ("model", CHOICES[1], SIZES),
        ("other", CHOICES[0], SIZES),
    ):
        asked = model()
        TracedOracle(lambda asked=asked: asked, folder=tmp_path / folder).micro(choice, sizes)
        assert len(asked.asked) == 1


def test_a_damaged_file_is_asked_again_and_replaced(tmp_path: Path) -> None:
    for damage in (b"", b"PK", b"no archive"):
        TracedOracle(model, folder=tmp_path / "model").micro(CHOICES[0], SIZES)
        (path,) = (tmp_path / "model").iterdir()
        path.write_bytes(damage or path.read_bytes()[:-200])
        answer = TracedOracle(model, folder=tmp_path / "model").micro(CHOICES[0], SIZES)
        assert TracedOracle(never_asked, folder=tmp_path / "model").micro(CHOICES[0], SIZES).parts == answer.parts


def test_only_the_newest_models_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "MOST_MODELS", 3)
    for number in range(5):
        TracedOracle(model, folder=tmp_path / f"model {number}").standing(CHOICES[0])
    assert len(list(tmp_path.iterdir())) == 3
