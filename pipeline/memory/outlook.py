"""The contents of `pipeline plan train`: the plan of a training, measurements of probes, and harmful settings.

docs/explanation/memory.md lists more settings to avoid, which are not checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pipeline.codec import plain

# By which a remembered plan is read again
from pipeline.errors import PipelineError
from pipeline.memory.footprint import MemoryPart
from pipeline.memory.hardware.caching_allocator import VARIABLES, allocator_options
from pipeline.memory.hardware.host_memory import HostNeed
from pipeline.memory.history import Suggestion
from pipeline.memory.planning.memory_plan import Configuration, MemoryPlan, Offer, PlannedOffer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PLANNING = "planning memory: tracing a training step, then small real steps on this CPU (seconds to minutes) ..."
_DOCS, _PYTORCH = "https://docs.pytorch.org/docs/stable", "https://github.com/pytorch/pytorch"
EVERY = "all items"  # the stage of a curriculum that has them


# Known-bad settings


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


# Plan and probes


class ProbeOutcome(StrEnum):
    """How a probe ended."""

    MEASURED = "measured"
    DIED = "died of memory"
    REFUSED = "not submitted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe of a GPU predicted and measured."""

    card: str
    outcome: ProbeOutcome
    predicted_bytes: int
    measured_bytes: int  # of a probe that ran out of memory: it needs more than this
    predicted_s: float
    step_s: float
    log: str
    why: str = ""
    notes: tuple[str, ...] = ()
    error: PipelineError | None = None  # its exit code ends the command

    @property
    def ratio(self) -> float:
        return self.measured_bytes / self.predicted_bytes if self.predicted_bytes else 0.0


@dataclass(frozen=True)
class TrainOutlook:
    """What training would take: the plan, what it is compared with, and its job."""

    task: str
    items: int
    sizes_from: str  # empty: from graphs, or from what a reader gave
    offer: Offer
    plans: Mapping[str, MemoryPlan]  # by the stage of the curriculum, the last with all items
    kept: Mapping[str, int]  # by the same: micro-batches of a step that a rank keeps for its second pass
    ahead_bytes: Mapping[str, int]  # by the same: of the inputs that are copied while a step runs; 0: none are
    parameters: int  # how many numbers
    trained: int  # how many of them are trained
    standing: tuple[MemoryPart, ...]  # live between two steps
    evaluation_bytes: int | None  # live, of the largest micro-batch without gradients; None: unknown
    configurations: Sequence[Configuration]
    item: Mapping[str, int]  # of the configurations
    alternatives: Sequence[PlannedOffer]
    waits_s: Mapping[str, float]  # until a job of an offer would start, as the scheduler says it, where it does
    host: HostNeed
    mem: Suggestion
    cpus: int  # of a node
    gpus: int
    nodes: int
    time_s: int  # that a job may ask for, as configured
    findings: Sequence[LintFinding]
    probed: Sequence[Probed] = ()
    ignores_sizes: bool = False  # larger batches take no more: example() may ignore its sizes
    pace: float | None = None  # measured/planned seconds of a step; None: not measured

    @property
    def plan(self) -> MemoryPlan:
        return self.plans[EVERY]

    @property
    def epoch_s(self) -> float:
        """Return how long an epoch takes, by measured steps where there are some."""
        return self.plan.epoch_s.value * (self.pace or 1.0)

    @property
    def train_s(self) -> float:
        """Return how long all epochs take, as far as is known."""
        hours = sum(plan.gpu_hours.value for plan in self.plans.values())
        return hours * 3600 / self.offer.ranks * (self.pace or 1.0)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        own = (
            *("task", "items", "sizes_from", "plans", "parameters", "trained", "standing", "evaluation_bytes", "item"),
            *("configurations", "train_s", "pace", "ignores_sizes", "findings"),
        )
        return {
            "stage": "train",
            **{name: plain(getattr(self, name)) for name in own},
            "cards": [card.name for card in self.offer.cards],
            "ranks": self.offer.ranks,
            "alternatives": [
                {**_alternative(planned), "waits_s": self.waits_s.get(planned.offer.name)}
                for planned in self.alternatives
            ],
            "host": {"parts": plain(self.host.parts), "mem_bytes": self.mem.mem_bytes, "why": self.mem.why},
            "job": {"cpus": self.cpus, "gpus": self.gpus, "nodes": self.nodes, "time_s": self.time_s},
            "gpu_hours": self.train_s * self.offer.ranks / 3600 if self.gpus else 0.0,
            "probed": [_probed(probed) for probed in self.probed],
        }


def _alternative(planned: PlannedOffer) -> dict[str, Any]:
    """Return an alternative as JSON data."""
    return {
        "offer": planned.offer.name,
        "ranks": planned.offer.ranks,
        "gpu_hours": planned.gpu_hours.value if planned.gpu_hours else None,
        "hours": planned.hours.value if planned.hours else None,
        "remedies": list(planned.plan.remedies) if planned.plan else [],
        "why": planned.why,
    }


def _probed(probed: Probed) -> dict[str, Any]:
    """Return a probe as JSON data."""
    kept = ("card", "predicted_bytes", "measured_bytes", "predicted_s", "step_s", "log", "why", "notes")
    return {**{name: getattr(probed, name) for name in kept}, "outcome": probed.outcome.value, "ratio": probed.ratio}
