"""Draws of an epoch: weights, clusters, sources and shares, the same in whatever way a run is cut or resumed."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.schema_train import SamplingSection
from pipeline.errors import PipelineError
from pipeline.planning.sampled_items import with_draws
from pipeline.training.items.batch import copy_name, item_rng
from pipeline.training.items.item_table import ItemTable, TableBuilder
from pipeline.training.sampling import BatchOrigin, Sampler, SamplerSettings

ITEMS = 600
WEIGHT, CLUSTER, SOURCE = "weight", "cluster", "source"


def table_of(items: int = ITEMS) -> ItemTable:
    """Return a table of items 0, 1, 2, …"""
    builder = TableBuilder()
    for number in range(items):
        builder.add(str(number), number.to_bytes(16, "big"), "train", {"nodes": 20 + number % 90})
    return builder.table()


def written(folder: Path, **columns: object) -> Path:
    """Write a table with these columns, one function of an item's number each."""
    path = folder / "sampling.csv"
    rows = [",".join(map(str, (n, *(made(n) for made in columns.values())))) for n in reversed(range(ITEMS))]  # type: ignore[operator]
    path.write_text("\n".join([",".join(("id", *columns)), *rows]) + "\n")
    return path


def epochs_of(table: ItemTable, epochs: int = 4) -> list[list[list[str]]]:
    """Return the ids of each step of each epoch."""
    sampler = Sampler(table.sizes, SamplerSettings(24), draws=table.draws)
    return [
        [[table.ids[number] for number in sampler.step_items(epoch, step)] for step in range(sampler.steps)]
        for epoch in range(epochs)
    ]


def drawn(table: ItemTable, epochs: int = 4) -> list[np.ndarray]:
    """Return how often each epoch draws each item."""
    ids = [[*chain(*epoch)] for epoch in epochs_of(table, epochs)]
    return [np.bincount(np.array(epoch, int), minlength=ITEMS) for epoch in ids]


def test_every_step_is_full_and_epochs_differ(tmp_path):
    sampled = with_draws(table_of(), SamplingSection(items_per_epoch=240))
    epochs = epochs_of(sampled)
    assert [[len(step) for step in epoch] for epoch in epochs] == [[24] * 10] * 4
    assert len({frozenset(chain(*epoch)) for epoch in epochs}) == 4
    assert all(len(set(chain(*epoch))) == 240 for epoch in epochs)  # none is drawn twice


def test_an_item_is_drawn_as_often_as_its_weight_says(tmp_path):
    path = written(tmp_path, weight=lambda n: (0, 0.5, 1, 2.5)[n % 4])
    sampled = with_draws(table_of(), SamplingSection(table=path, weight=WEIGHT))
    counts = drawn(sampled, 20)
    for count in counts:
        assert count.sum() == ITEMS
        each = np.array([count[rest::4].sum() for rest in range(4)])
        np.testing.assert_allclose(each / ITEMS, np.array([0, 0.5, 1, 2.5]) / 4, atol=0.01)
        expected = np.tile(np.array([0, 0.5, 1, 2.5]), ITEMS // 4)
        assert (np.abs(count - expected) < 1).all()
    assert np.ptp(np.sum(counts, axis=0)[1::4]) > 0  # by chance, not by turns


@pytest.mark.parametrize("per_cluster", [1, 3])
def test_each_cluster_gives_as_many_items_as_it_is_asked_for(tmp_path, per_cluster):
    path = written(tmp_path, split=lambda n: "train", cluster=lambda n: f"c{int(n**0.5)}")
    sampled = with_draws(table_of(), SamplingSection(table=path, cluster=CLUSTER, per_cluster=per_cluster))
    sizes = np.bincount((np.arange(ITEMS) ** 0.5).astype(int))
    seen = np.zeros(ITEMS, int)
    for count in drawn(sampled, 30):
        each = np.bincount((np.arange(ITEMS) ** 0.5).astype(int), count)
        np.testing.assert_array_equal(each, np.minimum(sizes, per_cluster))
        assert count.max() == 1
        seen += count
    assert (seen[:100] > 0).mean() > 0.8  # in time, all of the small ones are seen


def test_an_item_without_a_cluster_is_alone(tmp_path):
    path = written(tmp_path, cluster=lambda n: "" if n < 50 else "big")
    (count,) = drawn(with_draws(table_of(), SamplingSection(table=path, cluster=CLUSTER)), 1)
    assert (count[:50] == 1).all()
    assert count[50:].sum() == 1


def test_sources_get_their_shares_of_every_epoch(tmp_path):
    path = written(tmp_path, source=lambda n: "pdb" if n < 60 else "predicted")
    sampling = SamplingSection(table=path, source=SOURCE, shares={"pdb": 7, "predicted": 3}, items_per_epoch=1000)
    for count in drawn(with_draws(table_of(), sampling)):
        assert count.sum() == 1000
        assert abs(count[:60].sum() / 1000 - 0.7) <= 0.01
        assert np.ptp(count[:60]) <= 1  # 700 draws of 60 items: 11 or 12 of each


def test_weights_clusters_and_shares_go_together(tmp_path):
    path = written(tmp_path, weight=lambda n: 1 + n % 3, cluster=lambda n: n // 6, source=lambda n: "ab"[n >= 300])
    sampling = SamplingSection(
        table=path, weight=WEIGHT, cluster=CLUSTER, source=SOURCE, shares={"a": 0.2, "b": 0.8}, items_per_epoch=500
    )
    counts = drawn(with_draws(table_of(), sampling), 50)
    for count in counts:
        assert abs(count[:300].sum() / 500 - 0.2) <= 0.01
        clusters = count.reshape(-1, 6).sum(axis=1)
        assert set(clusters[:50]) <= {2}  # 100 draws of 50 clusters
        assert set(clusters[50:]) <= {8}
    share = np.sum(counts, axis=0).reshape(-1, 3).sum(axis=0) / np.sum(counts)
    np.testing.assert_allclose(share, np.array([1, 2, 3]) / 6, atol=0.02)


@settings(deadline=None, max_examples=25)
@given(epoch=st.integers(0, 50), step=st.integers(0, 9), ranks=st.sampled_from([1, 2, 3]))
def test_a_resumed_training_draws_the_same_steps(epoch, step, ranks):
    table = with_draws(table_of(200), SamplingSection(items_per_epoch=240))
    whole, resumed = (
        Sampler(table.sizes, SamplerSettings(24, seed=3), ranks=count, draws=table.draws) for count in (1, ranks)
    )
    whole.set_epoch(epoch)
    state = {**whole.state_dict(), "epoch": epoch, "step": step}
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    together = sorted(item for rank in resumed.shares(epoch, step) for part in rank for item in part.tolist())
    assert together == sorted(whole.step_items(epoch, step).tolist())


def test_a_state_of_other_draws_is_refused():
    table = table_of(200)
    one, other = (with_draws(table, SamplingSection(items_per_epoch=items)) for items in (150, 200))
    state = Sampler(one.sizes, SamplerSettings(24), draws=one.draws).state_dict()
    with pytest.raises(PipelineError):
        Sampler(other.sizes, SamplerSettings(24), draws=other.draws).load_state_dict(state)


def test_part_of_the_items_draws_no_row_twice_and_at_least_one(tmp_path):
    path = written(tmp_path, weight=lambda n: 1 if n % 2 else 0.6)
    sampled = with_draws(table_of(), SamplingSection(table=path, weight=WEIGHT, items_per_epoch=480))
    for rows in ([0, 1], [0], [0, 2, 3, 5]):
        draws = sampled.take(np.array(rows)).draws
        assert draws is not None
        for epoch in range(40):
            drawn_rows = draws.epoch(0, epoch).tolist()
            assert len(drawn_rows) == draws.items >= 1
            assert len(set(drawn_rows)) == len(drawn_rows)


@pytest.mark.parametrize("heavy", [1e308, 1e-310])
def test_only_the_ratio_of_weights_counts(tmp_path, heavy):
    path = written(tmp_path, weight=lambda n: heavy if n % 2 else 0, cluster=lambda n: n // 6)
    for sampling in ({"weight": WEIGHT}, {"weight": WEIGHT, "cluster": CLUSTER}):
        (count,) = drawn(with_draws(table_of(), SamplingSection(table=path, **sampling)), 1)
        assert count.sum() == (ITEMS if len(sampling) == 1 else ITEMS // 6)
        assert not count[::2].any()


def test_copies_of_an_item_have_random_numbers_of_their_own(tmp_path):
    sampled = with_draws(table_of(3), SamplingSection(items_per_epoch=6))
    sampler = Sampler(sampled.sizes, SamplerSettings(6), draws=sampled.draws)
    numbers = sampler.step_items(0, 0).tolist()
    assert (len(sampled), sampled.distinct) == (6, 3)
    names = [copy_name(sampled.ids[row], copy) for row, copy in zip(numbers, sampler.copies(numbers), strict=True)]
    assert sorted(names) == ["0", "0\x001", "1", "1\x001", "2", "2\x001"]
    origin = BatchOrigin(0, 0, 0, 1)
    assert len({int(item_rng(origin, name).integers(1 << 62)) for name in names}) == 6


def test_no_items_have_no_draws():
    assert not len(with_draws(table_of(0), SamplingSection(items_per_epoch=5)))


def test_rows_that_say_the_same_are_one_and_rows_that_differ_are_an_error(tmp_path):
    path = written(tmp_path, weight=lambda _: 1)
    sampling = SamplingSection(table=path, weight=WEIGHT)
    with path.open("a") as file:
        file.write("7,1\n")
    assert with_draws(table_of(), sampling).in_epoch == ITEMS
    with path.open("a") as file:
        file.write("9,2\n700,1\n700,2\n")
    with pytest.raises(PipelineError, match=r"1 of 600 .*such as 9"):
        with_draws(table_of(), sampling)


def test_a_phase_draws_its_items_as_often_as_the_epoch_would(tmp_path):
    path = written(tmp_path, weight=lambda n: 1 if n % 2 else 3)
    sampled = with_draws(table_of(), SamplingSection(table=path, weight=WEIGHT))
    even = sampled.take(np.array([n for n in range(len(sampled)) if int(sampled.ids[n]) % 2 == 0]))
    assert even.in_epoch == 450
    assert sampled.in_epoch == ITEMS


@pytest.mark.parametrize(
    ("columns", "sampling", "says"),
    [
        ({"weight": lambda n: "-1" if n == 7 else 1}, {"weight": WEIGHT}, "sampling.csv:594"),
        ({"weight": lambda n: "heavy" if n == 7 else 1}, {"weight": WEIGHT}, "sampling.csv:594"),
        ({"weight": lambda _: 0}, {"weight": WEIGHT}, "train.sampling.weight"),
        ({"weight": lambda _: 1}, {"weight": "wieght"}, "sampling.csv"),
        ({"source": lambda _: "a"}, {"source": SOURCE, "shares": {"a": 1, "b": 1}}, "train.sampling.shares"),
    ],
)
def test_a_wrong_table_is_an_error_that_names_the_place(tmp_path, columns, sampling, says):
    path = written(tmp_path, **columns)
    with pytest.raises(PipelineError) as caught:
        with_draws(table_of(), SamplingSection(table=path, **sampling))
    assert says in str(caught.value)
    assert caught.value.next


def test_an_item_that_the_table_lacks_is_an_error(tmp_path):
    path = written(tmp_path, weight=lambda _: 1)
    with pytest.raises(PipelineError, match="3 of 603"):
        with_draws(table_of(ITEMS + 3), SamplingSection(table=path, weight=WEIGHT))
