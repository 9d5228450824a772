"""Known-bad settings: every rule fires on its case, is silent on its neighbour, and says where it is from."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import torch

from pipeline.memory.hardware.allocator_variables import VARIABLES, allocator_options
from pipeline.memory.lint import LintFinding, RunFacts, lint


def env(**variables: str) -> RunFacts:
    return RunFacts(environment=variables)


def conf(text: str) -> RunFacts:
    return env(PYTORCH_ALLOC_CONF=text)


NORM = frozenset({"Linear", "BatchNorm1d"})
CASES: dict[str, tuple[RunFacts, RunFacts]] = {  # what is found, and the nearest in which nothing is
    "allocator-malformed": (conf("expandable_segments:true"), conf("expandable_segments:True")),
    "split-size-of-expandable-segments": (
        env(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True,max_split_size_mb:128"),
        conf("expandable_segments:True"),
    ),
    "empty-cache": (RunFacts(empty_cache_every=10), RunFacts(empty_cache_every=0)),
    "memory-fraction": (RunFacts(memory_fraction=0.95), RunFacts(memory_fraction=1.0)),
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
    assert allocator_options(both.environment[VARIABLES[0]])[0] == allocator_options(ran.stdout)[0]
    assert VARIABLES[0] == "PYTORCH_CUDA_ALLOC_CONF"


VALUES = {
    "max_split_size_mb": ["128", "20", "19", "0", "128MB", "x", "-5"],
    "large_segment_size_mb": ["10", "0", "21"],
    "max_non_split_rounding_mb": ["19", "64"],
    "garbage_collection_threshold": ["0.8", ".8x", "1.0", "0"],
    "roundup_power2_divisions": ["4", "3", "0", "[256:1,512:2,>:8]", "[256:0]", "[256:3]", "[300:4]", "[256:1", "[]"],
}
TEXTS = [
    *(f"{name}:{value}" for name, values in VALUES.items() for value in values),
    "",
    "expandable_segments:True",
    "expandable_segments:true",
    " expandable_segments : True ",
    "expandable_segments:True,",
    "expandable_segments,True",
    "expandable_segments",
    "expandable_segments:",
    "expandable_segments:True expandable_segments:False",
    "max_split_size_mb:128;expandable_segments:True",
    "large_segment_size_mb:50,max_split_size_mb:30",
    "max_split_size_mb:30,large_segment_size_mb:50",
    "pinned_max_round_threshold_mb:128,pinned_use_background_threads:True",
]


def test_an_allocator_variable_is_refused_where_torch_refuses_it() -> None:
    wrong = []
    for text in TEXTS:
        is_refused = False
        try:
            torch._C._accelerator_setAllocatorSettings(text)
        except (ValueError, RuntimeError):
            is_refused = True
        finally:
            torch._C._accelerator_setAllocatorSettings("")
        wrong += [text] if bool(allocator_options(text)[1]) is not is_refused else []
    assert wrong == []
    for text in ("max_split:128", ",expandable_segments:True", "a:True,,b:False", "backend:fast"):
        assert allocator_options(text)[1], "only a CUDA build refuses it"


def test_options_are_read_with_their_lists() -> None:
    text = "roundup_power2_divisions:[256:1, >:8], expandable_segments:True, backend:cudaMallocAsync"
    options, faults = allocator_options(text)
    expected = {"roundup_power2_divisions": "[256:1,>:8]", "expandable_segments": "True", "backend": "cudaMallocAsync"}
    assert (options, faults) == (expected, ())
