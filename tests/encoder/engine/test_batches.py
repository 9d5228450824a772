"""Which sequences are encoded together: each exactly once, and a prime number of them not one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.encoder.embedding_recipe import ENDS, EmbeddingRecipe, windows
from pipeline.encoder.engine.token_batches import (
    BatchSchedule,
    cap_shards,
    cost,
    deal_shards,
    fitting_cap,
    plan_batches,
    recipe_costs,
    too_long,
)
from tests.testkit.counted import calls_of

POLICIES = ("divisor", "tokens")
relaxed = settings(deadline=None)  # other work may share the machine
LENGTHS = st.lists(st.integers(0, 3000), max_size=80).map(lambda lengths: np.array(lengths, np.int64))
ENDLESS = 1 << 60


@relaxed
@given(LENGTHS, st.sampled_from(POLICIES), st.integers(1, 9), st.integers(1, 5000))
def test_every_sequence_is_in_one_batch_and_no_batch_beyond_the_budget(lengths, policy, cap, budget):
    batches = plan_batches(lengths, policy=policy, cap=cap, budget=budget)
    assert sorted(np.concatenate([*batches, []]).tolist()) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or (lengths[batch] + ENDS).sum() <= budget
        assert policy == "tokens" or len(batch) <= cap
    order = np.concatenate([*batches, []]).astype(int).tolist()  # the longest first, equal ones in their order
    assert order == sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))


def test_batches_of_some_lengths():
    def sizes(lengths, **how):
        return [
            len(batch) for batch in plan_batches(np.asarray(lengths), **{"policy": "divisor", "budget": ENDLESS, **how})
        ]

    assert sizes(np.full(8713, 100), cap=4) == [4] * 2178 + [1]  # a prime count does not degrade to ones
    assert sizes(np.arange(11), cap=4) == [4, 4, 3]
    assert sizes([98, 98, 48, 48, 8, 8, 8, 8], cap=8, budget=100) == [1, 1, 2, 4]  # halved until it fits
    for policy in POLICIES:  # both marks of each sequence count
        assert sizes([8] * 4, policy=policy, cap=2, budget=20) == [2, 2]
        assert sizes([8] * 4, policy=policy, cap=2, budget=19) == [1] * 4


@relaxed
@given(LENGTHS, st.integers(1, 5000))
def test_a_token_batch_ends_only_where_the_next_sequence_would_not_fit(lengths, budget):
    batches = plan_batches(lengths, policy="tokens", cap=1, budget=budget)
    for batch, following in pairwise(batches):
        assert (lengths[[*batch, following[0]]] + ENDS).sum() > budget


NOBODY = np.array([], np.int64)
RECIPE = EmbeddingRecipe("0", 2, "chain", "fp32", "fp32", length=50, overlap=10)


def drawn(schedule, budget):
    batches = []
    while (batch := schedule.draw(budget)) is not None:
        batches.append(batch.tolist())
    return batches


def test_what_is_left_is_cut_again_when_the_budget_changes():
    schedule = BatchSchedule(np.full(40, 48), NOBODY, RECIPE, policy="tokens", cap=None)
    assert len(schedule.draw(500)) == 10
    assert drawn(schedule, 150) == [list(range(first, first + 3)) for first in range(10, 40, 3)]
    assert drawn(schedule, 200) == []
    for budget in (0, 1):  # what is larger than any budget is drawn alone
        assert drawn(BatchSchedule(np.array([3, 4]), NOBODY, RECIPE, policy="tokens", cap=None), budget) == [[1], [0]]
    for cap, sizes in ((2, [2, 2, 2]), (None, [3, 3])):  # as large as was said, or as the budget allows
        schedule = BatchSchedule(np.full(6, 48), NOBODY, RECIPE, policy="divisor", cap=cap)
        assert [len(batch) for batch in drawn(schedule, 150)] == sizes


def test_what_is_refused_is_never_drawn():
    lengths = np.array([50, 51, 10])
    strict = replace(RECIPE, long="error")
    assert too_long(lengths, strict).tolist() == [1]
    assert too_long(lengths, RECIPE).tolist() == too_long(lengths[:1], strict).tolist() == []
    assert too_long(NOBODY, replace(strict, length=0)).tolist() == []
    schedule = BatchSchedule(lengths, np.array([1]), strict, policy="tokens", cap=None)
    assert drawn(schedule, 1000) == [[0, 2]]


def test_what_is_computed_in_windows_is_alone_and_what_is_truncated_counts_as_that():
    lengths = np.array([20, 80, 50, 200])
    windowed = BatchSchedule(lengths, NOBODY, replace(RECIPE, long="windows"), policy="tokens", cap=None)
    assert drawn(windowed, 104) == [[3], [1], [2, 0]]
    truncated = BatchSchedule(lengths, NOBODY, replace(RECIPE, long="truncate"), policy="tokens", cap=None)
    assert drawn(truncated, 104) == [[3, 1], [2, 0]]
    whole = BatchSchedule(lengths, NOBODY, replace(RECIPE, long="windows", whole=80), policy="tokens", cap=None)
    assert drawn(whole, 140) == [[3], [1, 2], [0]]


def test_what_is_truncated_or_taken_whole_costs_what_is_computed():
    lengths, (truncated, largest) = np.array([40, 80]), (cost(np.array([size]), 2, 8)[0] for size in (50, 80))
    assert recipe_costs(lengths, replace(RECIPE, long="truncate"), 8)[1] == truncated
    assert recipe_costs(lengths, replace(RECIPE, long="windows", whole=80), 8)[1] == largest
    assert recipe_costs(lengths, RECIPE, 8)[1] == largest
    found = recipe_costs(np.array([51, 131]), replace(RECIPE, long="windows"), 8)
    assert found.tolist() == [2 * truncated, len(windows(131, 50, 10)) * truncated]
    beside_longer = recipe_costs(np.array([80, 81]), replace(RECIPE, long="windows", whole=80), 8)
    assert beside_longer[0] == largest


def test_an_automatic_cap_fills_the_budget_with_usual_sequences():
    assert fitting_cap(np.array([98] * 9 + [5000]), 1000) == 10
    assert fitting_cap(np.array([10] * 3), 24) == 2
    assert fitting_cap(np.array([5000]), 1000) == 1
    assert fitting_cap(np.array([8]), 100_000) == 64
    assert fitting_cap(np.array([], np.int64), 1000) == 1


def test_a_cost_is_the_multiply_adds_of_the_matrices():
    layers, dim, tokens = 3, 16, 10 + ENDS
    linear = sum(tokens * dim * out for out in (dim, dim, dim, dim, 4 * dim, 4 * dim))
    attention = tokens * tokens * dim + tokens * tokens * dim  # scores, and the sums they weigh
    assert cost(np.array([10]), layers, dim).tolist() == [layers * (linear + attention)]


@relaxed
@given(LENGTHS, st.integers(1, 7), st.integers(1, 6))
def test_every_sequence_is_dealt_once_in_whole_groups_and_no_shard_costs_a_group_more_than_another(
    lengths, shards, multiple
):
    costs_N = cost(lengths, 2, 8)
    dealt = deal_shards(lengths, costs_N, shards, multiple)
    parts = np.split(np.argsort(-lengths, kind="stable"), range(multiple, 80, multiple))
    loads = [costs_N[shard].sum() for shard in dealt]
    assert max(loads) - min(loads) <= max(costs_N[part].sum() for part in parts) * (1 + 1e-9)
    assert len(dealt) == shards
    assert sorted(np.concatenate(dealt).tolist()) == list(range(len(lengths)))
    assert sum(len(shard) % multiple > 0 for shard in dealt) <= 1
    assert all((np.diff(lengths[shard]) <= 0).all() for shard in dealt)


@relaxed
@given(LENGTHS, st.integers(1, 7), st.integers(1, 9))
def test_a_shard_of_too_many_is_dealt_in_parts_that_cost_about_the_same(lengths, shards, most):
    costs_N = cost(lengths, 2, 8)
    dealt = deal_shards(lengths, costs_N, shards, 1)
    capped = list(cap_shards(dealt, most))
    assert sorted(np.concatenate([*capped, []]).tolist()) == list(range(len(lengths)))
    assert all(0 < len(part) <= most and (np.diff(lengths[part]) <= 0).all() for part in capped)
    for shard in dealt:
        loads = [costs_N[part].sum() for part in cap_shards([shard], most)]
        assert max(loads, default=0) - min(loads, default=0) <= costs_N[shard].max(initial=0) * (1 + 1e-9)
    assert [part.tolist() for part in cap_shards(dealt, 80)] == [shard.tolist() for shard in dealt if len(shard)]


def test_a_million_sequences_are_planned_and_dealt_in_a_few_calls_a_batch():
    lengths = np.random.default_rng(0).integers(20, 2000, 1_000_000)
    shards = deal_shards(lengths, cost(lengths, 33, 1280), 100, 4)
    assert calls_of(lambda: deal_shards(lengths, cost(lengths, 33, 1280), 100, 4)) < 300_000
    for policy in POLICIES:
        assert calls_of(lambda policy=policy: plan_batches(lengths, policy=policy, cap=4, budget=8192)) < 1_500_000
    loads = [cost(lengths[shard], 33, 1280).sum() for shard in shards]
    assert max(loads) / min(loads) < 1.001
