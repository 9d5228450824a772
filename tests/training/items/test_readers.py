"""Threads and processes read the same batches, and a process that cannot is only ever a thread's work."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from pipeline.errors import CacheDamaged, RecordMissing
from pipeline.training.items.item_source import CachedGraphs, DamagedItems
from pipeline.training.items.loader import PROCESSES, THREADS

LISTS = [[3, 1, 4], [], [1], [5, 9, 2, 6], [0, 7], list(range(10)) * 3] * 3


class Pair(NamedTuple):
    values: torch.Tensor
    same: torch.Tensor


@dataclass
class Structured:
    """A batch of all sorts of parts."""

    named: dict[str, Any]
    pair: Pair
    text: tuple[str, ...]
    by: int

    def to(self, device: Any) -> Structured:
        raise AssertionError("nobody asked for it to be moved")


def structured(items, rng) -> Structured:
    values = torch.cat([item.sides["receptor"].embedding.float() for item in items])
    draws = torch.tensor([item.rng.normal() for item in items])
    named = {"draws": draws, "transposed": values.t(), "empty": values[:0], "one": values.sum(), "none": None}
    return Structured(named, Pair(values, values), tuple(item.id for item in items), os.getpid())


def weights(batch) -> dict[str, Any]:
    return {"rows": float(len(batch.pair.values)), "draws": batch.named["draws"].abs().sum()}


def content(batch) -> Any:
    if batch.value is None:
        return batch.ids, batch.origin, None
    value = batch.value
    tensors = {**value.named, "values": value.pair.values}
    said = {name: None if one is None else (one.dtype, one.tolist()) for name, one in tensors.items()}
    told = {name: float(weight) for name, weight in batch.weights.items()}
    assert value.pair.values is value.pair.same, "the same tensor is one tensor, there and here"
    return batch.ids, batch.numbers, batch.origin, said, value.text, told


def test_processes_make_what_threads_make_weights_and_draws_included(data):
    def read(readers):
        loader = data.loader(LISTS, collate=structured, weigh=weights, readers=readers)
        found = [(content(batch), batch.value.by if batch.value else os.getpid()) for batch in loader.read()]
        loader.end()
        return [what for what, _ in found], {by for _, by in found}

    by_threads, here = read(THREADS)
    by_processes, there = read(PROCESSES)
    assert by_processes == by_threads
    assert here == {os.getpid()}
    assert len(there - here) == 2


def test_processes_stay_for_the_next_epoch_and_end_with_the_loader(data):
    loader = data.loader([[0], [1], [2], [3]], collate=structured, readers=PROCESSES)
    pids = [{batch.by for batch in loader} for _ in range(2)]
    assert os.getpid() not in pids[0] | pids[1]
    assert len(pids[0] | pids[1]) <= 2
    loader.end()
    for pid in pids[0] | pids[1]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.timeout(60)
def test_processes_end_even_if_a_process_forked_later_holds_their_pipes(data):
    loader = data.loader([[0], [1]], readers=PROCESSES)
    assert len(list(loader)) == 2
    read, write = os.pipe()
    if not (pid := os.fork()):
        os.close(write)
        os.read(read, 1)  # until the other end is closed
        os._exit(0)
    loader.end()
    os.close(write)
    os.close(read)
    assert os.waitpid(pid, 0)[1] == 0


def test_what_is_not_to_be_collated_ahead_no_process_collates(data):
    loader = data.loader(LISTS, collate=structured, readers=PROCESSES, may_collate=lambda ids: "item1" not in ids)
    for batch in loader.read():
        assert batch.is_made == ("item1" not in batch.ids)
        assert batch.is_made or batch.part(0, len(batch)).by == os.getpid()
    loader.end()


def test_a_process_that_is_killed_costs_nothing_but_its_pace(data, caplog):
    loader = data.loader([[0], [1], [2], [3], [4], [5]] * 2, collate=structured, readers=PROCESSES, slots=2, threads=1)
    seen = []
    for batch in loader:
        if batch.by != os.getpid() and not any(by == os.getpid() for _, by in seen):
            os.kill(batch.by, signal.SIGKILL)
        seen.append((batch.text, batch.by))
        del batch
    assert [text for text, _ in seen] == [(f"item{number}",) for number in range(6)] * 2
    assert seen[-1][1] == os.getpid()
    assert "exit code -9" in caplog.text
    loader.end()


def unsendable(items, rng) -> Any:
    class Mine:
        ids = tuple(item.id for item in items)

    return Mine()


def test_what_cannot_be_sent_is_made_by_a_thread(data):
    loader = data.loader([[0], [1]], collate=unsendable, readers=PROCESSES)
    assert [batch.ids for batch in loader] == [("item0",), ("item1",)]
    loader.end()


def refusing(items, rng) -> Any:
    raise LookupError(f"{items[0].id} has no label")


def test_what_collate_raises_is_raised_here_in_its_place(data):
    loader = data.loader([[0], [1]], collate=refusing, readers=PROCESSES)
    with pytest.raises(LookupError, match="item0 has no label"):
        list(loader)
    loader.end()


@pytest.mark.parametrize("readers", [THREADS, PROCESSES])
def test_what_cannot_be_read_is_told_by_the_training_itself(data, tmp_path, readers):
    lists, graphs = [[0, 1], [2]], data.only(tmp_path, 0, 2)
    with pytest.raises((RecordMissing, CacheDamaged), match="item1"):
        list(data.loader(lists, graphs=graphs, collate=structured, readers=readers))
    mending = DamagedItems(lambda _id, _key: False, 3, 2, "here")
    mended = CachedGraphs(graphs.store, data.table, mending)
    loader = data.loader(lists, graphs=mended, mending=mending, collate=structured, readers=readers)
    assert [batch.text for batch in loader] == [("item0",), ("item2",)]
    assert mending.newly_skipped() == ["item1"]
    loader.end()
