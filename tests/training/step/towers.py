"""Two tiny towers whose pairs must find each other among all items of a step; as a task of trainings and of traces.

Shapes: B items, D features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.training.loop.loops import Plot

WIDTH = 12


class Towers(nn.Module):
    """Both towers, a temperature, and a tower that nothing uses."""

    def __init__(self, task: Pairs) -> None:
        super().__init__()
        self.left, self.right = (_tower(task) for _ in range(2))
        self.sharpness = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, left_BD: Tensor, right_BD: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.seen += len(left_BD)
        return functional.normalize(self.left(left_BD), dim=-1), functional.normalize(self.right(right_BD), dim=-1)


def _tower(task: Pairs) -> nn.Module:
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(task.width, task.width), nn.Tanh(), nn.Dropout(task.dropout)) for _ in range(task.depth)
    )
    norm = nn.BatchNorm1d(task.width) if task.norm else nn.Identity()
    return nn.Sequential(nn.Linear(WIDTH, task.width), norm, *blocks, nn.Linear(task.width, task.out))


@dataclass(frozen=True)
class Pairs:
    """A pair for each item: two views of its nodes."""

    width: int = 8
    out: int = 6
    depth: int = 2
    dropout: float = 0.0
    norm: bool = False
    double: bool = True
    terms: int = 1  # 2: one more, with weights of another kind
    nan: tuple[int, ...] = ()  # items

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    def model(self) -> nn.Module:
        return Towers(self).to(self.dtype)

    def cost(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"nodes": item["nodes"]}

    def collate(self, items: Sequence[Any], rng: np.random.Generator) -> dict[str, Any]:
        pairs = [self._pair(item) for item in items]
        left_BD, right_BD = (torch.stack(side) for side in zip(*pairs, strict=True))
        return {"left": left_BD, "right": right_BD, "ids": tuple(item.id for item in items)}

    def _pair(self, item: Any) -> tuple[Tensor, Tensor]:
        x_ND = item.sides["receptor"].nodes["pos"].reshape(-1, WIDTH).to(self.dtype)
        left_D = x_ND.mean(0) + 0.01 * float(item.rng.normal())
        if int(item.id[4:]) in self.nan:
            left_D = left_D * torch.nan
        return left_D, x_ND[0]

    def embed(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        left_BD, right_BD = model(batch["left"], batch["right"])
        return {"left": left_BD, "right": right_BD, "size": batch["left"].detach().norm(dim=1) > 0}

    def contrast(self, model: nn.Module, embedded: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, float]]:
        left_BD, right_BD = embedded["left"], embedded["right"]
        likeness_BB = model.sharpness.exp() * left_BD @ right_BD.T  # type: ignore[operator]
        own_B = torch.arange(len(left_BD), device=left_BD.device)
        terms = {"pairs": (functional.cross_entropy(likeness_BB, own_B, reduction="sum"), float(len(left_BD)))}
        if self.terms > 1:
            terms["spread"] = ((left_BD.mean(0) - right_BD.mean(0)).square().sum(), 3.0)
        return terms

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, float]]:
        return self.contrast(model, self.embed(model, batch))

    def example(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        return drawn(sizes["items"], self.dtype)


def drawn(items: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    """Return some pairs."""
    left_BD = torch.randn(items, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return {"left": left_BD, "right": left_BD.roll(1, 1)}


def cut(batch: Mapping[str, Tensor], sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    """Return a batch in parts of some sizes."""
    sides = {name: one.split(list(sizes)) for name, one in batch.items()}
    return [{name: parts[place] for name, parts in sides.items()} for place in range(len(sizes))]


def of(plot: Plot) -> Pairs:
    """Return the task of a plot."""
    return Pairs(dropout=plot.dropout, double=plot.config().precision == "fp32", nan=tuple(plot.nan))
