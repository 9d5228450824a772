"""The reference task: what it sees, what it returns, and that it learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from pipeline.errors import ConfigError
from pipeline.graphs.item_graph import GraphRecipe, ItemGraph
from pipeline.records import Role
from pipeline.structures.synthetic import complex_pdb
from tests.tasks.cases import INTERFACE as SMALL
from tests.tasks.cases import RNG, model_of, outputs_of, stepped, unlabelled
from tests.tasks.items import DIM, batch_of, double, graph_of, made


def collated(*graphs, task=SMALL, dim=DIM, ids=()):
    return task.collate(batch_of(graphs, dim, ids).items[:], RNG)


def precise(graph):
    """Return a graph whose positions have double precision."""
    parts = tuple(
        replace(part, nodes=part.nodes | {name: part.nodes[name].astype(np.float64) for name in ("pos", "side")})
        for part in graph.parts
    )
    return replace(graph, parts=parts)


def moved(graph, turns, shifts):
    parts = []
    for part, turn_33, shift_3 in zip(graph.parts, turns, shifts, strict=True):
        nodes = {"pos": part.nodes["pos"] @ turn_33.T + shift_3, "side": part.nodes["side"] @ turn_33.T}
        parts.append(replace(part, nodes=part.nodes | nodes))
    return replace(graph, parts=tuple(parts))


# ---- what it is ----


def test_the_network_is_one_graph_to_a_compiler_whatever_the_sizes():
    model, graphs = model_of(replace(SMALL, layers=1, pair_layers=1), torch.float32), []

    def eager(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=eager, fullgraph=True, dynamic=True)
    for batch in (collated(made(0)), collated(made(1, 50, 70), made(2, 30, 30)), collated(unlabelled(made(2, 30, 30)))):
        for one, other in zip(compiled(batch), model(batch), strict=True):
            assert torch.allclose(one, other, atol=1e-5)
    assert len(graphs) == 1


# ---- what it sees ----


@pytest.mark.parametrize("mirrored", [False, True])
def test_turning_and_moving_each_partner_changes_nothing(mirrored):
    graph, model = precise(made(0)), model_of(SMALL)
    turns = Rotation.random(2, random_state=0).as_matrix() * (-1 if mirrored else 1)
    elsewhere = moved(graph, turns, [np.array([5.0, -40, 13]), np.array([-70.0, 2, 8])])
    here, there = (model(double(collated(one))) for one in (graph, elsewhere))
    for one, other in zip(here, there, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-10)


def test_moving_one_residue_changes_its_own_partner_and_what_is_paired_with_it():
    graph, model = precise(made(0)), model_of(SMALL)
    receptor, ligand = graph.parts
    pos = receptor.nodes["pos"].copy()
    pos[0] += 1.0
    bent = replace(graph, parts=(replace(receptor, nodes=receptor.nodes | {"pos": pos}), ligand))
    (residues, pairs), (others, other_pairs) = (model(double(collated(one))) for one in (graph, bent))
    assert (residues[:60] - others[:60]).abs().max() > 1e-6
    assert (pairs - other_pairs).abs().max() > 1e-6


@pytest.mark.parametrize("flag", [1, 2, 4, 8, 16])  # the last: a low pLDDT, which structures.low_plddt: mask keeps
def test_every_flag_of_a_residue_is_seen(flag):
    graph, model = precise(made(0)), model_of(SMALL)
    receptor, ligand = graph.parts
    flags = receptor.nodes["flags"] ^ np.array(flag, np.uint8)
    other = replace(graph, parts=(replace(receptor, nodes=receptor.nodes | {"flags": flags}), ligand))
    residues, others = (model(double(collated(one)))[0] for one in (graph, other))
    assert (residues - others)[:60].abs().max() > 1e-6


def test_the_other_partner_is_seen():
    model = model_of(SMALL)
    graph, other = made(0), made(1)
    swapped = ItemGraph((graph.parts[0], other.parts[1]))
    residues, others = (model(double(collated(one)))[0][:60] for one in (graph, swapped))
    assert (residues - others).abs().max() > 1e-6


def test_atoms_that_are_missing_leave_every_number_finite():
    graph = made(0)
    part = graph.parts[0]
    pos, side = part.nodes["pos"].copy(), part.nodes["side"].copy()
    pos[3, [0, 2, 3]], side[3] = np.nan, np.nan
    holes = replace(graph, parts=(replace(part, nodes=part.nodes | {"pos": pos, "side": side}), graph.parts[1]))
    assert all(torch.isfinite(one).all() for one in stepped(SMALL, [double(collated(holes))]).values())


# ---- labels ----


def test_labels_are_the_contacts_of_the_graph():
    graph = made(0)
    found = outputs_of(SMALL, model_of(SMALL, dtype=torch.float32), collated(graph))
    pairs = graph.labels["contact_pairs"]
    assert np.argwhere(found["contacts_label"][0] == 1).tolist() == pairs.tolist()
    assert np.flatnonzero(found["receptor_interface_label"][0] == 1).tolist() == sorted(set(pairs[:, 0].tolist()))
    assert np.flatnonzero(found["ligand_interface_label"][0] == 1).tolist() == sorted(set(pairs[:, 1].tolist()))


def test_items_without_labels_have_outputs_and_no_figures():
    batch = collated(unlabelled(made(0)))
    found = outputs_of(SMALL, model_of(SMALL, dtype=torch.float32), batch)
    assert found["contacts"][0].shape == (60, 40)
    assert [found[name][0].size for name in found if name.endswith("label")] == [0, 0, 0]
    assert SMALL.metrics(found) == {}
    assert SMALL.weights(batch) == {"interface": 0.0, "contacts": 0.0}


def test_residues_that_the_bound_structure_lacks_are_not_known():
    graph = made(0)
    receptor, ligand = graph.parts
    is_known = np.ones(receptor.size, bool)
    is_known[:10] = False
    parts = (
        replace(receptor, nodes=receptor.nodes | {"labelled": is_known}),
        replace(ligand, nodes=ligand.nodes | {"labelled": np.ones(ligand.size, bool)}),
    )
    batch = collated(replace(graph, parts=parts), graph, ids=["unbound", "bound"])
    assert SMALL.weights(batch) == {"interface": 90.0 + 100, "contacts": 50.0 * 40 + 60 * 40}
    found = outputs_of(SMALL, model_of(SMALL, dtype=torch.float32), batch)
    assert (found["contacts_label"][0][:10] == -1).all()
    assert (found["contacts_label"][0][10:] != -1).all()
    assert (found["contacts_label"][1] != -1).all()


def test_what_stands_alone_has_residues_and_no_pairs():
    part = replace(made(0).parts[0], role=Role.WHOLE)
    found = outputs_of(SMALL, model_of(SMALL, dtype=torch.float32), collated(ItemGraph((part,))))
    assert found["receptor_interface"][0].shape == (60,)
    assert found["ligand_interface"][0].shape == (0,)
    assert found["contacts"][0].shape == (60, 0)
    assert SMALL.metrics(found) == {}


# ---- figures ----


def test_scores_that_are_the_labels_have_perfect_figures():
    found = outputs_of(SMALL, model_of(SMALL, dtype=torch.float32), collated(made(0), made(1)))
    labels = {name: values for name, values in found.items() if name.endswith("_label")}
    perfect = labels | {name.removesuffix("_label"): values for name, values in labels.items()}
    perfect |= {name: [0.1 + 0.8 * one for one in values] for name, values in perfect.items() if "label" not in name}
    figures = SMALL.metrics(perfect)
    precision = figures.pop("contact_precision_l5")
    assert figures == pytest.approx(dict.fromkeys(figures, 1.0))
    contacts = [len(made(seed).labels["contact_pairs"]) for seed in (0, 1)]
    assert max(contacts) < (60 + 40) // 5  # fewer than are looked at, so that even the best precision is not 1
    assert precision == pytest.approx(np.mean(contacts) / 20)


# ---- bad input ----


def test_embeddings_of_another_width_are_refused_with_what_to_set():
    with pytest.raises(ConfigError, match=r"embeddings of 16 numbers, but the data set's have 24") as caught:
        collated(made(0), dim=24)
    assert caught.value.remedy == "--set train.options.embedding_dim=24"


def test_a_data_set_without_embeddings_is_refused_unless_none_are_wanted():
    with pytest.raises(ConfigError, match="the data set has no embeddings") as caught:
        collated(made(0), dim=None)
    assert "embedding_dim=0" in caught.value.remedy
    bare = replace(SMALL, embedding_dim=0)
    batch = collated(made(0), dim=None, task=bare)
    assert len(model_of(bare, torch.float32)(batch)[1]) == 2400


def test_atom_graphs_are_refused():
    graph = graph_of(complex_pdb(0, 30, 20), recipe=GraphRecipe(nodes="atom"))
    with pytest.raises(ConfigError, match="reads residue graphs"):
        collated(graph)


# ---- it works and it learns ----
