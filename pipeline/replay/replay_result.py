"""The result of running a failed step again: as JSON data, and in a sentence."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.units import first_few, format_bytes

if TYPE_CHECKING:
    from pipeline.training.forensics.rerun import PartResult, Rerun, Suspect
    from pipeline.training.forensics.step_bundle import Bundle

_SHOWN = 3  # items of a part


@dataclass(frozen=True, slots=True)
class Traced:
    """The memory of a failed micro-batch, by a trace on fake tensors."""

    ids: tuple[str, ...]
    live_bytes: int  # at the peak
    card: str  # for which
    limit_bytes: int  # what torch may take of it, as planned
    origin: str  # traced, or how else it is known

    @property
    def fits(self) -> bool:
        """Tell whether the live bytes are within the limit; what the allocator reserves beyond them is not counted."""
        return self.live_bytes <= self.limit_bytes

    def words(self) -> str:
        """Return a sentence for people."""
        verdict = "it would fit" if self.fits else "it does not fit"
        taken = f"{format_bytes(self.live_bytes)} live at the peak ({self.origin})"
        return f"on {self.card}: {taken}, of {format_bytes(self.limit_bytes)}: {verdict}"


@dataclass(slots=True)
class ReplayResult:
    """The result of running a failed step again."""

    run: str
    bundle: Bundle
    where: str  # the bundle's folder
    device: str  # here
    weights: str  # where the weights are from, and what that means
    is_exact: bool  # the weights are exactly those of that step
    notes: list[str] = field(default_factory=list)
    rerun: Rerun | None = None  # None: the step killed the process
    suspects: list[Suspect] = field(default_factory=list)
    traced: Traced | None = None
    died: str = ""  # how the child process ended
    on: tuple[str, ...] = ()  # the items that it worked on

    @property
    def is_reproduced(self) -> bool:
        """Tell whether the same failure happened again."""
        if self.rerun is None:
            return bool(self.died) and self.bundle.kind.value == "poison"
        if self.bundle.kind.value == "oom":
            return bool(self._results("out of memory"))
        return self.bundle.kind.value == "nan" and self._is_strange

    @property
    def _is_strange(self) -> bool:
        """Tell whether a loss or a gradient is not finite."""
        assert self.rerun is not None
        norm = self.rerun.norm
        return bool(
            self._results("not finite") or self.rerun.gradients or (norm is not None and not math.isfinite(norm))
        )

    def _results(self, outcome: str) -> list[PartResult]:
        return [result for result in self.rerun.results if result.outcome.value == outcome] if self.rerun else []

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        if self.rerun is None:
            on = first_few(self.on, _SHOWN) or "nothing yet"
            return f"{self._head}: the process {self.died} while processing {on}"
        if self._results("out of memory"):
            return f"{self._head}: {self._out_of_memory()}"
        if self._is_strange:
            return f"{self._head}: {self._not_finite()}"
        kind = self.bundle.kind.value
        if kind == "oom":
            return f"{self._head}: {self._room()}"
        if kind == "nan":
            return f"{self._head}: {self._all_finite()}"
        return f"{self._head}: the process completed it"

    @property
    def _head(self) -> str:
        return "reproduced" if self.is_reproduced else "not reproduced"

    def _out_of_memory(self) -> str:
        (result, *_) = self._results("out of memory")
        on = first_few(result.part.ids, _SHOWN)
        return f"out of memory at micro-batch {result.part.micro + 1}, {on}: {result.error}"

    def _not_finite(self) -> str:
        assert self.rerun is not None
        if self.suspects:
            more = f" (and {len(self.suspects) - 1} more)" if len(self.suspects) > 1 else ""
            return self.suspects[0].words() + more
        if bad := self._results("not finite"):
            return f"{first_few(bad[0].part.ids, _SHOWN)} together; individually they are finite"
        if self.rerun.gradients:
            return f"the gradients of {', '.join(self.rerun.gradients[:_SHOWN])}, summed over micro-batches"
        return f"every gradient is finite, but their norm is {self.rerun.norm}"

    def _room(self) -> str:
        assert self.rerun is not None
        rerun, limit = self.rerun, int(self.bundle.plan["limit_bytes"])
        if not rerun.is_counted:
            grown = max((result.grown_bytes for result in rerun.results), default=0)
            room = f"this machine has enough memory; the process grew by {format_bytes(grown)}"
            return f"{room}; {self.traced.words()}" if self.traced else room
        peak = max((result.peak_bytes for result in rerun.results), default=0)
        taken = f"{format_bytes(rerun.reserved_bytes)} reserved and {format_bytes(peak)} live at the peak"
        if rerun.reserved_bytes > limit:
            return f"this device has enough memory: {taken}; the run's limit was {format_bytes(limit)}"
        why = "fragmentation or other processes caused it there"
        return f"{taken}, within the {format_bytes(limit)} of the run's device: {why}"

    def _all_finite(self) -> str:
        why = [] if self.is_exact else ["the weights differ from those of that step"]
        if self.bundle.world > 1:
            why.append(f"another rank may have failed: --rank N, of {self.bundle.world}")
        if self.device != self.bundle.device:
            why.append(f"it ran on {self.bundle.device}, this is {self.device}")
        reasons = f" ({'; '.join(why)})" if why else ""
        return f"every loss and gradient of rank {self.bundle.rank}'s share is finite here{reasons}"

    def to_json(self) -> dict[str, Any]:
        """Return JSON data; numbers that are not finite become text."""
        bundle, rerun = self.bundle, self.rerun
        document = {
            "run": self.run,
            "step": bundle.step,
            "epoch": bundle.epoch,
            "kind": bundle.kind.value,
            "rank": bundle.rank,
            "world": bundle.world,
            "bundle": self.where,
            "message": bundle.message,
            "ran_on": bundle.state.get("card") or bundle.device,
            "device": self.device,
            "weights": self.weights,
            "weights_are_exact": self.is_exact,
            "notes": self.notes,
            "is_reproduced": self.is_reproduced,
            "verdict": self.verdict,
            "limit_bytes": bundle.plan["limit_bytes"],
            "counted": rerun.is_counted if rerun else None,
            "reserved_bytes": rerun.reserved_bytes if rerun else None,
            "micro_batches": [_plain(result) for result in rerun.results] if rerun else [],
            "suspects": [{**asdict(suspect), "words": suspect.words()} for suspect in self.suspects],
            "gradients_not_finite": rerun.gradients if rerun else [],
            "gradient_norm": rerun.norm if rerun else None,
            "traced": {**asdict(self.traced), "fits": self.traced.fits, "words": self.traced.words()}
            if self.traced
            else None,
            "died": self.died,
            "on": list(self.on),
        }
        plain: dict[str, Any] = _worded(document)
        return plain


def _plain(result: PartResult) -> dict[str, Any]:
    part = result.part
    return {
        "micro_batch": part.micro + 1,
        "items": list(part.ids),
        "sizes": dict(part.sizes),
        "rung": part.rung,
        "planned_bytes": part.cost_bytes,
        "peak_bytes": result.peak_bytes,
        "grown_bytes": result.grown_bytes,
        "terms": {name: list(term) for name, term in result.terms.items()},
        "outcome": result.outcome.value,
        "error": result.error,
    }


def _worded(value: Any) -> Any:
    """Return JSON data with numbers that are not finite as text, since JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _worded(part) for name, part in value.items()}
    return [_worded(part) for part in value] if isinstance(value, list | tuple) else value
