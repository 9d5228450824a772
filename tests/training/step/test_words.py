"""What ranks tell each other, and what all of them make of it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from pipeline.errors import DataError
from pipeline.training.step.global_step import RankReport, StepReport


def heard(*said: dict[str, Any]) -> StepReport:
    """Return words as they come from other processes."""
    return StepReport.of([json.loads(json.dumps(RankReport(**one).to_json())) for one in said])


def test_sums_and_weights_are_added_up_over_the_ranks_that_had_items() -> None:
    told = heard({"terms": {"a": (1.5, 3.0), "b": (1.0, 1.0)}}, {}, {"terms": {"b": (2.0, 1.0), "a": (0.5, 1.0)}})
    assert told.totals == {"a": (2.0, 4.0), "b": (3.0, 2.0)}
    assert told.names == ["a", "b"]


def test_sums_do_not_depend_on_the_order_of_ranks() -> None:
    parts = [{"terms": {"a": (value, 1.0)}} for value in (1e16, 1.0, -1e16)]
    assert heard(*parts).total("a") == heard(*reversed(parts)).total("a") == (1.0, 3.0)


def test_terms_of_unequal_names_are_refused_with_both_ranks() -> None:
    with pytest.raises(DataError, match="a on rank 0 and a, b on rank 2"):
        heard({"terms": {"a": (1.0, 1.0)}}, {}, {"terms": {"b": (1.0, 1.0), "a": (1.0, 1.0)}})


def test_a_step_that_began_again_has_run_out_of_memory_before() -> None:
    first, second = RankReport(ooms=2, cropped=1, budget=5, items=3), RankReport(ooms=1, budget=9, items=4)
    second.carry(first)
    assert (second.ooms, second.cropped, second.budget, second.items) == (3, 1, 5, 4)


def test_what_is_not_finite_is_known_with_its_rank() -> None:
    terms = [{"terms": {"a": one}} for one in ((1.0, 1.0), (math.nan, 1.0), (1.0, math.inf))]
    assert heard(*terms).not_finite == [1, 2]
    assert heard({}, terms[0]).not_finite == []


def test_a_parameter_has_a_gradient_where_any_rank_has_one() -> None:
    assert heard({"absent": [0, 2]}, {"absent": [2, 3]}, {}).with_gradient(5) == [0, 1, 3, 4]
    assert heard({"absent": []}, {"absent": [1]}).with_gradient(2) == [0, 1]
    assert heard({}, {}).with_gradient(2) == []


def test_all_ranks_decide_the_same() -> None:
    told = heard(
        {"budget": 9, "ending": 0, "is_due": False, "host_share": 0.2, "is_written": True},
        {"budget": 7, "ending": 15, "is_due": True, "host_share": 0.97, "is_written": False, "lost": "torn"},
    )
    assert (told.budget, told.ending, told.is_due, told.host_share) == (7, 15, False, 0.97)
    assert told.lost == "rank 1: torn"
    assert not told.is_written
    assert heard({"is_written": True}, {"is_written": True}).is_written
