"""Settings and surroundings that change what is trained, or waste memory or time: a finding for each, with its fix."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from pipeline.memory.hardware.allocator_variables import VARIABLES, allocator_options, number_at_start

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_DOCS, _PYTORCH = "https://docs.pytorch.org/docs/stable", "https://github.com/pytorch/pytorch"
_ALLOCATOR_DOCS = f"{_DOCS}/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf"
_NATIVE_ONLY = {"expandable_segments", "garbage_collection_threshold", "max_split_size_mb", "roundup_power2_divisions"}


class Severity(StrEnum):
    """How bad a finding is, the worst first."""

    ERROR = "error"  # the run fails, or trains something else than intended
    WARNING = "warning"  # it costs memory, time, or both
    INFO = "info"


@dataclass(frozen=True, slots=True)
class LintFinding:
    """A harmful setting, why it is harmful, and the fix."""

    code: str
    severity: Severity
    what: str
    why: str
    remedy: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The known facts of a run; None if unknown."""

    environment: Mapping[str, str] = field(default_factory=dict)
    empty_cache_every: int | None = None  # micro-batches
    memory_fraction: float | None = None
    accumulation: int = 1  # micro-batches of a step on a GPU
    gpus: int = 1
    module_types: frozenset[str] = frozenset()  # class names of the model's modules
    in_batch_contrastive: bool = False  # the loss compares items of a micro-batch with each other, and only those
    precision: str = "fp32"
    native_bf16: bool | None = None  # of all GPUs that the run may get
    cpus: int | None = None  # of a rank

    def has(self, module: str) -> bool:
        """Tell whether the model has a module whose class name contains this."""
        return any(module in name for name in self.module_types)


def lint(facts: RunFacts) -> tuple[LintFinding, ...]:
    """Return the findings in a run, the worst first."""
    found = [*_environment(facts), *_training(facts)]
    return tuple(sorted(found, key=lambda finding: list(Severity).index(finding.severity)))


def _environment(facts: RunFacts) -> Iterator[LintFinding]:
    """Yield harmful environment variables."""
    known = facts.environment
    names = [name for name in VARIABLES if name in known]
    options, faults = allocator_options(known[names[0]]) if names else ({}, [])
    expandable = options.get("expandable_segments") == "True"
    if faults := [f"{name}: {fault}" for name in names for fault in allocator_options(known[name])[1]]:
        yield LintFinding(
            "allocator-malformed",
            Severity.ERROR,
            "; ".join(faults),
            "torch raises when it reads the variable; CUDA builds also reject unknown options",
            "write option:value,option:value as documented",
            _ALLOCATOR_DOCS,
        )
    if len(names) > 1:
        yield LintFinding(
            "allocator-variables",
            Severity.WARNING,
            f"{' and '.join(names)} are set",
            f"both name one setting and torch reads only one: torch 2.13 reads {VARIABLES[0]}, other versions "
            f"{VARIABLES[1]}",
            "set one of them, and unset the other",
            _ALLOCATOR_DOCS,
        )
    if expandable and (size := options.get("max_split_size_mb")):
        yield LintFinding(
            "split-size-of-expandable-segments",
            Severity.WARNING,
            f"expandable_segments:True with max_split_size_mb:{size}",
            "freed blocks above that size are never reused and the segment grows instead: reserved memory grew "
            "from 220 MiB to 14 GiB while 266 MiB were in use",
            "use expandable_segments:True alone",
            f"{_PYTORCH}/issues/123548 and {_PYTORCH}/pull/193400",
        )
    if options.get("backend") == "cudaMallocAsync" and (ignored := sorted(_NATIVE_ONLY & options.keys())):
        yield LintFinding(
            "async-backend",
            Severity.WARNING,
            f"backend:cudaMallocAsync with {', '.join(ignored)}",
            "cudaMallocAsync ignores these options, and plans assume the native allocator",
            "remove backend",
            _ALLOCATOR_DOCS,
        )
    if (value := known.get("PYTORCH_NO_CUDA_MEMORY_CACHING")) is not None:
        yield LintFinding(
            "no-cache",
            Severity.WARNING,
            f"PYTORCH_NO_CUDA_MEMORY_CACHING={value}",
            "any value, even 0, makes every tensor a cudaMalloc and cudaFree, which wait for the GPU",
            "unset PYTORCH_NO_CUDA_MEMORY_CACHING (for memory checkers only)",
            f"{_DOCS}/cuda_environment_variables.html",
        )
    if known.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield LintFinding(
            "launch-blocking",
            Severity.WARNING,
            "CUDA_LAUNCH_BLOCKING=1",
            "the CPU waits for every kernel; use it only to find a failing kernel",
            "unset CUDA_LAUNCH_BLOCKING",
            "https://discuss.pytorch.org/t/cuda-launch-blocking-1-reduces-the-training-speed/160924",
        )
    threads = number_at_start(known.get("OMP_NUM_THREADS", "")) or 0
    if facts.cpus and threads > facts.cpus:
        yield LintFinding(
            "crowded-cores",
            Severity.WARNING,
            f"OMP_NUM_THREADS={threads:.0f} on {facts.cpus} cores",
            "threads wait for each other, and each has a stack and a malloc arena in host memory",
            "set OMP_NUM_THREADS to at most the cores of a process",
            f"{_PYTORCH}/blob/v2.13.0/torch/distributed/run.py",
        )


def _training(facts: RunFacts) -> Iterator[LintFinding]:
    """Yield harmful settings of the training, and layers that do not suit its cuts."""
    if facts.accumulation > 1 and facts.in_batch_contrastive:
        yield LintFinding(
            "accumulated-contrast",
            Severity.ERROR,
            "accumulation over a loss with in-batch negatives",
            "items are contrasted only with their own micro-batch, which changes the loss",
            "define embed() and contrast() in the task (Contrastive in pipeline/protocol.py): the loss then spans all "
            "micro-batches",
            "https://github.com/luyug/GradCache",
        )
    if facts.accumulation > 1 and facts.has("BatchNorm"):
        yield LintFinding(
            "accumulated-norm",
            Severity.ERROR,
            "accumulation over BatchNorm",
            "each micro-batch has its own mean and variance, and updates the moving averages: this is not the training "
            "of the whole batch",
            "use GroupNorm or LayerNorm, or one micro-batch a GPU",
            f"{_PYTORCH}/issues/46516",
        )
    if every := facts.empty_cache_every:
        yield LintFinding(
            "empty-cache",
            Severity.WARNING,
            f"empty_cache() after every {f'{every} micro-batches' if every > 1 else 'micro-batch'}",
            "torch would reuse this memory anyway, and must now allocate it again: "
            "27 to 54 cudaMalloc and cudaFree a step in simulated training",
            "remove it; against fragmentation use expandable_segments:True",
            f"{_DOCS}/notes/cuda.html#memory-management",
        )
    if facts.memory_fraction is not None and facts.memory_fraction < 1:
        yield LintFinding(
            "memory-fraction",
            Severity.WARNING,
            f"a memory fraction of {facts.memory_fraction:g}",
            "it only makes torch run out of memory earlier",
            "remove it unless others share the GPU",
            f"{_DOCS}/generated/torch.cuda.memory.set_per_process_memory_fraction.html",
        )
    if facts.precision == "bf16" and facts.native_bf16 is False:
        yield LintFinding(
            "emulated-bf16",
            Severity.WARNING,
            "bf16 on a GPU without it",
            "below compute capability 8.0 (V100, T4) bf16 is computed in fp32 with casts: slower, although "
            "is_bf16_supported() returns True",
            "use fp16 with loss scaling on these GPUs, or request others",
            f"{_PYTORCH}/pull/148322 and {_PYTORCH}/issues/124996",
        )
    if facts.gpus > 1 and facts.has("BatchNorm") and not facts.has("SyncBatchNorm"):
        yield LintFinding(
            "norm-of-each-gpu",
            Severity.INFO,
            f"BatchNorm on {facts.gpus} GPUs, each by itself",
            "its statistics cover the items of one GPU and change with their number",
            "use torch.nn.SyncBatchNorm.convert_sync_batchnorm or another norm",
            f"{_DOCS}/generated/torch.nn.SyncBatchNorm.html",
        )
