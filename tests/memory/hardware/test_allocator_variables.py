"""A plan's allocator settings and the user's own reach torch in the one variable that it reads."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pipeline.memory.hardware.caching_allocator import VARIABLES, allocator_settings, overruled_note

EXPANDABLE = "expandable_segments:True"
FIRST, _, GENERAL = VARIABLES


@pytest.mark.parametrize(
    ("environment", "name", "value"),
    [
        ({}, FIRST, EXPANDABLE),
        ({GENERAL: "garbage_collection_threshold:0.8"}, GENERAL, f"garbage_collection_threshold:0.8,{EXPANDABLE}"),
        ({FIRST: "roundup_power2_divisions:[256:1,>:4]"}, FIRST, f"roundup_power2_divisions:[256:1,>:4],{EXPANDABLE}"),
        ({GENERAL: "max_split_size_mb:128", FIRST: EXPANDABLE}, FIRST, EXPANDABLE),
        ({GENERAL: "expandable_segments:False"}, GENERAL, "expandable_segments:False"),
    ],
)
def test_a_plan_is_added_to_the_variable_that_torch_reads(
    environment: Mapping[str, str], name: str, value: str
) -> None:
    assert allocator_settings(EXPANDABLE, environment) == {name: value}


def test_what_the_users_own_environment_overrules_is_said() -> None:
    assert overruled_note(EXPANDABLE, {GENERAL: "expandable_segments:False"}).endswith(": expandable_segments")
    assert not overruled_note(EXPANDABLE, {GENERAL: EXPANDABLE})
    assert allocator_settings("", {GENERAL: "backend:native"}) == {}
