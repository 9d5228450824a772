from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from pipeline.training.items import read_ahead
from pipeline.training.items.read_ahead import Lease, Ring

MIB = 1 << 20


def fill(ring, slot, value, used=100):
    lease = Lease(ring, slot)
    lease.room(used)[:] = value
    lease.lend()
    return lease.tensor(used)


def taken(ring):
    return ring.free.get_nowait()


def test_a_slot_comes_back_when_its_memory_is_let_go_of():
    ring = Ring(2, pin=False)
    slot = taken(ring)
    batch = fill(ring, slot, 7)
    assert ring.free.qsize() == 1
    del batch
    assert ring.free.qsize() == 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    "view",
    [
        lambda memory: memory[8:16].view(torch.float32).view(2, 1),
        lambda memory: memory.numpy()[3:],
        lambda memory: [memory[1:], memory[2:]],
        lambda memory: torch.utils.data.default_collate([memory[:1]]) and memory[:5].split(2),
        lambda memory: memoryview(memory.numpy()),
    ],
)
def test_any_view_of_it_keeps_a_slot(view):
    ring = Ring(2, pin=False)
    kept = view(fill(ring, taken(ring), 7))
    gc.collect()
    assert ring.free.qsize() == 1
    del kept
    assert ring.free.qsize() == 2


def test_a_copy_does_not_keep_a_slot():
    ring = Ring(2, pin=False)
    kept = fill(ring, taken(ring), 7).clone()
    assert ring.free.qsize() == 2
    assert (kept == 7).all()


def test_what_a_backward_pass_needs_keeps_a_slot_until_it_ran():
    ring = Ring(2, pin=False)
    weight = torch.ones(25, requires_grad=True)
    memory = fill(ring, taken(ring), 0)
    values = memory.view(torch.float32)
    values += 2
    loss = (weight * values).sum()
    del memory, values
    assert ring.free.qsize() == 1
    loss.backward()
    assert ring.free.qsize() == 2
    assert (weight.grad == 2).all()


def test_a_slot_let_go_of_in_another_thread_comes_back():
    ring = Ring(2, pin=False)
    held = [fill(ring, taken(ring), 7)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join(60)
    assert ring.free.qsize() == 2


def test_all_are_lent_only_while_the_loop_holds_all():
    ring = Ring(2, pin=False)
    first, second = (fill(ring, taken(ring), 1) for _ in range(2))
    assert ring.all_lent()
    del second
    assert not ring.all_lent()
    circle = [fill(ring, taken(ring), 1)]
    circle.append(circle)
    del circle  # only the garbage collector sees that nobody refers to it
    assert not ring.all_lent()
    assert (first == 1).all()


def test_memory_is_used_again_and_grows_to_one_size():
    ring = Ring(3, pin=False)
    for used in (10, 3 * MIB, 100, 2 * MIB, MIB, 3 * MIB):
        slot = taken(ring)
        ring.room(slot, used)
        ring.free.put(slot)
    sizes = {len(slot.memory) for slot in ring.slots}
    assert max(sizes) == 4 * MIB
    before = [slot.memory.data_ptr() for slot in ring.slots]
    for _ in range(6):
        slot = taken(ring)
        ring.room(slot, MIB)
        ring.free.put(slot)
    assert before == [slot.memory.data_ptr() for slot in ring.slots]


def test_what_had_no_memory_does_not_make_smaller_batches_ask_for_as_much(monkeypatch):
    ring, real = Ring(2, pin=False), read_ahead.bytes_on_host

    def little(size, pin):
        if size > 8 * MIB:
            raise MemoryError
        return real(size, pin=pin)

    monkeypatch.setattr(read_ahead, "bytes_on_host", little)
    slot = taken(ring)
    with pytest.raises(MemoryError):
        ring.room(slot, 32 * MIB)
    assert len(ring.room(slot, MIB)) == MIB
    assert ring.grown == 1


def test_a_batch_of_nothing_has_memory_of_no_length():
    ring = Ring(2, pin=False)
    assert len(fill(ring, taken(ring), 0, used=0)) == 0


def test_one_slot_is_refused():
    with pytest.raises(ValueError, match="2 at least"):
        Ring(1, pin=False)


class RingMachine(RuleBasedStateMachine):
    """Whatever is lent, kept in part and let go of: nothing that is still held is ever written over."""

    held = Bundle("held")

    def __init__(self):
        super().__init__()
        self.ring = Ring(3, pin=False)
        self.count = 0
        self.live = {}

    @rule(target=held, used=st.integers(1, 200), first=st.integers(0, 3))
    @precondition(lambda self: self.ring.free.qsize())
    def lend(self, used, first):
        self.count += 1
        name = self.count
        self.live[name] = (fill(self.ring, taken(self.ring), name % 256, used + first)[first:], name % 256)
        return name

    @rule(name=consumes(held))
    def let_go(self, name):
        del self.live[name]

    @invariant()
    def held_values_are_theirs(self):
        assert all((values == number).all() for values, number in self.live.values())
        assert self.ring.free.qsize() + len(self.live) == 3


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_readers_in_threads_never_write_over_what_is_held():
    ring, errors = Ring(3, pin=False), []

    def read(number):
        for turn in range(200):
            slot = ring.free.get()
            value = (number * 31 + turn) % 256
            memory = fill(ring, slot, value, used=1000)
            if not np.all(memory.numpy() == value):
                errors.append(turn)
            del memory, slot

    threads = [threading.Thread(target=read, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert ring.free.qsize() == 3
