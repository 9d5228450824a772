"""From texts to arrays: whatever the batches, whatever goes wrong, what was computed arrives and nothing else does."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.encoder.embedding_recipe import SequenceCut, Variant, windows
from pipeline.encoder.engine import embed_engine, memory_ladder, token_batches
from pipeline.encoder.engine.embed_engine import Engine
from pipeline.encoder.engine.encoder_source import EsmSource
from pipeline.encoder.esm2 import TILE
from pipeline.encoder.esm_checkpoint import load_esm_checkpoint
from pipeline.encoder.parity import Reference
from pipeline.errors import PlanInfeasible
from pipeline.records import Reason
from pipeline.store.format.disk import Disk
from tests.encoder.engine.stand_ins import DIM, Shelf, Workshop, lengths_of, recipe, run, settings, texts


class Stopped(BaseException):
    """What the worker raises when a signal asks it to end."""


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.fixture
def checkpoint(tiny):
    return load_esm_checkpoint(tiny)


def embed(checkpoint, sequences, the_recipe=None, **changes):
    """Embed with the real encoder; return what became of the sequences, and what was stored."""
    shelf = Shelf()
    engine = Engine(EsmSource(checkpoint), the_recipe or recipe(layer=3, length=1022), settings(**changes))
    return run(engine, sequences, shelf), shelf


def stood_in(workshop, the_recipe=None, **changes):
    return Engine(workshop, the_recipe or recipe(), settings(**changes))


def test_rows_are_those_of_the_reference_and_the_same_bits_whatever_the_batches(checkpoint):
    sequences = texts(*range(1, 60), 300, 200)
    _, plain = embed(checkpoint, sequences)
    for index, wanted in enumerate(Reference(checkpoint, 3, torch.device("cpu"))(sequences)):
        np.testing.assert_allclose(plain.taken[index].rows_LD, wanted, rtol=0, atol=2e-5)
        rows = {"residues": len(wanted), "rows": len(wanted)}
        assert plain.taken[index].meta == {**rows, "precision": "fp32", "cut": None}
    for changes in ({"cap": 1}, {"cap": 64}, {"policy": "tokens"}, {"budget": 90}, {"cap": "auto"}):
        _, other = embed(checkpoint, sequences, **changes)
        assert other.rows() == plain.rows(), changes


@pytest.mark.parametrize(("storage", "dtype"), [("fp32", "f4"), ("fp16", "f2"), ("bf16", "u2")])
def test_rows_are_stored_in_the_precision_that_is_asked_for_or_refused(checkpoint, storage, dtype):
    sequences = texts(30, 20)
    _, full = embed(checkpoint, sequences)
    _, shelf = embed(checkpoint, sequences, recipe(layer=3, storage=storage))
    as_torch = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[storage]
    for index, made in shelf.taken.items():
        wanted = torch.from_numpy(full.taken[index].rows_LD).to(as_torch)
        assert made.rows_LD.dtype == dtype
        assert made.rows_LD.tobytes() == wanted.view(torch.uint8).numpy().tobytes()
    if storage != "fp32":
        huge = {"emb_layer_norm_after.weight": torch.full((32,), {"fp16": 1e6, "bf16": 3.4e38}[storage])}
        checkpoint = replace(checkpoint, tensors={**checkpoint.tensors, **huge})
        outcomes, shelf = embed(checkpoint, sequences[:1], recipe(layer=3, storage=storage))
        assert outcomes[0].reason is Reason.NOT_FINITE
        assert not shelf.taken


def test_sequences_that_cannot_be_read_are_refused_and_the_others_are_not(checkpoint):
    bad = ["", "ACj", "AC DE", "A*", "M.", "AC<mask>", "é", "😀A"]
    outcomes, shelf = embed(checkpoint, ["ACDE", *bad, "MK"])
    assert {outcomes[index].reason for index in range(1, 1 + len(bad))} == {Reason.BAD_SEQUENCE}
    assert sorted(shelf.taken) == [0, 1 + len(bad)]


def test_what_is_too_long_is_refused_without_being_read():
    sequences = texts(51, 50, 200)
    seen = []

    def read(places):
        seen.extend(places)
        return [sequences[at] for at in places]

    engine = stood_in(Workshop(), recipe(long="error"))
    outcomes = {one.index: one.reason for one in engine.run(lengths_of(sequences), read, Shelf())}
    assert outcomes == {0: Reason.SEQUENCE_TOO_LONG, 1: None, 2: Reason.SEQUENCE_TOO_LONG}
    assert seen == [1]


def test_a_sequence_that_is_cut_has_the_rows_of_its_parts_and_says_so(checkpoint):
    (sequence,) = texts(131)
    spans = windows(131, 50, 10)
    _, pieces = embed(checkpoint, [sequence[start:stop] for start, stop in spans])
    outcomes, shelf = embed(checkpoint, [sequence], recipe(layer=3, long="truncate"))
    assert shelf.rows()[0] == pieces.rows()[0]
    assert outcomes[0].variant == Variant("fp32", SequenceCut("truncate", 50))
    cut = {"policy": "truncate", "length": 50, "overlap": 0}
    assert shelf.taken[0].meta == {"residues": 131, "rows": 50, "precision": "fp32", "cut": cut}
    for budget in (20, 110, 10_000):
        outcomes, shelf = embed(checkpoint, [sequence, "AC"], recipe(layer=3, long="windows"), budget=budget)
        assert [outcomes[index].variant.cut for index in (0, 1)] == [SequenceCut("windows", 50, 10), None]
        found = shelf.taken[0].rows_LD
        assert len(found) == 131
        for number, place in ((0, 44), (1, 45), (1, 84), (2, 85), (3, 130)):
            assert found[place].tolist() == pieces.taken[number].rows_LD[place - spans[number][0]].tolist()


def test_the_longest_is_read_first_and_reading_never_runs_far_ahead():
    sequences = texts(*range(1, 51))
    read, ahead, workshop = [], [], Workshop()

    def fetch(places):
        read.extend(places)
        ahead.append(len(read) - sum(map(len, workshop.calls())))
        return [sequences[at] for at in places]

    assert len(list(stood_in(workshop, cap=1).run(lengths_of(sequences), fetch, Shelf()))) == 50
    assert read == list(range(49, -1, -1))
    assert workshop.calls() == [[length] for length in range(50, 0, -1)]
    assert max(ahead) <= embed_engine.AHEAD + 1


def test_rows_that_wait_to_be_written_are_bounded(monkeypatch):
    monkeypatch.setattr(embed_engine, "QUEUE_BYTES", 5000)
    workshop, waiting, written = Workshop(), [], 0

    def sink(made):
        nonlocal written
        computed = sum(sum(call) for call in list(workshop.calls())) * DIM * 4
        waiting.append(computed - written)
        written += made.rows_LD.nbytes

    sequences = texts(*[50] * 100)
    outcomes = stood_in(workshop, cap=2).run(lengths_of(sequences), lambda at: [sequences[i] for i in at], sink)
    assert len(list(outcomes)) == 100
    batch = 2 * 50 * DIM * 4
    assert max(waiting) <= 5000 + 2 * batch  # what waits, what is being written, what was just computed


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_that_is_not_finite_is_done_again_in_full_or_refused(precision):
    sequences = [*texts(20, 30, 40), "AAWAA"]
    workshop = Workshop(spoiled="W")
    engine = stood_in(workshop, recipe(precision=precision, storage="fp16"))
    outcomes = run(engine, sequences, Shelf())
    assert [outcomes[index].variant.precision for index in range(4)] == [precision] * 3 + ["fp32"]
    assert workshop.calls("cpu", "fp32") == [[5]]
    hopeless = stood_in(Workshop(hopeless="W"), recipe(precision=precision))
    strict = stood_in(Workshop(spoiled="W"), recipe(precision=precision, half_fallback=False))
    full = stood_in(Workshop(hopeless="W"), recipe())
    for engine in (hopeless, strict, full):
        outcomes = run(engine, sequences, shelf := Shelf())
        assert outcomes[3].reason is Reason.NOT_FINITE
        assert sorted(shelf.taken) == [0, 1, 2]


def test_a_sink_or_a_reader_that_fails_is_heard():
    sequences, taken, allowed, second = texts(*range(1, 51)), [], threading.Event(), threading.Event()

    def read(places):
        return [sequences[at] for at in places]

    def sink(made):
        if len(taken) == 5:
            raise OSError("the disk is full")
        taken.append(made.index)

    def late(made):
        if made.index == 49:
            second.wait()  # so that another batch is on its way when the first has its outcome
        else:
            allowed.wait()
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        list(stood_in(Workshop()).run(lengths_of(sequences), read, sink))
    assert len(taken) == 5
    workshop = Workshop(before=lambda tokens: len(tokens[0]) == 49 and second.set())
    work = stood_in(workshop, cap=1).run(lengths_of(sequences), read, late)
    assert next(work).index == 49
    allowed.set()
    with pytest.raises(OSError, match="the disk is full"):  # while all is being ended
        work.close()
    with pytest.raises(OSError, match="gone"):
        list(stood_in(Workshop()).run(np.array([3, 4]), lambda at: (_ for _ in ()).throw(OSError("gone")), Shelf()))
    with pytest.raises(ValueError, match="4 residues"):
        list(stood_in(Workshop()).run(np.array([5]), lambda at: ["ACDE"], Shelf()))


@pytest.mark.parametrize("end", ["throw", "close"])
def test_what_was_computed_is_stored_when_the_work_is_ended(end, monkeypatch):
    monkeypatch.setattr(embed_engine, "QUEUE_BYTES", 0)
    sequences, shelf, workshop = texts(*range(1, 51)), Shelf(), Workshop()
    work = stood_in(workshop).run(lengths_of(sequences), lambda at: [sequences[i] for i in at], shelf)
    seen = [next(work).index for _ in range(6)]
    if end == "close":
        work.close()
    else:
        with pytest.raises(Stopped):
            work.throw(Stopped)
    computed = sorted(length for call in workshop.calls() for length in call)
    assert 6 <= len(computed) < 50
    assert sorted(len(made.text) for made in shelf.taken.values()) == computed
    assert set(seen) <= set(shelf.taken)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_waits_for_the_end_of_a_thread(number):
    done = []

    def work():
        os.kill(os.getpid(), number)
        time.sleep(0.3)
        done.append(1)

    def stop(_number, _frame):
        raise Stopped

    before = signal.signal(number, stop)
    try:
        with pytest.raises(Stopped), embed_engine.one_thread("thread") as thread:
            thread.submit(lambda: time.sleep(0.2) or work())
        assert done
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("where", ["computing", "writing", "reading"])
def test_a_signal_at_any_moment_loses_at_most_the_batch_under_way(where, monkeypatch):
    monkeypatch.setattr(embed_engine, "QUEUE_BYTES", 0)
    sequences, shelf, counts = texts(*range(1, 51)), Shelf(), {"computing": 0, "writing": 0, "reading": 0}

    def moment(name):
        counts[name] += 1
        if name == where and counts[name] == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    def sink(made):
        moment("writing")
        shelf(made)

    def read(places):
        moment("reading")
        return [sequences[at] for at in places]

    def stop(_number, _frame):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Stopped

    workshop = Workshop(before=lambda _: moment("computing"))
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(Stopped):
            for _ in stood_in(workshop).run(lengths_of(sequences), read, sink):
                pass
    finally:
        signal.signal(signal.SIGTERM, before)
    calls = workshop.calls()
    computed = [sorted(itertools.chain(*some)) for some in (calls, calls[:-1])]
    assert sorted(len(made.text) for made in shelf.taken.values()) in computed
    assert len(shelf.taken) < 50


@pytest.mark.parametrize(
    ("lengths", "limit", "budget_tokens", "forwards"),
    [([131, 20, 20, 20, 20], 1000, 60, 4 + 2), ([20, 20, 20, 20], 60, 200, 1 + 2)],
    ids=["windows, then batches", "halves of a batch"],
)
def test_rows_are_gone_from_the_device_before_the_next_forward(monkeypatch, lengths, limit, budget_tokens, forwards):
    monkeypatch.setattr(embed_engine, "QUEUE_BYTES", 0)
    alive, rows = [], []

    class Watch:
        dim, fill = DIM, 1

        def __init__(self, encode):
            self._encode, self.bytes_per_token, self.tokenize = encode, encode.bytes_per_token, encode.tokenize

        def __call__(self, tokens, *, cls=False):
            alive.append(sum(one() is not None for one in rows))
            rows_RD = self._encode(tokens, cls=cls)
            rows.append(weakref.ref(rows_RD))
            return rows_RD

    workshop = Workshop({"cpu": limit})
    build = workshop.build
    workshop.build = lambda **how: Watch(build(**how))
    engine = Engine(workshop, recipe(long="windows"), settings(budget=budget_tokens))
    sequences = texts(*lengths)
    outcomes = engine.run(lengths_of(sequences), lambda at: [sequences[i] for i in at], lambda _: None)
    assert all(one.reason is None for one in outcomes)
    assert alive == [0] * len(alive)
    assert len(alive) == forwards


def test_figures_add_up():
    sequences = [*texts(10, 20, 120), "J"]
    engine = stood_in(Workshop(), recipe(long="windows"))
    assert len(run(engine, sequences, Shelf())) == 4
    figures = engine.figures
    assert (figures.residues, figures.encoded_residues) == (150, 180)
    assert figures.tokens == 12 + 22 + 3 * 52
    assert figures.cost_done == pytest.approx(token_batches.cost(np.array([10, 20, 50, 50, 50, 1]), 2, DIM).sum())


def test_thousands_of_sequences_take_no_more_memory_than_a_few(checkpoint):
    engine = Engine(EsmSource(checkpoint), recipe(layer=3, storage="fp16"), settings(cap=16))

    def grown(count):
        lengths = np.arange(count) % 47 + 3
        for _ in engine.run(lengths, lambda at: [("MKV" * 17)[: i % 47 + 3] for i in at], lambda _: None):
            pass
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    few = grown(500)
    assert grown(5000) - few < 8 << 20


def test_an_engine_with_nothing_to_do_builds_nothing_and_one_that_cannot_be_built_says_why():
    workshop = Workshop()
    assert list(stood_in(workshop).run(np.zeros(0, np.int64), lambda at: [], Shelf())) == []
    assert not workshop.built

    def build(**_):
        raise MemoryError

    workshop.build = build
    with pytest.raises(PlanInfeasible, match="stand-in"):
        list(stood_in(workshop).run(np.array([1]), lambda at: ["A"], Shelf()))
    Engine(workshop, recipe(precision="fp16"), settings(), precision="fp32")
    strict = recipe(precision="fp16", half_fallback=False)
    with pytest.raises(ValueError, match="fp32"):
        Engine(workshop, strict, settings(), precision="fp32")


def automatic_budget(mem_bytes):
    engine = stood_in(Workshop(bytes_per_token=1 << 20), budget="auto", mem_bytes=mem_bytes)
    run(engine, texts(20, 30), Shelf())
    return engine.figures.budget_tokens


def test_an_automatic_budget_follows_the_memory_of_the_allocation(monkeypatch):
    held = 1 << 30  # by this process, which else grows and shrinks meanwhile
    monkeypatch.setattr(memory_ladder, "host_free_bytes", lambda mem_bytes: mem_bytes - held)
    for tokens in (100, 1000, 8000):
        mem_bytes = held + memory_ladder.QUEUE_BYTES + int((tokens + TILE) * (1 << 20) / memory_ladder.SHARE)
        assert automatic_budget(mem_bytes) == pytest.approx(tokens, abs=60)
    assert automatic_budget(1 << 50) == memory_ladder.CPU_TOKENS
    assert automatic_budget(1 << 20) == 1


MAPPED = """
import sys
import numpy as np
from pipeline.encoder.engine.memory_ladder import host_free_bytes

def taken_since(before):
    return before - host_free_bytes(4 << 30)

before = host_free_bytes(4 << 30)
mapped = np.memmap(sys.argv[1], np.uint8)
assert int(mapped[::4096].sum()) == 0
assert taken_since(before) < 64 << 20, taken_since(before)
block = np.ones(256 << 20, np.uint8)
assert taken_since(before) > block.nbytes - (64 << 20), taken_since(before)
"""


@pytest.mark.nightly
def test_memory_that_only_holds_mapped_files_is_free(tmp_path):
    if Disk().in_memory(tmp_path):
        pytest.skip("files are kept in memory here: what is mapped of them does take it")
    file = tmp_path / "mapped"
    with file.open("wb") as empty:
        empty.truncate(256 << 20)
    command = [sys.executable, "-c", MAPPED, str(file)]  # a process of its own: this one has threads, and a past
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
