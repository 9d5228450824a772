"""Matching left sides to right sides: two towers, with all other items of a step as negatives (the CLIP family).

    train: {task: "pipeline.tasks.contrastive_pair:ContrastivePair", options: {left: vectors, left_dim: 768},
            batching: padded}

An item has `left.token` and `right.token`, bytes of a text or a sequence, or `left.vector` and `right.vector`, such as
the patches of an image. Of a side with more than `left_most`, `right_most` rows the first are read. A tower sees one
item at a time.

The loss is of all items of a step together, so micro-batches do not add up to it: 8 of 16 give each item 15 others, one
of 128 gives it 127. So the task separates embeddings from their loss (`protocol.Contrastive`), and `loss` is that of a
single batch. Shapes: B items, L rows of the longest item and its class token, D features, N items of a split, K and M
items of two blocks of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from pipeline.errors import ConfigError
from pipeline.protocol import ITEMS
from pipeline.tasks.task_parts import (
    WHERE,
    AttentionLayer,
    at_least,
    at_least_single,
    dropout_of,
    example_mask,
    padded_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from pipeline.protocol import Sizes
    from pipeline.training.items.batch import ItemTensors

    Floats = NDArray[np.float32]
    Counts = NDArray[np.int64]

SIDES = (LEFT, RIGHT) = ("left", "right")
TOKENS, VECTORS = "tokens", "vectors"
FIELD = {TOKENS: "token", VECTORS: "vector"}
PAIRS = "pairs"
BYTES = 256
COLDEST = 0.01  # temperature, as CLIP has it: cosines are multiplied by 100 at most
SPREAD = 0.02  # of what is learned for places, to begin with
BLOCK = 2048  # items whose embeddings are held at once, twice
ALIKE = 1e-6  # cosines no further apart are ties
AT = (1, 5)
COUNTS = ("left_most", "right_most", "width", "layers", "heads", "feedforward", "out")
LEAST = {**dict.fromkeys(COUNTS, 1), "temperature": COLDEST}


class Rows(NamedTuple):
    """One side of a batch's items, padded."""

    values: Tensor  # [B, L] bytes, or vectors [B, L, D]
    real_BL: Tensor | None  # which are real, the class token first; None: all are


class PairBatch(NamedTuple):
    """Both sides of a batch's items."""

    left: Rows
    right: Rows


class Tower(nn.Module):
    """A transformer that embeds one side of an item as a vector of length 1."""

    def __init__(self, task: ContrastivePair, kind: str, dim: int, most: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, task.width) if kind == TOKENS else nn.Linear(dim, task.width)
        self.whole_D = nn.Parameter(SPREAD * torch.randn(task.width))  # the class token, whose output embeds the item
        self.place_LD = nn.Parameter(SPREAD * torch.randn(most, task.width))
        inner = task.feedforward * task.width
        self.layers = nn.ModuleList(
            AttentionLayer(task.width, task.heads, inner, task.dropout, functional.gelu) for _ in range(task.layers)
        )
        self.norm, self.out = nn.LayerNorm(task.width), nn.Linear(task.width, task.out, bias=False)

    def forward(self, rows: Rows) -> Tensor:
        """Return the vector of each item [B, D]."""
        x_BLD = self.embed(rows.values) + self.place_LD[: rows.values.shape[1]]
        x_BLD = torch.cat([self.whole_D.expand(len(x_BLD), 1, -1), x_BLD], 1)
        for layer in self.layers:
            x_BLD = layer(x_BLD, rows.real_BL)
        vector_BD = self.out(self.norm(x_BLD[:, 0]))
        return functional.normalize(at_least_single(vector_BD), dim=-1)


class Towers(nn.Module):
    """Both towers, and the learned scale (inverse temperature) of their cosines."""

    def __init__(self, task: ContrastivePair) -> None:
        super().__init__()
        self.left = Tower(task, task.left, task.left_dim, task.left_most)
        self.right = Tower(task, task.right, task.right_dim, task.right_most)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(task.temperature)))

    def forward(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        return self.left(batch.left), self.right(batch.right)

    def scale(self) -> Tensor:
        """Return the factor on cosines; it is capped, but keeps its gradient beyond the cap and can come back."""
        above = (self.log_scale + math.log(COLDEST)).clamp(min=0).detach()
        return (self.log_scale - above).exp()


@dataclass(frozen=True)
class ContrastivePair:
    """The task: each item's two sides must find each other among all items of a step."""

    left: str = TOKENS  # tokens: bytes, or vectors
    right: str = TOKENS
    left_dim: int = 0  # numbers of a vector of the left side, where it has vectors
    right_dim: int = 0
    left_most: int = 256  # tokens or vectors of an item that are read: the first ones
    right_most: int = 256
    width: int = 512
    layers: int = 12  # of each tower
    heads: int = 8
    feedforward: int = 4  # how much wider a layer is within
    out: int = 512  # numbers of the vectors that are compared
    temperature: float = 0.07  # to begin with: it is learned, and stays above 0.01
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for side in SIDES:
            self._check_side(side)
        at_least(self, LEAST)
        dropout_of(self)
        if self.width % self.heads:
            problem = f"{self.width} features cannot be divided among {self.heads} heads"
            raise ConfigError(problem, where=f"{WHERE}.heads", remedy=f"--set {WHERE}.width={64 * self.heads}")

    def _check_side(self, side: str) -> None:
        """Refuse a side of an unknown kind, or of vectors without a size."""
        if (kind := getattr(self, side)) not in FIELD:
            problem = f"{side} is {kind!r}: it must be {TOKENS} or {VECTORS}"
            raise ConfigError(problem, where=f"{WHERE}.{side}", remedy=f"--set {WHERE}.{side}={TOKENS}")
        if kind == VECTORS and getattr(self, f"{side}_dim") < 1:
            problem = f"{side} has vectors: say how many numbers each has"
            raise ConfigError(problem, where=f"{WHERE}.{side}_dim", remedy=f"--set {WHERE}.{side}_dim=768")

    def model(self) -> nn.Module:
        return Towers(self)

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return all trained parameters; the temperature has no weight decay, as in CLIP."""
        scale = model.log_scale
        others = [weight for weight in model.parameters() if weight.requires_grad and weight is not scale]
        groups: list[dict[str, Any]] = [{"params": others}] if others else []
        return [*groups, {"params": [scale], "weight_decay": 0.0}] if scale.requires_grad else groups

    def cost(self, item: Mapping[str, Any]) -> dict[str, Any]:
        return {side: np.minimum(item[side], getattr(self, f"{side}_most")) for side in SIDES}

    def collate(self, items: Sequence[ItemTensors], rng: np.random.Generator) -> PairBatch:  # noqa: ARG002 - the protocol has it
        return PairBatch(*(self._rows(side, items) for side in SIDES))

    def _rows(self, side: str, items: Sequence[ItemTensors]) -> Rows:
        """Return one side of items."""
        taken = [self._taken(side, item) for item in items]
        values, real_BL = padded_rows(taken)
        whole = None if real_BL is None else functional.pad(real_BL, (1, 0), value=True)
        return Rows(values.long() if getattr(self, side) == TOKENS else values.float(), whole)

    def _taken(self, side: str, item: ItemTensors) -> Tensor:
        """Return the rows of one side that are read; the configuration must fit them."""
        name = f"{side}.{FIELD[getattr(self, side)]}"
        if name not in item.values:
            problem = f"the task reads {name}; {item.id} has {', '.join(sorted(item.values)) or 'no arrays'}"
            raise ConfigError(problem, where=f"{WHERE}.{side}", remedy=f"--set {WHERE}.{side}={TOKENS} (or {VECTORS})")
        rows = item.values[name][: getattr(self, f"{side}_most")]
        dim = getattr(self, f"{side}_dim")
        if getattr(self, side) == VECTORS and rows.shape[1:] != (dim,):
            problem = f"the task reads vectors of {dim} numbers, {name} of {item.id} is of {list(rows.shape[1:])}"
            raise ConfigError(problem, where=f"{WHERE}.{side}_dim", remedy=f"--set {WHERE}.{side}_dim={rows.shape[-1]}")
        return rows

    def embed(self, model: nn.Module, batch: PairBatch) -> dict[str, Tensor]:
        """Return the vectors of both sides of each item; no item sees another."""
        return dict(zip(SIDES, model(batch), strict=True))

    def contrast(self, model: nn.Module, embedded: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, float]]:
        """Return the cross entropy of finding the right from the left and back, the mean of both, over all items."""
        left_BD, right_BD = (at_least_single(embedded[side]) for side in SIDES)
        with torch.autocast(left_BD.device.type, enabled=False):
            logits_BB = model.scale() * left_BD @ right_BD.T  # type: ignore[operator]  # it is Towers
            missed_B = (logits_BB.logsumexp(0) + logits_BB.logsumexp(1)) / 2 - logits_BB.diagonal()
        return {PAIRS: (missed_B.sum(), float(len(left_BD)))}

    def loss(self, model: nn.Module, batch: PairBatch) -> dict[str, tuple[Tensor, float]]:
        """Return the loss of a single batch: the step's loss where it is the only one."""
        return self.contrast(model, self.embed(model, batch))

    def outputs(self, model: nn.Module, batch: PairBatch) -> dict[str, Tensor]:
        """Return the vectors of each item, and how similar they are: their cosine."""
        vectors = self.embed(model, batch)
        return vectors | {"similarity": torch.cosine_similarity(vectors[LEFT], vectors[RIGHT])}

    def metrics(self, outputs: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Return how often an item's other side is the nearest, or among the nearest 5, of all in the split.

        And its mean rank, from 1. Among ties every place is equally likely, so towers whose vectors are all the same
        score as chance does.
        """
        figures = {}
        ways = (f"{LEFT}_to_{RIGHT}", f"{RIGHT}_to_{LEFT}")
        for way, (nearer_N, tied_N) in zip(ways, _places(outputs[LEFT], outputs[RIGHT]), strict=True):
            for most in AT:
                found_N = np.clip((most - nearer_N) / (1 + tied_N), 0, 1)
                figures[f"{way}_at_{most}"] = float(found_N.mean())
            figures[f"{way}_mean_rank"] = float((1 + nearer_N + tied_N / 2).mean())
        return figures

    def example(self, sizes: Sizes) -> PairBatch:
        return PairBatch(*(self._example(side, sizes[ITEMS], sizes[side]) for side in SIDES))

    def _example(self, side: str, items: int, length: int) -> Rows:
        real_BL = example_mask(items, 1 + length)
        if getattr(self, side) == TOKENS:
            return Rows(torch.randint(BYTES, (items, length)), real_BL)
        return Rows(torch.randn(items, length, getattr(self, f"{side}_dim")), real_BL)


def _places(left: Sequence[Any], right: Sequence[Any]) -> list[tuple[Counts, Counts]]:
    """Count for each left the other rights that are nearer than its own, and the ties; likewise for each right.

    Two blocks of items and their cosines are held at a time. NaN counts as nearer than anything.
    """
    pairs = zip(_blocks(left), _blocks(right), strict=True)
    own_N = np.concatenate([(left_KD * right_KD).sum(1) for (_, left_KD), (_, right_KD) in pairs])
    ways = [(np.zeros(len(own_N), np.int64), np.zeros(len(own_N), np.int64)) for _ in range(2)]
    for rows, left_KD in _blocks(left):
        for columns, right_MD in _blocks(right):
            cosine_KM = left_KD @ right_MD.T
            if rows == columns:
                np.fill_diagonal(cosine_KM, -np.inf)  # an item's own other side is not counted
            _count(ways[0], rows, cosine_KM, own_N[rows])
            _count(ways[1], columns, cosine_KM.T, own_N[columns])
    return ways


def _count(way: tuple[Counts, Counts], rows: slice, cosine_KM: Floats, own_K: Floats) -> None:
    """Add a block's counts: items nearer than the own other side, and ties."""
    above_KM = cosine_KM - own_K[:, None]
    is_below_KM = above_KM < -ALIKE
    is_tied_KM = np.abs(above_KM) <= ALIKE
    is_other_KM = cosine_KM != -np.inf
    way[0][rows] += (~is_below_KM & ~is_tied_KM & is_other_KM).sum(1)
    way[1][rows] += is_tied_KM.sum(1)


def _blocks(vectors: Sequence[Any]) -> Iterator[tuple[slice, Floats]]:
    """Yield the vectors in blocks of items, each with its slice."""
    for start in range(0, len(vectors), BLOCK):
        rows = slice(start, min(start + BLOCK, len(vectors)))
        yield rows, np.stack([np.asarray(vectors[place], np.float32) for place in range(rows.start, rows.stop)])
