"""Known-bad settings: every rule fires on its case, is silent on its neighbour, and says where it is from."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest

from pipeline.memory.hardware.caching_allocator import VARIABLES, allocator_options, allocator_settings, overruled_note
from pipeline.memory.outlook import LintFinding, RunFacts, lint


def env(**variables: str) -> RunFacts:
    return RunFacts(environment=variables)


def conf(text: str) -> RunFacts:
    return env(PYTORCH_ALLOC_CONF=text)


NORM = frozenset({"Linear", "BatchNorm1d"})
CASES: dict[str, tuple[RunFacts, RunFacts]] = {  # what is found, and the nearest in which nothing is
    "split-size-of-expandable-segments": (
        env(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True,max_split_size_mb:128"),
        conf("expandable_segments:True"),
    ),
    "empty-cache": (RunFacts(empty_cache_every=10), RunFacts(empty_cache_every=0)),
    "accumulated-contrast": (
        RunFacts(accumulation=8, in_batch_contrastive=True),
        RunFacts(accumulation=1, in_batch_contrastive=True),
    ),
    "accumulated-norm": (
        RunFacts(accumulation=8, module_types=NORM),
        RunFacts(accumulation=8, module_types=frozenset({"GroupNorm"})),
    ),
}


def found(facts: RunFacts) -> dict[str, LintFinding]:
    return {finding.code: finding for finding in lint(facts)}


def test_a_rule_fires_on_its_case_and_is_silent_on_its_neighbour() -> None:
    for code, (bad, good) in CASES.items():
        assert code in found(bad), code
        assert code not in found(good), code
        finding = found(bad)[code]
        assert all(text.strip() for text in (finding.what, finding.why, finding.remedy)), code
        assert all(re.fullmatch(r"https://[\w./#-]+", link) for link in finding.source.split(" and ")), code


def test_nothing_is_found_where_nothing_is_known() -> None:
    assert lint(RunFacts()) == ()


def test_batch_norms_of_other_libraries_and_lazy_ones_are_known() -> None:
    for name in ("BatchNorm3d", "LazyBatchNorm2d", "SyncBatchNorm", "HeteroBatchNorm"):
        assert "accumulated-norm" in found(RunFacts(accumulation=2, module_types=frozenset({name})))
    assert "accumulated-norm" not in found(
        RunFacts(accumulation=2, module_types=frozenset({"InstanceNorm1d", "LayerNorm"}))
    )


def test_where_two_variables_are_set_options_are_those_of_the_first_that_torch_reads() -> None:
    both = env(PYTORCH_ALLOC_CONF="max_split_size_mb:111", PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:222")
    program = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **both.environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert allocator_options(both.environment[VARIABLES[0]]) == allocator_options(ran.stdout)
    assert VARIABLES[0] == "PYTORCH_CUDA_ALLOC_CONF"


def test_options_are_read_with_their_lists() -> None:
    text = "roundup_power2_divisions:[256:1, >:8], expandable_segments:True, backend:cudaMallocAsync"
    expected = {"roundup_power2_divisions": "[256:1,>:8]", "expandable_segments": "True", "backend": "cudaMallocAsync"}
    assert allocator_options(text) == expected


# Allocator settings


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
