"""Graphs as PyTorch Geometric sees them: alone, in batches, and without a way back into the cache."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyG uses what torch has deprecated, as it is imported
    from torch_geometric.data import Batch, Data, HeteroData
    from torch_geometric.loader import DataLoader

from pipeline.errors import ConfigError
from pipeline.graphs import atom_graph, pyg_view, residue_graph
from pipeline.graphs.item_graph import GraphRecipe, ItemGraph
from pipeline.records import Role
from pipeline.structures.synthetic import complex_pdb
from tests.graphs.complexes import complex_of, side

AB = (side(Role.RECEPTOR, "A"), side(Role.LIGAND, "B"))


@pytest.fixture(scope="module")
def graphs() -> list[ItemGraph]:
    recipe = GraphRecipe(cross_neighbours=4)
    reads = [complex_of(complex_pdb(seed, 30 + 9 * seed, 300 - 80 * seed).decode(), *AB) for seed in range(3)]
    return [residue_graph.build_residue_graph(read, recipe) for read in reads]


def test_a_complex_has_a_node_type_per_partner_and_its_contacts_as_edges(graphs: list[ItemGraph]) -> None:
    graph = graphs[0]
    whole = pyg_view.data(graph)
    assert isinstance(whole, HeteroData)
    assert whole.validate()
    assert whole.node_types == ["receptor", "ligand"]
    assert set(whole.edge_types) == {
        ("receptor", "near", "receptor"), ("ligand", "near", "ligand"), ("ligand", "near", "receptor"),
        ("receptor", "contact", "ligand"),
    }  # fmt: skip
    for part in graph.parts:
        role = part.role.value
        assert whole[role].num_nodes == part.size
        np.testing.assert_array_equal(whole[role, "near", role].edge_index, part.edges["near"])
        np.testing.assert_array_equal(whole[role].pos, part.nodes["pos"])
    contacts = whole["receptor", "contact", "ligand"]
    np.testing.assert_array_equal(contacts.edge_index.T, graph.labels["contact_pairs"].astype(np.int64))
    np.testing.assert_array_equal(contacts.atoms, graph.labels["contact_atoms"].astype(np.int64))
    np.testing.assert_array_equal(whole["ligand", "near", "receptor"].edge_index, graph.cross["near"])


def test_one_partner_is_data(graphs: list[ItemGraph]) -> None:
    part = graphs[0].parts[0]
    for one in (pyg_view.data(part), pyg_view.data(ItemGraph((part,)))):
        assert isinstance(one, Data)
        assert one.validate()
        assert one.num_nodes == part.size
        assert one.num_edges == part.edges["near"].shape[1]
        assert one.type.dtype == one.row.dtype == one.chain.dtype == torch.int64  # uint8 would be taken for a mask


def test_batches_of_several_hold_all_nodes_and_edges_and_point_within_their_own(graphs: list[ItemGraph]) -> None:
    wholes = [pyg_view.data(graph) for graph in graphs]
    batch = Batch.from_data_list(wholes)
    for kind in wholes[0].edge_types:
        assert batch[kind].edge_index.shape[1] == sum(one[kind].edge_index.shape[1] for one in wholes)
        source, target = (batch[role].batch[ends] for role, ends in zip(kind[::2], batch[kind].edge_index, strict=True))
        assert torch.equal(source, target)
    assert batch["receptor"].num_nodes == sum(graph.parts[0].size for graph in graphs)
    assert batch["receptor_centre"].shape == (3, 3)
    assert batch["receptor"].pos.shape[1:] == (4, 3)
    loader = DataLoader([pyg_view.data(graph.parts[0]) for graph in graphs], batch_size=2)
    assert [one.num_edges for one in loader] == [
        sum(graph.parts[0].edges["near"].shape[1] for graph in some) for some in (graphs[:2], graphs[2:])
    ]


def test_each_residue_gets_the_row_that_is_its_own(graphs: list[ItemGraph]) -> None:
    part = graphs[0].parts[1]
    rows = torch.arange(part.size * 2, dtype=torch.bfloat16).reshape(part.size, 2)
    whole = pyg_view.data(graphs[0], {Role.LIGAND: rows})
    assert torch.equal(whole["ligand"].x, rows)
    assert "x" not in whole["receptor"]
    with pytest.raises(ValueError, match="have 7 rows, not 300"):
        pyg_view.data(graphs[0], {Role.LIGAND: rows[:7]})


def test_atom_graphs_have_residues_as_nodes_which_batches_count_through() -> None:
    lines = complex_pdb(5, 20, 20).decode()
    graph = atom_graph.build_atom_graph(complex_of(lines, *AB), GraphRecipe(nodes="atom"))
    whole = pyg_view.data(graph, {Role.RECEPTOR: torch.ones(20, 3)})
    assert whole.validate()
    part = graph.parts[0]
    assert whole["receptor"].num_nodes == part.size
    assert whole["receptor_residue"].x.shape == (20, 3)
    assert {kind for _, kind, _ in whole.edge_types} == {*part.edges, "in", "contact"}
    inside = whole["receptor", "in", "receptor_residue"].edge_index
    np.testing.assert_array_equal(inside[1], part.nodes["residue"])
    batch = Batch.from_data_list([whole, whole])
    assert int(batch["receptor", "in", "receptor_residue"].edge_index[1].max()) == 39
    assert isinstance(pyg_view.data(part), HeteroData)


def test_without_pyg_people_are_told_what_to_install(graphs: list[ItemGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
    with pytest.raises(ConfigError, match=r"pip install 'protein-training-pipeline\[pyg\]'"):
        pyg_view.data(graphs[0])
