"""Seed 004's 128 negatives: gradients of the recipe's task, however 128 pairs are cut, beside those of one batch.

Shapes: N items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.recipes_parts.bench import Bench
from pipeline.training.step.contrastive import ContrastiveStep

RECIPES = ("contrastive_pair",)
ITEMS = 128
REACH = 1e-10
SMALL = ["width=64", "layers=2", "heads=1", "out=64", "image_width=64", "image_layers=2", "vocabulary=1000"]
CUTS = {
    "8 x 16": [16] * 8,
    "16 x 8": [8] * 16,
    "128 x 1": [1] * ITEMS,
    "uneven: 1, 7, 30, 40, 50": [1, 7, 30, 40, 50],
}
Gradients = Mapping[str, Tensor]


class Caught(ContrastiveStep):
    """Keeps what the optimizer is given."""

    def apply(self) -> None:
        """Keep the gradients."""
        self.caught = {name: one.grad.clone() for name, one in self.model.named_parameters() if one.grad is not None}
        super().apply()


def measured(recipe: str) -> list[dict[str, Any]]:
    """Return the errors of each cut; print them."""
    bench = Bench.of(recipe, [f"train.options.{one}" for one in SMALL], ITEMS)
    whole = one_batch(bench)
    rows = []
    for name, sizes in CUTS.items():
        exact, plain = errors(stepped(bench, sizes), whole), errors(accumulated(bench, sizes), whole)
        rows.append({"cut": name, "two_passes": exact, "plain_accumulation": plain})
        print(f"{name:28}{exact['largest']:12.2e}{plain['largest']:12.2e}{plain['whole']:12.2e}", flush=True)
    return rows


def told(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the figures come to."""
    return {
        "what": f"gradients in float64 of {ITEMS} made images with captions, read by the recipe's reader and padded "
        "batch by batch, beside plain autograd of one batch of all; largest: of any parameter's gradient, the norm of "
        f"its error over its own; whole: the same of all gradients together; small model: {', '.join(SMALL)}; plain "
        "accumulation: the mean over micro-batches of their own losses, each with the negatives that it has itself",
        "reach": f"{REACH:.0e}",
        "worst": max(row["two_passes"]["largest"] for row in rows),
        "plain_accumulation_is_off_by": {row["cut"]: row["plain_accumulation"]["whole"] for row in rows},
    }


def _model(bench: Bench) -> torch.nn.Module:
    torch.manual_seed(0)
    return bench.work.task.model().double()


def _batches(bench: Bench, sizes: Sequence[int]) -> list[Any]:
    """Return the pairs, so many at a time."""
    ends = np.cumsum(sizes)
    numbers = [list(range(end - size, end)) for size, end in zip(sizes, ends.tolist(), strict=True)]
    return [bench.work.task.collate(bench.data.items(cut), np.random.default_rng(0)) for cut in numbers]


def one_batch(bench: Bench) -> Gradients:
    """Return the gradients of all pairs as one batch, by autograd alone."""
    return _plain(bench, [ITEMS])


def accumulated(bench: Bench, sizes: Sequence[int]) -> Gradients:
    """Return what accumulating the losses of micro-batches gives."""
    return _plain(bench, sizes)


def _plain(bench: Bench, sizes: Sequence[int]) -> Gradients:
    model = _model(bench)
    for batch in _batches(bench, sizes):
        for total, _ in bench.work.task.loss(model, batch).values():
            (total / ITEMS).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def stepped(bench: Bench, sizes: Sequence[int]) -> Gradients:
    """Return what the optimizer is given by a step of these micro-batches."""
    settings = replace(bench.work.settings, clip=None, batch=ITEMS)
    step = Caught(bench.work.task, settings, model=_model(bench))
    step.run(_batches(bench, sizes))
    return step.caught


def errors(found: Gradients, true: Gradients) -> dict[str, float]:
    """Return the largest error of a parameter's gradient beside its norm, and that of all together."""
    assert found.keys() == true.keys()
    apart = {name: float((found[name] - one).norm()) for name, one in true.items()}
    norms = {name: float(one.norm()) for name, one in true.items()}
    return {
        "largest": max(apart[name] / norms[name] for name in true),
        "whole": float(np.linalg.norm([*apart.values()]) / np.linalg.norm([*norms.values()])),
    }
