"""Model families that the planner's authors had not in mind, as people write them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pipeline.memory.footprint import MemoryChoice, MicroFootprint, live_peak_bytes
from pipeline.runs.model.training_work import Work, target_of
from pipeline.training.step.optimizers import StepSettings
from tests.memory.tracing.traced import true_peak
from tests.zoo.member import Member, Synthetic
from tests.zoo.spread import lengths
from tests.zoo.strangers import architectures, derivatives, ways
from tests.zoo.strangers.architectures import WORDS

if TYPE_CHECKING:
    import numpy as np

FAMILIES = {**architectures.FAMILIES, **ways.FAMILIES, **derivatives.FAMILIES}
LEFT_OUT: dict[str, str] = {}  # families that need what is not installed
LEAST, ROWS = {"items": 64}, {"items": 1024}  # of the smallest batch, and of one that is planned


class Grouped(Synthetic):
    """A family of which an item has groups of words, more or fewer."""

    def __init__(self, name: str) -> None:
        self._small = FAMILIES[name]()

    def model(self) -> nn.Module:
        return self._small.model()

    def example(self, sizes: Mapping[str, int]) -> Tensor:
        return self._small.example({"items": WORDS * sizes["groups"]})

    def loss(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return self._small.loss(model, batch)


def _items(count: int, rng: np.random.Generator) -> dict[str, Any]:
    return lengths(count, rng, median=10, name="groups")


def member(name: str) -> Member:
    """Return a family as a member of the zoo, whose items are of variable sizes."""
    sizes = tuple({"groups": 16 * items, "items": items} for items in (1, 4, 9))
    return Member(name, partial(Grouped, name), {}, sizes, {"foreach": True}, padded=False, items=_items)


def planned(name: str, folder: Path) -> tuple[MicroFootprint, int]:
    """Return what is planned of a family's micro-batch, and the live peak of a step of two, without a margin."""
    work = Work(FAMILIES[name](), StepSettings(way="foreach"), device="cpu")
    oracle, choice = work.oracle(LEAST, target_of(None), padded=False, kept=folder), MemoryChoice()
    micro, standing = oracle.micro(choice, ROWS), oracle.standing(choice)
    return micro, live_peak_bytes(standing, micro, accumulate=True)


def real(name: str) -> int:
    """Return the live peak of such a step that is really taken."""
    return true_peak(FAMILIES[name](), ROWS, 2)
