"""The ways of computing one sequence, from the one that is wanted down to the last that will do.

Memory that does not suffice leads down: whole → windows (or the CPU, as configured) → the CPU → nothing. A number that
is not finite leads from half to full precision. Only variants that the recipe accepts are steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline.encoder.recipe import Variant
from pipeline.encoder.tokens import ENDS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pipeline.encoder.recipe import Cut, Recipe


@dataclass(frozen=True, slots=True)
class Step:
    """Where and how a sequence is computed."""

    device: str  # cpu or cuda
    variant: Variant


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence on its way."""

    index: int  # its place in what the engine was given
    text: str
    tokens_L: NDArray[np.uint8]  # of the residues that get a row
    step: Step

    @property
    def windows(self) -> Cut | None:
        """Return the windows it is cut into; None where it goes through the encoder as one."""
        cut = self.step.variant.cut
        return cut if cut is not None and cut.policy == "windows" else None

    @property
    def tokens(self) -> int:
        """Count the tokens it has as one."""
        return len(self.tokens_L) + ENDS

    def at(self, step: Step) -> Work:
        """Return the same sequence on another step; windows never follow a truncation, so its tokens stay."""
        return replace(self, step=step)


def first(recipe: Recipe, precision: str, residues: int, device: str) -> Step:
    """Return how a sequence of that length is computed to begin with."""
    return Step(device, Variant(precision, recipe.wanted(residues).cut))


def below(recipe: Recipe, residues: int, step: Step) -> Step | None:
    """Return what to try when a step does not fit the memory; None when nothing is left."""
    cut = recipe.windowed(residues)
    lower = [Step(step.device, replace(step.variant, cut=cut))] if cut != step.variant.cut else []
    if step.device != "cpu":
        lower.append(Step("cpu", Variant("fp32", cut)))
    accepted = recipe.accepted(residues)
    return next((one for one in lower if one.variant in accepted), None)


def full_precision(recipe: Recipe, step: Step) -> Step | None:
    """Return what to try when a step gives numbers that are not finite; None when nothing is left."""
    if step.variant.precision == "fp32" or not recipe.half_fallback:
        return None
    return replace(step, variant=replace(step.variant, precision="fp32"))
