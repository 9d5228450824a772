"""The true pose of bound and of unbound partners, made and of real pairs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.errors import ConfigError
from pipeline.graphs.item_graph import GraphRecipe
from pipeline.graphs.make_graphs import build_graph
from pipeline.tasks.docking.docking_items import bound_frame, is_unbound
from pipeline.tasks.docking.rigid_diffusion import superposed, turn_matrices
from tests.graphs.conftest import read_pairs
from tests.tasks.docking_items import CA, changed
from tests.tasks.items import batch_of, made

INTERFACE = 10.0  # Å between CA atoms of the bound structures
SIDES = (0, 1)


def sides_of(*graphs):
    """The partners of the first of some graphs that are in one batch."""
    return tuple(batch_of(graphs, None).items[0].sides.values())


def ca_of(graph, place):
    part = graph.parts[place]
    return torch.from_numpy(part.nodes["pos"][:, CA] + part.centre_3)


def apart(pos_N3, true_N3):
    return float((pos_N3 - true_N3).square().sum(-1).mean().sqrt())


def moved(graph, place, vector, shift, known_N):
    """Return a graph whose partner stands elsewhere, with the places of some of its residues where it stood."""
    bound_N3 = ca_of(graph, place).numpy().astype(np.float32)
    bound_N3[~known_N] = np.nan
    turn_33 = turn_matrices(torch.tensor(vector, dtype=torch.float64)).numpy()
    part = graph.parts[place]
    pos = (part.nodes["pos"].astype(np.float64) @ turn_33.T).astype(np.float32)
    graph = changed(graph, place, pos=pos, labelled=known_N, bound=bound_N3)
    parts = list(graph.parts)
    parts[place] = replace(parts[place], centre_3=part.centre_3 + shift)
    return replace(graph, parts=tuple(parts))


def unbound_of(graph, share=0.8):
    """Return a graph whose partners stand apart from each other, each with the places of most residues together."""
    rng = np.random.default_rng(0)
    for place in SIDES:
        known_N = rng.random(graph.parts[place].size) < share
        graph = moved(graph, place, rng.normal(size=3), 30 * rng.normal(size=3), known_N)
    return graph


def test_bound_partners_stand_as_in_their_file():
    sides = sides_of(made(0))
    for place, pos_N3 in enumerate(bound_frame(*sides)):
        assert pos_N3.dtype == torch.float64
        torch.testing.assert_close(pos_N3, ca_of(made(0), place))


def test_unbound_partners_that_differ_by_a_move_alone_are_where_the_bound_ones_are_also_where_residues_lack_a_place():
    for place, pos_N3 in enumerate(bound_frame(*sides_of(unbound_of(made(0))))):
        torch.testing.assert_close(pos_N3, ca_of(made(0), place), atol=1e-4, rtol=0)


def test_a_bound_item_beside_an_unbound_one_in_a_batch_stays_as_in_its_file():
    sides = sides_of(made(1), unbound_of(made(0)))
    assert "labelled" in sides[0].nodes
    assert not is_unbound(*sides)
    for place, pos_N3 in enumerate(bound_frame(*sides)):
        torch.testing.assert_close(pos_N3, ca_of(made(1), place))


def test_a_partner_whose_turn_nothing_says_is_refused_by_name():
    graph = unbound_of(made(0))
    known_N = np.zeros(graph.parts[1].size, bool)
    known_N[:2] = True
    with pytest.raises(ConfigError, match="2 residues of the ligand are in the bound structure; superposing needs 3"):
        bound_frame(*sides_of(changed(graph, 1, labelled=known_N)))


def test_unbound_pairs_of_the_benchmark_are_near_their_bound_complexes(structures):
    pairs = read_pairs(structures / "pairs", "unbound")
    assert len(pairs) == 5
    for name, read in pairs.items():
        sides = sides_of(build_graph(read, GraphRecipe()))
        known = [side.nodes["labelled"] for side in sides]
        true = [side.nodes["bound"][known_N].double() for side, known_N in zip(sides, known, strict=True)]
        found = [pos_N3[known_N] for pos_N3, known_N in zip(bound_frame(*sides), known, strict=True)]
        near_RL = torch.cdist(*true) < INTERFACE
        met = near_RL.any(1), near_RL.any(0)
        true_3, found_3 = (torch.cat([pos[near] for pos, near in zip(of, met, strict=True)]) for of in (true, found))
        # From 1Z0K, a rigid-body pair, to 1R8S, a difficult one; the benchmark superposes each interface alone.
        assert 0.4 < apart(superposed(found_3[None], true_3)[0], true_3) < 4.2, name
        for pos_N3, true_N3 in zip(found, true, strict=True):
            assert apart(pos_N3, true_N3) == pytest.approx(apart(superposed(pos_N3[None], true_N3)[0], true_N3))
