"""What is known to be wrong with the allocator of a card, with its cache, and with what stands in the environment."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pipeline.memory.lint.lint_facts import VARIABLES, LintRule, Severity, allocator_options, leading_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.memory.lint.lint_facts import RunFacts

MIB = 1 << 20
NCCL_BUFFER_BYTES = 4 * MIB  # the default
WASTEFUL = 1.25  # times what was asked for
_NATIVE_ONLY = {"expandable_segments", "garbage_collection_threshold", "max_split_size_mb", "roundup_power2_divisions"}
_DOCS, _PYTORCH = "https://docs.pytorch.org/docs/stable", "https://github.com/pytorch/pytorch"
_ALLOCATOR_DOCS = f"{_DOCS}/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf"
_VARIABLES_DOCS = f"{_DOCS}/cuda_environment_variables.html"
_NCCL_DOCS = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"


def _divisions(facts: RunFacts) -> list[int]:
    value = facts.allocator.get("roundup_power2_divisions", "")
    return [int(one) for one in re.findall(r"(?:^|:)(\d+)", value)]


def _expandable(facts: RunFacts) -> bool:
    return facts.allocator.get("expandable_segments") == "True"


def _both_variables(facts: RunFacts) -> str:
    found = [name for name in VARIABLES if name in facts.environment]
    return f"{' and '.join(found)} are set" if len(found) > 1 else ""


def _malformed(facts: RunFacts) -> str:
    faults = [
        f"{name}: {fault}" for name in VARIABLES for fault in allocator_options(facts.environment.get(name, ""))[1]
    ]
    return "; ".join(faults)


def _split_of_expandable(facts: RunFacts) -> str:
    size = facts.allocator.get("max_split_size_mb")
    return f"expandable_segments:True with max_split_size_mb:{size}" if size and _expandable(facts) else ""


def _collected_expandable(facts: RunFacts) -> str:
    collects = "garbage_collection_threshold" in facts.allocator and _expandable(facts)
    return "expandable_segments:True with garbage_collection_threshold" if collects else ""


def _idle_collector(facts: RunFacts) -> str:
    fraction = facts.memory_fraction is not None or "per_process_memory_fraction" in facts.allocator
    idle = "garbage_collection_threshold" in facts.allocator and not fraction and not _expandable(facts)
    return "garbage_collection_threshold without a memory fraction" if idle else ""


def _split_size(facts: RunFacts) -> str:
    size = facts.allocator.get("max_split_size_mb")
    return f"max_split_size_mb:{size}" if size and not _expandable(facts) else ""


def _rounded_up(facts: RunFacts) -> str:
    coarse = [one for one in _divisions(facts) if one > 1 and 1 + 1 / one >= WASTEFUL]
    return f"roundup_power2_divisions of {min(coarse)}: blocks are up to 1/{min(coarse)} too large" if coarse else ""


def _rounded_by_one(facts: RunFacts) -> str:
    return "roundup_power2_divisions of 1" if 1 in _divisions(facts) else ""


def _async_backend(facts: RunFacts) -> str:
    ignored = sorted(_NATIVE_ONLY & facts.allocator.keys())
    asked = facts.allocator.get("backend") == "cudaMallocAsync"
    return f"backend:cudaMallocAsync with {', '.join(ignored)}" if asked and ignored else ""


def _uncached(facts: RunFacts) -> str:
    name = "PYTORCH_NO_CUDA_MEMORY_CACHING"
    return f"{name}={facts.environment[name]}" if name in facts.environment else ""


def _is_on(name: str, *values: str) -> Callable[[RunFacts], str]:
    def found(facts: RunFacts) -> str:
        value = facts.environment.get(name, "")
        return f"{name}={value}" if value in values else ""

    return found


def _emptied(facts: RunFacts) -> str:
    every = facts.empty_cache_every
    return f"empty_cache() after every {f'{every} micro-batches' if every > 1 else 'micro-batch'}" if every else ""


def _fraction(facts: RunFacts) -> str:
    told = leading_number(facts.allocator.get("per_process_memory_fraction", ""))
    fraction = told if facts.memory_fraction is None else facts.memory_fraction
    return f"a memory fraction of {fraction:g}" if fraction is not None and fraction < 1 else ""


def hoped(name: str, what: str) -> Callable[[RunFacts], str]:
    """Return who finds a setting that was made to save GPU memory."""
    return lambda facts: f"{what} to save GPU memory" if name in facts.to_save_gpu_memory else ""


def _large_buffers(facts: RunFacts) -> str:
    size = leading_number(facts.environment.get("NCCL_BUFFSIZE", "")) or 0
    return f"NCCL_BUFFSIZE={size:.0f}" if size > NCCL_BUFFER_BYTES else ""


ALLOCATOR_RULES = (
    LintRule(
        "allocator-malformed",
        Severity.ERROR,
        _malformed,
        "torch raises when it reads the variable; a CUDA build also refuses options whose names it does not know",
        "write option:value,option:value as the page shows",
        _ALLOCATOR_DOCS,
    ),
    LintRule(
        "split-size-of-expandable-segments",
        Severity.WARNING,
        _split_of_expandable,
        "freed blocks above that size are never given out again, and the segment grows in their place: reserved memory "
        "grew from 220 MiB to 14 GiB while 266 MiB were in use",
        "keep expandable_segments:True alone",
        f"{_PYTORCH}/issues/123548 and {_PYTORCH}/pull/193400",
    ),
    LintRule(
        "allocator-variables",
        Severity.WARNING,
        _both_variables,
        "they are names of one setting and only one is read: torch 2.13 takes PYTORCH_CUDA_ALLOC_CONF, other versions "
        "PYTORCH_ALLOC_CONF",
        "set one of them, and unset the other",
        _ALLOCATOR_DOCS,
    ),
    LintRule(
        "collector-of-expandable-segments",
        Severity.INFO,
        _collected_expandable,
        "the collector passes over blocks of expandable segments, so it frees nothing",
        "leave garbage_collection_threshold out",
        f"{_PYTORCH}/pull/134338",
    ),
    LintRule(
        "idle-collector",
        Severity.INFO,
        _idle_collector,
        "the allocator collects only where set_per_process_memory_fraction has set a limit to compare with",
        "leave it out; expandable_segments:True is what helps against fragmentation",
        f"{_PYTORCH}/blob/v2.13.0/c10/cuda/CUDACachingAllocator.cpp",
    ),
    LintRule(
        "split-size",
        Severity.INFO,
        _split_size,
        "a last resort: larger blocks are no longer split, so that a freed one waits for a request of its own size, "
        "and emptying such segments costs time",
        "try expandable_segments:True in its place",
        f"{_PYTORCH}/pull/113481",
    ),
    LintRule(
        "coarse-rounding",
        Severity.INFO,
        _rounded_up,
        "every large block is rounded up to the next division between powers of two, and what is added is lost",
        "8 divisions or more, or expandable_segments:True in its place",
        _ALLOCATOR_DOCS,
    ),
    LintRule(
        "rounding-by-one",
        Severity.INFO,
        _rounded_by_one,
        "one division is read as none: nothing is rounded to a power of two",
        "leave it out, or take 2 and more",
        f"{_PYTORCH}/issues/161139",
    ),
    LintRule(
        "async-backend",
        Severity.WARNING,
        _async_backend,
        "these are options of the native allocator, which cudaMallocAsync ignores; plans are of the native one, too",
        "leave backend out",
        _ALLOCATOR_DOCS,
    ),
    LintRule(
        "no-cache",
        Severity.WARNING,
        _uncached,
        "set to anything, 0 as well, it makes every tensor a cudaMalloc and a cudaFree, which waits for the GPU",
        "unset PYTORCH_NO_CUDA_MEMORY_CACHING: it is for memory checkers",
        _VARIABLES_DOCS,
    ),
    LintRule(
        "launch-blocking",
        Severity.WARNING,
        _is_on("CUDA_LAUNCH_BLOCKING", "1"),
        "the CPU waits for every kernel; it is for finding the one that fails",
        "unset CUDA_LAUNCH_BLOCKING",
        "https://discuss.pytorch.org/t/cuda-launch-blocking-1-reduces-the-training-speed/160924",
    ),
    LintRule(
        "eager-modules",
        Severity.WARNING,
        _is_on("CUDA_MODULE_LOADING", "EAGER"),
        "all kernels of all libraries are loaded into the context, which took more than 1000 MB where 300 are enough",
        "unset CUDA_MODULE_LOADING",
        f"{_PYTORCH}/issues/107667",
    ),
    LintRule(
        "empty-cache",
        Severity.WARNING,
        _emptied,
        "it gives torch no memory that torch would not have used again, and the next step asks the driver for it anew: "
        "27 to 54 cudaMalloc and cudaFree a step in simulated training",
        "leave it out; where memory is fragmented, expandable_segments:True",
        f"{_DOCS}/notes/cuda.html#memory-management and https://github.com/huggingface/transformers/issues/31372",
    ),
    LintRule(
        "memory-fraction",
        Severity.WARNING,
        _fraction,
        "it only makes torch raise out-of-memory earlier, by what is left over; nothing becomes smaller",
        "leave it out unless others use the card too",
        f"{_DOCS}/generated/torch.cuda.memory.set_per_process_memory_fraction.html",
    ),
    LintRule(
        "reset-peak",
        Severity.INFO,
        hoped("reset_peak_memory_stats", "reset_peak_memory_stats()"),
        "it resets the counters of the peak and frees nothing",
        "keep it for measuring",
        f"{_DOCS}/generated/torch.cuda.memory.reset_peak_memory_stats.html",
    ),
    LintRule(
        "record-streams",
        Severity.WARNING,
        _is_on("TORCH_NCCL_AVOID_RECORD_STREAMS", "0", "false", "False"),
        "tensors of collectives are held until the CPU looks again, so that FSDP allocates more than it needs",
        "unset TORCH_NCCL_AVOID_RECORD_STREAMS: not to record is the default",
        f"{_PYTORCH}/issues/147168",
    ),
    LintRule(
        "communication-buffers",
        Severity.WARNING,
        _large_buffers,
        "every channel to every peer has a buffer of this size, outside what torch counts; the default is 4 MiB",
        "unset NCCL_BUFFSIZE",
        f"{_NCCL_DOCS}#nccl-buffsize",
    ),
    LintRule(
        "no-peer-to-peer",
        Severity.INFO,
        _is_on("NCCL_P2P_DISABLE", "1"),
        "for debugging: GPUs then talk through the host's shared memory, which is slower and counts in --mem",
        "unset NCCL_P2P_DISABLE unless the machine needs it",
        f"{_NCCL_DOCS}#nccl-p2p-disable",
    ),
)
