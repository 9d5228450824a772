"""Convolutions against e3nn's tensor product and against sums edge by edge."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pipeline.tasks.docking.equivariant import (
    PairConvolution,
    edge_features,
    edge_harmonics,
    listed_pairs,
)
from pipeline.tasks.docking.score_network import TrunkSizes
from pipeline.tasks.irreps import Irrep, harmonics

SIZES = TrunkSizes(scalars=5, vectors=3)
LAYERS = [(SIZES.irreps(layer), SIZES.irreps(layer + 1)) for layer in range(4)]
HEAD = (SIZES.irreps(4), (Irrep(2, 1, -1), Irrep(2, 1, 1)))
TOLD, NODES = 4, 7
ANGLES = "1x0e+1x1o+1x2e"


def e3nn_product(enter, leave):
    """Their product and harmonics, whose constants have the precision that is the default when they are made."""
    o3 = pytest.importorskip("e3nn.o3", reason="e3nn is not installed: pip install e3nn")
    texts = [
        "+".join(f"{m}x{degree}{'e' if even == 1 else 'o'}" for m, degree, even in side) for side in (enter, leave)
    ]
    torch.set_default_dtype(torch.float64)
    try:
        product = o3.FullyConnectedTensorProduct(texts[0], ANGLES, texts[1], shared_weights=False)
    finally:
        torch.set_default_dtype(torch.float32)
    return product, partial(o3.spherical_harmonics, [0, 1, 2], normalize=True, normalization="component")


def made(enter, leave):
    """A convolution, and random features of nodes that send and that are told of."""
    torch.manual_seed(0)
    convolution = PairConvolution(enter, leave, [TOLD] * 3).double()
    senders = tuple(torch.randn(1, NODES, block.components, block.channels, dtype=torch.float64) for block in enter)
    return convolution, senders, torch.randn(1, NODES, TOLD, dtype=torch.float64)


def edge_by_edge(convolution, senders, told_PNM, edges):
    """Sum e3nn's messages over (receiver, sender, way, features, column, row), and divide by their number."""
    product, angles = e3nn_product(convolution.enter, convolution.leave)
    flat = torch.cat([block[0].transpose(1, 2).flatten(1) for block in senders], -1)
    sums, counts = torch.zeros(NODES, product.irreps_out.dim, dtype=torch.float64), torch.zeros(NODES, 1)
    for receiver, sender, way, features, column, row in edges:
        told = torch.cat([features, told_PNM[0, column], told_PNM[0, row]])
        weights = convolution.weights(convolution.hidden(told).relu())
        sums[receiver] += product(flat[sender][None], angles(way)[None], weights[None])[0]
        counts[receiver] += 1
    return sums / counts.clamp(min=1)


def flat_blocks(blocks):
    return torch.cat([block.transpose(2, 3).flatten(2) for block in blocks], -1)[0]


@pytest.mark.parametrize("row_sends", [True, False])
@pytest.mark.parametrize(("enter", "leave"), [*LAYERS, HEAD])
@torch.no_grad()
def test_listed_neighbours_of_any_number_are_summed_as_edge_by_edge(enter, leave, row_sends):
    convolution, senders, told = made(enter, leave)
    table = torch.tensor([[1, 2, 3], [0, 2, -1], [-1, -1, -1], [1, -1, -1], [1, 0, 6], [1, 2, 6], [5, 1, -1]])
    way, features = (torch.randn(1, *table.shape, width, dtype=torch.float64) for width in (3, TOLD))
    grid, kernel = listed_pairs(table, way), convolution.kernel()
    edges = convolution.edges(kernel, grid, edge_harmonics(way, grid), (edge_features(features, grid), told, told))
    found = flat_blocks(convolution(kernel, edges, senders, row_sends=row_sends))
    listed = [
        (
            *((int(node), row) if row_sends else (row, int(node))),
            way[0, row, slot],
            features[0, row, slot],
            int(node),
            row,
        )
        for row, nodes in enumerate(table)
        for slot, node in enumerate(nodes)
        if node >= 0
    ]
    assert (found - edge_by_edge(convolution, senders, told, listed)).abs().max() < 1e-12


def test_harmonics_of_no_direction_are_nothing():
    assert torch.equal(harmonics(torch.zeros(3)), torch.zeros(8))
