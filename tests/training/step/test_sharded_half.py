"""A sharded model in half precision: the weights are gathered in it, and computed with as a whole model would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.memory.footprint import MemoryChoice
from pipeline.training.ranks.process_group import ProcessGroup
from pipeline.training.step import collectives
from pipeline.training.step.contrastive import make_step
from pipeline.training.step.fsdp import ShardedStep
from pipeline.training.step.optimizers import StepSettings
from tests.testkit.limited import device
from tests.training.ranks.crews import crew
from tests.training.step import spread

WIDTH, BLOCKS, WORDS, LENGTH = 64, 4, 11, 5
HALF_BYTES = 2


class Attention(nn.Module):
    """A block that has all that autocast treats apart: maps, norms of two kinds, a softmax, places, a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.three = nn.Linear(WIDTH, 3 * WIDTH)
        self.groups = nn.GroupNorm(2, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x_NLD: Tensor, places_NL: Tensor) -> Tensor:
        q, k, v = self.three(self.norm(x_NLD)).chunk(3, dim=-1)
        far_NLL = (places_NL[:, :, None] - places_NL[:, None, :]).abs()
        weights_NLL = (q @ k.transpose(1, 2) / WIDTH**0.5 - far_NLL / 1000).softmax(-1)
        mixed = self.groups((weights_NLL @ v).transpose(1, 2)).transpose(1, 2)
        return x_NLD + self.out(mixed) * self.scale


class Words(nn.Module):
    """A small transformer; its places are numbers that half precision cannot tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.kinds: list[str] = []

    def forward(self, words_NL: Tensor, places_NL: Tensor) -> Tensor:
        x_NLD = self.words(words_NL)
        for block in self.blocks:
            x_NLD = block(x_NLD, places_NL)
        self.kinds = [str(x_NLD.dtype)]
        return self.head(self.norm(x_NLD))


class Guess:
    """Which word is where."""

    def model(self) -> nn.Module:
        return Words()

    def cost(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        return item

    def collate(self, items: Sequence[Any], rng: Any) -> Any:
        numbers = torch.tensor([item["number"] for item in items])
        drawn = torch.Generator().manual_seed(1)
        words = torch.randint(WORDS, (spread.ITEMS, LENGTH), generator=drawn)[numbers]
        places = (1000 + torch.rand(spread.ITEMS, LENGTH, generator=drawn))[numbers]
        return {"words": words, "places": places, "number": numbers}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, tuple[Tensor, Tensor | float]]:
        said = model(batch["words"], batch["places"]).flatten(0, 1)
        total = nn.functional.cross_entropy(said, batch["words"].flatten(), reduction="sum")
        return {"guess": (total, float(batch["words"].numel()))}


def step_of(group: ProcessGroup, precision: str, *, checkpointing: bool = False) -> ShardedStep:
    torch.manual_seed(7)
    return ShardedStep(Guess(), StepSettings(precision=precision, checkpointing=checkpointing), group)


def half(group: ProcessGroup, precision: str) -> dict[str, Any]:
    """Return what a step in half precision found, and in which types."""
    gathered: list[Tensor] = []
    call = collectives.Gather.__call__

    def watched(self: Any, output_tensor: Tensor, *others: Any, **named: Any) -> None:
        gathered.append(output_tensor)
        call(self, output_tensor, *others, **named)

    collectives.Gather.__call__ = watched  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    for checkpointing in (False, True):
        step = step_of(group, precision, checkpointing=checkpointing)
        step.scaler = torch.amp.GradScaler("cpu", enabled=False)
        shares = [[[0, 1, 2], [3, 4, 5, 6]], [[7, 8, 9, 10, 11, 12]]]
        stepper = spread.stepper_of(step)
        spread.accumulate(stepper, shares[group.rank])
        found[str(checkpointing)] = [step.totals["guess"], spread.gradients(step)]
        assert {tensor.dtype for tensor in gathered} == {
            getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[precision])
        }
        assert {gradient.dtype for gradient in step.gradients} == {torch.float32}
        assert step.model.kinds == ["torch.float32"]  # what is added up over blocks stays as it is in a whole model
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_that_of_a_whole_model(tmp_path: Path, precision: str) -> None:
    started = crew(tmp_path, 2, half, precision)
    assert started.wait() == [0, 0], [started.err(rank) for rank in range(2)]
    torch.manual_seed(7)
    whole = make_step(Guess(), StepSettings(precision=precision), scaled=False)
    batch = whole.task.collate([{"number": number} for number in range(spread.ITEMS)], None)  # type: ignore[arg-type]
    whole.accumulate(batch)
    ((total, weight),) = whole.totals.values()
    whole.settle(weight)
    for checkpointing in ("False", "True"):
        found = [started.result(rank)[checkpointing] for rank in range(2)]
        assert sum(one[0][0] for one in found) == pytest.approx(total, rel=2e-3)
        for name, parameter in whole.model.named_parameters():
            assert parameter.grad is not None
            wanted, got = parameter.grad, torch.tensor(found[0][1][name]).view_as(parameter)
            assert float((got - wanted).norm()) <= 0.03 * float(wanted.norm()) + 1e-5, name


def kept(group: ProcessGroup, choice: MemoryChoice) -> dict[str, int]:
    """Return how many bytes a forward keeps for its backward, and how many the weights have in half precision."""
    step = step_of(group, choice.precision)
    batch = step.task.collate([{"number": 1}], None)  # type: ignore[arg-type]
    step.accumulate(batch)
    step.release()
    with device.LimitedDevice() as limited:
        terms = step.terms_of(batch)
        live = limited.live_bytes
        del terms
    return {"live": live, "weights": HALF_BYTES * sum(one.numel() for one in step.model.parameters())}


def test_no_copy_of_all_weights_waits_for_backward(tmp_path: Path) -> None:
    device.need()
    device.library()
    started = crew(tmp_path, 2, kept, MemoryChoice(precision="bf16"))
    assert started.wait() == [0, 0], [started.err(rank) for rank in range(2)]
    found = started.result(0)
    assert found["live"] < 0.5 * found["weights"]
