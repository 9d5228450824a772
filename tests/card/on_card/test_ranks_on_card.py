"""Two ranks on a card each add their gradients up while the last backward of a step runs, as on GPUs by default.

Hooks then run in a thread of autograd, one for each card, while the one that called backward waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.training.ranks.gradient_sums import GradientSums
from pipeline.training.ranks.process_group import ProcessGroup
from tests.card import card
from tests.card.on_card.test_refused_memory import step_on_card
from tests.training.loop.loops import Plot, Run
from tests.training.loop.test_loop_ranks import ADAM, EXACT, LONG, apart, weights
from tests.training.ranks.crews import crew

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared
WITHIN_S = 600.0  # after which ranks that wait for each other are ended
INTERRUPTED = 1  # the rank, and its card
REFUSALS = 12  # over the allocations of a forward and its backward
BUCKET_BYTES = 256  # so that the small network makes several
SHORT = Plot(train={**ADAM, "epochs": 1, "effective_batch": 4}, items=9, budget=60, dropout=0.3)  # 3 steps
SINGLE = replace(SHORT, train={**ADAM, "epochs": 1, "effective_batch": 4, "micro_batch": 1})  # exact on every rung


@pytest.fixture(scope="module", autouse=True)
def cards_of_ranks() -> Iterator[None]:
    """Give processes that are ranks simulated cards, as soon as they import torch."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in card.environment(card.Cards()).items():
            patch.setenv(name, value)
        yield


def both(folder: Path, part: Any, *words: Any) -> list[Any]:
    """Let two ranks do a part to its end, each on a card of its own; return what came of it."""
    made = crew(folder, 2, part, folder, *words, device=card.NAME)
    codes = made.wait(WITHIN_S)
    assert codes == [0, 0], "".join(made.err(rank) for rank in range(2))
    return [made.result(rank) for rank in range(2)]


def begun(group: ProcessGroup, folder: Path, plot: Plot) -> tuple[Run, Any]:
    """Return a training on this rank's card, and what adds up its gradients: in small buckets, of which it has some."""
    assert torch.accelerator.current_device_index() == group.rank
    run = Run(plot, folder, ranks=group, make=step_on_card)
    sums = run.trainer.whole._sums
    assert sums is not None
    sums._cut(BUCKET_BYTES)
    return run, sums


def early(sums: GradientSums) -> list[int]:
    """Return what is filled with the buckets that go before a backward has ended."""
    gone, go = list[int](), sums._go

    def noted(place: int) -> None:
        if sums._is_armed:
            gone.append(place)
        go(place)

    sums._go = noted  # type: ignore[method-assign]
    return gone


def within_and_after(group: ProcessGroup, folder: Path, plot: Plot) -> dict[str, Any]:
    """Train as is done by default, and with sums after the backward."""
    run, sums = begun(group, folder / "within", plot)
    gone = early(sums)
    within = run.to_end().state()
    other, their_sums = begun(group, folder / "after", plot)
    their_sums.overlaps = False
    after = other.to_end().state()
    return {
        "within": within,
        "after": after,
        "gone": len(gone),
        "buckets": len(sums._buckets),
        "steps": run.trainer.done,
    }


@pytest.mark.parametrize("terms", ["one", "weighted"])
def test_two_cards_that_add_up_within_the_backward_train_bitwise_as_after_it_and_as_one_card(
    tmp_path: Path, terms: str
) -> None:
    plot = replace(LONG, terms=terms)
    told = both(tmp_path, within_and_after, plot)
    alone = Run(plot, tmp_path / "alone", make=step_on_card).to_end().state()
    for one in told:
        assert one["within"] == one["after"]
        assert weights(one["within"]) == weights(told[0]["within"])
        assert apart(one["within"], alone) < EXACT
        assert one["buckets"] >= 4
        assert one["gone"] >= (one["steps"] - 1) * (one["buckets"] - 2) > 0, "not of the first step, nor what is unused"


def interrupted(group: ProcessGroup, folder: Path, plot: Plot) -> list[dict[str, Any]]:
    """Train again and again, while an allocation of the second step's last forward and backward is refused."""
    found = list[dict[str, Any]]()
    for place in [None, *range(REFUSALS)]:
        run, sums = begun(group, folder / str(place), plot)
        at = None if place is None else place * found[0]["counts"][1] // REFUSALS
        counts, gone = counted(sums, at if group.rank == INTERRUPTED else None), early(sums)
        before = card.refused(INTERRUPTED)
        state = run.to_end().state()
        refused = card.refused(INTERRUPTED) - before
        found.append({"state": state, "counts": counts, "refused": refused, "gone": len(gone)})
    return found


def counted(sums: Any, refuse: int | None) -> Sequence[int]:
    """Count the allocations of each step's last forward and backward; one of the second time may be refused."""
    counts, within = list[int](), sums.within

    @contextmanager
    def aimed() -> Iterator[None]:
        before = card.allocations(INTERRUPTED)
        is_aimed = refuse is not None and len(counts) == 1
        try:
            with card.refusing(refuse or 0, card=INTERRUPTED) if is_aimed else nullcontext(), within():
                yield
        finally:
            counts.append(card.allocations(INTERRUPTED) - before)

    sums.within = aimed
    return counts


@pytest.mark.parametrize("terms", ["one", "weighted"])
def test_memory_of_one_card_that_ends_in_the_last_backward_keeps_nobody_waiting_and_changes_nothing(
    tmp_path: Path, terms: str
) -> None:
    first, second = both(tmp_path, interrupted, replace(SINGLE, terms=terms))
    expected, steps = weights(first[0]["state"]), len(first[0]["counts"])
    assert second[0]["gone"] > 0
    for number, pair in enumerate(zip(first, second, strict=True)):
        assert [weights(one["state"]) == expected for one in pair] == [True, True], number
    assert [one["refused"] for one in second] == [0] + [1] * REFUSALS
    again = [len(one["counts"]) - steps for one in first[1:]]
    assert 0 < sum(again) < REFUSALS, "where sums were under way the other rank, too, ran its share once more"
