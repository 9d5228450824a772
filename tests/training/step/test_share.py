"""A rank's share of a step: gone through again and again, read anew where it is no longer there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from pipeline.training.items.batch import BatchOrigin
from pipeline.training.step.micro_batches import Piece, RankShare


@dataclass
class Items:
    """A batch as far as a share looks at it."""

    ids: tuple[str, ...]
    numbers: tuple[int, ...]
    origin: BatchOrigin
    rejected: tuple[Any, ...] = ()
    is_made: bool = True

    @property
    def value(self) -> tuple[str, ...]:
        return self.ids

    def __len__(self) -> int:
        return len(self.ids)


def some_batch(index: int, of: int, step: int = 0) -> Any:
    return Items((f"a{index}", f"b{index}"), (2 * index, 2 * index + 1), BatchOrigin(0, step, index, of))


def empty(index: int, of: int) -> Any:
    return Items((), (), BatchOrigin(0, 0, index, of), rejected=("gone", "gone"))


def share_of(
    batches: list[Any], *, hold: int = 0, leave_out: tuple[str, ...] = (), read: list[int] | None = None
) -> RankShare:
    by_index = {one.origin.index: one for one in batches}

    def fetch(_: Any, origin: BatchOrigin) -> Any:
        (read if read is not None else []).append(origin.index)
        return by_index[origin.index]

    return RankShare(iter(batches), fetch, hold=hold, leave_out=leave_out)


def ids(share: RankShare) -> list[tuple[str, ...]]:
    return [piece.ids for piece in share]


@pytest.mark.parametrize("hold", [0, 1, 2, 5])
def test_a_share_is_the_same_every_time_and_what_is_not_held_is_read_again(hold: int) -> None:
    read: list[int] = []
    share = share_of([some_batch(index, 4) for index in range(4)], hold=hold, read=read)
    first = ids(share)
    assert read == []
    assert ids(share) == ids(share) == first == [(f"a{n}", f"b{n}") for n in range(4)]
    assert read == [n for n in range(4) if n >= hold] * 2


@pytest.mark.parametrize("hold", [0, 1, 2, 5])
def test_the_last_pass_lets_go_of_each_batch_and_only_an_attempt_after_it_reads_again(hold: int) -> None:
    read: list[int] = []
    share = share_of([some_batch(index, 4) for index in range(4)], hold=hold, read=read)
    first = ids(share)
    share.is_last_pass = True
    held: list[int] = []
    for piece in share:
        assert piece.ids == first[len(held)]
        held.append(len(share._held))
    assert held == [max(0, min(hold, 4) - 1 - place) for place in range(4)]
    assert read == list(range(hold, 4))
    assert ids(share) == first
    assert read == [*range(hold, 4), *range(4)]


def test_a_share_of_one_pass_keeps_nothing_and_reads_nothing_again() -> None:
    read: list[int] = []
    share = share_of([some_batch(index, 4) for index in range(4)], hold=5, read=read)
    share.is_last_pass = True
    for _ in share:
        assert not share._held
    assert read == []


@pytest.mark.parametrize("stop", [0, 1, 2, 3])
def test_a_share_that_was_left_midway_begins_again_and_goes_on(stop: int) -> None:
    share = share_of([some_batch(index, 4) for index in range(4)], hold=1)
    for place, _ in enumerate(share):
        if place == stop:
            break
    assert ids(share) == [(f"a{n}", f"b{n}") for n in range(4)]


def test_a_share_takes_nothing_of_the_next_step() -> None:
    batches = iter([some_batch(0, 2), some_batch(1, 2), some_batch(0, 1, step=1)])
    share = RankShare(batches, lambda *_: None, hold=9)  # type: ignore[arg-type, return-value]
    assert len(ids(share)) == 2
    following = RankShare(batches, lambda *_: None, hold=9)  # type: ignore[arg-type, return-value]
    assert following.origin.step == 1
    following.drain()
    assert RankShare(batches, lambda *_: None, hold=9).is_over  # type: ignore[arg-type, return-value]


@dataclass
class Told:
    """What copies ahead, as far as a share is concerned."""

    following: Any = None
    drops: int = 0

    def drop(self) -> None:
        self.drops += 1


@pytest.mark.parametrize("hold", [0, 2, 5])
def test_a_share_tells_what_follows_where_it_is_held_or_has_been_read(hold: int) -> None:
    queue = [some_batch(index, 3) for index in range(3)] + [some_batch(0, 1, step=1)]
    queue[-1].ids, told = ("next",), Told()
    taken = iter(queue)
    place = 0

    def batches() -> Any:
        nonlocal place
        for one in taken:
            place += 1
            yield one

    fetch: Any = lambda _, origin: queue[origin.index]  # noqa: E731
    at_hand: Any = lambda: queue[place]  # noqa: E731
    share = RankShare(batches(), fetch, hold=hold, ahead=told, at_hand=at_hand)  # type: ignore[arg-type]
    first = [told.following() for _ in share]
    assert first == [("a1", "b1"), ("a2", "b2"), ("a0", "b0") if hold else None]
    share.is_last_pass = True
    last = [told.following() for _ in share]
    assert last == [("a1", "b1") if hold > 1 else None, ("a2", "b2") if hold > 2 else None, ("next",)]
    queue[-1].is_made = False  # memory ended while it was
    assert [told.following() for _ in share][-1] is None
    share.drain()
    assert told.drops == 1


def test_an_empty_batch_is_passed_once_wherever_it_stands() -> None:
    for place in range(3):
        batches = [empty(n, 3) if n == place else some_batch(n, 3) for n in range(3)]
        share = share_of(batches)
        expected = [(f"a{n}", f"b{n}") for n in range(3) if n != place]
        assert ids(share) == expected
        assert ids(share) == expected
        assert share.rejected == 2


def test_items_that_are_left_out_part_a_batch() -> None:
    share = share_of([some_batch(0, 2), some_batch(1, 2)], leave_out=("b0", "a1"))
    assert ids(share) == [("a0",), ("b1",)]
    assert ids(share_of([some_batch(0, 1)], leave_out=("a0", "b0"))) == []


def test_a_drained_share_can_still_be_gone_through() -> None:
    share = share_of([some_batch(n, 3) for n in range(3)])
    share.drain()
    assert len(ids(share)) == 3
    assert [cut for cut, _ in share.cuts] == [("a0", "b0"), ("a1", "b1"), ("a2", "b2")]


def test_pieces_are_halved_down_to_single_items() -> None:
    batch = Items(tuple("abcde"), tuple(range(5)), BatchOrigin(0, 0, 0, 1))
    whole = Piece(batch, 0, 5)  # type: ignore[arg-type]
    assert [piece.ids for piece in whole.halves()] == [("a", "b"), ("c", "d", "e")]
    assert [piece.ids for piece in whole.singles()] == [(name,) for name in "abcde"]
    (single,) = whole.singles()[0].halves()
    assert single.numbers == (0,)
