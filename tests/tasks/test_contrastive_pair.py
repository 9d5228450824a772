"""The contrastive task: what a tower sees, what its loss is of, and how a step in parts is one of all its items."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from pipeline.errors import ConfigError
from pipeline.memory.footprint import MemoryChoice, live_peak_bytes
from pipeline.protocol import ITEMS, Contrastive, Example, Outputs
from pipeline.readers import made
from pipeline.readers.pairs import Pairs
from pipeline.runs.model.task_contract import breaches
from pipeline.tasks.contrastive_pair import ContrastivePair
from pipeline.tasks.pairs import retrieval
from pipeline.training.step.checkpointing import repeated
from pipeline.training.step.contrastive import make_step
from pipeline.training.step.optimizers import StepSettings
from tests.memory.tracing.traced import tracer, true_peak
from tests.tasks.items import double
from tests.tasks.reader_items import batch_of
from tests.testkit.limited import device

RNG = np.random.default_rng(0)
SMALL = ContrastivePair(
    right="vectors", right_dim=6, left_most=20, right_most=12, width=16, layers=2, heads=2, feedforward=2, out=8
)
CHOICE = MemoryChoice()
SIZES = (
    {"left": 5, "right": 3, ITEMS: 1},
    {"left": 12, "right": 12, ITEMS: 6},
    {"left": 20, "right": 9, ITEMS: 40},
)
STEP, MICRO = 128, 16


def pair(seed, left=None, right=None):
    """Return an item whose sides have to do with each other."""
    rng = np.random.default_rng(seed)
    left = int(rng.integers(1, 16)) if left is None else left
    right = int(rng.integers(1, 10)) if right is None else right
    sort = rng.normal(size=6)
    return {
        "left.token": rng.integers(97, 123, left).astype(np.uint8),
        "right.vector": (sort + 0.1 * rng.normal(size=(right, 6))).astype(np.float32),
    }


def collated(*pairs, task=SMALL):
    return task.collate(batch_of(pairs).items[:], RNG)


def model_of(task=SMALL, dtype=torch.float64):
    torch.manual_seed(0)
    return task.model().to(dtype)


MIXED = [pair(0), pair(1, 0, 4), pair(2, 30, 30), pair(3, 1, 0)]


# ---- what it is ----


def test_it_keeps_the_contract():
    assert isinstance(SMALL, Example)
    assert isinstance(SMALL, Contrastive)
    assert isinstance(SMALL, Outputs)
    sizes = {"left": 12, "right": 7, ITEMS: 3}
    assert list(breaches(replace(SMALL, layers=1, left_most=64, right_most=64), sizes, batch_of(MIXED).items[:])) == []


def test_a_task_whose_embeddings_see_other_items_breaks_the_contract():
    class Centred(ContrastivePair):
        def embed(self, model, batch):
            return {name: rows - rows.mean(0) for name, rows in super().embed(model, batch).items()}

    options = {name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__}
    task = Centred(**options | {"layers": 1, "left_most": 64})
    found = list(breaches(task, {"left": 12, "right": 7, ITEMS: 3}, batch_of(MIXED).items[:]))
    assert [one.partition(" of an item")[0] for one in found] == ["embed(): 'left'", "embed(): 'right'"]


def test_cost_is_what_is_read_of_both_sides_of_one_item_or_of_whole_columns():
    assert SMALL.cost({"left": 7, "right": 4}) == {"left": 7, "right": 4}
    columns = SMALL.cost({"left": np.array([7, 900]), "right": np.array([900, 4])})
    assert {name: column.tolist() for name, column in columns.items()} == {"left": [7, 20], "right": [12, 4]}


def test_an_example_has_the_shapes_of_a_batch_of_its_sizes():
    for pairs, sizes in ((MIXED, {"left": 20, "right": 12, ITEMS: 4}), ([pair(0, 9, 7)], {"left": 9, "right": 7})):
        wanted, got = ([(one.shape, one.dtype) for one in tree_leaves(batch) if isinstance(one, torch.Tensor)]
                       for batch in (collated(*pairs), SMALL.example({ITEMS: 1} | sizes)))  # fmt: skip
        assert got == wanted


def test_both_towers_layers_may_run_again_in_backward():
    assert set(repeated(SMALL.model())) == {f"{side}.layers.{place}" for side in ("left", "right") for place in (0, 1)}


def test_the_default_is_two_towers_of_clips_text_size():
    with torch.device("meta"):
        model = ContrastivePair().model()
    assert sum(one.numel() for one in model.left.parameters()) == sum(one.numel() for one in model.right.parameters())
    assert sum(one.numel() for one in model.parameters()) == 76_598_273


# ---- what a tower sees ----


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_an_item_is_embedded_the_same_alone_and_in_a_batch(dtype, tolerance):
    model = model_of(dtype=dtype)
    convert = double if dtype is torch.float64 else (lambda batch: batch)
    together = SMALL.embed(model, convert(collated(*MIXED)))
    alone = [SMALL.embed(model, convert(collated(one))) for one in MIXED]
    for name, rows in together.items():
        assert torch.allclose(rows, torch.cat([one[name] for one in alone]), rtol=0, atol=tolerance)


def test_vectors_have_length_1_also_those_of_a_side_that_is_empty():
    for rows in SMALL.embed(model_of(), double(collated(*MIXED))).values():
        assert torch.allclose(rows.norm(dim=-1), torch.ones(4, dtype=torch.float64))


def test_of_a_long_side_the_first_rows_are_read():
    item = pair(0, 50, 30)
    cut = {"left.token": item["left.token"][:20], "right.vector": item["right.vector"][:12]}
    for long, short in zip(tree_leaves(collated(item)), tree_leaves(collated(cut)), strict=True):
        assert long is short or torch.equal(long, short)


def test_the_order_of_tokens_is_seen():
    item = pair(0, 9, 3)
    turned = item | {"left.token": item["left.token"][::-1]}
    found = SMALL.embed(model_of(), double(collated(item, turned)))
    assert (found["left"][0] - found["left"][1]).norm() > 1e-3
    assert torch.equal(found["right"][0], found["right"][1])


@pytest.mark.parametrize("kind", ["tokens", "vectors"])
def test_both_sides_may_be_of_one_kind(kind):
    task = replace(SMALL, left=kind, right=kind, left_dim=6)
    field = {"tokens": "token", "vectors": "vector"}[kind]
    name = {"token": "left.token", "vector": "right.vector"}[field]
    items = [{f"left.{field}": pair(seed)[name], f"right.{field}": pair(seed + 1)[name]} for seed in range(3)]
    (total, weight) = task.loss(model_of(task), double(collated(*items, task=task)))["pairs"]
    assert torch.isfinite(total)
    assert weight == 3


def test_it_takes_what_the_reader_of_pairs_gives(tmp_path):
    made.pairs(tmp_path / "made.tsv", 5)
    entries = list(Pairs(tmp_path / "made.tsv").entries())
    task = replace(SMALL, right="tokens")
    batch = task.collate(batch_of([one.arrays for one in entries], [one.id for one in entries]).items[:], RNG)
    assert {name: rows.shape for name, rows in task.outputs(model_of(task, torch.float32), batch).items()} == {
        "left": (5, 8), "right": (5, 8), "similarity": (5,),
    }  # fmt: skip


# ---- the loss ----


def test_the_loss_is_the_symmetric_cross_entropy_of_cosines_over_the_temperature():
    model, batch = model_of(), double(collated(*MIXED))
    rows = SMALL.embed(model, batch)
    logits = rows["left"] @ rows["right"].T / SMALL.temperature
    own = torch.arange(4)
    wanted = (functional.cross_entropy(logits, own) + functional.cross_entropy(logits.T, own)) / 2
    total, weight = SMALL.contrast(model, rows)["pairs"]
    assert float((total / weight - wanted).detach()) == pytest.approx(0, abs=1e-6)  # the temperature is kept in single


def test_the_temperature_is_learned_stays_above_a_hundredth_and_can_come_back():
    model, rows = model_of(), SMALL.embed(model_of(), double(collated(*MIXED)))
    with torch.no_grad():
        model.log_scale.fill_(9.0)
    assert float(model.scale().detach()) == pytest.approx(100)
    same = {"left": rows["left"], "right": rows["left"].roll(1, 0)}  # all wrong: less sharp would be better
    SMALL.contrast(model, {name: one.detach() for name, one in same.items()})["pairs"][0].backward()
    assert float(model.log_scale.grad) > 1


def test_half_precision_is_finite_and_compares_in_single():
    batch, model = collated(*MIXED), model_of(dtype=torch.float32)
    plain = float(SMALL.loss(model, batch)["pairs"][0].detach())
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            half, _ = SMALL.loss(model, batch)["pairs"]
        half.backward()
        assert half.dtype == torch.float32
        assert float(half.detach()) == pytest.approx(plain, rel=0.1)
        assert all(torch.isfinite(one.grad).all() for one in model.parameters())
    single = SMALL.embed(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert float(SMALL.contrast(model, single)["pairs"][0].detach()) == plain


# ---- 8 micro-batches of 16, and one batch of 128 ----


@pytest.fixture(scope="module")
def whole():
    """Return the pairs of a step, the loss of one batch of them, and its gradients."""
    pairs = [pair(seed) for seed in range(STEP)]
    model = model_of()
    total, weight = SMALL.loss(model, double(collated(*pairs)))["pairs"]
    assert weight == STEP
    (total / weight).backward()
    return pairs, float(total.detach()) / STEP, {name: one.grad for name, one in model.named_parameters()}


def parts(pairs):
    return [double(collated(*pairs[at : at + MICRO])) for at in range(0, STEP, MICRO)]


def relative(found, wanted):
    apart = sum(float((found[name] - one).square().sum()) for name, one in wanted.items())
    return (apart / sum(float(one.square().sum()) for one in wanted.values())) ** 0.5


def test_plain_accumulation_of_8_times_16_trains_on_another_loss_than_one_batch_of_128(whole):
    pairs, loss, wanted = whole
    model, sums = model_of(), 0.0
    for batch in parts(pairs):
        total, _ = SMALL.loss(model, batch)["pairs"]
        (total / STEP).backward()
        sums += float(total.detach()) / STEP
    found = {name: one.grad for name, one in model.named_parameters()}
    assert sums < loss - 1  # 15 wrong answers are easier to tell from than 127
    assert relative(found, wanted) > 0.2


def test_two_passes_over_8_times_16_are_one_batch_of_128(whole):
    pairs, _, wanted = whole
    model, batches = model_of(), parts(pairs)
    with torch.no_grad():
        told = [SMALL.embed(model, batch) for batch in batches]
    rows = {name: torch.cat([one[name] for one in told]).requires_grad_() for name in ("left", "right")}
    total, weight = SMALL.contrast(model, rows)["pairs"]
    (total / weight).backward()
    for place, batch in enumerate(batches):
        again = SMALL.embed(model, batch)
        mine = slice(MICRO * place, MICRO * (place + 1))
        torch.autograd.backward(list(again.values()), [rows[name].grad[mine] for name in again])
    found = {name: one.grad for name, one in model.named_parameters()}
    assert max(float((one - wanted[name]).abs().max()) for name, one in found.items()) < 1e-10
    assert relative(found, wanted) < 1e-12


@pytest.mark.parametrize("cuts", [(16, 32, 48, 64, 80, 96, 112), (1, 2, 90), (64,)])
def test_a_step_has_the_same_gradients_however_it_is_cut(whole, cuts):
    pairs, _, wanted = whole
    step = make_step(
        SMALL, StepSettings(optimizer="sgd", learning_rate=1.0, weight_decay=0.0, momentum=0.0), model=model_of()
    )
    before = {name: one.detach().clone() for name, one in step.model.named_parameters()}
    spans = zip((0, *cuts), (*cuts, STEP), strict=True)
    step.run([double(collated(*pairs[start:stop])) for start, stop in spans])
    found = {name: before[name] - one.detach() for name, one in step.model.named_parameters()}
    assert max(float((one - wanted[name]).abs().max()) for name, one in found.items()) < 1e-10


# ---- figures ----


def outputs_of(left, right):
    return {"left": list(left), "right": list(right)}


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("block", [7, 1000])
def test_figures_are_those_of_all_cosines_sorted(monkeypatch, block):
    monkeypatch.setattr(retrieval, "BLOCK", block)
    left = unit(RNG.normal(size=(50, 8)))
    right = unit(left + 0.5 * RNG.normal(size=(50, 8)))
    cosines = left @ right.T
    figures = SMALL.metrics(outputs_of(left, right))
    for way, table in (("left_to_right", cosines), ("right_to_left", cosines.T)):
        places = (table > np.diag(table)[:, None]).sum(1)
        assert figures[f"{way}_at_1"] == pytest.approx((places < 1).mean())
        assert figures[f"{way}_at_5"] == pytest.approx((places < 5).mean())
        assert figures[f"{way}_mean_rank"] == pytest.approx(1 + places.mean())
    assert 0 < figures["left_to_right_at_1"] < figures["left_to_right_at_5"] < 1


def test_towers_that_tell_nothing_apart_find_nothing():
    alike = np.tile(unit(RNG.normal(size=(1, 8))), (40, 1))
    figures = SMALL.metrics(outputs_of(alike, alike))
    assert figures["left_to_right_at_1"] == pytest.approx(1 / 40)
    assert figures["right_to_left_at_5"] == pytest.approx(5 / 40)
    assert figures["left_to_right_mean_rank"] == pytest.approx(20.5)


def test_vectors_that_are_not_numbers_are_found_by_nobody():
    rows = unit(RNG.normal(size=(10, 8)))
    broken = rows.copy()
    broken[:] = np.nan
    figures = SMALL.metrics(outputs_of(rows, broken))
    assert figures["left_to_right_at_5"] == 0
    assert figures["left_to_right_mean_rank"] == 10  # of ten
    assert SMALL.metrics(outputs_of(rows, rows))["left_to_right_at_1"] == 1


def test_figures_hold_two_blocks_of_items_at_a_time(monkeypatch):
    monkeypatch.setattr(retrieval, "BLOCK", 10)
    held, most = [0], [0]

    class Rows(np.ndarray):
        def __del__(self):
            held[0] -= 1

    class Lazy:
        def __len__(self):
            return 200

        def __getitem__(self, place):
            held[0] += 1
            most[0] = max(most[0], held[0])
            return unit(np.random.default_rng(place).normal(size=(1, 8)))[0].view(Rows)

    SMALL.metrics({"left": Lazy(), "right": Lazy()})
    assert held == [0]
    assert most[0] <= 3 * 10


# ---- decay ----


def test_all_is_trained_and_the_temperature_alone_does_not_decay():
    step = make_step(SMALL, StepSettings(weight_decay=0.5))
    decays = {id(one): group["weight_decay"] for group in step.optimizer.param_groups for one in group["params"]}
    assert decays == {id(one): 0.5 for one in step.model.parameters()} | {id(step.model.log_scale): 0.0}


def test_a_frozen_temperature_is_not_given_to_the_optimizer():
    step = make_step(SMALL, StepSettings(frozen=("log_scale",)))
    assert [len(group["params"]) for group in step.optimizer.param_groups] == [len(step.trained)]


# ---- memory ----


@pytest.mark.nightly
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("size", range(len(SIZES)))
def test_the_planner_traces_it_to_two_thousandths_of_what_it_takes(size):
    device.need()
    settings = {"clip": 1.0, "batch": SIZES[size][ITEMS]}
    traced = tracer(SMALL, least=SIZES[0], **settings)
    standing, micro = traced.standing(CHOICE), traced.micro(CHOICE, SIZES[size])
    predicted = live_peak_bytes(standing, micro, accumulate=False)
    assert predicted == pytest.approx(true_peak(SMALL, SIZES[size], **settings), rel=0.002)


# ---- bad input ----


@pytest.mark.parametrize(
    ("options", "name", "said"),
    [
        ({"left": "sounds"}, "left", "left is 'sounds': it must be tokens, vectors, images or text"),
        ({"right": "vectors"}, "right_dim", "right has vectors: say how many numbers each has"),
        ({"left_most": 0}, "left_most", "left_most is 0"),
        ({"temperature": 0.001}, "temperature", "temperature is 0.001"),
        ({"temperature": float("inf")}, "temperature", "temperature is inf"),
        ({"dropout": -0.1}, "dropout", "dropout is -0.1"),
        ({"heads": 7}, "heads", "512 features cannot be divided among 7 heads"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options, name, said):
    with pytest.raises(ConfigError, match=said) as caught:
        ContrastivePair(**options)
    assert caught.value.where == f"train.options.{name}"


def test_vectors_of_another_width_are_refused_with_what_to_set():
    with pytest.raises(ConfigError, match=r"vectors of 5 numbers, right.vector of item0 is of \[6\]") as caught:
        collated(pair(0), task=replace(SMALL, right_dim=5))
    assert caught.value.remedy == "--set train.options.right_dim=6"


def test_items_without_the_side_that_is_read_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"reads left.vector; item0 has left.token, right.vector"):
        collated(pair(0), task=replace(SMALL, left="vectors", left_dim=6))


# ---- it learns ----


@pytest.mark.nightly
def test_it_learns_to_find_pairs():
    pairs = [pair(seed) for seed in range(24)]
    torch.manual_seed(0)
    step = make_step(SMALL, StepSettings(learning_rate=3e-3, clip=1.0))
    batches = [collated(*pairs[at : at + 6]) for at in range(0, 24, 6)]
    losses = [float(step.run(batches)["pairs"]) for _ in range(40)]
    assert losses[0] > 2.5
    assert losses[-1] < 0.3
    step.model.eval()
    with torch.no_grad():
        told = SMALL.outputs(step.model, collated(*pairs))
    figures = SMALL.metrics({name: [one.numpy() for one in rows] for name, rows in told.items()})
    assert figures["left_to_right_at_1"] > 0.9
