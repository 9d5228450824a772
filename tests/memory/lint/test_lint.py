"""Known-bad settings: every rule fires on its case, is silent on its neighbour, and says where it is from."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from pipeline.memory.hardware.allocator_variables import VARIABLES, allocator_options
from pipeline.memory.lint.lint_facts import (
    NCCL_BUFFER_BYTES,
    LintFinding,
    RunFacts,
    Severity,
)
from pipeline.memory.lint.lint_rules import RULES, lint

GIB = 1 << 30
CONVOLUTION = frozenset({"Conv1d", "ReLU"})


def env(**variables: str) -> RunFacts:
    return RunFacts(environment=variables)


def conf(text: str, **known: float) -> RunFacts:
    return RunFacts(environment={"PYTORCH_ALLOC_CONF": text}, **known)


def cut(micro_batch: int, accumulation: int, **known: object) -> RunFacts:
    return RunFacts(micro_batch=micro_batch, accumulation=accumulation, **known)  # type: ignore[arg-type]


NORM = frozenset({"Linear", "BatchNorm1d"})
CASES: dict[str, tuple[RunFacts, RunFacts]] = {  # what fires, and the nearest that does not
    "allocator-malformed": (conf("expandable_segments:true"), conf("expandable_segments:True")),
    "split-size-of-expandable-segments": (
        env(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True,max_split_size_mb:128"),
        conf("expandable_segments:True"),
    ),
    "allocator-variables": (
        env(PYTORCH_CUDA_ALLOC_CONF="", PYTORCH_ALLOC_CONF="expandable_segments:True"),
        env(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
    ),
    "collector-of-expandable-segments": (
        conf("garbage_collection_threshold:0.8,expandable_segments:True", memory_fraction=0.5),
        conf("garbage_collection_threshold:0.8,expandable_segments:False", memory_fraction=0.5),
    ),
    "idle-collector": (
        conf("garbage_collection_threshold:0.8"),
        conf("garbage_collection_threshold:0.8,per_process_memory_fraction:0.5"),
    ),
    "split-size": (conf("max_split_size_mb:64"), conf("max_non_split_rounding_mb:64")),
    "coarse-rounding": (conf("roundup_power2_divisions:[256:2,>:8]"), conf("roundup_power2_divisions:8")),
    "rounding-by-one": (conf("roundup_power2_divisions:[512:1,>:16]"), conf("roundup_power2_divisions:[512:0,>:16]")),
    "async-backend": (
        conf("backend:cudaMallocAsync,expandable_segments:True"),
        conf("backend:native,expandable_segments:True"),
    ),
    "no-cache": (env(PYTORCH_NO_CUDA_MEMORY_CACHING="0"), env()),
    "launch-blocking": (env(CUDA_LAUNCH_BLOCKING="1"), env(CUDA_LAUNCH_BLOCKING="0")),
    "eager-modules": (env(CUDA_MODULE_LOADING="EAGER"), env(CUDA_MODULE_LOADING="LAZY")),
    "empty-cache": (RunFacts(empty_cache_every=10), RunFacts(empty_cache_every=0)),
    "memory-fraction": (RunFacts(memory_fraction=0.95), RunFacts(memory_fraction=1.0)),
    "reset-peak": (
        RunFacts(to_save_gpu_memory=frozenset({"reset_peak_memory_stats"})),
        RunFacts(to_save_gpu_memory=frozenset({"checkpointing"})),
    ),
    "record-streams": (env(TORCH_NCCL_AVOID_RECORD_STREAMS="0"), env(TORCH_NCCL_AVOID_RECORD_STREAMS="1")),
    "communication-buffers": (env(NCCL_BUFFSIZE="67108864"), env(NCCL_BUFFSIZE=str(NCCL_BUFFER_BYTES))),
    "no-peer-to-peer": (env(NCCL_P2P_DISABLE="1"), env(NCCL_P2P_DISABLE="0")),
    "accumulated-contrast": (cut(16, 8, in_batch_contrastive=True), cut(128, 1, in_batch_contrastive=True)),
    "accumulated-norm": (cut(16, 8, module_types=NORM), cut(16, 8, module_types=frozenset({"GroupNorm"}))),
    "mean-of-means": (cut(16, 8, mean_of_means=True), cut(128, 1, mean_of_means=True)),
    "wrong-product": (cut(12, 10, batch=128, gpus=1), cut(16, 8, batch=128, gpus=1)),
    "changed-batch": (
        cut(8, 1, gpus=1, before_gpus=3, before_micro_batch=8, before_batch=24),
        cut(8, 3, gpus=1, before_gpus=3, before_micro_batch=8, before_batch=24),
    ),
    "more-for-each-gpu": (
        RunFacts(batch=24, gpus=2, before_batch=24, before_gpus=3),
        RunFacts(batch=24, gpus=2, before_batch=24, before_gpus=3, accumulation=2),
    ),
    "uneven-batch": (RunFacts(batch=25, gpus=2), RunFacts(batch=24, gpus=2)),
    "norm-of-each-gpu": (
        RunFacts(module_types=NORM, gpus=2, environment={"OMP_NUM_THREADS": "1"}),
        RunFacts(module_types=frozenset({"SyncBatchNorm"}), gpus=2),
    ),
    "emulated-bf16": (RunFacts(precision="bf16", native_bf16=False), RunFacts(precision="fp16", native_bf16=False)),
    "foreach-temporaries": (
        RunFacts(optimizer_way="foreach", parameter_bytes=3 * GIB, gpu_bytes=24 * GIB),
        RunFacts(optimizer_way="fused", parameter_bytes=3 * GIB, gpu_bytes=24 * GIB),
    ),
    "clipping": (RunFacts(to_save_gpu_memory=frozenset({"clip"})), RunFacts()),
    "prefetch": (RunFacts(to_save_gpu_memory=frozenset({"prefetch"})), RunFacts()),
    "workers-over-lists": (
        RunFacts(num_workers=4, data_container="list"),
        RunFacts(num_workers=4, data_container="numpy"),
    ),
    "cudnn-plans": (
        RunFacts(module_types=CONVOLUTION, variable_shapes=True),
        RunFacts(module_types=frozenset({"Linear", "GCNConv"}), variable_shapes=True),
    ),
    "crowded-cores": (
        RunFacts(environment={"OMP_NUM_THREADS": "16"}, cpus=8),
        RunFacts(environment={"OMP_NUM_THREADS": "8"}, cpus=8),
    ),
    "unlimited-threads": (RunFacts(gpus=4), RunFacts(gpus=4, environment={"OMP_NUM_THREADS": "4"})),
}
GOOD = RunFacts(
    environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "8", "HOME": "/home/ann"},
    empty_cache_every=0,
    memory_fraction=1.0,
    batch=24,
    micro_batch=4,
    accumulation=3,
    gpus=2,
    before_batch=24,
    before_micro_batch=8,
    before_gpus=3,
    mean_of_means=False,
    module_types=frozenset({"Linear", "LayerNorm", "MultiheadAttention"}),
    in_batch_contrastive=False,
    parameter_bytes=3 * GIB,
    gpu_bytes=40 * GIB,
    variable_shapes=True,
    precision="bf16",
    native_bf16=True,
    optimizer_way="fused",
    data_container="numpy",
    num_workers=0,
    cpus=8,
)


def found(facts: RunFacts) -> dict[str, LintFinding]:
    return {finding.code: finding for finding in lint(facts)}


def test_every_rule_has_its_case() -> None:
    codes = [rule.code for rules in RULES.values() for rule in rules]
    assert len(codes) == len(set(codes))
    assert set(codes) == CASES.keys()


@pytest.mark.parametrize("code", CASES)
def test_a_rule_fires_on_its_case_and_is_silent_on_its_neighbour(code: str) -> None:
    bad, good = CASES[code]
    assert code in found(bad)
    assert code not in found(good)


@pytest.mark.parametrize("code", CASES)
def test_a_finding_says_why_what_to_do_and_where_it_is_from(code: str) -> None:
    finding = found(CASES[code][0])[code]
    assert all(finding.what.strip() and text for text in (finding.why, finding.remedy))
    assert all(re.fullmatch(r"https://[\w./#-]+", link) for link in finding.source.split(" and "))


def test_nothing_is_found_where_nothing_is_known_or_all_is_well() -> None:
    assert lint(RunFacts()) == ()
    assert lint(GOOD) == ()


def test_the_worst_is_told_first() -> None:
    facts = replace(GOOD, empty_cache_every=1, memory_fraction=0.95, in_batch_contrastive=True)
    order = [finding.severity for finding in lint(facts)]
    assert order == sorted(order, key=list(Severity).index)
    assert {Severity.ERROR, Severity.WARNING} == set(order)


def test_the_settings_of_the_guides_are_named() -> None:
    fragments = env(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True,max_split_size_mb:128")
    assert found(fragments).keys() == {"split-size-of-expandable-segments"}
    towers = RunFacts(
        batch=128,
        micro_batch=16,
        accumulation=8,
        gpus=1,
        in_batch_contrastive=True,
        empty_cache_every=10,
        memory_fraction=0.95,
        to_save_gpu_memory=frozenset({"clip", "prefetch"}),
    )
    expected = {"accumulated-contrast", "empty-cache", "memory-fraction", "clipping", "prefetch"}
    assert found(towers).keys() == expected
    assert "15 negatives, not 127" in found(towers)["accumulated-contrast"].what


def test_fewer_gpus_change_the_batch_or_what_each_has_to_hold() -> None:
    docking = RunFacts(gpus=1, before_gpus=3, before_batch=24, before_micro_batch=8)
    same_share = found(replace(docking, micro_batch=8))
    assert "8 a step, not 24" in same_share["changed-batch"].what
    same_batch = found(replace(docking, batch=24, micro_batch=24))
    assert "24 items each, not 8" in same_batch["more-for-each-gpu"].what
    assert "changed-batch" not in same_batch


def test_batch_norms_of_other_libraries_and_lazy_ones_are_known() -> None:
    for name in ("BatchNorm3d", "LazyBatchNorm2d", "SyncBatchNorm", "HeteroBatchNorm"):
        assert "accumulated-norm" in found(cut(2, 2, module_types=frozenset({name})))
    assert "accumulated-norm" not in found(cut(2, 2, module_types=frozenset({"InstanceNorm1d", "LayerNorm"})))


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
    assert both.allocator == allocator_options(ran.stdout)[0]
    assert VARIABLES[0] == "PYTORCH_CUDA_ALLOC_CONF"


TEXTS = [
    "",
    "expandable_segments:True",
    "expandable_segments:true",
    " expandable_segments : True ",
    "expandable_segments:True,",
    "expandable_segments,True",
    "expandable_segments",
    "expandable_segments:",
    "expandable_segments:True expandable_segments:False",
    "max_split_size_mb:128",
    "max_split_size_mb:20",
    "max_split_size_mb:19",
    "max_split_size_mb:0",
    "max_split_size_mb:128MB",
    "max_split_size_mb:x",
    "max_split_size_mb:-5",
    "max_split_size_mb:128;expandable_segments:True",
    "large_segment_size_mb:50,max_split_size_mb:30",
    "max_split_size_mb:30,large_segment_size_mb:50",
    "large_segment_size_mb:10",
    "large_segment_size_mb:0",
    "large_segment_size_mb:21",
    "max_non_split_rounding_mb:19",
    "max_non_split_rounding_mb:64",
    "garbage_collection_threshold:0.8",
    "garbage_collection_threshold:.8x",
    "garbage_collection_threshold:1.0",
    "garbage_collection_threshold:0",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:[256:1,512:2,>:8]",
    "roundup_power2_divisions:[256:0]",
    "roundup_power2_divisions:[256:3]",
    "roundup_power2_divisions:[300:4]",
    "roundup_power2_divisions:[256:1",
    "roundup_power2_divisions:[]",
    "pinned_max_round_threshold_mb:128,pinned_use_background_threads:True",
]


@pytest.mark.parametrize("text", TEXTS)
def test_an_allocator_variable_is_refused_where_torch_refuses_it(text: str) -> None:
    _, faults = allocator_options(text)
    try:
        torch._C._accelerator_setAllocatorSettings(text)
    except (ValueError, RuntimeError):
        assert faults
    else:
        assert not faults
    finally:
        torch._C._accelerator_setAllocatorSettings("")


@pytest.mark.parametrize("text", ["max_split:128", ",expandable_segments:True", "a:True,,b:False", "backend:fast"])
def test_what_only_a_cuda_build_refuses_is_named_too(text: str) -> None:
    assert allocator_options(text)[1]


def test_options_are_read_with_their_lists() -> None:
    text = "roundup_power2_divisions:[256:1, >:8], expandable_segments:True, backend:cudaMallocAsync"
    options, faults = allocator_options(text)
    expected = {"roundup_power2_divisions": "[256:1,>:8]", "expandable_segments": "True", "backend": "cudaMallocAsync"}
    assert (options, faults) == (expected, ())
