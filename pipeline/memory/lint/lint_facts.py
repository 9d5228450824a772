"""What is known of a run, what is looked for in it, and what was found: the values of `lint`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Severity(str, Enum):
    """How bad a finding is, the worst first."""

    ERROR = "error"  # the run fails, or trains something else than is asked for
    WARNING = "warning"  # it costs memory, time, or both
    INFO = "info"  # it does nothing of what may be hoped for, or is good to know


@dataclass(frozen=True, slots=True)
class LintFinding:
    """What is wrong with a setting."""

    code: str
    severity: Severity
    what: str
    why: str
    remedy: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known of a run."""

    environment: Mapping[str, str] = field(default_factory=dict)
    to_save_gpu_memory: frozenset[str] = frozenset()  # set for that: clip, prefetch, reset_peak_memory_stats
    empty_cache_every: int | None = None  # micro-batches
    memory_fraction: float | None = None
    batch: int | None = None  # items in a step, over all GPUs
    micro_batch: int | None = None  # items at once on a GPU
    accumulation: int | None = None  # micro-batches in a step, on a GPU
    gpus: int | None = None
    before_batch: int | None = None  # of the run that this one shall repeat
    before_micro_batch: int | None = None
    before_gpus: int | None = None
    mean_of_means: bool | None = None  # the loss of a step is the plain mean over micro-batches of any size
    module_types: frozenset[str] = frozenset()  # names of the classes of a model's modules
    in_batch_contrastive: bool | None = None  # the loss compares items of a batch with each other
    two_passes: bool | None = None  # and the step makes two passes for it: of all its items
    parameter_bytes: int | None = None
    gpu_bytes: int | None = None  # of a card
    variable_shapes: bool | None = None
    precision: str = "fp32"
    loss_scaling: bool | None = None
    native_bf16: bool | None = None  # of all cards that the run may land on
    optimizer_way: str | None = None  # foreach, fused or loop
    compile_mode: str | None = None  # None: not compiled
    compile_dynamic: bool | None = None
    cudnn_benchmark: bool | None = None
    data_container: str | None = None  # list, dict, numpy …: what the data set keeps its items in
    num_workers: int | None = None  # processes of a DataLoader
    prefetch: int | None = None  # batches that each of them reads ahead
    pin: bool | None = None
    batch_bytes: int | None = None  # the largest, on the host
    cpus: int | None = None  # of a rank

    @property
    def allocator(self) -> Mapping[str, str]:
        """Return the options of the allocator, by name."""
        text = next((self.environment[name] for name in VARIABLES if name in self.environment), "")
        return allocator_options(text)[0]

    @property
    def accumulates(self) -> bool:
        """Say whether a step has several micro-batches on a GPU."""
        return (self.accumulation or 1) > 1

    def has(self, module: str) -> bool:
        """Say whether the model has a module with this in its name."""
        return any(module in name for name in self.module_types)


@dataclass(frozen=True, slots=True)
class LintRule:
    """What is looked for: `found` returns what it saw, or nothing."""

    code: str
    severity: Severity
    found: Callable[[RunFacts], str]
    why: str
    remedy: str
    source: str


# As torch 2.13 looks for them [measured; a test looks]; versions before and after have looked in another order.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
LARGE_SEGMENT_MB = 20  # the default of large_segment_size_mb, below which max_split_size_mb is refused
# https://docs.pytorch.org/docs/stable/notes/cuda.html, c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h
_SWITCHES = {"expandable_segments", "pinned_use_background_threads", "pinned_use_cuda_host_register"}
_SWITCHES |= {"release_lock_on_cudamalloc", "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom"}
_MEGABYTES = {"large_segment_size_mb", "max_split_size_mb", "max_non_split_rounding_mb"}
_MEGABYTES |= {"pinned_reserve_segment_size_mb", "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb"}
_OTHERS = {"backend", "garbage_collection_threshold", "roundup_power2_divisions", "pinned_num_register_threads"}
_KNOWN = _SWITCHES | _MEGABYTES | _OTHERS | {"per_process_memory_fraction"}
_SMALLEST_SEGMENT_MB = 10


def allocator_options(text: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the options in a text, by name, and what a CUDA build of torch 2.13 would refuse.

    Like torch's `ConfigTokenizer` this leaves out all spaces, and takes any token for a colon or a comma.
    """
    tokens = re.findall(r"[,:\[\]]|[^,:\[\]]+", re.sub(r"\s+", "", text))
    options: dict[str, str] = {}
    faults: list[str] = []
    at = 0
    while at < len(tokens):
        name, end = tokens[at], _end_of_value(tokens, at + 2)
        if end is None:
            return options, (*faults, f"{name} has no value")
        options[name] = "".join(tokens[at + 2 : end + 1])
        faults += [] if name in _KNOWN else [f"{name!r} is no option"]
        at = end + 2
    return options, (*faults, *_value_faults(options))


def _end_of_value(tokens: list[str], at: int) -> int | None:
    if at >= len(tokens):
        return None
    return at if tokens[at] != "[" else next((end for end in range(at, len(tokens)) if tokens[end] == "]"), None)


def _value_faults(options: Mapping[str, str]) -> list[str]:
    """Return the options whose values torch refuses; of a number it reads the beginning."""
    faults = [
        f"{name} is True or False" for name in _SWITCHES & options.keys() if options[name] not in ("True", "False")
    ]
    faults += [f"{name} is a number" for name in _MEGABYTES & options.keys() if leading_number(options[name]) is None]
    sizes = {name: size for name in _MEGABYTES if (size := leading_number(options.get(name, ""))) is not None}
    large = sizes.get("large_segment_size_mb", LARGE_SEGMENT_MB)
    least = {"max_split_size_mb": large, "max_non_split_rounding_mb": LARGE_SEGMENT_MB}
    faults += [f"{name} is {most:g} at least" for name, most in least.items() if 0 <= sizes.get(name, most) < most]
    if large <= _SMALLEST_SEGMENT_MB:
        faults.append(f"large_segment_size_mb is more than {_SMALLEST_SEGMENT_MB}")
    threshold = options.get("garbage_collection_threshold")
    if threshold is not None and not 0 < (leading_number(threshold) or 0.0) < 1:
        faults.append("garbage_collection_threshold is between 0 and 1")
    if options.get("backend", "native") not in ("native", "cudaMallocAsync"):
        faults.append("backend is native or cudaMallocAsync")
    return faults + _division_faults(options.get("roundup_power2_divisions"))


def _division_faults(value: str | None) -> list[str]:
    if value is None:
        return []
    listed = value.startswith("[")
    numbers = [leading_number(one) for one in re.split(r"[\[\]:,]", value) if one and one != ">"]
    good = all(one is not None and _is_power_of_two(one, zero=listed) for one in numbers)
    return [] if good else ["roundup_power2_divisions are powers of two"]


def _is_power_of_two(value: float, *, zero: bool) -> bool:
    whole = int(value)
    return zero if whole == 0 else whole & (whole - 1) == 0


def leading_number(text: str) -> float | None:
    """Return the number that a text begins with."""
    found = re.match(r"[+-]?(\d+\.?\d*|\.\d+)", text)
    return float(found[0]) if found else None
