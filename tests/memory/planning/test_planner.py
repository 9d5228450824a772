"""The planner on models whose memory is known for every micro-batch."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pipeline.errors import ConfigError, DataError, PipelineError, PlanInfeasible
from pipeline.memory.footprint import MemoryChoice, Provenance, margin_of
from pipeline.memory.hardware.gpus import device
from pipeline.memory.planning.budget_search import ChoiceMemory, Terms, extremes
from pipeline.memory.planning.memory_plan import (
    CardSpec,
    CostModel,
    DataSizes,
    MemoryPlan,
    MicroBatchLimit,
    Micros,
    Offer,
    Oversize,
    PlanRequest,
    RemedyVerdict,
)
from pipeline.memory.planning.planner import CurriculumStage, compare_offers, plan_memory, plan_stages
from pipeline.memory.planning.step_estimates import compare_configurations
from pipeline.training.sampling import Draws
from tests.memory.planning.oracles import GIB, LAYERS, MIB, Integers, Model, card, data, greedy, heavy

BATCH = 24


def affine(sizes: Mapping[str, int]) -> float:
    return 20_000 * sizes["nodes"] + 3_000 * sizes["edges"] + 100_000 * sizes["items"]


def quadratic(sizes: Mapping[str, int]) -> float:
    return 10_000 * sizes["nodes"] + 8 * sizes["nodes"] ** 2 + 1_000 * sizes["edges"]


def two_branches(sizes: Mapping[str, int]) -> float:
    """Whichever of two parts takes more: convex, and no plane fits it."""
    return max(90_000 * sizes["nodes"], 4_500 * sizes["edges"])


def padded(sizes: Mapping[str, int]) -> float:
    return sizes["items"] * (2_000 * sizes["length"] + 400 * sizes["length"] ** 2)


def lengths(count: int = 500) -> dict[str, Integers]:
    return {"length": np.random.default_rng(1).integers(20, 400, count)}


CASES: dict[str, tuple[Callable[[Mapping[str, int]], float], dict[str, Integers], bool]] = {
    "affine": (affine, heavy(600), False),
    "quadratic": (quadratic, heavy(600), False),
    "two branches": (two_branches, heavy(600), False),
    "a long tail": (affine, heavy(600, spread=1.0), False),
    "padded": (padded, lengths(), True),
}


def micros_of(made: MemoryPlan, items: DataSizes, cut: Callable[..., Micros] | None = None) -> Micros:
    """Return an epoch under a plan."""
    cost = made.cost(items.sizes)
    return (cut or items.cut)(items, cost, made.budget_bytes, made.request.ranks)


def peaks_of(model: Model, made: MemoryPlan, micros: Micros) -> list[int]:
    rows = [dict(zip(micros.names, row, strict=True)) for row in micros.sizes_MS.tolist()]
    return [model.peak(made.choice, row) for row in rows]


def planned(model: Model, items: DataSizes, budget: int, **about: Any) -> MemoryPlan:
    return plan_memory(model, items, PlanRequest(batch=BATCH, blocks=LAYERS, **about), [card(budget)])


@pytest.mark.parametrize("budget", [150, 300, 700])
@pytest.mark.parametrize("name", CASES)
def test_no_micro_batch_of_an_epoch_is_over_the_limit_and_at_least_80_percent_is_used(name: str, budget: int) -> None:
    activations, sizes, is_padded = CASES[name]
    model, items = Model(activations), data(sizes, BATCH, padded=is_padded)
    made = planned(model, items, budget * MIB)
    worst = max(peaks_of(model, made, micros_of(made, items)))
    assert worst <= budget * MIB
    assert made.cuts.limit is MicroBatchLimit.WHOLE_SHARE or worst >= 0.8 * budget * MIB
    assert made.live.value >= worst, "what the plan says is what was measured, or more"
    assert len(set(model.asked)) == len(model.asked) <= 60, "and none is asked twice"


@pytest.mark.parametrize("name", CASES)
def test_a_plan_holds_in_epochs_that_were_never_cut(name: str) -> None:
    activations, sizes, is_padded = CASES[name]
    model, items = Model(activations), data(sizes, BATCH, padded=is_padded)
    made = planned(model, items, 300 * MIB)
    assert sum(part.bytes for part in made.parts) == made.live.value
    for seed in range(1, 20):
        cut = greedy(BATCH, padded=is_padded, seed=seed)
        assert max(peaks_of(model, made, micros_of(made, items, cut))) <= 300 * MIB


def test_a_step_that_fits_at_once_is_not_cut() -> None:
    made = planned(Model(affine), data(heavy(200), BATCH), 8 * GIB)
    assert made.cuts.limit is MicroBatchLimit.WHOLE_SHARE
    assert (made.cuts.steps_most, made.cuts.items_most) == (1, BATCH)
    assert made.remedies == ()


def test_more_memory_never_makes_a_slower_plan() -> None:
    items = data(heavy(400), BATCH)
    times = [
        planned(Model(affine), items, budget * MIB, precisions=("fp32", "bf16")).epoch_s.value
        for budget in (80, 120, 200, 320, 500, 1000, 4000)
    ]
    slower = [later / earlier for earlier, later in pairwise(times)]
    assert max(slower) <= 1.05, "by so much an earlier remedy may be slower than a later one"
    assert times[-1] < times[0]


def single(size: int, count: int = 48) -> dict[str, Integers]:
    return {"nodes": np.full(count, size, np.int64)}


@pytest.mark.parametrize(
    ("largest", "remedies"),
    [
        (70, ()),
        (200, ("checkpointing",)),
        (350, ("checkpointing", "precision")),
        (800, ("checkpointing", "precision", "offload")),
    ],
)
def test_remedies_are_taken_in_their_order_as_far_as_an_item_needs_them(
    largest: int, remedies: tuple[str, ...]
) -> None:
    model = Model(lambda sizes: MIB * sizes["nodes"], flops_a_byte=100, kernels=0)
    # a card whose half precision is as slow as fp32, so that nothing but memory asks for it
    slow_half = replace(card(100 * MIB), flops_per_s={"fp32": 20e12, "bf16": 20e12})
    request = PlanRequest(batch=BATCH, blocks=LAYERS, precisions=("fp32", "bf16"))
    made = plan_memory(model, data(single(largest), BATCH), request, [slow_half])
    assert tuple(remedy.split()[0] for remedy in made.remedies) == remedies
    assert [trial.verdict for trial in made.trials].count(RemedyVerdict.CHOSEN) == 1
    tried = [trial.verdict for trial in made.trials]
    assert set(tried[: tried.index(RemedyVerdict.CHOSEN)]) <= {RemedyVerdict.TOO_LARGE}


@pytest.mark.parametrize("largest", [100, 150, 230])
def test_as_few_blocks_are_checkpointed_as_fit(largest: int) -> None:
    model = Model(lambda sizes: MIB * sizes["nodes"])
    made = planned(model, data(single(largest), BATCH), 100 * MIB, offload=False)
    fewer = replace(made.choice, checkpointing=made.choice.checkpointing - 1)
    assert 0 < made.choice.checkpointing < LAYERS
    assert made.remedies == (f"checkpointing {made.choice.checkpointing} of {LAYERS} blocks",)
    alone, with_fewer = (model.peak(choice, {"items": 1, "nodes": largest}) for choice in (made.choice, fewer))
    assert 1.02 * alone <= 100 * MIB < 1.02 * with_fewer
    pinned = planned(model, data(single(largest), BATCH), 100 * MIB, offload=False, checkpointing=LAYERS)
    assert made.epoch_s.value < pinned.epoch_s.value


def test_stages_share_the_blocks_that_the_largest_needs() -> None:
    stages = [CurriculumStage(str(size), data(single(size), BATCH)) for size in (20, 200)]
    plans = plan_stages(
        Model(lambda sizes: MIB * sizes["nodes"]), stages, PlanRequest(batch=BATCH, blocks=LAYERS), [card(100 * MIB)]
    )
    assert len({plan.choice for plan in plans.values()}) == 1
    assert plans["20"].choice.checkpointing > 0


def test_sharding_is_the_last_remedy() -> None:
    model = Model(lambda sizes: 10_000 * sizes["nodes"], parameters=100 * MIB)
    items, request = data(single(10), BATCH), PlanRequest(batch=BATCH, blocks=LAYERS, ranks=4, shards=None)
    with pytest.raises(PlanInfeasible):
        plan_memory(model, items, replace(request, shards=1), [card(250 * MIB)])
    assert plan_memory(model, items, request, [card(700 * MIB)]).choice.shards == 1
    spread = plan_memory(model, items, request, [card(250 * MIB)])
    assert spread.choice.shards == 4
    assert spread.remedies[-1] == "sharding over 4 ranks"


def test_half_precision_is_taken_where_it_is_faster_and_only_where_every_card_has_it() -> None:
    items, request = data(heavy(200), BATCH), PlanRequest(batch=BATCH, blocks=LAYERS, precisions=("fp32", "bf16"))
    able, unable = card(GIB, "new"), card(2 * GIB, "old", half=False)
    assert plan_memory(Model(affine, flops_a_byte=50_000), items, request, [able]).choice.precision == "bf16"
    made = plan_memory(Model(affine, flops_a_byte=50_000), items, request, [able, unable])
    assert made.choice.precision == "fp32"
    assert {trial.verdict for trial in made.trials if trial.choice.precision == "bf16"} == {RemedyVerdict.UNSUPPORTED}
    with pytest.raises(ConfigError, match="bf16"):
        plan_memory(Model(affine), items, replace(request, precisions=("bf16",)), [able, unable])


def test_a_plan_for_several_cards_fits_the_smallest() -> None:
    items = data(heavy(300), BATCH)
    small = plan_memory(Model(affine), items, PlanRequest(batch=BATCH, blocks=LAYERS), [card(150 * MIB)])
    both = plan_memory(
        Model(affine), items, PlanRequest(batch=BATCH, blocks=LAYERS), [card(GIB, "large"), card(150 * MIB, "small")]
    )
    assert (both.budget_bytes, both.limit_bytes, both.cards) == (small.budget_bytes, 150 * MIB, ("large", "small"))


def test_the_allocator_is_part_of_the_total() -> None:
    model, items = Model(affine, parameters=64 * MIB), data(heavy(300), BATCH)
    made = plan_memory(model, items, PlanRequest(batch=BATCH, blocks=LAYERS), [card(2 * GIB, caching=True)])
    assert made.reserved.value >= made.live.value
    assert made.reserved.value * 1.08 <= made.total.value + 1
    assert made.total.value <= 2 * GIB
    assert max(peaks_of(model, made, micros_of(made, items))) <= 2 * GIB


def test_pinned_settings_are_kept() -> None:
    made = planned(
        Model(affine), data(heavy(200), BATCH), 400 * MIB, micro_batch=4, checkpointing=LAYERS, offload=False
    )
    assert (made.cuts.items_most, made.cuts.limit, made.choice) == (
        4,
        MicroBatchLimit.PINNED,
        MemoryChoice(checkpointing=LAYERS),
    )
    assert set(micros_of(made, data(heavy(200), BATCH)).items_M.tolist()) == {4}


def test_a_pinned_micro_batch_that_does_not_fit_is_refused_with_one_that_does() -> None:
    items = data(single(10, 96), BATCH)
    pinned = {"micro_batch": 24, "checkpointing": 0, "offload": False}
    with pytest.raises(ConfigError) as refused:
        planned(Model(lambda sizes: MIB * sizes["nodes"]), items, 120 * MIB, **pinned)
    fits = int(refused.value.remedy.split(" fit:")[0])
    model = Model(lambda sizes: MIB * sizes["nodes"])
    assert planned(model, items, 120 * MIB, **{**pinned, "micro_batch": fits}).cuts.items_most == fits


def with_giants() -> dict[str, Integers]:
    sizes = {name: values.copy() for name, values in heavy(300).items()}
    for item, nodes in ((17, 60_000), (230, 45_000)):
        sizes["nodes"][item], sizes["edges"][item] = nodes, 20 * nodes
    return sizes


def test_items_that_can_never_fit_are_named_with_what_they_take_and_a_card_that_would_do() -> None:
    cards = [CardSpec.of(device(name), 1) for name in ("a100-80", "a100-40", "h200")]
    with pytest.raises(PlanInfeasible) as refused:
        plan_memory(
            Model(affine),
            data(with_giants(), BATCH),
            PlanRequest(batch=BATCH, blocks=LAYERS),
            [card(200 * MIB)],
            others=cards,
        )
    assert refused.value.exit_code == 5
    assert all(word in refused.value.what for word in ("item 17", "60,000 nodes", "item 230"))
    assert "a100-40" in refused.value.remedy


def test_an_item_that_an_epoch_draws_twice_is_one_item_in_an_error() -> None:
    copy_N = (np.arange(300) == 230).astype(np.int64)  # of the item in row 17
    draws = Draws(np.ones(300), np.zeros(300, np.int64), np.arange(300), copy_N)
    ids = ["giant" if row in (17, 230) else f"c{row}" for row in range(300)]
    items = replace(data(with_giants(), BATCH), draws=draws, ids=ids)
    with pytest.raises(PlanInfeasible, match="1 of 299 items"):
        planned(Model(affine), items, 200 * MIB)


def test_oversize_items_are_left_out_where_that_is_wanted() -> None:
    model, items = Model(affine), data(with_giants(), BATCH)
    made = planned(model, items, 200 * MIB, oversize=Oversize.SKIP)
    assert [one.item for one in made.oversize] == [17, 230]
    kept = items.only(~np.isin(np.arange(300), [17, 230]))
    assert max(peaks_of(model, made, micros_of(made, kept))) <= 200 * MIB
    alone = model.peak(MemoryChoice(checkpointing=LAYERS, offload=True), {"items": 1, **made.oversize[0].sizes})
    assert made.oversize[0].total.value >= alone > made.oversize[0].budget_bytes


@pytest.mark.parametrize("caching", [False, True])
def test_every_refused_item_takes_more_than_there_is_and_a_larger_one_no_less(*, caching: bool) -> None:
    """Kernels change their way with the size: some larger items take less. An allocator holds more than is live."""
    model = Model(lambda sizes: 10 * MIB * sizes["nodes"] * (1 - 0.1 * (sizes["nodes"] % 2)), parameters=MIB)
    items, pinned = data({"nodes": np.arange(20, 60)}, 2), {"checkpointing": 0, "offload": False}
    for nodes in (40, 44.0005, 48, 52):
        limit = [card(int((4 + 10 * nodes) * MIB), caching=caching)]
        request = PlanRequest(batch=2, oversize=Oversize.SKIP, **pinned)
        refused = plan_memory(model, items, request, limit).oversize
        totals = [item.total.value for item in sorted(refused, key=lambda item: item.sizes["nodes"])]
        assert totals == sorted(totals)
        assert min(totals) > limit[0].budget_bytes
        with pytest.raises(PlanInfeasible) as error:
            plan_memory(model, items, replace(request, oversize=Oversize.ERROR), limit)
        *takes, has = re.findall(r"[\d,.]+ [MG]?i?B\b", error.value.what)
        assert has not in takes


def test_oversize_items_are_cropped_to_sizes_that_fit() -> None:
    model, items = Model(affine), data(with_giants(), BATCH)
    made = planned(model, items, 200 * MIB, oversize=Oversize.CROP)
    cropped = items.cropped(made.crop)
    worst = max(peaks_of(model, made, micros_of(made, cropped)))
    assert worst <= 200 * MIB
    assert made.crop["nodes"] < 45_000
    assert model.peak(MemoryChoice(checkpointing=LAYERS, offload=True), {"items": 1, **made.crop}) > 0.7 * 200 * MIB


@pytest.mark.parametrize(
    ("sizes", "request_", "error"),
    [
        (heavy(50), PlanRequest(batch=2, ranks=3), ConfigError),
        ({"nodes": np.zeros(0, np.int64)}, PlanRequest(batch=BATCH, blocks=LAYERS), DataError),
    ],
    ids=["a batch below the ranks", "no items"],
)
def test_what_no_plan_could_satisfy_is_refused(
    sizes: dict[str, Integers], request_: PlanRequest, error: type[PipelineError]
) -> None:
    with pytest.raises(error) as refused:
        plan_memory(Model(affine), data(sizes, BATCH), request_, [card(GIB)])
    assert refused.value.remedy


def test_a_card_smaller_than_the_model_is_refused() -> None:
    with pytest.raises(PlanInfeasible, match=r"at least 192 MiB") as refused:
        planned(Model(affine, parameters=64 * MIB), data(heavy(50), BATCH), 100 * MIB)
    assert "sharding" in refused.value.remedy


def test_a_curriculum_has_a_plan_for_each_stage_in_one_precision() -> None:
    short, long = heavy(200), {name: 4 * values for name, values in heavy(200).items()}
    stages = [
        CurriculumStage("short", data(short, BATCH), epochs=10),
        CurriculumStage("long", data(long, BATCH), epochs=2),
    ]
    slow_half = replace(card(220 * MIB), flops_per_s={"fp32": 20e12, "bf16": 20e12})
    request = PlanRequest(batch=BATCH, blocks=LAYERS, precisions=("fp32", "bf16"), checkpointing=0, offload=False)
    plans = plan_stages(Model(affine), stages, request, [slow_half])
    assert plans["short"].cuts.items_median > plans["long"].cuts.items_median
    assert {one.choice.precision for one in plans.values()} == {"bf16"}, "the long stage needs it"
    for stage in stages:
        worst = max(peaks_of(Model(affine), plans[stage.name], micros_of(plans[stage.name], stage.data)))
        assert worst <= 220 * MIB


def test_what_is_not_traced_has_a_larger_margin() -> None:
    origins = Provenance.TRACED, Provenance.ASSUMED
    traced, assumed = (planned(Model(affine, origin=one), data(heavy(200), BATCH), 300 * MIB) for one in origins)
    assert assumed.budget_bytes < traced.budget_bytes
    assert (assumed.live.origin, assumed.margin.factor) == (Provenance.ASSUMED, 1.30)


def test_after_runs_the_margin_is_their_worst_and_the_chance_is_counted() -> None:
    margin = margin_of(Provenance.TRACED, (0.95, 1.01, 0.97))
    assert margin.factor == pytest.approx(1.01 * 1.02)
    assert margin.probability == 0.95  # of three runs alone it would be 3/4: the rest is assumed
    assert margin.trust is Provenance.ASSUMED
    many = margin_of(Provenance.TRACED, (1.0,) * 40)
    assert many.probability == pytest.approx(40 / 41)
    assert many.trust is Provenance.MEASURED
    assert (margin.origin, margin_of(Provenance.TRACED).origin) == (Provenance.MEASURED, Provenance.ASSUMED)
    assert [margin_of(Provenance.TRACED, caching=caching).factor for caching in (True, False)] == [1.08, 1.02]


def test_the_table_of_configurations_says_which_fit_on_which_card() -> None:
    cards = [card(size * GIB, f"{size}") for size in (24, 40, 80)]
    model = Model(lambda sizes: 0.3 * GIB * sizes["items"], parameters=50 * MIB)
    memory = ChoiceMemory(model, MemoryChoice(), ("items", "peaks"))
    request = PlanRequest(batch=96)
    rows = compare_configurations(memory, [(96, 1), (48, 2), (64, 2)], cards, {"peaks": 100}, request)
    assert [(row.items, row.accumulation) for row in rows] == [(96, 1), (48, 2), (64, 2)]
    assert rows[1].fits == {"24": True, "40": True, "80": True}
    assert rows[0].fits == {"24": False, "40": True, "80": True}
    assert rows[0].total.value > rows[2].total.value > rows[1].total.value


def test_offers_are_compared_in_gpu_hours_and_one_that_does_not_fit_says_why() -> None:
    items, request = data(heavy(400), BATCH), PlanRequest(batch=BATCH, blocks=LAYERS, epochs=100)
    small, large, tiny = card(200 * MIB, "small"), card(400 * MIB, "large", speed=2.0), card(MIB, "tiny")
    offers = [Offer("1 tiny", 1, (tiny,)), Offer("3 small", 3, (small,)), Offer("1 large", 1, (large,))]
    made = compare_offers(Model(affine), items, request, offers)
    assert made[-1].plan is None
    assert made[-1].why
    costs = {one.offer.name: one.gpu_hours.value for one in made if one.gpu_hours}
    assert list(costs.values()) == sorted(costs.values())
    assert costs["1 large"] < costs["3 small"]
    assert made[0].hours is not None


@pytest.mark.parametrize("padded", [False, True])
def test_the_memory_of_planning_is_some_numbers_an_item(padded: bool) -> None:
    count = 1 << 18
    sizes_NS = np.random.default_rng(0).integers(1, 100, (count, 3))
    terms = Terms(("items", "nodes", "edges", "pairs"), padded)
    model, sizes = CostModel(dict.fromkeys(terms.texts, 1.0)), dict(zip(terms.names[1:], sizes_NS.T, strict=True))
    tracemalloc.start()
    try:
        cost_N = model.cost(sizes)
        of_costs = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        extremes(sizes_NS, cost_N, 100 * int(cost_N.mean()), 64, padded=padded)
        of_extremes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(of_costs, of_extremes) < 96 * count


def test_what_was_measured_of_one_choice_says_nothing_of_another() -> None:
    items = data(heavy(200), BATCH)
    limit = 300 * MIB
    before = planned(Model(affine), items, limit)
    other = MemoryChoice(checkpointing=LAYERS - before.choice.checkpointing)
    lucky = planned(Model(affine), items, limit, ratios=(0.85,), measured=other)
    assert lucky.choice != before.choice or lucky.margin.factor == before.margin.factor
    told = {one.choice: one.margin.factor for one in (before, lucky)}
    assert all(factor >= 1.0 or choice != before.choice for choice, factor in told.items())


def test_a_compiled_model_gets_more_also_after_an_eager_measurement() -> None:
    items = data(heavy(100), BATCH)
    eager = planned(Model(affine), items, GIB, ratios=(1.0,))
    fused = planned(Model(affine), items, GIB, ratios=(1.0,), compiled=True)
    assert fused.margin.factor == pytest.approx(1.1 * eager.margin.factor)


def test_an_epoch_that_was_cut_in_part_is_as_long_as_it_is() -> None:
    whole = data(heavy(400), BATCH)

    def a_quarter(data: Any, cost_N: Any, budget_bytes: int, ranks: int) -> Micros:
        found = whole.cut(data, cost_N, budget_bytes, ranks)
        kept = found.step_M < np.unique(found.step_M).size // 4
        share = np.unique(found.step_M[kept]).size / np.unique(found.step_M).size
        return Micros(found.names, found.sizes_MS[kept], found.step_M[kept], found.rank_M[kept], share)

    all_s = planned(Model(affine), whole, GIB).epoch_s.value
    some_s = planned(Model(affine), replace(whole, cut=a_quarter), GIB).epoch_s.value
    assert some_s == pytest.approx(all_s, rel=0.3)


def test_a_share_of_a_card_includes_what_cublas_holds() -> None:
    half = CardSpec.of(device("h100"), 1, fraction=0.5)
    assert half.budget_bytes == device("h100").usable_bytes // 2 - device("h100").workspace_bytes
    assert CardSpec.of(device("h100"), 1, fraction=1.0) == CardSpec.of(device("h100"), 1)
