"""Which cards a job asks for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cluster.job_spec import Request
from pipeline.config.schema_cluster import CardSection
from pipeline.errors import PlanInfeasible
from pipeline.stages.jobs import eligible, first_to_start

GIB = 1 << 30
NOW = 1000.0
L4 = CardSection(gres="l4", partition="gpu", mem=24 * GIB)
A100 = CardSection(gres="a100", partition="gpu", mem=40 * GIB)
H100 = CardSection(gres="h100", partition="big", mem=80 * GIB)


def fits(request: Request, card: CardSection) -> bool:
    """Tell whether a scheduler might put the request on a card."""
    return (
        (card.partition or "") == request.partition
        and request.card in ("", card.gres)
        and (not request.constraint or card.feature in request.constraint.split("|"))
    )


def test_only_cards_that_the_plan_fits_are_asked_for() -> None:
    assert eligible([L4, A100, H100], 30 * GIB, 2) == {
        Request(gpus=2, card="a100", partition="gpu"): 40 * GIB,
        Request(gpus=2, card="h100", partition="big"): 80 * GIB,
    }


def test_cards_told_apart_by_feature_are_asked_for_together() -> None:
    cards = [CardSection(feature=name, mem=gib * GIB) for name, gib in (("v100", 16), ("h100", 80), ("a100", 40))]
    assert eligible(cards, 30 * GIB, 1) == {Request(gpus=1, constraint="a100|h100"): 40 * GIB}
    assert eligible(cards, 10 * GIB, 1) == {Request(gpus=1): 16 * GIB}


def test_a_feature_that_a_smaller_card_has_too_is_no_constraint() -> None:
    cards = [CardSection(feature="ampere", mem=24 * GIB), CardSection(feature="ampere", mem=80 * GIB)]
    with pytest.raises(PlanInfeasible, match="ampere") as caught:
        eligible(cards, 30 * GIB, 1)
    assert "config show" in caught.value.remedy


def test_one_type_with_two_memories_is_told_apart_by_feature() -> None:
    cards = [CardSection(gres="a100", feature=f"a100-{gib}", mem=gib * GIB) for gib in (40, 80)]
    assert eligible(cards, 60 * GIB, 1) == {Request(gpus=1, card="a100", constraint="a100-80"): 80 * GIB}


def test_a_request_without_a_type_admits_the_cards_of_every_type() -> None:
    untyped = CardSection(partition="gpu", mem=80 * GIB)
    assert eligible([untyped, L4, A100], 30 * GIB, 1) == {Request(gpus=1, card="a100", partition="gpu"): 40 * GIB}


def test_a_plan_that_fits_no_card_is_infeasible_with_its_figures() -> None:
    with pytest.raises(PlanInfeasible, match="h100"):
        eligible([L4, A100, H100], 90 * GIB, 1)


def test_where_no_cards_are_described_or_wanted_whatever_comes_is_asked_for() -> None:
    assert eligible([], 90 * GIB, 2) == {Request(gpus=2): 0}
    assert eligible([L4], 90 * GIB, 0) == {Request(): 0}


SMALL, LARGE = Request(gpus=1, card="l4", partition="gpu"), Request(gpus=1, card="h100", partition="big")
BOTH = {SMALL: 24 * GIB, LARGE: 80 * GIB}


def test_the_earliest_start_decides() -> None:
    assert first_to_start(BOTH, {SMALL: NOW + 600, LARGE: NOW}.get, NOW) == LARGE
    assert first_to_start(BOTH, {SMALL: NOW, LARGE: NOW + 600}.get, NOW) == SMALL


def test_starts_that_are_as_good_as_equal_leave_the_large_card_to_others() -> None:
    assert first_to_start(BOTH, {SMALL: NOW + 40, LARGE: NOW}.get, NOW) == SMALL


def test_an_unknown_start_comes_last_and_without_any_the_smallest_card_is_taken() -> None:
    assert first_to_start(BOTH, {LARGE: NOW + 1e6}.get, NOW) == LARGE
    assert first_to_start(BOTH, lambda request: None, NOW) == SMALL


CARDS = st.lists(
    st.builds(
        CardSection,
        gres=st.sampled_from([None, "a", "b"]),
        feature=st.sampled_from([None, "x", "y", "z"]),
        partition=st.sampled_from([None, "p"]),
        mem=st.integers(1, 8).map(lambda gib: gib * GIB),
    ),
    min_size=1,
    max_size=8,
)


@given(CARDS, st.integers(1, 9))
def test_no_request_ever_admits_a_card_that_is_too_small(cards: list[CardSection], need: int) -> None:
    try:
        requests = eligible(cards, need * GIB, 1)
    except PlanInfeasible:
        return
    for request, smallest_bytes in requests.items():
        admitted = [card.mem for card in cards if fits(request, card)]
        assert min(admitted) == smallest_bytes >= need * GIB


@given(CARDS, st.data())
def test_the_choice_does_not_depend_on_the_order_of_requests(cards: list[CardSection], data: st.DataObject) -> None:
    requests = eligible(cards, GIB, 1)
    starts = {request: data.draw(st.sampled_from([None, NOW, NOW + 550])) for request in requests}
    other = dict(data.draw(st.permutations(list(requests.items()))))
    assert first_to_start(requests, starts.get, NOW) == first_to_start(other, starts.get, NOW)
