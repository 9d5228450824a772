"""The equivariant task: what turns and what does not, alone and in a batch, and that it learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation
from torch.utils._pytree import tree_leaves

from pipeline.errors import ConfigError
from pipeline.graphs.build_graph import build_graph
from pipeline.protocol import ITEMS, Example, Outputs
from pipeline.records import Role
from pipeline.runs.model.task_contract import breaches
from pipeline.training.step.checkpointing import repeated
from pipeline.training.step.optimizers import StepSettings
from pipeline.training.step.step import Step
from tests.graphs.complexes import moved, shared_complex
from tests.tasks.items import double
from tests.tasks.rna_items import RECIPE, by_item, made
from tests.tasks.rna_models import (
    NOTHING,
    RNG,
    SIZES,
    SMALL,
    TINY,
    collated,
    model_of,
    new_model,
    three,
)

pytest.importorskip("e3nn")
pytestmark = pytest.mark.usefixtures("one_thread")


# ---- what it is ----


def test_it_has_all_that_a_task_may_have():
    assert isinstance(SMALL, Example)
    assert isinstance(SMALL, Outputs)


def test_it_keeps_the_contract(learned):
    task = replace(TINY, targets=learned.targets, cosine=0.5)
    assert list(breaches(task, dict(SIZES[0]), three())) == []


def test_cost_is_of_one_item_or_of_whole_columns():
    sizes = made(0).sizes()
    cost = SMALL.cost(sizes)
    assert cost == {"nodes": sizes["nodes"], "edges": sizes["edges"] + 2 * sizes["cross"]}
    columns = {name: np.array([size, 2 * size]) for name, size in sizes.items()}
    assert SMALL.cost(columns)["edges"].tolist() == [cost["edges"], 2 * cost["edges"]]


def test_cost_before_graphs_are_built_says_what_to_set():
    with pytest.raises(ConfigError, match=r"graph\.cache=true"):
        SMALL.cost({"nodes": 3, "receptor": 2, "ligand": 1, "pairs": 2, "residues": 2})


@pytest.mark.parametrize("task", [SMALL, replace(SMALL, **NOTHING), replace(SMALL, use_multi_hop=False)])
@pytest.mark.parametrize("recipe", [RECIPE, replace(RECIPE, hops=1), replace(RECIPE, atom_radius=None, hops=1)])
def test_an_example_of_the_cost_of_items_has_the_shapes_of_their_batch(task, recipe):
    graphs = [made(0, recipe=recipe), made(1, 4, recipe=recipe)]
    costs = [task.cost(graph.sizes()) for graph in graphs]
    sizes = {name: sum(cost[name] for cost in costs) for name in costs[0]} | {ITEMS: 2}
    wanted, got = ([(one.shape, one.dtype) for one in tree_leaves(batch) if isinstance(one, torch.Tensor)]
                   for batch in (collated(*graphs, task=task), task.example(sizes)))  # fmt: skip
    assert got == wanted


def test_layers_are_found_and_may_run_again_in_backward(learned):
    assert set(repeated(learned.model())) == {"layers.0", "layers.1"}
    plain, again = (gradients(learned, [three()], checkpointing=checkpointing) for checkpointing in (False, True))
    assert max_difference(plain, again) < 1e-12


# ---- the made pockets ----


@pytest.mark.parametrize("seed", range(3))
def test_a_made_pocket_is_as_dense_as_a_real_one_and_nothing_in_it_clashes(seed):
    graph = made(seed, 46, 24)
    rna, ligand = graph.parts
    lengths = {kind: np.linalg.norm(np.subtract(*rna.nodes["pos"][rna.edges[kind]]), axis=-1) for kind in rna.edges}
    assert 1.2 < lengths["bond"].min() < lengths["bond"].max() < 1.62
    assert lengths["near"].min() > 2.5
    assert 23 < sum(map(len, lengths.values())) / rna.size < 28  # 25.7 in 4P5J
    assert ligand.size == 24
    assert ligand.edges["bond"].shape[1] > 2 * 24  # rings
    assert graph.labels["contact_nearest"].min() > 2.9


# ---- what it sees ----


def turned(graph, turn_33, shift_3):
    """Return a graph in double precision, elsewhere; where its partners' centres are is part of it."""
    parts = []
    for part in graph.parts:
        pos_N3 = part.nodes["pos"].astype(np.float64) @ turn_33.T
        parts.append(replace(part, nodes=part.nodes | {"pos": pos_N3}, centre_3=part.centre_3 @ turn_33.T + shift_3))
    return replace(graph, parts=tuple(parts))


IRREPS = [SMALL.hidden_irreps, "4x0e+4x0o+2x1o+2x1e", "2x3o+4x0e+3x1o+2x0e"]
TASKS = [replace(SMALL, hidden_irreps=irreps) for irreps in IRREPS]
TASKS += [replace(TINY, product="full"), replace(TINY, **NOTHING)]


@pytest.mark.parametrize("task", TASKS)
def test_turning_and_moving_an_item_changes_nothing(task):
    model = model_of(task, torch.float64)
    turn_33 = Rotation.random(random_state=1).as_matrix()
    here, there = (
        model(double(collated(turned(made(0), *how), task=task)))
        for how in ((np.eye(3), np.zeros(3)), (turn_33, np.array([5.0, -40.0, 13.0])))
    )
    assert here.std() > 1e-2
    assert torch.allclose(here, there, rtol=0, atol=1e-10)


def test_in_single_precision_it_is_turned_without_harm(shared_structures):
    """As a file would have it: read elsewhere, its graph built anew."""
    read = shared_complex(shared_structures / "varied" / "4p5j.cif")
    away = moved(read, Rotation.random(random_state=2).as_matrix(), np.array([30.0, -20.0, 10.0]))
    model = model_of()
    with torch.no_grad():
        here, there = (model(collated(build_graph(one, RECIPE))) for one in (read, away))
    assert torch.allclose(here, there, rtol=0, atol=1e-4)


def test_only_scalars_that_a_mirror_turns_round_tell_an_item_from_its_mirror_image():
    mirror = np.diag([-1.0, 1.0, 1.0])
    apart = {}
    for irreps in (SMALL.hidden_irreps, "4x0o+8x0e+4x1o+4x1e"):
        task = replace(SMALL, hidden_irreps=irreps, layers=3)
        model = model_of(task, torch.float64)
        one, other = (
            model(double(collated(turned(made(0), turn, np.zeros(3)), task=task))) for turn in (np.eye(3), mirror)
        )
        apart[irreps] = float((one - other).detach().abs().max())
    even, odd = apart.values()
    assert even < 1e-10 < 1e-6 < odd


@pytest.mark.parametrize("which", [0, 1])
def test_a_partner_that_moves_alone_is_seen_across(which):
    graph, model = made(0), model_of()
    parts = list(graph.parts)
    parts[which] = replace(parts[which], centre_3=parts[which].centre_3 + np.array([0.0, 0.5, 0.5]))
    apart = model(collated(graph)) - model(collated(replace(graph, parts=tuple(parts))))
    assert apart.abs().max() > 1e-5


def test_partners_that_no_edge_joins_do_not_see_how_they_stand():
    graph, task = made(0), replace(SMALL, use_nonbonded=False)
    ligand = replace(graph.parts[1], centre_3=graph.parts[1].centre_3 + 3.0)
    model = model_of(task)
    one, other = (collated(one, task=task) for one in (graph, replace(graph, parts=(graph.parts[0], ligand))))
    assert torch.allclose(model(one), model(other), atol=1e-5)


def test_a_pocket_alone_is_an_item():
    part = replace(made(0).parts[0], role=Role.WHOLE)
    batch = collated(replace(made(0), parts=(part,), cross={}, labels={}), made(1))
    assert batch.side_N.unique().tolist() == [0, 1, 2]
    assert torch.isfinite(model_of()(batch)).all()


def test_edges_are_those_of_the_graph_by_kind():
    graph, batch = made(0), collated(made(1), made(0))
    sizes, first = graph.sizes(), made(1).sizes()["nodes"]
    mine = batch.from_E >= first
    assert torch.equal(mine, batch.to_E >= first)
    counts = torch.bincount(batch.kind_E[mine], minlength=4).tolist()
    near = sizes["near"] + 2 * sizes["cross"]
    assert counts == [sizes["bond"], sizes["angle"], sizes["dihedral"], near]
    apart_E = (batch.pos_N3[batch.from_E] - batch.pos_N3[batch.to_E]).norm(dim=-1)
    assert apart_E[batch.kind_E == 0].max() < 2.0
    assert apart_E[batch.kind_E == 3].max() < 5.001


# ---- batches ----


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_an_item_has_the_same_outputs_alone_and_in_a_batch(dtype, tolerance):
    model = model_of(dtype=dtype)
    convert = double if dtype is torch.float64 else (lambda batch: batch)
    together = SMALL.outputs(model, convert(SMALL.collate(three(), RNG)))["embedding"]
    for place, item in enumerate(three()):
        (alone,) = SMALL.outputs(model, convert(SMALL.collate([item], RNG)))["embedding"]
        assert torch.allclose(together[place], alone, rtol=0, atol=tolerance)


def gradients(task, batches, **settings):
    step = Step(
        task,
        StepSettings(optimizer="sgd", **settings),
        model=new_model(task, torch.float64) if settings else model_of(task, torch.float64),
    )
    made_batches = [double(task.collate(items, RNG)) for items in batches]
    weights = step.weights(made_batches)
    for batch in made_batches:
        step.accumulate(batch, weights)
    found = [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in step.trained]
    step.update(weights)
    return [*found, *(one.detach().clone() for one in step.trained)]


def max_difference(ones, others):
    return max(float((one - other).abs().max()) for one, other in zip(ones, others, strict=True))


def test_a_step_is_the_same_however_its_items_are_cut(tmp_path, targets):
    del targets["b"]
    task = replace(SMALL, cosine=0.5, targets_missing="skip", targets=by_item(tmp_path / "two.h5", targets))
    first, *others = three()
    trained = [gradients(task, cut)[-30:] for cut in ([three()], [[first], others], [[one] for one in three()])]
    assert max(max_difference(trained[0], other) for other in trained[1:]) < 1e-10


def test_half_precision_leaves_what_turns_in_single(learned):
    batch, model = learned.collate(three(), RNG), model_of(learned)
    with torch.no_grad():
        plain = learned.loss(model, batch)["target"][0]
        with torch.autocast("cpu", torch.bfloat16):
            half = learned.loss(model, batch)["target"][0]
    assert half.dtype == torch.float32
    assert float(half) == pytest.approx(float(plain), rel=0.02)


# ---- it learns ----


def test_it_overfits_three_pockets(learned):
    task = replace(TINY, targets=learned.targets)
    torch.manual_seed(0)
    step = Step(task, StepSettings(learning_rate=1e-2, clip=1.0))
    batch = task.collate(three(), RNG)
    for _ in range(40):
        step.run([batch])
    with torch.no_grad():
        found = task.outputs(step.model, batch)
    figures = task.metrics({name: [one.numpy() for one in values] for name, values in found.items()})
    assert figures["cosine"] > 0.95
