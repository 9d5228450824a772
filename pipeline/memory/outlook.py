"""The plan of a training, and what probes of it measured: what `pipeline plan train` shows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pipeline.codec import plain

# By which a remembered plan is read again
from pipeline.errors import PipelineError
from pipeline.memory.footprint import MemoryPart
from pipeline.memory.hardware.host_memory import HostNeed
from pipeline.memory.history import Suggestion
from pipeline.memory.lint import LintFinding
from pipeline.memory.planning.memory_plan import Configuration, MemoryPlan, Offer, PlannedOffer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PLANNING = "planning memory: tracing a training step, then small real steps on this CPU (seconds to minutes) ..."
EVERY = "all items"  # the stage of a curriculum that has them


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
    measured_bytes: int  # of one that died: it needs more than this
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
        return {
            "stage": "train",
            "task": self.task,
            "items": self.items,
            "sizes_from": self.sizes_from,
            "cards": [card.name for card in self.offer.cards],
            "ranks": self.offer.ranks,
            "plans": {name: plain(plan) for name, plan in self.plans.items()},
            "parameters": self.parameters,
            "trained": self.trained,
            "standing": plain(self.standing),
            "evaluation_bytes": self.evaluation_bytes,
            "item": dict(self.item),
            "configurations": plain(self.configurations),
            "alternatives": [
                {**_alternative(planned), "waits_s": self.waits_s.get(planned.offer.name)}
                for planned in self.alternatives
            ],
            "host": {"parts": plain(self.host.parts), "mem_bytes": self.mem.mem_bytes, "why": self.mem.why},
            "job": {"cpus": self.cpus, "gpus": self.gpus, "nodes": self.nodes, "time_s": self.time_s},
            "train_s": self.train_s,
            "gpu_hours": self.train_s * self.offer.ranks / 3600 if self.gpus else 0.0,
            "pace": self.pace,
            "ignores_sizes": self.ignores_sizes,
            "findings": plain(self.findings),
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
