"""The facts of a run that `lint` looks at, and the checks on them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from pipeline.memory.hardware.allocator_variables import VARIABLES, allocator_options, number_at_start
from pipeline.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NCCL_BUFFER_BYTES = 4 * MIB  # the default
WASTEFUL = 1.25  # times what was asked for
WORTH_SAYING = 0.02  # of a card's memory
_NATIVE_ONLY = {"expandable_segments", "garbage_collection_threshold", "max_split_size_mb", "roundup_power2_divisions"}


class Severity(StrEnum):
    """How bad a finding is, the worst first."""

    ERROR = "error"  # the run fails, or trains something else than is asked for
    WARNING = "warning"  # it costs memory, time, or both
    INFO = "info"  # it does nothing of what may be hoped for, or is good to know


@dataclass(frozen=True, slots=True)
class LintFinding:
    """A setting that does harm or nothing, why, and what to do."""

    code: str
    severity: Severity
    what: str
    why: str
    remedy: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The known facts of a run; None where unknown."""

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
    native_bf16: bool | None = None  # of all cards that the run may land on
    optimizer_way: str | None = None  # foreach, fused or loop
    data_container: str | None = None  # list, dict, numpy …: what the data set keeps its items in
    num_workers: int | None = None  # processes of a DataLoader
    cpus: int | None = None  # of a rank

    @property
    def allocator_variables(self) -> list[str]:
        return [name for name in VARIABLES if name in self.environment]

    @property
    def allocator(self) -> Mapping[str, str]:
        """Return the allocator's options by name, from the variable that torch reads."""
        return allocator_options(self.environment[self.allocator_variables[0]])[0] if self.allocator_variables else {}

    @property
    def is_expandable(self) -> bool:
        return self.allocator.get("expandable_segments") == "True"

    @property
    def accumulates(self) -> bool:
        return (self.accumulation or 1) > 1

    def has(self, module: str) -> bool:
        """Tell whether the model has a module whose class name contains this."""
        return any(module in name for name in self.module_types)

    # Each of these returns a description of the harmful setting, or "".

    def malformed(self) -> str:
        faults = {name: allocator_options(self.environment.get(name, ""))[1] for name in VARIABLES}
        return "; ".join(f"{name}: {fault}" for name, texts in faults.items() for fault in texts)

    def beside_expandable(self, option: str) -> str:
        value = self.allocator.get(option)
        return f"expandable_segments:True with {option}:{value}" if value and self.is_expandable else ""

    def idle_collector(self) -> str:
        limited = self.memory_fraction is not None or "per_process_memory_fraction" in self.allocator
        idle = "garbage_collection_threshold" in self.allocator and not limited and not self.is_expandable
        return "garbage_collection_threshold without a memory fraction" if idle else ""

    def split_size(self) -> str:
        size = self.allocator.get("max_split_size_mb")
        return f"max_split_size_mb:{size}" if size and not self.is_expandable else ""

    def divisions(self) -> list[int]:
        value = self.allocator.get("roundup_power2_divisions", "")
        return [int(division) for division in re.findall(r"(?:^|:)(\d+)", value)]

    def rounded_up(self) -> str:
        coarse = [division for division in self.divisions() if division > 1 and 1 + 1 / division >= WASTEFUL]
        return (
            f"roundup_power2_divisions of {min(coarse)}: blocks are up to 1/{min(coarse)} too large" if coarse else ""
        )

    def async_backend(self) -> str:
        ignored = sorted(_NATIVE_ONLY & self.allocator.keys())
        asked = self.allocator.get("backend") == "cudaMallocAsync"
        return f"backend:cudaMallocAsync with {', '.join(ignored)}" if asked and ignored else ""

    def variable(self, name: str, *values: str) -> str:
        """Return NAME=VALUE of an environment variable if it has one of these values (any, where none are given)."""
        value = self.environment.get(name)
        return f"{name}={value}" if value is not None and (not values or value in values) else ""

    def hoped(self, name: str, what: str) -> str:
        """Return a text if the setting was made to save GPU memory."""
        return f"{what} to save GPU memory" if name in self.to_save_gpu_memory else ""

    def emptied(self) -> str:
        every = self.empty_cache_every
        return f"empty_cache() after every {f'{every} micro-batches' if every > 1 else 'micro-batch'}" if every else ""

    def fraction(self) -> str:
        fraction = self.memory_fraction
        if fraction is None:
            fraction = number_at_start(self.allocator.get("per_process_memory_fraction", ""))
        return f"a memory fraction of {fraction:g}" if fraction is not None and fraction < 1 else ""

    def large_buffers(self) -> str:
        size = number_at_start(self.environment.get("NCCL_BUFFSIZE", "")) or 0
        return f"NCCL_BUFFSIZE={size:.0f}" if size > NCCL_BUFFER_BYTES else ""

    def workers_over_lists(self) -> str:
        copied = self.data_container in {"list", "dict", "tuple", "set"} and (self.num_workers or 0) > 0
        return (
            f"{self.num_workers} worker processes over a data set in a Python {self.data_container}" if copied else ""
        )

    def wrong_product(self) -> str:
        if None in (self.batch, self.micro_batch, self.accumulation, self.gpus):
            return ""
        micro, times, gpus = self.micro_batch or 0, self.accumulation or 0, self.gpus or 0
        product = micro * times * gpus
        return f"{micro} items × {times} × {gpus} GPUs are {product}, not {self.batch}" if product != self.batch else ""

    def uneven(self) -> str:
        uneven = self.batch and self.gpus and self.batch % self.gpus
        return f"a batch of {self.batch} on {self.gpus} GPUs" if uneven else ""

    def changed_batch(self) -> str:
        if not self.before_gpus or not self.gpus or self.gpus == self.before_gpus or self.micro_batch is None:
            return ""
        now, then = self.micro_batch * self.gpus * (self.accumulation or 1), self.before_batch
        if self.micro_batch != self.before_micro_batch or then is None or now == then:
            return ""
        gpus = f"{self.gpus} GPUs instead of {self.before_gpus}"
        return f"{gpus} with {self.micro_batch} items each: {now} a step, not {then}"

    def more_each(self) -> str:
        if not self.before_gpus or not self.gpus or self.gpus >= self.before_gpus or not self.batch:
            return ""
        if self.batch != self.before_batch or self.accumulates:
            return ""
        now, then = -(-self.batch // self.gpus), -(-self.batch // self.before_gpus)
        return f"{self.gpus} GPUs instead of {self.before_gpus} for the same batch: {now} items each, not {then}"

    def local_norm(self) -> str:
        local = (self.gpus or 1) > 1 and self.has("BatchNorm") and not self.has("SyncBatchNorm")
        return f"BatchNorm on {self.gpus} GPUs, each by itself" if local else ""

    def accumulated_contrast(self) -> str:
        if not self.accumulates or not self.in_batch_contrastive or self.two_passes:
            return ""
        micro, times = self.micro_batch or 0, self.accumulation or 0
        sizes = f": {micro} × {times} has {micro - 1} negatives, not {micro * times - 1}" if micro else ""
        return f"accumulation over a loss with in-batch negatives{sizes}"

    def foreach(self) -> str:
        size, card = self.parameter_bytes or 0, self.gpu_bytes or 0
        worth = self.optimizer_way == "foreach" and card and size > WORTH_SAYING * card
        return f"a foreach optimizer: its temporaries are about {size / MIB:.0f} MiB" if worth else ""

    def convolves(self) -> bool:
        """Tell whether the model has convolutions for cuDNN (graph convolutions are none)."""
        return any(re.search(r"Conv(Transpose)?[123]d", name) for name in self.module_types)

    def plans_kept(self) -> str:
        unlimited = "TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT" not in self.environment
        kept = unlimited and self.variable_shapes and self.convolves()
        return "convolutions over inputs of varying shapes" if kept else ""

    def crowded(self) -> str:
        threads = number_at_start(self.environment.get("OMP_NUM_THREADS", "")) or 0
        return f"OMP_NUM_THREADS={threads:.0f} on {self.cpus} cores" if self.cpus and threads > self.cpus else ""

    def unlimited(self) -> str:
        unlimited = (self.gpus or 1) > 1 and not self.environment.get("OMP_NUM_THREADS")
        return f"OMP_NUM_THREADS is not set for {self.gpus} processes" if unlimited else ""


@dataclass(frozen=True, slots=True)
class LintRule:
    """A rule of lint: `found` describes the harm in a run, or returns ""."""

    code: str
    found: Callable[[RunFacts], str]
    why: str
    remedy: str
    source: str
