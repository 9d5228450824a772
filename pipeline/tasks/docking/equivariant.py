"""Equivariant convolutions over grids of edges, in plain torch, without any tensor of edges times weights.

A message is the tensor product of its sender's features with the harmonics of the edge's direction, with weights that
are linear in the edge's hidden features. A sum over edges of something linear in the hidden features is contracted
before it meets the weights: per receiver for most paths (`_heard`), per sender for those that turn many scalars into
few vectors (`_sent`).

Shapes: P poses, N residues, R rows and C columns of a grid (each cell an edge or nothing), S senders, A receivers, K
edges of one of them, H hidden features (and a 1), D components and M channels of a block, Q columns of what is summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from pipeline.tasks.irreps import DIRECTIONS, Irrep, ProductPath, coupling, harmonics, product_paths

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


ABSENT = -1e30  # added to hidden features before their activation where there is no edge
ABSENT_HALF = -6e4  # the same in float16, in which nothing is much larger
_OF_DEGREE = {1: slice(3), 2: slice(3, DIRECTIONS)}
# Factors of a path's scale for these harmonics and couplings of whole numbers: degree in, of the harmonics, out.
_NORMS = {
    (0, 0, 0): 1.0,
    (0, 1, 1): 1.0,
    (1, 0, 1): 1 / math.sqrt(3),
    (1, 1, 0): 1.0,
    (1, 1, 1): 1 / math.sqrt(2),
    (1, 2, 1): math.sqrt(3 / 2),
}


def edge_features(features_PRCM: Tensor, grid: Grid) -> Tensor:
    """Return the input of a convolution: edge features, a mark of absent edges, which cancels them, and a 1."""
    real_PRC1 = grid.real_PRC.unsqueeze(-1).expand(*features_PRCM.shape[:-1], 1)
    return torch.cat([features_PRCM, 1 - real_PRC1, torch.ones_like(real_PRC1)], -1)


def edge_harmonics(way_PRC3: Tensor, grid: Grid) -> Tensor:
    """Return the harmonics of edges' directions, and 0 where there is no edge [P, R, C, 8]."""
    return harmonics(way_PRC3) * grid.real_PRC.unsqueeze(-1)


def _whole_coupling(degree: int, result: int) -> Tensor:
    """Return the coupling of vectors and harmonics of a degree [3, 8, D]: halves and whole numbers, always exact."""
    symbol = coupling(1, degree, result)
    found = torch.zeros(3, DIRECTIONS, symbol.shape[-1])
    # each harmonic apart: those of the diagonal have another length than e3nn's
    largest = np.abs(symbol).max((0, 2), keepdims=True)
    found[:, _OF_DEGREE[degree]] = torch.from_numpy(np.round(2 * symbol / largest) / 2).float()
    return found


@dataclass(frozen=True)
class AllPairs:
    """A grid of every row's node with every column's; some of its cells are edges."""

    real_PRC: Tensor  # 1 where there is an edge, else 0

    def of_row(self, x_PRM: Tensor) -> Tensor:
        """Return the row's features, to be broadcast over cells."""
        return x_PRM.unsqueeze(2)

    def of_column(self, x_PCM: Tensor) -> Tensor:
        """Return the column's features, to be broadcast over cells."""
        return x_PCM.unsqueeze(1)

    def turned(self, cells_PRCM: Tensor) -> Tensor:
        """List cells by their column's node, or by their row's again."""
        return cells_PRCM.transpose(1, 2)

    turned_edges = turned_back = turned  # absent edges are 0 already

    def row_of_turned(self, x_PRM: Tensor) -> Tensor:
        """Return the row's features, to be broadcast over cells listed by column."""
        return x_PRM.unsqueeze(1)

    def degrees(self, *, by_row: bool) -> Tensor:
        """Count the edges of each node [P, N, 1, 1], at least 1."""
        return self.real_PRC.sum(2 if by_row else 1).clamp(min=1)[..., None, None]


@dataclass(frozen=True)
class ListedPairs:
    """A grid of every row's node with a few others, as `neighbours_RC` lists them: -1 where there is none."""

    column_RC: Tensor
    real_PRC: Tensor
    there_NK: Tensor  # the cells of each column's node, counted through
    back_RC: Tensor  # where each cell is among those
    real_NK: Tensor

    def of_row(self, x_PRM: Tensor) -> Tensor:
        """Return the row's features, to be broadcast over cells."""
        return x_PRM.unsqueeze(2)

    def of_column(self, x_PNM: Tensor) -> Tensor:
        """Return the column's features for every cell."""
        return _rows(x_PNM, self.column_RC)

    def turned(self, cells_PRCM: Tensor) -> Tensor:
        """List cells by their column's node."""
        return _rows(cells_PRCM.flatten(1, 2), self.there_NK)

    def turned_edges(self, edges_PRCM: Tensor) -> Tensor:
        """List cells by their column's node, with 0 where there is no edge."""
        return self.turned(edges_PRCM) * self.real_NK.unsqueeze(-1)

    def turned_back(self, cells_PNKM: Tensor) -> Tensor:
        """List cells by their row's node again."""
        return _rows(cells_PNKM.flatten(1, 2), self.back_RC)

    def row_of_turned(self, x_PRM: Tensor) -> Tensor:
        """Return the row's features for cells listed by column."""
        return _rows(x_PRM, self.there_NK // self.column_RC.shape[1])

    def degrees(self, *, by_row: bool) -> Tensor:
        """Count the edges of each node [1, N, 1, 1], at least 1."""
        counts_PN = self.real_PRC.sum(2) if by_row else self.real_NK.sum(1).unsqueeze(0)
        return counts_PN.clamp(min=1)[..., None, None]


def listed_pairs(neighbours_RC: Tensor, like: Tensor, least: int = 1) -> ListedPairs:
    """Return the grid of these neighbours (-1 where there is none); masks have the type of `like`.

    A node is given cells for at least `least` of those that list it, so that memory is the same for most proteins.
    """
    real_RC = neighbours_RC >= 0
    column_RC = neighbours_RC.clamp(min=0)
    nodes = len(neighbours_RC)
    cells_E = real_RC.flatten().nonzero().squeeze(1)
    owner_E = column_RC.flatten()[cells_E]
    order_E = owner_E.argsort(stable=True)
    counts_N = torch.bincount(owner_E, minlength=nodes)
    place_E = torch.arange(len(order_E), device=order_E.device) - (counts_N.cumsum(0) - counts_N)[owner_E[order_E]]
    most = max(least, int(counts_N.max()) if nodes else 1)
    there_NK, real_NK = (neighbours_RC.new_zeros(nodes, most) for _ in range(2))
    there_NK[owner_E[order_E], place_E] = cells_E[order_E]
    real_NK[owner_E[order_E], place_E] = 1
    back_RC = torch.zeros_like(column_RC).flatten()
    back_RC[cells_E[order_E]] = owner_E[order_E] * most + place_E
    return ListedPairs(
        column_RC=column_RC,
        real_PRC=real_RC.to(like).unsqueeze(0),
        there_NK=there_NK,
        back_RC=back_RC.view_as(column_RC),
        real_NK=real_NK.to(like),
    )


Grid: TypeAlias = AllPairs | ListedPairs
Blocks: TypeAlias = "tuple[Tensor, ...]"  # features by irrep, each [P, N, D, M]


class Edges(NamedTuple):
    """A grid's edges as a convolution takes them."""

    grid: Grid
    hidden_PRCH: Tensor  # 0 where there is no edge
    harmonics_PRC8: Tensor  # likewise


class Kernel(NamedTuple):
    """A convolution's weights as its contractions take them: made once for many poses."""

    inputs: tuple[Tensor, ...]  # [features, H] of the edge, the column's node and the row's
    bias_H: Tensor  # its last hidden feature is 1 everywhere
    same: dict[tuple[int, int], Tensor]  # block in, block out → [M · H, channels out]
    bent: dict[int, Tensor]  # block out → [M of all its paths · H, channels out]
    sent: tuple[Tensor, ...]  # [channels in, H · channels out]


class PairConvolution(nn.Module):
    """Means of messages by receiver: tensor products of senders' features with harmonics, weighted by a small network.

    The network reads features of the edge and of one or both of its ends: `inputs` has the width of each.
    """

    def __init__(self, enter: Sequence[Irrep], leave: Sequence[Irrep], inputs: Sequence[int]) -> None:
        super().__init__()
        self.enter, self.leave, self.inputs = tuple(enter), tuple(leave), tuple(inputs)
        self.paths, width = product_paths(enter, leave), sum(inputs)
        self.hidden = nn.Linear(width, width)
        self.weights = nn.Linear(width, sum(path.weights for path in self.paths))
        for degree, result in ((1, 0), (1, 1), (2, 1)):
            self.register_buffer(f"coupling_1{degree}{result}", _whole_coupling(degree, result), persistent=False)
        self.same = [path for path in self.paths if path.harmonic == 0]
        self.sent = [path for path in self.paths if path.harmonic and not enter[path.source].degree]
        self.bent = [path for path in self.paths if path.harmonic and enter[path.source].degree]
        self.bent.sort(key=lambda path: path.target)

    def kernel(self) -> Kernel:
        """Return the weights as the contractions take them."""
        weights_WH = torch.cat([self.weights.weight, self.weights.bias.unsqueeze(1)], 1)
        of_edge, *of_ends = functional.pad(self.hidden.weight.T, (0, 1)).split_with_sizes(self.inputs)
        return Kernel(
            inputs=(torch.cat([of_edge, torch.full_like(of_edge[:1], _absent(of_edge.device.type))]), *of_ends),
            bias_H=functional.pad(self.hidden.bias, (0, 1), value=1.0),
            same={path[:3:2]: self._of_path(weights_WH, path).flatten(0, 1) for path in self.same},
            bent={
                target: torch.cat([self._of_path(weights_WH, path).flatten(0, 1) for path in paths])
                for target, paths in groupby(self.bent, lambda path: path.target)
            },
            sent=tuple(self._of_path(weights_WH, path).flatten(1) for path in self.sent),
        )

    def edges(self, kernel: Kernel, grid: Grid, harmonics_PRC8: Tensor, inputs: Sequence[Tensor]) -> Edges:
        """Return a grid's edges with hidden features; inputs are `edge_features` and the nodes' [P, N, M]."""
        of_column = grid.of_column(inputs[1] @ kernel.inputs[1] + kernel.bias_H)
        of_row = grid.of_row(inputs[2] @ kernel.inputs[2]) if len(inputs) > 2 else None
        return Edges(grid, _hidden(inputs[0], kernel.inputs[0], of_column, of_row), harmonics_PRC8)

    def forward(self, kernel: Kernel, edges: Edges, senders: Blocks, *, row_sends: bool) -> Blocks:
        """Return the means of the messages from rows to columns, or from columns to rows."""
        grid, hidden, bends = edges
        if row_sends:
            heard = HeardEdges(grid.turned_edges(hidden), grid.turned_edges(bends), grid.turned, grid.row_of_turned)
        else:
            heard = HeardEdges(hidden, bends, grid.turned_back, grid.of_column)
            hidden, bends = grid.turned(hidden), grid.turned(bends)
        sums = [*self._same(kernel, heard, senders), *self._bent(kernel, heard, bends, senders)]
        sums += self._sent(kernel, heard, hidden, senders)
        degrees = grid.degrees(by_row=not row_sends)
        return tuple(sum(part for into, part in sums if into == at) / degrees for at in range(len(self.leave)))

    def _same(self, kernel: Kernel, heard: HeardEdges, senders: Blocks) -> Iterator[tuple[int, Tensor]]:
        """Yield the terms of degree-0 harmonics, which are the same for every edge."""
        sources = [path.source for path in self.same]
        if not sources:
            return
        x_PSQ = torch.cat([senders[source].flatten(2) for source in sources], -1)
        sums_PAQH = heard.stand(x_PSQ).transpose(-1, -2) @ heard.hidden_PAKH
        parts = sums_PAQH.split_with_sizes([math.prod(senders[source].shape[2:]) for source in sources], 2)
        for path, part_PAQH in zip(self.same, parts, strict=True):
            yield path.target, _mixed(part_PAQH, self.leave[path.target], kernel.same[path[:3:2]])

    def _bent(
        self, kernel: Kernel, heard: HeardEdges, bends_PSK8: Tensor, senders: Blocks
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the terms of vectors and directions, summed by receiver before the weights apply."""
        if not self.bent:
            return
        bent = {target: list(paths) for target, paths in groupby(self.bent, lambda path: path.target)}
        columns = [
            torch.cat([self._coupled(path, senders[path.source]) for path in paths], -1).flatten(3)
            for paths in bent.values()
        ]
        bent_PSKQ = bends_PSK8 @ torch.cat(columns, -1)
        sums_PAQH = heard.passed(bent_PSKQ).transpose(-1, -2) @ heard.hidden_PAKH
        for target, part_PAQH in zip(
            bent, sums_PAQH.split_with_sizes([part.shape[-1] for part in columns], 2), strict=True
        ):
            yield target, _mixed(part_PAQH, self.leave[target], kernel.bent[target])

    def _sent(
        self, kernel: Kernel, heard: HeardEdges, hidden_PSKH: Tensor, senders: Blocks
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield vectors of many scalars and a direction: the weights come first, so that there are few to sum."""
        if not self.sent:
            return
        hidden = hidden_PSKH.shape[-1]
        mixed = [
            senders[path.source].squeeze(2) @ weights for path, weights in zip(self.sent, kernel.sent, strict=True)
        ]
        mixed_PSHQ = torch.cat([part.view(*part.shape[:2], hidden, -1) for part in mixed], -1)
        sent_PAKQ = heard.passed(hidden_PSKH @ mixed_PSHQ)
        sums_PA3Q = heard.bends_PAK8[..., _OF_DEGREE[1]].transpose(-1, -2) @ sent_PAKQ
        widths = [self.leave[path.target].channels for path in self.sent]
        for path, part_PA3M in zip(self.sent, sums_PA3Q.split_with_sizes(widths, -1), strict=True):
            yield path.target, part_PA3M

    def _coupled(self, path: ProductPath, x_PS3M: Tensor) -> Tensor:
        """Return the coupling of a block with each harmonic [P, S, 8, D, M]."""
        coupled = self.get_buffer(f"coupling_1{path.harmonic}{self.leave[path.target].degree}")
        return torch.einsum("ijk,psiu->psjku", coupled, x_PS3M)

    def _of_path(self, weights_WH: Tensor, path: ProductPath) -> Tensor:
        """Return a path's weights [channels in, H, channels out], scaled."""
        rows_WH = weights_WH[path.first : path.first + path.weights]
        weights_MMH = rows_WH.view(self.enter[path.source].channels, -1, weights_WH.shape[1])
        return weights_MMH.transpose(1, 2) * (path.scale * _NORMS[path.degrees])


class HeardEdges(NamedTuple):
    """Edges by their receivers, and how to bring there features that are listed by senders."""

    hidden_PAKH: Tensor
    bends_PAK8: Tensor
    passed: Callable[[Tensor], Tensor]
    stand: Callable[[Tensor], Tensor]  # features of senders


def _absent(kind: str) -> float:
    """Return a number that cancels a hidden feature in the precision of products on a kind of device."""
    is_half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
    return ABSENT_HALF if is_half else ABSENT


def _hidden(edges_PRCM: Tensor, weights: Tensor, of_column: Tensor, of_row: Tensor | None) -> Tensor:
    """Return hidden features: of a sum of three in one product for each row, where the row's own is one more weight."""
    poses = max(len(edges_PRCM), len(of_column))
    _, rows, columns, _ = edges_PRCM.shape
    hidden = weights.shape[-1]
    if of_row is None:
        of_row = weights.new_zeros(1, rows, 1, hidden)
    weights = torch.cat([weights.expand(poses, rows, -1, -1), of_row.expand(poses, -1, -1, -1)], 2)
    sums = torch.baddbmm(
        of_column.expand(poses, rows, columns, -1).flatten(0, 1),
        edges_PRCM.expand(poses, -1, -1, -1).flatten(0, 1),
        weights.flatten(0, 1),
    )
    return sums.view(poses, rows, columns, hidden).relu_()


def _mixed(sums_PAQH: Tensor, block: Irrep, weights: Tensor) -> Tensor:
    """Contract sums with a path's weights [P, A, D, M]."""
    poses, receivers = sums_PAQH.shape[:2]
    # as one product of matrices: matmul makes one for each receiver if the memory is no matrix
    mixed = sums_PAQH.reshape(poses * receivers * block.components, len(weights)) @ weights
    return mixed.view(poses, receivers, block.components, -1)


def _rows(x_PNM: Tensor, index: Tensor) -> Tensor:
    """Return rows by an index of any shape."""
    return x_PNM.index_select(1, index.flatten()).view(len(x_PNM), *index.shape, -1)
