"""Which items make a step, on which rank, in which micro-batch: each once, whatever the ranks and the memory."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from itertools import combinations, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ConfigError, DataError, PlanInfeasible
from pipeline.training.loop.phase import worst_of
from pipeline.training.prepared import COST, LIKENESS, sampler_settings
from pipeline.training.sampling import (
    ORDER_VERSION,
    SHUFFLE,
    WINDOW,
    Sampler,
    SamplerSettings,
    deal_to_ranks,
    random_bits,
    shuffled,
)

relaxed = settings(deadline=None, max_examples=50)  # other work may share the machine
RANKS = (1, 2, 3, 8)


def made(items: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return sizes as complexes have them: partners of 20 to 800 residues, and no two dimensions alike."""
    rng = np.random.default_rng(seed)
    receptor, ligand = (np.maximum(20, np.exp(rng.normal(mean, 0.5, items))).astype(np.int64) for mean in (5.6, 4.9))
    return {"receptor": receptor, "ligand": ligand, "nodes": receptor + ligand, "pairs": receptor * ligand}


def epoch_of(sampler: Sampler, epoch: int = 0) -> list[list[int]]:
    """Return the items of every step, as they come."""
    return [sampler.step_items(epoch, step).tolist() for step in range(sampler.steps)]


def micros_of(sampler: Sampler) -> list[tuple]:
    """Return what one loop over a sampler hands out."""
    return [(micro.epoch, micro.step, micro.index, micro.of, micro.items.tolist()) for micro in sampler]


def padded(sizes: dict[str, np.ndarray], names: tuple[str, ...], items: np.ndarray) -> int:
    return len(items) * int(np.prod([sizes[name][items].max() for name in names]))


def real(sizes: dict[str, np.ndarray], names: tuple[str, ...], items: np.ndarray) -> int:
    return int(np.prod([sizes[name][items] for name in names], axis=0).sum())


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], SamplerSettings]:
    """Draw sizes, some of them zero and many of them equal, and settings that can be met."""
    items = draw(st.integers(1, 90))
    size = st.lists(st.one_of(st.integers(0, 6), st.integers(0, 900)), min_size=items, max_size=items)
    sizes = {name: np.array(draw(size), np.int64) for name in ("receptor", "ligand")}
    by = draw(st.sampled_from([("receptor",), ("receptor", "ligand")]))
    budgets = {
        "ligand": max(1, int(sizes["ligand"].max())),
        "receptor*ligand": max(1, int((sizes["receptor"] * sizes["ligand"]).max())),
    }
    limited = draw(st.lists(st.sampled_from(sorted(budgets)), unique=True))
    return sizes, SamplerSettings(
        batch=draw(st.integers(1, 40)),
        seed=draw(st.integers(0, 3)),
        by=by,
        window=draw(st.sampled_from([1, 16, 50, 4096])),
        brick=draw(st.integers(1, 12)),
        shuffle=draw(st.booleans()),
        cost=draw(st.sampled_from([None, "ligand", "receptor*ligand"])),
        budget={name: draw(st.integers(1, 4)) * budgets[name] for name in limited},
        micro_batch=draw(st.sampled_from([None, 1, 3, 8])),
        padding=draw(st.sampled_from([None, 1.0, 1.03, 1.5])),
    )


@relaxed
@given(cases(), st.sampled_from(RANKS))
def test_over_all_ranks_every_item_comes_once_in_steps_that_neither_ranks_nor_limits_change(case, ranks):
    sizes, chosen = case
    free = replace(chosen, budget={}, micro_batch=None, padding=None, cost=None)
    one, seen = Sampler(sizes, free), []
    assert epoch_of(one) == epoch_of(Sampler(sizes, chosen, ranks=ranks))
    for rank in range(ranks):
        steps: dict[int, list] = {}
        for micro in Sampler(sizes, chosen, rank=rank, ranks=ranks):
            steps.setdefault(micro.step, []).append(micro)
        assert list(steps) == list(range(-(-len(sizes["ligand"]) // chosen.batch))), "every rank sees every step"
        for micros in steps.values():
            assert [(micro.index, micro.of) for micro in micros] == [(n, len(micros)) for n in range(len(micros))]
            assert len(micros) == 1 or all(len(micro.items) for micro in micros)
        seen.append([np.concatenate([micro.items for micro in micros]) for micros in steps.values()])
    for step, dealt in enumerate(zip(*seen, strict=True)):
        assert sorted(np.concatenate(dealt).tolist()) == sorted(one.step_items(0, step).tolist())
    assert sorted(item for step in epoch_of(one) for item in step) == list(range(len(sizes["ligand"])))


@relaxed
@given(cases(), st.sampled_from(RANKS))
def test_no_micro_batch_exceeds_a_limit(case, ranks):
    sizes, chosen = case
    sampler = Sampler(sizes, chosen, ranks=ranks)
    for step in range(sampler.steps):
        for items in (part for share in sampler.shares(0, step) for part in share):
            assert len(items) <= (chosen.micro_batch or len(items))
            for name, most in chosen.budget.items():
                size = padded if chosen.padding is not None else real
                assert size(sizes, tuple(name.split("*")), items) <= most
            if chosen.padding is not None and len(items) > 1:
                assert padded(sizes, chosen.by, items) <= chosen.padding * real(sizes, chosen.by, items)


@relaxed
@given(cases())
def test_without_the_short_step_all_others_stay_what_they_are(case):
    sizes, chosen = case
    if len(sizes["ligand"]) < chosen.batch:
        with pytest.raises(DataError, match="drop_last"):
            Sampler(sizes, replace(chosen, drop_last=True))
        return
    steps = epoch_of(Sampler(sizes, chosen))
    full = [step for step in steps if len(step) == chosen.batch]
    assert epoch_of(Sampler(sizes, replace(chosen, drop_last=True))) == full


@pytest.mark.parametrize("ranks", RANKS)
def test_a_run_resumed_after_any_step_does_exactly_the_rest(ranks):
    sizes, chosen = made(100), SamplerSettings(batch=12, by=("receptor", "ligand"), window=48, micro_batch=3)
    for rank in range(ranks):
        whole = micros_of(Sampler(sizes, chosen, rank=rank, ranks=ranks))
        first = Sampler(sizes, chosen, rank=rank, ranks=ranks)
        for done, micro in enumerate(first, start=1):
            again = Sampler(sizes, chosen, rank=rank, ranks=ranks)
            again.load_state_dict(json.loads(json.dumps(first.state_dict())))
            if done == len(whole):
                assert (again.epoch, micros_of(again)[0][:2]) == (1, (1, 0))
            elif micro.is_last:
                assert micros_of(again) == whole[done:]
            else:  # a step that was not finished is done again
                assert micros_of(again) == whole[done - 1 - micro.index :]


def test_a_run_resumed_on_other_ranks_and_half_the_memory_does_the_rest_of_the_same_steps():
    sizes = made(200)
    chosen = SamplerSettings(batch=24, budget={"nodes": 2 * int(sizes["nodes"].max())})
    before = Sampler(sizes, chosen, rank=1, ranks=2)
    for micro in before:
        if micro.step == 3 and micro.is_last:
            break
    halved = replace(chosen, budget={"nodes": int(sizes["nodes"].max())})
    rest: dict[int, list[int]] = {}
    for rank in range(3):
        after = Sampler(sizes, halved, rank=rank, ranks=3)
        after.load_state_dict(before.state_dict())
        for micro in after:
            rest.setdefault(micro.step, []).extend(micro.items.tolist())
    whole = epoch_of(Sampler(sizes, chosen))
    assert {step: sorted(items) for step, items in rest.items()} == {n: sorted(whole[n]) for n in range(4, len(whole))}


def test_a_loop_that_was_left_begins_where_it_began():
    sampler = Sampler(made(100), SamplerSettings(batch=10))
    begun = micros_of(Sampler(made(100), SamplerSettings(batch=10)))
    for _ in range(2):
        assert next(iter(sampler)).items.tolist() == begun[0][-1]
    assert micros_of(sampler) == begun
    state = sampler.state_dict() | {"epoch": 0, "step": 4}
    sampler.load_state_dict(state)
    for _ in range(2):
        assert next(iter(sampler)).step == 4


def test_a_finished_loop_moves_on_and_naming_the_epoch_keeps_the_place_in_it():
    sampler = Sampler(made(100), SamplerSettings(batch=10))
    first, second = micros_of(sampler), micros_of(sampler)
    assert [epoch for epoch, *_ in (first[0], second[0])] == [0, 1]
    sampler.load_state_dict(sampler.state_dict() | {"epoch": 5, "step": 7})
    sampler.set_epoch(5)
    assert micros_of(sampler)[0][:2] == (5, 7)
    sampler.set_epoch(0)
    assert micros_of(sampler) == first


@pytest.mark.parametrize("by", [("nodes",), ("receptor", "ligand")])
def test_another_epoch_and_another_seed_are_other_orders(by):
    sizes, chosen = made(500), SamplerSettings(batch=8, by=by)
    sampler = Sampler(sizes, chosen)
    orders = [epoch_of(sampler, 0), epoch_of(sampler, 1), epoch_of(Sampler(sizes, replace(chosen, seed=1)))]
    flat = [np.concatenate(order).tolist() for order in orders]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        same = sum(mine == theirs for mine, theirs in zip(flat[one], flat[other], strict=True))
        assert same < 25  # 1 would be expected of 500
    assert epoch_of(sampler, 0) == orders[0]


def test_steps_mix_all_sizes_while_their_bricks_do_not():
    sizes = made(4_800)
    deviation = np.log(sizes["nodes"]).std()
    steps = np.array(epoch_of(Sampler(sizes, SamplerSettings(batch=24, brick=4))))
    logs = np.log(sizes["nodes"][steps])
    assert logs.reshape(-1, 4).std(axis=1).mean() < 0.03 * deviation
    assert 0.7 < logs.mean(axis=1).std() / (deviation / 6**0.5) < 1.3  # as if 6 items had been drawn at random


def test_the_first_half_of_an_epoch_is_no_smaller_than_the_second():
    sizes = made(9_600)
    steps = epoch_of(Sampler(sizes, SamplerSettings(batch=24, window=1200)))
    halves = [np.log(sizes["nodes"][np.array(half)]).mean() for half in (steps[:200], steps[200:])]
    assert abs(halves[0] - halves[1]) < 0.05


RECORDED = {  # of a seed: what each rank computes in an epoch
    "9b697b3aede8337a": ({"by": ("nodes",)}, 1),
    "b6bb14a3d4b333a0": ({"by": ("receptor", "ligand")}, 1),
    "6fbd4ff4dca329b0": ({"budget": {"nodes": 4000}}, 3),
    "07c30f4011f8b570": ({"padding": None, "budget": {"receptor*ligand": 900_000}, "micro_batch": 5}, 2),
    "f99ccf796620b865": (
        {"brick": 3, "batch": 10, "shuffle": False, "drop_last": True, "by": ("receptor", "ligand")},
        7,
    ),
}


@pytest.mark.parametrize("digest", RECORDED)
def test_the_order_of_a_seed_is_what_it_was(digest):
    """A later version resumes a run: anyone who changes an order raises ORDER_VERSION and these digests."""
    assert ORDER_VERSION == 1
    index = np.arange(1000)
    sizes = {"receptor": 50 + index * 7919 % 701, "ligand": 30 + index * 104_729 % 307}
    sizes["nodes"] = sizes["receptor"] + sizes["ligand"]
    settings, ranks = RECORDED[digest]
    chosen = SamplerSettings(**{"batch": 24, "seed": 7, "window": 400, **settings})
    sampler = Sampler(sizes, chosen, ranks=ranks)
    if ranks == 1:
        order = epoch_of(sampler, epoch=2)
    else:
        shares = [sampler.shares(2, step) for step in range(sampler.steps)]
        order = [[[part.tolist() for part in share] for share in step] for step in shares]
    assert hashlib.sha256(json.dumps(order).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("count", [1, WINDOW - 1, WINDOW, 2 * WINDOW + 1])
def test_an_order_that_is_made_part_by_part_is_that_of_all_at_once(count):
    mask = np.uint64((1 << count.bit_length()) - 1)
    keys_N = random_bits(count, 7, 2, SHUFFLE) & ~mask | np.arange(count, dtype=np.uint64)
    assert shuffled(count, 7, 2).tolist() == (np.sort(keys_N) & mask).tolist()


def test_without_shuffling_each_window_comes_in_file_order_largest_items_first():
    sizes = made(40)
    steps = epoch_of(Sampler(sizes, SamplerSettings(batch=5, window=20, shuffle=False)))
    for window, first in ((steps[:4], 0), (steps[4:], 20)):
        items = np.concatenate(window).tolist()
        assert sorted(items) == list(range(first, first + 20))
        assert (np.diff(sizes["nodes"][items]) <= 0).all()


@relaxed
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 4))
def test_no_swap_and_no_gift_of_the_costliest_rank_would_lower_what_the_two_have_to_do(costs, ranks):
    dealt = [part.tolist() for part in deal_to_ranks(np.array(costs, np.float64), ranks)]
    assert sorted(place for part in dealt for place in part) == list(range(len(costs)))
    loads = [sum(costs[place] for place in part) for part in dealt]
    heavy = max(range(ranks), key=lambda rank: loads[rank])
    if loads[heavy] <= sum(loads) / ranks * 1.001 or len(costs) <= ranks:
        return
    for other in set(range(ranks)) - {heavy}:
        for mine in dealt[heavy]:
            for back in (0, *(costs[place] for place in dealt[other])):
                change = costs[mine] - back
                assert max(loads[heavy] - change, loads[other] + change) >= loads[heavy]


@relaxed
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(60, 200), st.sampled_from([1.0, 1.1, 1.5]))
def test_no_other_way_to_cut_a_sorted_share_makes_fewer_micro_batches(sizes, budget, padding):
    chosen = SamplerSettings(batch=8, budget={"nodes": budget}, padding=padding)
    micros = Sampler({"nodes": np.array(sizes)}, chosen).micros(0, 0)
    order = sorted(sizes, reverse=True)

    def is_allowed(part: list[int]) -> bool:
        return len(part) * part[0] <= min(budget, padding * sum(part))

    ways = (
        [order[start:stop] for start, stop in pairwise((0, *places, len(order)))]
        for number in range(len(order))
        for places in combinations(range(1, len(order)), number)
    )
    assert len(micros) == min(len(way) for way in ways if all(is_allowed(part) for part in way))


def test_the_costliest_micro_batch_comes_first():
    sizes = made(48)
    for step in range(2):
        micros = Sampler(sizes, SamplerSettings(batch=24)).micros(0, step)
        costs = [padded(sizes, ("nodes",), micro.items) for micro in micros]
        assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("padding", [None, 1.03, 8.0])
def test_the_micro_batch_tried_before_step_1_is_the_costliest_of_the_whole_epoch(padding):
    rng = np.random.default_rng(1)
    late = np.ones(4500, np.int64)
    late[Sampler({COST: late, LIKENESS: late}, sampler_settings(1, 9, padding=padding)).step_items(0, 11)] = 9
    for cost_N, batch in [
        *((np.ceil(rng.lognormal(3, 0.8, 48)).astype(np.int64), 16) for _ in range(40)),
        *([] if padding else [(late, 1)]),
    ]:
        settings = sampler_settings(batch, max(int(cost_N.max()), int(16 * np.median(cost_N))), padding=padding)
        sampler = Sampler({COST: cost_N, LIKENESS: np.ones_like(cost_N)}, settings)
        taken = [cost_N[micro.items] for micro in sampler]
        sampler.set_epoch(0)
        phase = SimpleNamespace(loader=SimpleNamespace(sampler=sampler), cost_N=cost_N)
        worst = worst_of(phase, padded=padding is not None)
        of = (lambda cost_K: len(cost_K) * cost_K.max()) if padding else np.sum
        assert of(cost_N[worst.items]) == max(map(of, taken))


def test_limits_adjusted_within_an_epoch_hold_from_the_next_step_on():
    sampler = Sampler({"nodes": np.full(30, 10)}, SamplerSettings(batch=10, padding=None, budget={"nodes": 100}))
    lengths = []
    for micro in sampler:
        lengths.append((micro.step, len(micro.items)))
        sampler.adjust({"nodes": 50})
    assert lengths == [(0, 10), (1, 5), (1, 5), (2, 5), (2, 5)]


def test_items_too_large_for_the_budget_are_named_with_their_sizes():
    sizes = {"receptor": np.array([10, 900, 20, 30, 40, 50]), "ligand": np.array([5, 6, 700, 800, 900, 1000])}
    chosen = SamplerSettings(batch=2, by=("receptor",), budget={"receptor": 500, "receptor*ligand": 10_000})
    with pytest.raises(PlanInfeasible) as caught:
        Sampler(sizes, chosen)
    assert all(part in str(caught.value) for part in ("5 of 6", "item 1 has 900 receptor", "14,000 receptor*ligand"))
    sampler = Sampler(sizes, replace(chosen, budget={}))
    with pytest.raises(PlanInfeasible):
        sampler.adjust(chosen.budget)
    assert sampler.settings.budget == {}


def test_the_state_of_another_order_is_refused_with_what_changed():
    sizes, chosen = made(100), SamplerSettings(batch=10)
    sampler = Sampler(sizes, chosen, data="train")
    state = sampler.state_dict()
    others = {
        "seed 0 then, 1 now": Sampler(sizes, replace(chosen, seed=1), data="train"),
        "batch 10 then, 20 now": Sampler(sizes, replace(chosen, batch=20), data="train"),
        "items 100 then, 99 now": Sampler(made(99), chosen, data="train"),
        "sizes '": Sampler(made(100, seed=1), chosen, data="train"),
        "data 'train' then, 'test' now": Sampler(sizes, chosen, data="test"),
    }
    for text, other in others.items():
        with pytest.raises(ConfigError, match=text):
            other.load_state_dict(state)
    with pytest.raises(ConfigError, match="version 'nothing' then, 1 now"):
        sampler.load_state_dict({})
    with pytest.raises(ValueError, match="epoch 0 has no step 10"):
        sampler.load_state_dict(state | {"step": 10})


def test_settings_and_sizes_that_mean_nothing_are_refused_by_name():
    changes = {
        "batch": {"batch": 0}, "window": {"window": 0}, "brick": {"brick": 0}, "micro_batch": {"micro_batch": 0},
        "padding": {"padding": 0.9}, "nan": {"padding": math.nan},
        "nodes": {"budget": {"nodes": 0}}, "atoms": {"by": ("atoms",)}, "'atoms'": {"cost": "nodes*atoms"},
        "named 'atoms'": {"budget": {"atoms": 5}},
    }  # fmt: skip
    for text, change in changes.items():
        with pytest.raises(ValueError, match=text):
            Sampler(made(10), replace(SamplerSettings(batch=4), **change))
    with pytest.raises(DataError):
        Sampler(made(0), SamplerSettings(batch=4))


@pytest.mark.parametrize(
    "settings",
    [{"batch": 4}, {"batch": 4, "padding": None}, {"batch": 4, "drop_last": True}, {"batch": 1, "padding": None}],
)
def test_steps_for_which_another_rank_of_a_users_loop_would_wait_are_refused(settings):
    def loop(ranks):
        chosen = SamplerSettings(**settings)
        return Sampler({"nodes": np.arange(1, 11)}, chosen, place=lambda: (0, ranks))

    assert sum(1 for _ in loop(1)) >= 2
    with pytest.raises(ConfigError) as refused:
        next(iter(loop(2)))
    assert "SamplerSettings(" in refused.value.remedy
