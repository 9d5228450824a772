"""How far above a prediction a plan stays, and how likely it is then that all fits.

Before anything was measured, margin and probability are assumptions, and called so. After n runs, the worst of their
ratios measured/predicted corrects the prediction: of n + 1 runs that are alike, whose order says nothing, the next is
the worst with a chance of 1/(n + 1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline.memory.footprint import Origin

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FIRST_CONTACT = {  # what is added to a prediction for the caching allocator of a card, by where it is from
    Origin.MEASURED: 0.02,
    Origin.TRACED: 0.08,
    Origin.SIMULATED: 0.08,
    Origin.EXTRAPOLATED: 0.15,
    Origin.ASSUMED: 0.30,
}
LIVE_ONLY = {**FIRST_CONTACT, Origin.TRACED: 0.02, Origin.SIMULATED: 0.02}  # no allocator stands between
ASSUMED_PROBABILITY = 0.95
REPEATED = 0.02  # how far a run that is repeated is from itself
COMPILED = 0.10  # fusing mostly saves memory; its buffers, autotuning and CUDA graphs may take some: assumed
LEAST = 0.9  # of a prediction is kept, whatever was measured
_SUREST_FIRST = tuple(Origin)


@dataclass(frozen=True, slots=True)
class Margin:
    """What a prediction is multiplied by, and what that is good for."""

    factor: float
    probability: float  # that a run fits
    origin: Origin  # of the factor
    why: str
    trust: Origin = Origin.ASSUMED  # of the probability


def margin_of(origin: Origin, ratios: Sequence[float] = (), *, caching: bool = True) -> Margin:
    """Return the margin for a prediction of some origin, after runs with these ratios measured/predicted."""
    if ratios:
        return _after(ratios)
    extra = (FIRST_CONTACT if caching else LIVE_ONLY)[origin]
    why = f"nothing measured yet: {extra:.0%} on what is {origin.value}, assumed to do in {ASSUMED_PROBABILITY:.0%}"
    return Margin(1.0 + extra, ASSUMED_PROBABILITY, Origin.ASSUMED, why)


def _after(ratios: Sequence[float]) -> Margin:
    """Return the margin after measurements: what they show alone is little while they are few, and is said so."""
    worst, runs = max(ratios), len(ratios)
    shown = runs / (runs + 1)
    trust = Origin.MEASURED if shown >= ASSUMED_PROBABILITY else Origin.ASSUMED
    assumed = f"; with these {REPEATED:.0%}, {ASSUMED_PROBABILITY:.0%} is assumed" if trust is Origin.ASSUMED else ""
    why = (
        f"the worst of {runs} measured run{'s' if runs > 1 else ''} was {worst:.3f} of its prediction, "
        f"{REPEATED:.0%} are added; the next run is no worse than {'all' if runs > 1 else 'that one'} "
        f"with a chance of {runs}/{runs + 1}{assumed}"
    )
    return Margin(max(worst, LEAST) * (1.0 + REPEATED), max(shown, ASSUMED_PROBABILITY), Origin.MEASURED, why, trust)


def compiled(margin: Margin) -> Margin:
    """Return the margin of a model that is compiled: planned as it runs eagerly, and more for what fusing changes."""
    why = f"{margin.why}; compiled: planned as eager, and {COMPILED:.0%}"
    return replace(margin, factor=margin.factor * (1.0 + COMPILED), why=why)


def least_sure(origins: Iterable[Origin]) -> Origin:
    """Return the origin of what is made of several numbers."""
    return max(origins, key=_SUREST_FIRST.index, default=Origin.TRACED)
