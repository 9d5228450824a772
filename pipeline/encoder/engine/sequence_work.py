"""What flows through the engine: sequences on their way, computed rows, outcomes and counts."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from pipeline.device.accelerator import Card, card_here, is_card
from pipeline.device.kinds import CPU
from pipeline.encoder.embedding_recipe import ENDS, Variant

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pipeline.encoder.embedding_recipe import EmbeddingRecipe, SequenceCut
    from pipeline.records import Reason


@dataclass(slots=True)
class EmbeddingCounts:
    """Counts that only grow, but for the budget; changed by the engine alone, read by anybody."""

    sequences: int = 0  # stored
    refused: int = 0
    residues: int = 0  # of what was stored
    encoded_residues: int = 0  # in all forward passes: what windows share counts twice
    tokens: int = 0  # in all forward passes: ends and filling included, and what windows share twice
    batches: int = 0
    splits: int = 0  # times that memory did not suffice
    again: int = 0  # sequences done again in full precision
    forward_s: float = 0.0
    cost_done: float = 0.0
    budget_tokens: int = 0
    host_peak_bytes: int = 0
    device_peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """The device and the variant by which a sequence is computed."""

    device: str  # cpu, or a kind of card
    variant: Variant


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """A sequence that is to be computed."""

    index: int  # its place in what the engine was given
    text: str
    tokens_L: NDArray[np.uint8]  # of the residues that get a row
    step: ComputeStep

    @property
    def windows(self) -> SequenceCut | None:
        """The windows it is cut into; None where it goes through the encoder whole."""
        cut = self.step.variant.cut
        return cut if cut is not None and cut.policy == "windows" else None

    @property
    def tokens(self) -> int:
        return len(self.tokens_L) + ENDS

    def at(self, step: ComputeStep) -> SequenceWork:
        """Return the same sequence on another step; a truncated one is never cut into windows, so its tokens stay."""
        return replace(self, step=step)


def first_step(recipe: EmbeddingRecipe, precision: str, residues: int, device: str) -> ComputeStep:
    """Return the step on which a sequence of that length is tried first."""
    return ComputeStep(device, Variant(precision, recipe.wanted(residues).cut))


def below(recipe: EmbeddingRecipe, residues: int, step: ComputeStep) -> ComputeStep | None:
    """Return the step to try when this one does not fit the memory; None when there is no other."""
    cut = recipe.windowed(residues)
    lower = [ComputeStep(step.device, replace(step.variant, cut=cut))] if cut != step.variant.cut else []
    if step.device != CPU:
        lower.append(ComputeStep(CPU, Variant("fp32", cut)))
    accepted = recipe.accepted(residues)
    return next((candidate for candidate in lower if candidate.variant in accepted), None)


def full_precision(recipe: EmbeddingRecipe, step: ComputeStep) -> ComputeStep | None:
    """Return the step to try when this one gives numbers that are not finite; None when there is no other."""
    if step.variant.precision == "fp32" or not recipe.half_fallback:
        return None
    return replace(step, variant=replace(step.variant, precision="fp32"))


@dataclass(frozen=True, slots=True)
class RefusedSequence:
    """A sequence without an embedding, and why."""

    index: int
    reason: Reason
    detail: str


class Forward(Protocol):
    """An encoder of batches."""

    dim: int
    fill: int  # tokens are filled up to a multiple of this
    typical: NDArray[np.uint8]  # tokens of a sequence that is made up to try it

    def tokenize(self, sequence: str) -> NDArray[np.uint8]:
        """Return a number for each residue; raise BadSequence for one that it cannot read."""

    def bytes_per_token(self, residues: int = ...) -> int:
        """Return the memory that one more token takes, in a sequence of so many residues."""

    def __call__(self, tokens: Sequence[NDArray[np.uint8]], *, cls: bool = False) -> torch.Tensor:
        """Return the rows of all residues, in order; where `cls`, before those of each sequence that of its mark."""


class Span:
    """The time a computation takes; on a card, where it goes on after the call, by events."""

    def __init__(self, device: str) -> None:
        self._card = Card(device) if is_card(device) and card_here() is not None else None
        self._begin: Any = self._now()
        self._end: Any = self._begin

    def stop(self) -> Span:
        """Mark the end."""
        self._end = self._now()
        return self

    def hold(self, stream: torch.Stream) -> None:
        stream.wait_event(self._end)

    def seconds(self) -> float:
        """Return how long it took; on a card, call this only once it is over."""
        if self._card is not None:
            return float(self._begin.elapsed_time(self._end)) / 1e3
        return float(self._end - self._begin)

    def _now(self) -> Any:
        return time.perf_counter() if self._card is None else self._card.event(timed=True)


@dataclass(frozen=True, slots=True)
class Computed:
    """The rows of a few sequences, concatenated, on their device; on a card the computation may still be under way.

    Where the recipe keeps it, the row of each sequence's mark stands before those of its residues.
    """

    works: Sequence[SequenceWork]
    rows_RD: torch.Tensor  # in storage precision
    span: Span

    @property
    def bytes(self) -> int:
        return self.rows_RD.numel() * self.rows_RD.element_size()


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of a sequence, as it is stored."""

    index: int
    text: str
    variant: Variant
    rows_LD: NDArray[Any]  # in storage precision; bfloat16 as its bits, uint16
    cls_D: NDArray[Any] | None = None  # the row of the mark before the residues, where the recipe keeps it

    @property
    def residues(self) -> int:
        """The residues of the text; a truncated one has fewer rows."""
        return len(self.text)

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of the record, rows first: loading reads them straight into a batch."""
        return {"rows": self.rows_LD} | ({} if self.cls_D is None else {"cls": self.cls_D})

    @property
    def meta(self) -> dict[str, Any]:
        """The metadata of the record, as JSON data."""
        cut = self.variant.cut
        return {
            "residues": self.residues,
            "rows": len(self.rows_LD),
            "precision": self.variant.precision,
            "cut": None if cut is None else {"policy": cut.policy, "length": cut.length, "overlap": cut.overlap},
        }


@dataclass(frozen=True, slots=True)
class Done:
    """A sequence whose embedding the sink has taken."""

    reason: ClassVar[None] = None
    index: int
    variant: Variant
