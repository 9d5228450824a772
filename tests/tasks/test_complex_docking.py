"""The docking task: the noise it shows, the poses it draws, what it takes, and that it learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from pipeline.errors import ConfigError, DataError
from pipeline.graphs.item_graph import ItemGraph
from pipeline.planning.task_contract import breaches
from pipeline.protocol import ITEMS
from pipeline.records import Role
from pipeline.tasks.docking.pose_confidence import trained_confidence
from pipeline.tasks.docking.rigid_diffusion import rotation_tables, table_rows
from pipeline.training.checkpoints.trained_weights import load_pretrained
from tests.reference import checkpoint
from tests.tasks.cases import stepped
from tests.tasks.docking_items import (
    CA,
    CONFIDENCE,
    IDS,
    RNG,
    SIZES,
    SMALL,
    THREE,
    changed,
    collated,
    double,
    model_of,
    outputs_of,
    rows,
    rows_of,
    tensors_of,
)
from tests.tasks.items import batch_of, made
from tests.tasks.originals import as_original

# ---- what it is ----


def test_an_example_of_uneven_items_has_hardly_more_nodes_and_pairs_than_they():
    costs = [SMALL.cost(graph.sizes()) for graph in THREE]
    sizes = {name: sum(cost[name] for cost in costs) for name in costs[0]} | {ITEMS: 3}
    shapes = [
        (len(one.noised.receptor.pos_N3), len(one.noised.ligand.pos_N3)) for one in SMALL.example(sizes).complexes
    ]
    pairs, nodes = sum(left * right for left, right in shapes), sum(left + right for left, right in shapes)
    assert sizes["pairs"] <= pairs <= 1.05 * sizes["pairs"]
    assert sizes["nodes"] <= nodes <= 1.05 * sizes["nodes"]


# ---- the noise ----


def in_file(graph):
    return [part.nodes["pos"][:, CA].astype(np.float64) + part.centre_3 for part in graph.parts]


def test_the_ligand_is_shown_moved_as_its_draws_say_and_its_true_place_is_known():
    for graph, one in zip(THREE, collated(*THREE, ids=IDS).complexes, strict=True):
        receptor, ligand = in_file(graph)
        centred, shown = one.noised.receptor.pos_N3.numpy(), one.noised.pos_PL3[0].numpy()
        assert np.abs(cdist(centred, one.true_L3.numpy()) - cdist(receptor, ligand)).max() < 1e-3
        assert np.abs(cdist(shown, shown) - cdist(ligand, ligand)).max() < 1e-3
        assert np.abs(centred.mean(0)).max() < 1e-4


def test_the_scores_to_be_told_are_those_of_the_move():
    """Translations: minus the shift over sigma squared. Rotations: along the axis, as the table has it."""
    for one in collated(*THREE, ids=IDS).complexes:
        (time,) = one.noised.time_T.tolist()
        shift = one.noised.pos_PL3[0].mean(0) - one.true_L3.mean(0)
        sigma = SMALL.schedule.translation.sigma(time)
        assert torch.allclose(one.translation_score_P3[0], -shift / sigma**2, rtol=1e-3, atol=1e-4)
        row = int(table_rows(torch.tensor(SMALL.schedule.rotation.sigma(time)), as_published=False))
        size = float(one.rotation_score_P3[0].norm())
        assert size <= np.abs(rotation_tables().score_WA[row]).max() * 1.0001


def test_noise_and_poses_are_the_same_whatever_batch_an_item_is_in():
    together = collated(*THREE, ids=IDS)
    for place, (graph, name) in enumerate(zip(THREE, IDS, strict=True)):
        (alone,) = collated(graph, ids=[name]).complexes
        for one, other in zip(tensors_of(together.complexes[place]), tensors_of(alone), strict=True):
            assert torch.equal(one, other)


def test_several_noises_of_a_complex_are_all_different():
    (one,) = collated(made(0), task=replace(SMALL, multiplicity=4)).complexes
    assert len(set(one.noised.time_T.tolist())) == 4
    assert one.noised.pos_PL3.shape == (4, 40, 3)


def test_atoms_that_are_missing_leave_every_number_finite():
    graph = made(0)
    pos = graph.parts[0].nodes["pos"].copy()
    pos[:5, [0, 2, 3]] = np.nan  # CA is always there
    batch = collated(changed(graph, 0, pos=pos))
    assert all(torch.isfinite(one).all() for one in stepped(SMALL, [double(batch)], model_of()).values())


# ---- the poses ----


def test_a_pose_is_the_same_to_the_bit_whatever_poses_are_drawn_beside_it():
    model = model_of(dtype=torch.float32)
    together = outputs_of(SMALL, model, rows_of(made(0), "a", range(4)))
    for numbers in ([2], [0, 1], [3, 1]):
        alone = outputs_of(SMALL, model, rows_of(made(0), "a", numbers))
        for name, values in alone.items():
            for value, number in zip(values, numbers, strict=True):
                assert (value == together[name][number]).all(), name


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_poses_are_drawn_in_single_precision_whatever_the_model_was_trained_in(precision):
    model, batch = model_of(dtype=torch.float32), rows_of(made(0), "a", range(2))
    plain = outputs_of(SMALL, model, batch)
    with torch.autocast("cpu", precision):
        half = outputs_of(SMALL, model, batch)
        loss = SMALL.loss(model, batch)
    assert all((one == other).all() for name in plain for one, other in zip(plain[name], half[name], strict=True))
    assert all(torch.isfinite(total) for total, _ in loss.values())


def test_rows_of_several_complexes_come_back_in_their_order():
    model = model_of(dtype=torch.float32)
    both = [*rows(THREE[0], "a", range(2)), *rows(THREE[1], "b", range(1))]
    found = outputs_of(SMALL, model, SMALL.collate(both, RNG))
    (alone,) = outputs_of(SMALL, model, rows_of(THREE[1], "b", range(1)))["move"]
    assert (found["move"][2] == alone).all()
    assert [len(values) for values in found.values()] == [3] * len(found)


def test_a_move_brings_the_file_to_the_pose_whose_distance_is_told():
    graph = made(0)
    found = outputs_of(SMALL, model_of(dtype=torch.float32), rows_of(graph, "a", range(3)))
    _, ligand = in_file(graph)
    for move, told in zip(found["move"], found["ligand_rmsd"], strict=True):
        turn, shift = move[:9].reshape(3, 3), move[9:]
        assert np.allclose(turn @ turn.T, np.eye(3), atol=1e-9)
        assert np.linalg.det(turn) == pytest.approx(1)
        apart = np.sqrt(np.square(ligand @ turn.T + shift - ligand).sum(-1).mean())
        assert apart == pytest.approx(float(told), abs=1e-3)


@pytest.mark.parametrize("push", [torch.nan, 1e9])
def test_a_pose_that_explodes_is_no_number_and_others_are_what_they_were(push):
    class Wild(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model_of(dtype=torch.float32)

        def forward(self, batch, poses_at_once=1):
            translation, rotation = self.inner(batch, poses_at_once)
            translation[:, 1] = push
            return translation, rotation

    batch = rows_of(made(0), "a", range(3))
    plain, wild = (outputs_of(SMALL, model, batch) for model in (model_of(dtype=torch.float32), Wild()))
    for name, values in wild.items():
        assert np.isnan(values[1]).all()
        assert (values[0] == plain[name][0]).all()
        assert (values[2] == plain[name][2]).all()
    assert SMALL.metrics(wild)["exploded"] == pytest.approx(1 / 3)


def test_the_way_of_a_pose_ends_at_the_pose():
    task = replace(SMALL, trajectory=True)
    found = outputs_of(task, model_of(dtype=torch.float32), rows_of(made(0), "a", range(2), task=task))
    for way, move in zip(found["trajectory"], found["move"], strict=True):
        assert way.shape == (SMALL.steps + 1, 12)
        assert (way[-1] == move).all()


def test_without_a_known_pose_there_are_moves_and_no_distances():
    found = outputs_of(SMALL, model_of(dtype=torch.float32), collated(replace(made(0), labels={})))
    assert found["ligand_rmsd"] == [None]
    assert found["move"][0].shape == (12,)
    assert SMALL.metrics(found) == {}


# ---- figures ----


def outputs_by_hand(ligand, confidence):
    """Return outputs of poses of two complexes, as an evaluation has them."""

    class Column(list):
        def id(self, place):
            return ["a 0", "a 1", "a 2", "b 0", "b 1"][place]

    return {"ligand_rmsd": Column(np.array([value]) for value in ligand if value is not None),
            "confidence": Column(np.array([value]) for value in confidence)}  # fmt: skip


def test_poses_of_complexes_without_a_truth_are_in_no_figure_and_disturb_none():
    some = outputs_by_hand([9.0, 1.0, 30.0, None, None], [0.1, 0.9, 0.0, -2.0, -1.0])
    some["ligand_rmsd"].id = lambda place: ["b 0", "b 1", "a 0"][place]  # a column has the rows that have a value
    figures = SMALL.metrics(some)
    assert (figures["ligand_top1_within_1"], figures["ligand_top1_within_2"]) == (0, 0.5)
    assert (figures["ligand_top1_mean"], figures["ligand_top1_sd"]) == (15.5, 14.5)


def test_the_most_confident_pose_of_a_complex_is_its_first():
    figures = SMALL.metrics(outputs_by_hand([9.0, 1.0, 30.0, 4.0, 50.0], [0.1, 0.9, 0.0, -2.0, -1.0]))
    assert figures["ligand_top1_within_2"] == 0.5
    assert figures["ligand_top1_within_5"] == 0.5
    assert figures["ligand_oracle_within_5"] == 1.0
    assert figures["ligand_top5_within_5"] == 1.0
    assert figures["ligand_rmsd_median"] == 9.0


def test_a_pose_without_a_number_is_ranked_last_and_near_nothing():
    figures = SMALL.metrics(outputs_by_hand([np.nan, 1.0, 30.0, np.nan, np.nan], [np.nan, -5.0, -9.0, 2.0, 3.0]))
    assert figures["ligand_top1_within_2"] == 0.5
    assert figures["ligand_oracle_within_10"] == 0.5
    assert figures["exploded"] == pytest.approx(0.6)


# ---- it works ----


# ---- bad input ----


def test_a_graph_without_contacts_is_not_trained_on_as_nothing_shows_one_frame():
    with pytest.raises(ConfigError, match="has no native contacts"):
        SMALL.loss(model_of(dtype=torch.float32), collated(replace(made(0), labels={})))


def test_what_stands_alone_is_refused_by_name():
    part = replace(made(0).parts[0], role=Role.WHOLE)
    with pytest.raises(ConfigError, match="docking needs two partners, but lonely has one"):
        collated(ItemGraph((part,)), ids=["lonely"])


def test_embeddings_of_another_width_are_refused_unless_none_are_wanted():
    with pytest.raises(ConfigError, match=r"embeddings of 16 numbers, but the data set's have 24"):
        collated(made(0), dim=24)
    bare = replace(SMALL, embedding_dim=0)
    assert len(bare.loss(model_of(bare, torch.float32), collated(made(0), dim=None, task=bare))) == 2


# ---- weights to begin with, and a trial ----


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


def test_a_complex_without_poses_is_refused_by_name(tmp_path):
    task = drawn(tmp_path / "poses", THREE[:1], IDS[:1])
    with pytest.raises(DataError, match="b has no poses"):
        collated(THREE[1], ids=["b"], task=task)
