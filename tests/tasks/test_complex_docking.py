"""The docking task: the pose it is shown, the way back that it names, what it takes, and that it learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from scipy.spatial.transform import Rotation
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from pipeline.graphs.item_graph import ItemGraph
from pipeline.memory.footprint import MemoryChoice, live_peak_bytes
from pipeline.protocol import ITEMS, Example, Outputs, Weights
from pipeline.records import Role
from pipeline.runs.model.task_contract import breaches
from pipeline.tasks.complex_docking import ComplexDocking, arms, rotation_matrices
from pipeline.training.step.checkpointing import repeated
from pipeline.training.step.optimizers import StepSettings
from pipeline.training.step.step import Step
from tests.limited import device
from tests.memory.tracing.traced import tracer, true_peak
from tests.tasks.docking_items import (
    CA,
    DRAWS,
    IDS,
    IN_PIECES,
    SIZES,
    SMALL,
    THREE,
    changed,
    collated,
    double,
    model_of,
    outputs_of,
)
from tests.tasks.items import batch_of, made, real

# ---- what it is ----


@pytest.mark.parametrize("task", [SMALL, IN_PIECES], ids=["plain", "pieces"])
def test_it_keeps_the_contract_of_a_task(task):
    assert list(breaches(task, sizes=SIZES[0], items=batch_of(THREE, ids=IDS).items[:])) == []


def test_it_has_all_that_a_task_may_have():
    assert isinstance(SMALL, Example)
    assert isinstance(SMALL, Weights)
    assert isinstance(SMALL, Outputs)


def test_cost_is_of_one_item_or_of_whole_columns():
    sizes = made(0).sizes()
    assert SMALL.cost(sizes) == {"nodes": 100, "edges": 2000, "pairs": 2400}
    columns = {name: np.array([size, 2 * size]) for name, size in sizes.items()}
    assert SMALL.cost(columns)["pairs"].tolist() == [2400, 4800]


def test_an_example_has_the_shapes_of_a_batch_of_its_sizes():
    costs = [SMALL.cost(graph.sizes()) for graph in THREE]
    sizes = {name: sum(cost[name] for cost in costs) for name in costs[0]} | {ITEMS: 3}
    wanted, got = ([(one.shape, one.dtype) for one in tree_leaves(batch) if isinstance(one, torch.Tensor)]
                   for batch in (collated(*THREE), SMALL.example(sizes)))  # fmt: skip
    assert got == wanted


def test_outputs_of_an_example_can_be_traced():
    with FakeTensorMode():
        found = SMALL.outputs(SMALL.model(), SMALL.example(SIZES[1]))
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(found, 3)


def test_both_partners_go_through_the_same_layers():
    graph = made(0)
    parts = [
        replace(part, role=role) for part, role in zip(graph.parts[::-1], (Role.RECEPTOR, Role.LIGAND), strict=True)
    ]
    labels = graph.labels | {"contact_pairs": graph.labels["contact_pairs"][:, ::-1]}
    model, heard = model_of(), []
    for batch in (double(collated(one)) for one in (graph, ItemGraph(tuple(parts), labels=labels))):
        edge_ED = model.geometry(batch.partners.pos_NA3, batch.partners.from_E, batch.partners.to_E)
        heard.append(model.layers[0](torch.ones(100, 16, dtype=torch.float64), edge_ED, batch.partners))
    assert heard[0].std(0).max() > 1e-3
    assert torch.allclose(heard[0], torch.cat([heard[1][40:], heard[1][:40]]), atol=1e-4)  # but for rounded positions


# ---- the pose ----


def brought_back(batch):
    """Return every CA where the labels say that it belongs."""
    native = batch.partners.pos_NA3[:, CA].clone()
    is_ligand, item = batch.partners.partner_N % 2 == 1, batch.partners.partner_N // 2
    centre = native - arms(batch.partners)
    turned = (rotation_matrices(batch.rotation_B3)[item] @ arms(batch.partners).unsqueeze(-1)).squeeze(-1)
    native[is_ligand] = (centre + turned + batch.translation_B3[item])[is_ligand]
    return native.numpy()


def in_file(graph):
    return [part.nodes["pos"][:, CA] + part.centre_3 for part in graph.parts]


def test_what_is_to_be_said_brings_the_ligand_to_where_the_file_has_it():
    batch = collated(*THREE)
    native = np.split(brought_back(batch), np.cumsum([count for pair in batch.partners.sizes for count in pair])[:-1])
    for graph, receptor, ligand in zip(THREE, native[::2], native[1::2], strict=True):
        assert np.abs(cdist(receptor, ligand) - cdist(*in_file(graph))).max() < 1e-3


def test_the_receptor_stays_and_the_ligand_keeps_its_shape():
    graph, batch = made(0), collated(made(0))
    receptor, ligand = batch.partners.pos_NA3[:60, CA].numpy(), batch.partners.pos_NA3[60:, CA].numpy()
    assert (receptor == graph.parts[0].nodes["pos"][:, CA]).all()
    assert np.abs(cdist(ligand, ligand) - cdist(*[graph.parts[1].nodes["pos"][:, CA]] * 2)).max() < 1e-3
    assert np.abs(ligand - ligand.mean(0) - np.subtract(in_file(graph)[1], in_file(graph)[1].mean(0))).max() > 0.1


def test_noise_is_the_same_whatever_batch_an_item_is_in():
    together = collated(*THREE, ids=IDS)
    pos = together.partners.pos_NA3.split([count for pair in together.partners.sizes for count in pair])
    for place, (graph, name) in enumerate(zip(THREE, IDS, strict=True)):
        alone = SMALL.collate(batch_of([graph], ids=[name]).items[:], np.random.default_rng(place))
        assert torch.equal(alone.partners.pos_NA3, torch.cat(pos[2 * place : 2 * place + 2]))
        assert torch.equal(alone.translation_B3[0], together.translation_B3[place])
        assert torch.equal(alone.rotation_B3[0], together.rotation_B3[place])
    assert len({tuple(one.tolist()) for one in together.translation_B3}) == 3


def test_noise_is_as_wide_as_the_options_say_and_no_turn_is_more_than_half_a_circle():
    task, rng = ComplexDocking(translation_sigma=3.0, rotation_sigma=0.4), np.random.default_rng(5)
    rotations, translations = (
        np.array(column) for column in zip(*(task._noise(rng) for _ in range(DRAWS)), strict=True)
    )
    assert translations.std(axis=0) == pytest.approx([3.0] * 3, rel=0.05)
    assert np.sqrt((rotations**2).sum(axis=1).mean()) == pytest.approx(0.4, rel=0.05)
    assert np.abs(rotations.mean(axis=0)).max() < 0.02
    wide = ComplexDocking(rotation_sigma=30.0)
    assert max(np.linalg.norm(wide._noise(rng).rotation_3) for _ in range(DRAWS)) <= np.pi + 1e-12


def test_rotation_vectors_are_those_of_other_libraries():
    vectors = np.random.default_rng(0).normal(size=(7, 3))
    assert np.allclose(
        rotation_matrices(torch.from_numpy(vectors)), Rotation.from_rotvec(vectors).as_matrix(), atol=1e-12
    )


# ---- what it says ----


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_what_is_said_turns_with_the_complex(dtype, tolerance):
    task = replace(SMALL, translation_sigma=1.0, rotation_sigma=1.0)
    model, batch = model_of(task, dtype), double(collated(*THREE))
    turn_33 = torch.from_numpy(Rotation.random(random_state=0).as_matrix())
    shift_3 = torch.tensor([5.0, -4, 3])
    moved = placed(batch, batch.partners.pos_NA3 @ turn_33.T + shift_3)
    here, there = (model(double(one, dtype)) for one in (batch, moved))
    for said_B3, elsewhere_B3 in zip(here, there, strict=True):
        assert said_B3.abs().max() > 1e-3
        assert torch.allclose(said_B3 @ turn_33.T.to(dtype), elsewhere_B3, rtol=0, atol=tolerance)


def placed(batch, pos_NA3):
    """Return a batch whose residues are elsewhere."""
    return batch._replace(partners=batch.partners._replace(pos_NA3=pos_NA3))


def test_a_mirrored_complex_is_shifted_to_the_mirrored_place_and_turned_the_other_way():
    model, batch = model_of(), double(collated(made(0)))
    (shift, turn), (other_shift, other_turn) = (
        model(one) for one in (batch, placed(batch, -batch.partners.pos_NA3))
    )  # fmt: skip
    assert torch.allclose(-shift, other_shift, rtol=0, atol=1e-10)
    assert torch.allclose(turn, other_turn, rtol=0, atol=1e-10)


def test_moving_the_ligand_alone_changes_what_is_said():
    model, batch = model_of(), double(collated(made(0)))
    pos_NA3 = batch.partners.pos_NA3.clone()
    pos_NA3[60:] += 2.0
    for said, other in zip(model(batch), model(placed(batch, pos_NA3)), strict=True):
        assert (said - other).abs().max() > 1e-6


def test_atoms_that_are_missing_leave_every_number_finite():
    pos, side = (made(0).parts[1].nodes[name].copy() for name in ("pos", "side"))
    pos[3, [0, 2, 3]], side[3] = np.nan, np.nan
    batch = collated(changed(made(0), 1, pos=pos, side=side))
    assert all(torch.isfinite(one).all() for one in gradients(SMALL, [double(batch)]))


# ---- batches ----


def gradients(task, batches, **settings):
    step = Step(task, StepSettings(optimizer="sgd", **settings), model=model_of(task).train())
    weights = step.weights(batches)
    for batch in batches:
        step.accumulate(batch, weights)
    return [one.grad.clone() for one in step.trained]


def max_difference(ones, others):
    return max(float((one - other).abs().max()) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_an_item_has_the_same_outputs_alone_and_in_a_batch(dtype, tolerance):
    model = model_of(dtype=dtype)
    convert = double if dtype is torch.float64 else (lambda batch: batch)
    together = outputs_of(SMALL, model, convert(collated(*THREE, ids=IDS)))
    for place, (graph, name) in enumerate(zip(THREE, IDS, strict=True)):
        for key, (values,) in outputs_of(SMALL, model, convert(collated(graph, ids=[name]))).items():
            assert np.allclose(together[key][place], values, rtol=0, atol=tolerance), key


def test_any_split_of_a_batch_gives_the_same_gradients():
    whole = gradients(SMALL, [double(collated(*THREE, ids=IDS))])
    assert max(float(one.abs().max()) for one in whole) > 1e-3
    for cuts in ((1, 2), (2, 1), (1, 1, 1)):
        ends = np.cumsum(cuts)
        spans = [slice(end - cut, end) for end, cut in zip(ends, cuts, strict=True)]
        parts = [double(collated(*THREE[span], ids=IDS[span])) for span in spans]
        assert max_difference(whole, gradients(SMALL, parts)) < 1e-10


def test_pairs_in_pieces_and_layers_run_again_give_the_same_gradients():
    model = SMALL.model()
    assert set(repeated(model)) == {"layers.0", "layers.1", "cross_layers.0", "cross_layers.1"}
    batch = double(collated(*THREE))
    plain = gradients(SMALL, [batch])
    for task in (SMALL, IN_PIECES):
        for checkpointing in (False, True):
            assert max_difference(plain, gradients(task, [batch], checkpointing=checkpointing)) < 1e-10


def test_half_precision_sums_the_loss_in_single():
    batch, model = collated(*THREE), model_of(dtype=torch.float32)
    with torch.no_grad():
        plain = SMALL.loss(model, batch)
        with torch.autocast("cpu", torch.bfloat16):
            half = SMALL.loss(model, batch)
    for name, (total, _) in half.items():
        assert total.dtype == torch.float32
        assert float(total) == pytest.approx(float(plain[name][0]), rel=0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("task", "choice", "size"),
    [
        (SMALL, MemoryChoice(), 0),
        (SMALL, MemoryChoice(), 1),
        (SMALL, MemoryChoice(), 2),
        (SMALL, MemoryChoice(checkpointing=True), 2),
        (replace(SMALL, pairs_at_once=10_000), MemoryChoice(), 2),
    ],
    ids=["small", "middle", "large", "checkpointing", "pieces"],
)
def test_the_planner_traces_it_to_a_hundredth_of_what_it_takes(task, choice, size):
    device.need()
    traced = tracer(task, least=SIZES[0], clip=1.0)
    predicted = live_peak_bytes(traced.standing(choice), traced.micro(choice, SIZES[size]), accumulate=False)
    assert predicted == pytest.approx(true_peak(task, SIZES[size], 1, choice, clip=1.0), rel=0.01)


def test_in_pieces_memory_hardly_grows_with_pairs():
    sizes, grown = [SIZES[0] | {"pairs": pairs} for pairs in (20_000, 60_000)], []
    least = replace(SMALL, layers=1, cross_layers=1)
    for task in (least, replace(least, pairs_at_once=10_000)):
        traced = tracer(task, least=SIZES[0])
        tapes = [traced.micro(MemoryChoice(), size) for size in sizes]
        low, high = (live_peak_bytes(traced.standing(MemoryChoice()), tape, accumulate=False) for tape in tapes)
        grown.append((high - low) / 40_000)
    assert grown[0] > 250  # bytes a pair
    assert grown[1] < 20  # its two ends, of 8 bytes each


# ---- figures ----


class Knowing(torch.nn.Module):
    """Says what would be right, in units of the noise, and a little more."""

    def __init__(self, task, shift=0.0, degrees=0.0):
        super().__init__()
        self.task, self.shift, self.turn = task, shift, Rotation.from_euler("z", degrees, degrees=True)

    def forward(self, batch):
        turned = (self.turn * Rotation.from_rotvec(batch.rotation_B3.double().numpy())).as_rotvec()
        shift = torch.tensor([self.shift, 0, 0])
        rotation = torch.from_numpy(turned).float() / self.task.rotation_sigma
        return (batch.translation_B3 + shift) / self.task.translation_sigma, rotation


def test_figures_of_a_right_answer_are_nought():
    found = outputs_of(SMALL, Knowing(SMALL), collated(*THREE))
    figures = SMALL.metrics(found)
    assert figures["rmsd_before_mean"] > 2
    for name in ("rmsd_after_mean", "rmsd_after_median", "translation_error"):
        assert figures[name] == pytest.approx(0, abs=1e-4)
    assert figures["rotation_error"] == pytest.approx(0, abs=0.1)


def test_figures_tell_how_far_an_answer_is_off():
    shifted = SMALL.metrics(outputs_of(SMALL, Knowing(SMALL, shift=3.0), collated(*THREE)))
    assert shifted["translation_error"] == pytest.approx(3.0, abs=1e-4)
    assert shifted["rmsd_after_mean"] == pytest.approx(3.0, abs=1e-3)
    turned = SMALL.metrics(outputs_of(SMALL, Knowing(SMALL, degrees=25.0), collated(*THREE)))
    assert turned["rotation_error"] == pytest.approx(25.0, abs=0.05)
    assert turned["translation_error"] == pytest.approx(0, abs=1e-4)
    assert turned["rmsd_after_mean"] > 1


def test_in_half_precision_residues_are_measured_in_single():
    batch = collated(*THREE)
    plain = outputs_of(SMALL, Knowing(SMALL), batch)
    with torch.autocast("cpu", torch.bfloat16):
        half = outputs_of(SMALL, Knowing(SMALL), batch)
    assert np.allclose(plain["rmsd_before"], half["rmsd_before"], rtol=1e-5)


def test_a_model_that_says_nothing_leaves_the_ligand_where_it_is():
    found = outputs_of(SMALL, lambda batch: (torch.zeros(3, 3), torch.zeros(3, 3)), collated(*THREE))
    assert np.allclose(found["rmsd_before"], found["rmsd_after"], rtol=1e-5)
    assert {name: [one.shape for one in values] for name, values in found.items()} == {
        "translation": [(3,)] * 3, "rotation": [(3,)] * 3,
        "translation_label": [(3,)] * 3, "rotation_label": [(3,)] * 3,
        "rmsd_before": [(1,)] * 3, "rmsd_after": [(1,)] * 3,
    }  # fmt: skip


def test_no_items_have_no_figures():
    assert SMALL.metrics({name: [] for name in outputs_of(SMALL, Knowing(SMALL), collated(made(0)))}) == {}


# ---- it works and it learns ----


@pytest.mark.shared
def test_real_complexes_are_docked_from_where_their_files_have_them(shared_structures):
    paths = sorted((shared_structures / "complexes").glob("*.pdb"), key=lambda path: path.stat().st_size)[:3]
    graphs = [real(path) for path in paths]
    batch = collated(*graphs, ids=[path.stem for path in paths])
    native = np.split(brought_back(batch), np.cumsum([count for pair in batch.partners.sizes for count in pair])[:-1])
    for graph, receptor, ligand in zip(graphs, native[::2], native[1::2], strict=True):
        assert np.abs(cdist(receptor, ligand) - cdist(*in_file(graph))).max() < 1e-3
    figures = SMALL.metrics(outputs_of(SMALL, model_of(dtype=torch.float32), batch))
    assert all(np.isfinite(value) for value in figures.values())


def test_it_learns_the_way_back_of_a_few_complexes():
    task = replace(SMALL, width=32, pair_width=16)
    batch = collated(*(made(seed, 30, 20) for seed in range(4)), task=task, ids=("e", "f", "g", "h"))
    torch.manual_seed(0)
    step = Step(task, StepSettings(learning_rate=5e-3, clip=1.0))
    before = task.metrics(outputs_of(task, step.model, batch))
    for _ in range(60):
        step.run([batch])
    after = task.metrics(outputs_of(task, step.model, batch))
    for figure in ("translation_error", "rotation_error"):
        assert after[figure] < before[figure] / 2
    assert after["rmsd_after_mean"] < before["rmsd_before_mean"] / 3
