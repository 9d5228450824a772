"""A plan's allocator settings and the user's own reach torch in the one variable that it reads."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pipeline.memory.hardware.allocator_variables import VARIABLES, AllocatorVariable, allocator_settings

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
    note = AllocatorVariable.of(EXPANDABLE, {GENERAL: "expandable_segments:False"}).note
    assert note == f"{GENERAL} of the environment overrules the plan: expandable_segments"
    assert not AllocatorVariable.of(EXPANDABLE, {GENERAL: EXPANDABLE}).note
    assert allocator_settings("", {GENERAL: "backend:native"}) == {}
