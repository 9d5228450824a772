"""Traces that are kept: what a model was found to take is not asked again, and never believed of another."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.memory.estimating import traced
from pipeline.memory.estimating.traced import TracedOracle
from pipeline.memory.footprint import MemoryChoice, Tape
from tests.memory.planning.oracles import Model

SIZES = {"items": 4, "nodes": 300}
CHOICES = [MemoryChoice(), MemoryChoice(precision="bf16", checkpointing=True), MemoryChoice(offload=True)]


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
