"""The settings of torch's caching allocator in the environment: the variable that torch reads, and its options."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
    """Return the allocator's options in a text by name, and the faults that a CUDA build of torch 2.13 would refuse.

    Like torch's `ConfigTokenizer` this leaves out all spaces, and takes any token for a colon or a comma.
    """
    tokens = re.findall(r"[,:\[\]]|[^,:\[\]]+", re.sub(r"\s+", "", text))
    options: dict[str, str] = {}
    faults: list[str] = []
    while tokens:
        name, value, end = tokens[0], tokens[2:3], 3
        if value == ["["]:
            end = tokens.index("]", 2) + 1 if "]" in tokens[2:] else 0
            value = tokens[2:end]
        if not value:
            return options, (*faults, f"{name} has no value")
        options[name] = "".join(value)
        faults += [] if name in _KNOWN else [f"{name!r} is not an option"]
        tokens = tokens[end + 1 :]
    return options, (*faults, *_value_faults(options))


def _value_faults(options: Mapping[str, str]) -> Iterator[str]:
    """Yield the faults of values that torch refuses; of a number it reads only the beginning."""
    sizes = {name: _number(options[name]) for name in _MEGABYTES & options.keys()}
    yield from (f"{name} must be a number" for name, size in sizes.items() if size is None)
    for name in _SWITCHES & options.keys():
        if options[name] not in ("True", "False"):
            yield f"{name} must be True or False"
    large = sizes.get("large_segment_size_mb")
    large = LARGE_SEGMENT_MB if large is None else large
    for name, least in (("max_split_size_mb", large), ("max_non_split_rounding_mb", LARGE_SEGMENT_MB)):
        size = sizes.get(name)
        if size is not None and 0 <= size < least:
            yield f"{name} is {least:g} at least"
    if large <= _SMALLEST_SEGMENT_MB:
        yield f"large_segment_size_mb is more than {_SMALLEST_SEGMENT_MB}"
    if not 0 < (_number(options.get("garbage_collection_threshold", "0.5")) or 0.0) < 1:
        yield "garbage_collection_threshold is between 0 and 1"
    if options.get("backend", "native") not in ("native", "cudaMallocAsync"):
        yield "backend is native or cudaMallocAsync"
    divisions = options.get("roundup_power2_divisions", "1")
    least_division = 0 if divisions.startswith("[") else 1
    numbers = [_number(text) for text in re.findall(r"[^\[\]:,>]+", divisions)]
    if any(each is None or each < least_division or int(each) & (int(each) - 1) for each in numbers):
        yield "roundup_power2_divisions are powers of two"


def _number(text: str) -> float | None:
    match = re.match(r"[+-]?(\d+\.?\d*|\.\d+)", text)
    return float(match[0]) if match else None


@dataclass(frozen=True, slots=True)
class AllocatorVariable:
    """The variable that gives torch a plan's settings and the user's own, which win."""

    name: str
    value: str
    overruled: tuple[str, ...]  # options of the plan that the user's environment sets otherwise

    @classmethod
    def of(cls, planned: str, environment: Mapping[str, str]) -> AllocatorVariable:
        """Add planned settings to those that are set already; of several variables torch reads the first."""
        name = next((name for name in VARIABLES if name in environment), VARIABLES[0])
        own = environment.get(name, "")
        set_already, wanted = allocator_options(own)[0], allocator_options(planned)[0]
        added = (f"{option}:{value}" for option, value in wanted.items() if option not in set_already)
        overruled = tuple(option for option, value in wanted.items() if set_already.get(option, value) != value)
        return cls(name, ",".join(filter(None, (own, *added))), overruled)

    @property
    def note(self) -> str:
        """Return a note on options of the plan that are not followed; empty: none."""
        options = ", ".join(self.overruled)
        return f"{self.name} of the environment overrules the plan: {options}" if options else ""


def allocator_settings(planned: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable to set for a process with this environment; none where nothing is planned."""
    variable = AllocatorVariable.of(planned, environment)
    return {variable.name: variable.value} if planned else {}
