"""From texts to arrays: reads ahead, computes, writes behind; memory is flat however many sequences there are.

Shapes: N sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from pipeline.encoder import budget, schedule
from pipeline.encoder.checkpoint import as_dtype
from pipeline.encoder.esm2 import Encoder
from pipeline.encoder.figures import Figures
from pipeline.encoder.flow import Done, Flow
from pipeline.encoder.ladder import Ladder, Refused
from pipeline.encoder.recipe import Variant
from pipeline.encoder.settings import Settings
from pipeline.encoder.steps import Step
from pipeline.encoder.threads import Embedding, Reader, Writer
from pipeline.errors import PlanInfeasible
from pipeline.memory.oom import unless_out_of_memory
from pipeline.records import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pipeline.encoder.checkpoint import Checkpoint
    from pipeline.encoder.recipe import Recipe

    Integers = NDArray[np.int64]

__all__ = ["Done", "Embedding", "Engine", "Figures", "Refused", "Settings"]


class Builder(Protocol):
    """What makes an encoder: the class itself, or a stand-in."""

    def __call__(self, checkpoint: Checkpoint, *, layer: int, precision: str, device: torch.device) -> Encoder: ...


class Engine:
    """Embeds sequences with one checkpoint by one recipe; `figures` tell how far it is."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: Recipe,
        settings: Settings,
        *,
        precision: str | None = None,
        ceiling: int | None = None,
        learned: Callable[[int], None] = lambda _: None,
        build: Builder = Encoder,
        on: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> None:
        self.figures = Figures()
        self._checkpoint, self._recipe, self._settings, self._build = checkpoint, recipe, settings, build
        self._main = Step(settings.device, Variant(precision or recipe.precision))
        if self._main.variant not in recipe.accepted(0):
            raise ValueError(f"the recipe does not accept {self._main.variant.precision}")
        self._ceiling, self._on = ceiling, on
        storage = as_dtype(recipe.storage)
        self._ladder = Ladder(recipe, self._main, self._encoder, storage, self.figures, learned, settings.mem_bytes)

    def run(
        self,
        lengths_N: Integers,
        read: Callable[[Sequence[int]], Sequence[str]],
        sink: Callable[[Embedding], None],
    ) -> Generator[Done | Refused, None, None]:
        """Embed N sequences of known length, told from each other by their place; yield what became of each.

        `read` is called in a thread of its own, `sink` in another, each by nobody else. An outcome is yielded after the
        sink took the embedding. However this ends, what had been computed is given to the sink first, all but the
        batch under way; a failure of `read` or `sink` is raised here.
        """
        refused_N = schedule.too_long(lengths_N, self._recipe)
        for index in refused_N.tolist():
            self.figures.refused += 1
            what = f"{lengths_N[index]:,} residues; no more than {self._recipe.length:,} are wanted"
            yield Refused(index, Reason.SEQUENCE_TOO_LONG, what)
        if len(refused_N) == len(lengths_N):
            return
        self._set_budget()
        with Writer(sink) as writer, Reader(read, lengths_N, self._recipe, self._main) as reader:
            yield from self._run(lengths_N, refused_N, reader, writer)

    def _run(
        self, lengths_N: Integers, refused_N: Integers, reader: Reader, writer: Writer
    ) -> Iterator[Done | Refused]:
        """Pass on what becomes of the sequences that are not refused, and keep the figures."""
        settings = self._settings
        cap = None if settings.cap == "auto" else settings.cap
        order = schedule.Schedule(lengths_N, refused_N, self._recipe, policy=settings.policy, cap=cap)
        costs_N = schedule.costs(lengths_N, self._recipe, self._checkpoint.architecture.dim)
        for outcome in Flow(self._ladder, self._recipe, self.figures, order, reader, writer, self._on).outcomes():
            self.figures.refused += isinstance(outcome, Refused)
            self.figures.cost_done += float(costs_N[outcome.index])
            yield outcome

    def _encoder(self, device: str, precision: str) -> Encoder:
        return self._build(self._checkpoint, layer=self._recipe.layer, precision=precision, device=torch.device(device))

    def _set_budget(self) -> None:
        """Build the encoder and measure what fits beside it, once."""
        if self._ladder.budget:
            return
        tokens = unless_out_of_memory(self._measure)
        if tokens is None:
            what = f"the weights of {self._checkpoint.name} do not fit the memory of this {self._main.device} process"
            raise PlanInfeasible(what, remedy="a smaller model, or more memory (cluster.embed.mem)")
        self._ladder.allow(max(1, min(tokens, self._ceiling or tokens) >> self._settings.shrink))

    def _measure(self) -> int:
        encoder = self._ladder.main
        if self._settings.budget != "auto":
            return self._settings.budget
        return budget.measured(encoder, self._settings.device, self._ladder.room)
