"""The docking tasks: what input they refuse, weights from elsewhere, and confidence in poses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.errors import ConfigError, DataError
from pipeline.graphs.item_graph import GraphRecipe, ItemGraph
from pipeline.planning.task_contract import breaches
from pipeline.records import Role
from pipeline.structures.synthetic import complex_pdb
from pipeline.tasks.docking.pose_confidence import trained_confidence
from pipeline.training.checkpoints.trained_weights import load_pretrained
from tests.reference import checkpoint
from tests.tasks.docking_items import (
    CONFIDENCE,
    IDS,
    RNG,
    SIZES,
    SMALL,
    THREE,
    changed,
    collated,
    model_of,
    outputs_of,
    rows_of,
)
from tests.tasks.items import batch_of, graph_of, made
from tests.tasks.originals import as_original

# ---- bad input ----


def test_a_graph_without_contacts_is_not_trained_on_as_nothing_shows_one_frame():
    with pytest.raises(ConfigError, match="has no native contacts"):
        SMALL.loss(model_of(dtype=torch.float32), collated(replace(made(0), labels={})))


def test_unbound_partners_are_trained_on_where_the_bound_complex_has_them():
    """The bound places of these are those of the input, turned and moved as a whole: the true pose is the file's."""
    turn, shift = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0], np.array([50.0, -7.0, 3.0])
    turn *= np.linalg.det(turn)
    graph, flagged = made(0), made(0)
    for place, part in enumerate(graph.parts):
        bound = (part.nodes["pos"][:, 1] + part.centre_3) @ turn + shift
        flagged = changed(flagged, place, labelled=np.ones(part.size, bool), bound=bound.astype(np.float32))
    (bound,), (unbound,) = (collated(one, ids=["a"]).complexes for one in (graph, flagged))
    assert torch.allclose(unbound.true_L3, bound.true_L3, atol=1e-3)


def test_what_stands_alone_is_refused_by_name():
    part = replace(made(0).parts[0], role=Role.WHOLE)
    with pytest.raises(ConfigError, match="docking needs two partners, but lonely has one"):
        collated(ItemGraph((part,)), ids=["lonely"])


def test_atom_graphs_are_refused():
    with pytest.raises(ConfigError, match="reads residue graphs"):
        collated(graph_of(complex_pdb(0, 30, 20), recipe=GraphRecipe(nodes="atom")))


def test_embeddings_of_another_width_are_refused_unless_none_are_wanted():
    with pytest.raises(ConfigError, match=r"embeddings of 16 numbers, but the data set's have 24"):
        collated(made(0), dim=24)
    bare = replace(SMALL, embedding_dim=0)
    assert len(bare.loss(model_of(bare, torch.float32), collated(made(0), dim=None, task=bare))) == 2


# ---- weights to begin with, and a trial ----


def test_weights_of_another_width_are_refused_with_both_shapes(tmp_path):
    torch.save(replace(SMALL, scalars=8).model().state_dict(), path := tmp_path / "wide.pt")
    with pytest.raises(ConfigError) as caught:
        load_pretrained(SMALL.model(), path)
    said = str(caught.value)
    assert "trunk.residues.of_type.weight: float32[24, 8] in the file, float32[24, 6] in the model" in said
    assert "--set train.options.scalars=8 " in caught.value.remedy
    assert caught.value.remedy.endswith("train.pretrained_partial: true")


def test_weights_under_the_published_names_are_taken_where_the_network_has_the_oddities(tmp_path):
    task = replace(SMALL, as_published=True)
    torch.manual_seed(1)
    torch.save({"model": as_original(theirs := task.model()), "optimizer": {}}, path := tmp_path / "published.pth")
    report = load_pretrained(ours := task.model(), path)
    assert report.is_whole
    assert all(torch.equal(one, theirs.state_dict()[name]) for name, one in ours.state_dict().items())
    with pytest.raises(ConfigError, match="weights of DiffDock-PP") as caught:
        load_pretrained(SMALL.model(), path)
    assert caught.value.remedy == "--set train.options.as_published=true"


# ---- confidence ----


def drawn(folder, graphs, names, count=3, task=SMALL):
    """Write poses of complexes as stage predict does."""
    lines = ["id," + ",".join(f"move.{place}" for place in range(12))]
    for graph, name in zip(graphs, names, strict=True):
        moves = outputs_of(task, model_of(task, torch.float32), rows_of(graph, name, range(count), task))["move"]
        lines += [f"{name} {at}," + ",".join(map(repr, map(float, move))) for at, move in enumerate(moves)]
    folder.mkdir()
    (folder / "predictions.csv").write_text("\n".join(lines) + "\n")
    return replace(CONFIDENCE, poses=str(folder))


@pytest.mark.nightly
def test_confidence_keeps_the_contract_of_a_task(tmp_path):
    task = drawn(tmp_path / "poses", THREE, IDS)
    items = batch_of(THREE, ids=IDS).items[:]
    assert list(breaches(task, sizes=SIZES[0], items=items)) == []


def test_confidence_is_shown_the_poses_that_were_drawn_and_which_are_near(tmp_path):
    identity = "1,0,0,0,1,0,0,0,1"
    rows = ["id," + ",".join(f"move.{place}" for place in range(12)), f"a 0,{identity},0,0,0", f"b 0,{identity},0,0,9"]
    (tmp_path / "poses").mkdir()
    (tmp_path / "poses" / "predictions.csv").write_text("\n".join([*rows, "b 1" + "," * 12]) + "\n")
    task = replace(CONFIDENCE, poses=str(tmp_path / "poses"))
    found = [
        task.collate(batch_of([graph], ids=[name]).items[:], RNG).complexes[0]
        for graph, name in zip(THREE[:2], "ab", strict=True)
    ]
    assert [float(one.near_P) for one in found] == [1.0, 0.0]
    (docked,) = collated(THREE[0], ids=["a"]).complexes
    assert torch.allclose(found[0].posed.pos_PL3[0], docked.true_L3, atol=1e-4)


def test_a_complex_without_poses_is_refused_by_name(tmp_path):
    task = drawn(tmp_path / "poses", THREE[:1], IDS[:1])
    with pytest.raises(DataError, match="b has no poses"):
        collated(THREE[1], ids=["b"], task=task)


def test_a_table_without_poses_is_refused_with_what_makes_them(tmp_path):
    (tmp_path / "predictions.csv").write_text("id,loss\na,1\n")
    with pytest.raises(DataError, match="has no poses") as caught:
        collated(THREE[0], ids=["a"], task=replace(CONFIDENCE, poses=str(tmp_path)))
    assert "submit predict" in caught.value.remedy


@pytest.mark.parametrize("published", [True, False])
def test_poses_are_ranked_by_a_model_of_confidence_of_any_form(tmp_path, published):
    judge = model_of(replace(CONFIDENCE, as_published=published), torch.float32)
    torch.save(as_original(judge) if published else judge.state_dict(), path := tmp_path / "confidence.pt")
    task = replace(SMALL, confidence=str(path))
    batch = rows_of(made(0), "a", range(3), task)
    told = outputs_of(task, model_of(dtype=torch.float32), batch)
    plain = outputs_of(SMALL, model_of(dtype=torch.float32), batch)
    assert [one.shape for one in told["confidence"]] == [()] * 3
    assert all((one == other).all() for one, other in zip(told["move"], plain["move"], strict=True))


def test_the_published_confidence_is_told_by_its_shapes():
    model = trained_confidence(str(checkpoint("diffdock_pp/confidence.pth")), "cpu", torch.float32, False)
    assert sum(one.numel() for one in model.parameters()) == 255_601


def test_weights_of_another_model_do_not_rank_poses(tmp_path):
    torch.save(SMALL.model().state_dict(), path := tmp_path / "score.pt")
    with pytest.raises(ConfigError, match="not weights of a pose confidence model"):
        trained_confidence(str(path), "cpu", torch.float32, False)
