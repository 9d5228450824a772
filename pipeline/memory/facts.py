"""What is known of a run, what is looked for in it, and what was found: the values of `lint`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from pipeline.memory.conf import VARIABLES, allocator_options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Severity(str, Enum):
    """How bad a finding is, the worst first."""

    ERROR = "error"  # the run fails, or trains something else than is asked for
    WARNING = "warning"  # it costs memory, time, or both
    INFO = "info"  # it does nothing of what may be hoped for, or is good to know


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a setting."""

    code: str
    severity: Severity
    what: str
    why: str
    remedy: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
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
class Rule:
    """What is looked for: `found` returns what it saw, or nothing."""

    code: str
    severity: Severity
    found: Callable[[Facts], str]
    why: str
    remedy: str
    source: str
