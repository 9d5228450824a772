"""Settings that change the training, or waste memory or time: a finding for each, with its fix.

docs/explanation/memory.md lists more settings to avoid, which are not checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from pipeline.memory.hardware.caching_allocator import VARIABLES, allocator_options

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_DOCS, _PYTORCH = "https://docs.pytorch.org/docs/stable", "https://github.com/pytorch/pytorch"


class Severity(StrEnum):
    """How bad a finding is, the worst first."""

    ERROR = "error"  # the run fails, or trains something else than intended
    WARNING = "warning"  # it costs memory, time, or both


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
    accumulation: int = 1  # micro-batches of a step on a GPU
    module_types: frozenset[str] = frozenset()  # class names of the model's modules
    in_batch_contrastive: bool = False  # the loss compares the items of a micro-batch only with each other


def lint(facts: RunFacts) -> tuple[LintFinding, ...]:
    """Return the findings in a run, the worst first."""
    return tuple(sorted(_findings(facts), key=lambda finding: list(Severity).index(finding.severity)))


def _findings(facts: RunFacts) -> Iterator[LintFinding]:
    variable = next((facts.environment[name] for name in VARIABLES if name in facts.environment), "")
    options = allocator_options(variable)
    if options.get("expandable_segments") == "True" and (size := options.get("max_split_size_mb")):
        yield LintFinding(
            "split-size-of-expandable-segments",
            Severity.WARNING,
            f"expandable_segments:True with max_split_size_mb:{size}",
            "freed blocks above that size are never reused and the segment grows instead: reserved memory grew "
            "from 220 MiB to 14 GiB while 266 MiB were in use",
            "use expandable_segments:True alone",
            f"{_PYTORCH}/issues/123548 and {_PYTORCH}/pull/193400",
        )
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
    if facts.accumulation > 1 and any("BatchNorm" in name for name in facts.module_types):
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
