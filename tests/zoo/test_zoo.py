from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeline.protocol import ITEMS, Example
from tests.zoo import ZOO, batch_sizes
from tests.zoo.guides import GUIDES

NAMES = sorted(ZOO)
SETTINGS = {"optimizer", "foreach", "clip", "ema", "checkpointing"}


def smallest(member):
    task = member.build()
    return task, task.example(member.sizes[0])


def shapes_of(batch):
    return [leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def bytes_of(batch):
    return sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def check_step(task, batch):
    """One forward and backward: terms are (sum, weight), and every trained parameter has a finite gradient."""
    torch.manual_seed(0)
    model = task.model()
    terms = task.loss(model, batch)
    for total, weight in terms.values():
        assert total.ndim == 0
        assert torch.isfinite(total)
        assert float(weight) > 0
    sum(total / weight for total, weight in terms.values()).backward()
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    missing = [name for name, one in trained.items() if one.grad is None or not torch.isfinite(one.grad).all()]
    assert trained
    assert not missing
    assert any(one.grad.abs().sum() > 0 for one in trained.values())
    return terms


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_a_member_learns_from_its_smallest_batch(name):
    check_step(*smallest(ZOO[name]))


@pytest.mark.parametrize("name", NAMES)
def test_a_member_is_wholly_declared(name):
    member = ZOO[name]
    assert member.name == name
    assert isinstance(member.build(), Example)
    assert set(member.settings) <= SETTINGS
    assert member.padded is member.build().padded
    assert all(ITEMS in sizes for sizes in member.sizes)


@pytest.mark.parametrize("name", NAMES)
def test_shapes_of_an_example_are_a_function_of_its_sizes(name):
    member = ZOO[name]
    task, batch = smallest(member)
    assert shapes_of(task.example(member.sizes[0])) == shapes_of(batch)
    larger = [bytes_of(task.example(sizes)) for sizes in member.sizes]
    assert larger == sorted(set(larger))


@pytest.mark.parametrize("name", NAMES)
def test_every_size_of_an_example_is_a_dimension_of_it(name):
    member = ZOO[name]
    for sizes in member.sizes:
        seen = {number for shape in shapes_of(member.build().example(sizes)) for number in shape}
        for what, size in sizes.items():
            if name == "esm2_finetune" and what == "length":
                size += 2  # begin and end
            if name == "docking" and what in ("nodes", "edges"):
                size //= 2  # of each partner
            if "rows" not in sizes or what != ITEMS:  # whose rows they are, makes no difference
                assert size in seen, what


@pytest.mark.parametrize("name", NAMES)
def test_a_data_set_is_spread_and_its_items_make_batches(name):
    member = ZOO[name]
    rng = np.random.default_rng(0)
    items = member.items(400, rng)
    assert set(items) | {ITEMS} == set(member.sizes[0])
    assert all(values.dtype == np.int64 and len(values) == 400 for values in items.values())
    widest = max(np.quantile(values, 0.95) / np.quantile(values, 0.05) for values in items.values())
    assert widest > 3
    chosen = [{what: int(values[place]) for what, values in items.items()} for place in (0, 1)]
    task = member.build()
    assert all(dict(task.cost(item)) == item for item in chosen)
    assert shapes_of(task.collate(chosen, rng)) == shapes_of(task.example(batch_sizes(chosen, padded=member.padded)))


def test_batch_sizes_are_sums_or_those_of_the_largest():
    items = [{"nodes": 3, "edges": 9}, {"nodes": 5, "edges": 2}]
    assert batch_sizes(items, padded=False) == {"nodes": 8, "edges": 11, "items": 2}
    assert batch_sizes(items, padded=True) == {"nodes": 5, "edges": 9, "items": 2}


def test_fair_esm_itself_and_our_way_through_its_layers_agree():
    task = ZOO["esm2_finetune"].build()
    model, batch = task.model().eval(), task.example({"length": 30, "items": 3})
    ours, _ = model(batch["tokens"])
    model.stock = True
    theirs, _ = model(batch["tokens"])
    assert torch.allclose(ours[batch["mask"]], theirs[batch["mask"]], atol=1e-5)


def test_frozen_layers_are_the_lower_half():
    model = ZOO["transformer_frozen"].build().model()
    trained = [all(one.requires_grad for one in block.parameters()) for block in model.encoder.blocks]
    assert trained == [False] * 4 + [True] * 4


def test_tied_weights_are_one_parameter():
    model = ZOO["tied"].build().model()
    assert model.out.weight is model.embedding.weight


def test_no_gradient_passes_a_detached_supervision_step():
    task = ZOO["recurrent_depth"].task(width=12, heads=2, encoder_layers=1, decoder_layers=1, steps=2, latent=1)
    attached = type(task)(**{**vars(task), "detach": False})
    batch = task.example({"residues": 6, "peaks": 4, "items": 2})
    for one, reaches in ((task, False), (attached, True)):
        model = one.model()
        told = model(batch["peaks"], batch["precursor"], batch["mask"], 6)
        (gradient,) = torch.autograd.grad(told[-1].sum(), model.first_logits, allow_unused=True, materialize_grads=True)
        assert bool(gradient.abs().sum() > 0) is reaches


def test_edges_of_the_data_dependent_member_grow_with_its_sizes():
    from tests.zoo.gnn import _strongest

    kept = [len(_strongest(torch.randn(edges, 4), *torch.zeros(2, edges, dtype=int))[0]) for edges in (100, 200, 400)]
    assert kept == [50, 100, 200]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", sorted(GUIDES))
def test_a_small_version_of_a_guide_learns(seed):
    guide = GUIDES[seed]
    task = guide.build(**guide.tiny)
    check_step(task, task.example(guide.sizes(3, guide.tiny_item)))


@pytest.mark.parametrize("seed", sorted(GUIDES))
def test_a_guide_is_wholly_declared(seed):
    guide = GUIDES[seed]
    items = guide.items(50, np.random.default_rng(0))
    assert set(items) == set(guide.item) == set(guide.largest) == set(guide.tiny_item)
    assert all(guide.item[name] <= guide.largest[name] for name in guide.item)
    assert set(guide.settings) <= SETTINGS
    assert guide.notes
    for changes in ({}, *guide.variants.values()):
        assert guide.build(**changes)


@pytest.mark.parametrize(
    ("seed", "millions"), [("001", 99.8), ("003", 12.5), ("004", 151.3)]
)  # 95.6 and a head of 4.2; as its guide says; as published, and a head
def test_a_guide_has_its_real_number_of_parameters(seed, millions):
    with torch.device("meta"):
        model = GUIDES[seed].build().model()
    assert sum(one.numel() for one in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


def test_the_rnas_tensor_products_take_4800_weights_an_edge():
    model = GUIDES["000"].build(depth=1).model()
    assert model.layers[0]["contacts"].product.weight_numel == 4800


@pytest.mark.nightly
def test_the_effective_batches_of_the_guide_on_peptides_are_96_but_for_those_it_says_are_not():
    assert [one.effective for one in GUIDES["003"].batches] == [96, 96, 96, 128, 80, 96]
