"""Measures how far gradients are from those of one batch, in float64.

Each kind of step makes one step of all items, cut at several budgets, while memory ends at random pieces of every rank.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from pipeline.training.ranks import Ranks
from tests.training.loop.loops import Plot, furthest
from tests.training.ranks.crews import crew
from tests.training.step.kinds import GRADIENT, Trouble, outcome, true_gradient

EXACT = 1e-10
CASES = [
    ("local", 1),
    ("ranks", 2),
    ("ranks", 3),
    ("ranks", 4),
    ("contrastive", 1),
    ("contrastive ranks", 2),
    ("contrastive ranks", 4),
    ("sharded", 2),
    ("sharded", 3),
    ("sharded", 4),
]
PLOTS = [
    Plot(train={**GRADIENT, "effective_batch": items}, items=items, budget=budget, terms=terms)
    for items, budget, terms in ((11, 40, "one"), (11, 200, "several"), (11, 60, "weighted"), (1, 40, "several"))
]
SHARE = 0.2  # of the pieces of several items do not fit


class AtRandom(Trouble):
    """Memory that ends at random pieces, other ones on each rank: before their forward, or within their backward."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng, self.ooms = random.Random(seed), 0

    def _strikes(self, site: str, items: int = 2) -> bool:
        strikes = site in ("forward", "backward", "embed") and items > 1 and self._rng.random() < SHARE
        self.ooms += strikes
        return strikes


def gradients(ranks: Ranks, folder: Path, name: str, fails: bool) -> list[Any]:
    """Return the gradients of a step of each plot, and how often memory ended."""
    found = []
    for number, plot in enumerate(PLOTS):
        trouble = AtRandom(100 * number + ranks.rank) if fails else Trouble()
        done = outcome(name, plot, folder / f"{number}", ranks, trouble)
        found.append({**done, "struck": getattr(trouble, "ooms", 0)})
    return found


def largest_difference(folder: Path, name: str, world: int, *, fails: bool) -> tuple[float, int]:
    """Return the largest difference to the gradient of one batch, and how often memory ended."""
    folder.mkdir(parents=True, exist_ok=True)
    if world == 1:
        ranks = [gradients(Ranks(), folder, name, fails)]
    else:
        ranks = crew(folder, world, gradients, folder, name, fails).results()
    apart = 0.0
    for number, plot in enumerate(PLOTS):
        true = true_gradient(name, plot)
        for done in (rank[number] for rank in ranks):
            assert done["state"] == ranks[0][number]["state"], "all ranks have the same parameters"
            apart = max(apart, furthest({part: done["lost"][part] for part in true}, true))
    return apart, sum(done["struck"] for rank in ranks for done in rank)
