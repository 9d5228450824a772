from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import CacheDamaged, RecordMissing
from pipeline.records import Reason, Rejection
from pipeline.store.cache_folder import CacheFolder
from pipeline.training.items.batch import padded_field
from pipeline.training.items.loader import PROCESSES, THREADS
from pipeline.training.sampling import Sampler, SamplerSettings
from tests.training.items.content import ALONE, ENCODER, PRECISION, graph_of, made


def lists_of(items, size):
    return [list(range(first, min(first + size, items))) for first in range(0, items, size)]


def check_item(data, item):
    """Compare everything of an item in a batch with the graph it came from."""
    graph = data.graphs[item.number]
    assert list(item.sides) == [part.role.value for part in graph.parts]
    for part in graph.parts:
        side = item.sides[part.role.value]
        np.testing.assert_array_equal(side.centre, part.centre_3)
        for mine, theirs in ((side.nodes, part.nodes), (side.residues, part.residues), (side.paths, part.paths)):
            for name, array in theirs.items():
                np.testing.assert_array_equal(mine[name], array, err_msg=name)
        for name, edges in part.edges.items():
            np.testing.assert_array_equal(side.edges[name], edges, err_msg=name)
        wanted, encoded = data.wanted_rows(part)
        np.testing.assert_array_equal(side.embedding.view(torch.int16), wanted.view(np.int16))
        np.testing.assert_array_equal(side.encoded, encoded)
    for name, edges in graph.cross.items():
        np.testing.assert_array_equal(item.cross[name], edges)
    for name, array in graph.labels.items():
        np.testing.assert_array_equal(item.labels[name], array)


def test_every_item_of_every_batch_is_the_graph_that_was_stored(data):
    seen = []
    for batch in data.loader(lists_of(24, 5)):
        assert len(batch.items) == len(batch)
        for item in batch.items:
            check_item(data, item)
            seen.append(item.number)
    assert seen == list(range(24))


def test_edges_and_labels_of_a_batch_join_the_nodes_that_they_join_in_its_items(data):
    (batch,) = data.loader([[3, 1, 4, 1]])
    for role, place in (("receptor", 0), ("ligand", 1)):
        edges, ptr = batch.sides[role].edges["near"], batch.ptr(f"{role}.node")
        owner = batch.owner(f"{role}.node")
        assert torch.equal(owner[edges[0]], owner[edges[1]])
        for at, number in enumerate(batch.numbers):
            mine = edges[:, owner[edges[0]] == at] - ptr[at]
            np.testing.assert_array_equal(mine, data.graphs[number].parts[place].edges["near"])
    pairs, owner = batch["label.contact_pairs"], batch.owner("label.contact")
    for at, number in enumerate(batch.numbers):
        first = torch.stack([batch.ptr("receptor.node")[at], batch.ptr("ligand.node")[at]])
        np.testing.assert_array_equal(pairs[owner == at] - first, data.graphs[number].labels["contact_pairs"])


def test_padding_puts_every_row_where_it_belongs(data):
    (batch,) = data.loader([[0, 1, 2]])
    for name in ("receptor.node.pos", "ligand.embedding", "receptor.node.type"):
        dense, real = padded_field(batch, name, fill=9)
        assert real.sum(dim=1).tolist() == batch.ptr(batch.layout.places[name].axis).diff().tolist()
        assert torch.equal(dense[real], batch[name])
        assert (dense[~real] == 9).all()
    with pytest.raises(ValueError, match="no rows to pad"):
        padded_field(batch, "receptor.edge.near")


def test_items_of_all_sorts_share_a_batch(tmp_path):
    """Atoms and paths, RNA that is not encoded, no partner, bound labels for one item and none for the next."""
    graphs = [
        graph_of(0, atoms=True),
        graph_of(1, ALONE, atoms=True),
        graph_of(2, rna=True, atoms=True, bound=True),
    ]
    data = made(CacheFolder(tmp_path / "cache"), graphs)
    (batch,) = data.loader([[0, 1, 2]])
    for item in batch.items:
        check_item(data, item)
    encoded = batch.sides["receptor"].encoded
    assert not encoded.all()
    assert (batch.sides["receptor"].embedding[~encoded] == 0).all()
    nodes = batch.sides["receptor"].nodes
    assert nodes["bound"][: graphs[0].parts[0].size].isnan().all()
    assert not nodes["labelled"][: graphs[0].parts[0].size].any()
    assert batch["label.bound_centre"][:2].isnan().all()
    assert batch.sides["receptor"].paths["angle"].dtype == torch.int64


def test_types_are_the_same_in_every_batch_however_narrow_the_record(tmp_path):
    small, large = (graph_of(seed) for seed in (1, 2))
    large.parts[0].nodes["chain"] = large.parts[0].nodes["chain"].astype(np.uint16)
    data = made(CacheFolder(tmp_path / "cache"), [small, large])
    types = [{name: tensor.dtype for name, tensor in batch.fields.items()} for batch in data.loader([[0], [1], [0, 1]])]
    assert types[0] == types[1] == types[2]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_batches_come_in_the_samplers_order_whoever_is_done_first(data, threads):
    lists = [[number] * (1 + 9 * (number % 3 == 0)) for number in range(24)]
    got = [list(batch.numbers) for batch in data.loader(lists, threads=threads, slots=3)]
    assert got == lists


VIEWS = (
    lambda memory: memory[8:16].view(torch.float32).view(2, 1),
    lambda memory: torch.from_numpy(memory.numpy()[3:]),
    lambda memory: memory[:5].split(2)[1],
    lambda memory: torch.from_numpy(np.frombuffer(memoryview(memory.numpy()), np.uint8)),
)


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2)), min_size=12, max_size=12), st.integers(3, 5))
def test_whatever_is_kept_of_a_batch_in_whatever_view_stays_what_it_was(data, kept, slots):
    held = []
    for batch, (view, turns) in zip(data.loader(lists_of(24, 2), slots=slots), kept, strict=True):
        assert all(torch.equal(part, copy) for part, copy, _ in held)
        held = [(part, copy, left - 1) for part, copy, left in held if left > 1]
        part = VIEWS[view](batch.memory)
        held.append((part, part.clone(), turns))
        del batch, part


@pytest.mark.parametrize("readers", [THREADS, PROCESSES])
def test_a_loop_may_keep_every_batch(data, readers):
    loader = data.loader(lists_of(24, 2), slots=2, readers=readers)
    for batch in list(loader):
        for item in batch.items:
            check_item(data, item)
    loader.end()


@pytest.mark.parametrize(("slots", "kept"), [(2, 1), (4, 1), (4, 3), (3, 9)])
def test_no_more_batches_are_read_ahead_than_there_are_slots(data, slots, kept):
    made, alive, most = [], [], 0

    def collate(items, rng):
        made.append(weakref.ref(held := Held(items)))
        return held

    batches = data.loader([[number] for number in range(24)], slots=slots, collate=collate).read()
    for _ in range(24):
        alive = [*alive, next(batches)][-kept:]
        most = max(most, sum(ref() is not None for ref in made))
    assert most <= max(slots, kept + 1) + 1  # the one that the loop lets go of when it gets the next


def test_what_goes_wrong_comes_in_its_place_and_what_came_before_is_whole(data, tmp_path):
    loader = data.loader([[0], [1], [99], [2]], threads=3)
    got = []
    with pytest.raises(IndexError):
        got.extend(list(batch.numbers) for batch in loader)
    assert got == [[0], [1]]
    assert threads_left() == 0


def threads_left():
    return sum(thread.name.startswith("reader") for thread in threading.enumerate())


@pytest.mark.nightly
def test_a_loop_that_is_left_leaves_no_threads_and_can_begin_again(data):
    loader = data.loader(lists_of(24, 2))
    for stop, epoch in ((0, 0), (1, 0), (5, 0), (11, 0), (12, 1)):  # after the last batch comes the next epoch
        numbers = [list(batch.numbers) for batch in islice(loader, stop)]
        assert numbers == lists_of(24, 2)[:stop]
        gc.collect()
        assert threads_left() == 0
        assert loader.sampler.epoch == epoch


def test_a_new_loop_ends_the_one_under_way(data):
    loader = data.loader(lists_of(24, 6))
    first = iter(loader)
    next(first)
    assert [list(batch.numbers) for batch in loader] == lists_of(24, 6)
    with pytest.raises(ValueError, match="another loop"):
        next(first)
    assert threads_left() == 0


def test_the_state_is_after_what_was_yielded_not_after_what_was_read(data):
    settings = SamplerSettings(batch=6, seed=5, micro_batch=4, padding=None)

    def loader():
        return data.loader([], sampler=Sampler(data.table.sizes, settings), slots=4)

    whole = loader()
    wanted = [list(batch.numbers) for _ in range(2) for batch in whole]
    for stop in range(len(wanted)):
        first = loader()
        got = [first.state_dict() and list(batch.numbers) for batch in islice(endless(first), stop)]
        state = first.state_dict()
        done = sum(map(len, got)) // 6 * 6  # a step that was begun is begun again
        second = loader()
        second.load_state_dict(state)
        rest = [number for batch in islice(endless(second), len(wanted)) for number in batch.numbers]
        flat = [number for numbers in wanted for number in numbers]
        assert flat[:done] + rest[: len(flat) - done] == flat


def endless(loader):
    while True:
        yield from loader


def test_random_numbers_are_an_items_own_whatever_batch_it_is_in(data):
    def drawn(lists, **options):
        loader = data.loader(
            lists, collate=lambda items, rng: {item.number: item.rng.random() for item in items}, **options
        )
        return {number: value for batch in loader for number, value in batch.items()}

    once = drawn(lists_of(24, 24))
    assert drawn(lists_of(24, 5)) == once
    assert len(set(once.values())) == 24
    assert drawn(lists_of(24, 24), seed=1) != once
    sampler = data.loader(lists_of(24, 24)).sampler
    sampler.set_epoch(1)
    assert drawn([], sampler=sampler) != once


@dataclass
class Held:
    """What a collate may make of items: the items."""

    items: list


def test_a_collate_may_write_to_what_it_is_handed(data):
    """Nothing of it is in the cache, in the table, or in another batch."""

    def spoil(items, _):
        before = [item.sides["receptor"].nodes["pos"].clone() for item in items]
        for item in items:
            for fields in (item.sides["receptor"].nodes, item.values, item.labels):
                for tensor in fields.values():
                    tensor.zero_()
        return before

    first, second = (list(data.loader(lists_of(24, 5), collate=spoil)) for _ in range(2))
    assert all(
        torch.equal(a, b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)
    )


def test_what_is_not_collated_ahead_is_collated_by_the_thread_that_asks_for_it(data):
    threads = []

    def collate(items, _):
        threads.append(threading.current_thread())
        return [item.id for item in items]

    loader = data.loader(lists_of(24, 5), collate=collate, may_collate=lambda _: False)
    assert [name for batch in loader.read() for name in batch.part(0, len(batch))] == [f"item{n}" for n in range(24)]
    assert set(threads) == {threading.main_thread()}
    assert [name for batch in loader for name in batch] == [f"item{n}" for n in range(24)], "nor is nothing yielded"
    ahead = data.loader(lists_of(24, 5), collate=collate)
    threads.clear()
    assert [name for batch in ahead.read() for name in batch.part(0, len(batch))] == [f"item{n}" for n in range(24)]
    assert threading.main_thread() not in threads


def test_an_embedding_that_is_missing_names_the_item_and_what_to_type(data, tmp_path):
    lost = made(CacheFolder(tmp_path / "cache"), [graph_of(0)])
    text = lost.graphs[0].parts[1].texts[0]
    empty = CacheFolder(tmp_path / "other").kind("embed")
    with empty.writer() as writer:
        for other in lost.rows.keys() - {text}:
            writer.put(ENCODER.key(other, PRECISION), {"rows": lost.rows[other]}, {})
    lost.embed_store = empty
    with pytest.raises(RecordMissing, match=rf"item0 \({len(text)} residues\).*\n.*submit embed"):
        list(lost.loader([[0]]))


def test_an_embedding_that_does_not_fit_names_key_and_item(tmp_path):
    data = made(CacheFolder(tmp_path / "cache"), [graph_of(0)])
    text = data.graphs[0].parts[1].texts[-1]
    key, right = ENCODER.key(text, PRECISION), data.rows[text]
    wrong = {
        "too few": (right[:-1], ()), "too narrow": (right[:, :-1], ()), "too wide": (np.tile(right, 3), ()),
        "float32": (right.astype(np.float32), ()), "bfloat16": (right.view(np.uint16), ("rows",)),
    }  # fmt: skip
    for name, (rows, bfloat16) in wrong.items():
        data.embed_store = CacheFolder(tmp_path / name).kind("embed")
        with data.embed_store.writer() as writer:
            for other in data.rows.keys() - {text}:
                writer.put(ENCODER.key(other, PRECISION), {"rows": data.rows[other]}, {})
            writer.put(key, {"rows": rows}, {}, bfloat16=bfloat16)
        with pytest.raises(CacheDamaged, match=rf"{key.hex()} of item0"):
            list(data.loader([[0]]))


def test_a_row_beyond_the_embedding_is_an_error_that_names_the_item(tmp_path):
    graph = graph_of(0)
    graph.parts[0].nodes["row"][-1] += 20
    data = made(CacheFolder(tmp_path / "cache"), [graph])
    with pytest.raises(CacheDamaged, match=r"residues of item0 have rows .*; its embeddings have"):
        list(data.loader([[0]]))


def test_a_damaged_embedding_is_never_yielded(tmp_path):
    data = made(CacheFolder(tmp_path / "cache"), [graph_of(0)])
    (path,) = (tmp_path / "cache/embed/shards").iterdir()
    key = ENCODER.key(data.graphs[0].parts[0].texts[0], PRECISION)
    offset = data.embed_store.locate([key])[0][0].offset
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(offset + 3)
        byte = file.read(1)
        file.seek(offset + 3)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CacheDamaged, match=r"embedding .*item0"):
        list(data.loader([[0]]))


def test_a_missing_graph_names_the_item_and_what_to_type(data, tmp_path):
    with pytest.raises(RecordMissing, match=r"item0") as raised:
        list(data.loader([[0]], graphs=data.only(tmp_path)))
    assert "submit graph" in raised.value.remedy


def test_a_record_that_says_why_there_is_no_graph_is_a_rejection(data, tmp_path):
    told = []
    loader = data.loader([[0, 1], [1], [2]], reject=told.append, graphs=data.only(tmp_path, 0, 2, refused=[1]))
    got = [(list(batch.numbers), len(batch.rejected)) for batch in loader.read()]
    assert got == [([0], 1), ([], 1), ([2], 0)]
    assert told == [Rejection("item1", Reason.NO_CONTACTS, "too far apart")] * 2


LEFT_OPEN = """
import sys
from pathlib import Path
from pipeline.store.cache_folder import CacheFolder
from tests.training.items.content import graph_of, made
data = made(CacheFolder(Path(sys.argv[1])), [graph_of(seed) for seed in range(8)])
batches = iter(data.loader([[number] for number in range(8)]))
print(next(batches).ids)
"""


def test_a_program_that_ends_in_the_middle_of_a_loop_ends(tmp_path):
    command = [sys.executable, "-c", LEFT_OPEN, str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "('item0',)\n", "")
