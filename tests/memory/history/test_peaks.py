"""Measured peaks of training steps: what they are remembered by, and what they say of the next plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.memory.footprint import MemoryChoice
from pipeline.memory.history import Peak, PeakHistory, fingerprint, ratios_of_all

ONE = Peak(
    model="m",
    card="a100",
    gpu="a100-40gb",
    torch="2.13.0",
    driver="550.54",
    allocator="",
    sizes="2 x items=4",
    predicted_bytes=1000,
    measured_bytes=1050,
    died=False,
    outside_bytes=500,
    predicted_s=0.5,
    step_s=1.0,
    at=1.0,
)


def peaks(folder: Path, *many: Peak) -> PeakHistory:
    found = PeakHistory(folder / "peaks.jsonl", "2.13.0")
    assert found.record("run", many)
    return found


def test_ratios_are_of_this_model_on_this_card_newest_first(tmp_path: Path) -> None:
    others = (replace(ONE, model="n"), replace(ONE, card="v100", gpu="v100-16gb-sxm"), replace(ONE, torch="2.12.1"))
    found = peaks(tmp_path, ONE, replace(ONE, measured_bytes=990, at=2.0), *others)
    assert found.ratios("m", "a100") == (0.99, 1.05)
    assert found.ratios("m", "l4") == found.ratios("x", "a100") == ()


def test_a_card_is_known_by_what_the_driver_calls_it_as_well(tmp_path: Path) -> None:
    found = peaks(tmp_path, replace(ONE, card="main", gpu="a100-80gb-sxm"))
    assert found.ratios("m", "NVIDIA A100-SXM4-80GB") == found.ratios("m", "main") == (1.05,)
    assert found.ratios("m", "a100-40gb") == ()


def test_what_was_measured_corrects_the_time_as_well(tmp_path: Path) -> None:
    found = peaks(tmp_path, ONE, replace(ONE, died=True, step_s=0.0, at=2.0), replace(ONE, step_s=1.5, at=3.0))
    assert found.seconds("m", "a100") == (3.0, 2.0)


def test_a_step_that_died_needs_more_than_it_died_at_until_one_lived_with_as_much(tmp_path: Path) -> None:
    died = replace(ONE, died=True, measured_bytes=1200)
    assert peaks(tmp_path, ONE, replace(died, at=2.0)).ratios("m", "a100") == (1.5, 1.05)
    assert peaks(tmp_path, replace(ONE, measured_bytes=1210, at=3.0)).ratios("m", "a100") == (1.21, 1.05)
    assert peaks(tmp_path / "other", replace(died, measured_bytes=600)).ratios("m", "a100") == (), "it was planned more"


def test_a_plan_for_several_cards_is_corrected_once_all_were_measured(tmp_path: Path) -> None:
    found = peaks(tmp_path, ONE)
    assert ratios_of_all(found, "m", ["a100", "l4"]) == ()
    peaks(tmp_path, replace(ONE, card="l4", gpu="l4-24gb", measured_bytes=1100, at=2.0))
    assert ratios_of_all(found, "m", ["a100", "l4"]) == (1.05, 1.1)


def test_lines_that_are_no_measurement_are_passed_over_and_others_read_back_as_they_were(tmp_path: Path) -> None:
    wrong: list[dict[str, object]] = [{"predicted_bytes": -1}, {"died": 1}, {"at": float("inf")}, {"gpu": 5}]
    found = peaks(tmp_path, ONE, *(replace(ONE, **change) for change in wrong))  # type: ignore[arg-type]
    assert found.of("m", "a100") == [replace(ONE, run="run")]


@dataclass(frozen=True)
class Options:
    ema: float | None = None
    learning_rate: float = 1e-4


def model(heads: int = 2, *, second: type[nn.Module] = nn.ReLU, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.MultiheadAttention(8, heads), second(), nn.Linear(8, width))


def test_a_model_has_one_fingerprint_real_fake_or_on_the_meta_device() -> None:
    real = fingerprint(model(), Options(), MemoryChoice())
    with torch.device("meta"):
        assert fingerprint(model(), Options(), MemoryChoice()) == real
    with FakeTensorMode():
        assert fingerprint(model(), Options(), MemoryChoice()) == real
    assert fingerprint(model().eval(), Options(learning_rate=1.0), MemoryChoice()) == real


def test_what_changes_memory_changes_the_fingerprint() -> None:
    models = [model(), model(heads=4), model(second=nn.GELU), model(width=9), model().half()]
    options = [Options(ema=0.9), MemoryChoice(precision="bf16"), MemoryChoice(checkpointing=6)]
    prints = {fingerprint(one, Options()) for one in models}
    prints |= {fingerprint(model(), Options(), one) for one in (*options, MemoryChoice())}
    assert len(prints) == len(models) + len(options) + 1
