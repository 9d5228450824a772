"""Reports what happens in a training: metrics, bundles of failed steps, leaks, and a note for a crash."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
import torch

from pipeline.codec import plain
from pipeline.device.accelerator import Card, RngState, is_card
from pipeline.device.kinds import CPU
from pipeline.memory.leak_detector import Leaks
from pipeline.memory.runtime.meters import HostMeter
from pipeline.training.forensics import step_bundle
from pipeline.training.forensics.step_bundle import Bundle, BundleCut, BundleKind, CrashNote, PieceInFlight
from pipeline.training.loop.metrics_log import VALIDATION, Epoch, MetricsLog, open_trackers
from pipeline.training.sampling import BatchOrigin
from pipeline.training.step_clock import FIGURE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pipeline.config.schema_train import TrainSection
    from pipeline.memory.leak_detector import MemoryLeak
    from pipeline.memory.runtime.meters import Meter
    from pipeline.records import TaskContext
    from pipeline.training.prepared import ModelFolder, Prepared
    from pipeline.training.ranks import Ranks
    from pipeline.training.state import EpochTotals
    from pipeline.training.step.exact_step import Piece, RankShare
    from pipeline.training.step.step import Step

SLOW_RANK = "slow rank"  # the key of the warning


@dataclass(slots=True)
class ObservedStep:
    """A step: the newest, or one in which earlier processes died."""

    number: int
    origin: BatchOrigin  # of its first batch
    rng: RngState  # at its start
    cuts: Sequence[tuple[tuple[str, ...], tuple[int, ...]]]  # ids and numbers of each batch read so far
    begun: list[tuple[tuple[int, ...], int]] = field(default_factory=list)  # items and remedies of this pass' pieces


@dataclass(eq=False)
class TrainingObserver:
    """Writes a training's metrics, bundles and messages; rank 0 for all ranks, but each rank its own failures."""

    train: TrainSection
    prepared: Prepared
    folder: ModelFolder
    model_step: Step
    ranks: Ranks
    context: TaskContext
    say: Callable[[str], None]  # to people
    meter: Meter
    checkpoint: Callable[[], Mapping[str, str] | None]  # path and digest of the newest
    config: Mapping[str, Any] | None = None
    remember: Callable[[int, float], None] = lambda _bytes, _s: None
    budget: Callable[[], int] = lambda: 0  # of micro-batches, at present

    def __post_init__(self) -> None:
        self.device = device = self.model_step.device
        self._metrics: MetricsLog | None = None  # of rank 0
        self._newest: ObservedStep | None = None
        self._running: ObservedStep | None = None  # the running step; None in a rehearsal or a validation
        self._ooms = self._ooms_before = 0  # of this process: so far, and up to the end of the last epoch
        self._crash_note = CrashNote(self.folder.path / f".on-rank-{self.ranks.rank}")
        limit_bytes = self.prepared.limit_bytes
        if device == CPU:  # a leak ends the job, or the machine
            limit_bytes = HostMeter().read().limit_bytes or psutil.virtual_memory().total
        live = None if device == CPU else self._live_bytes
        self.leaks = Leaks(live=live, report=self._leaking, limit_bytes=limit_bytes)

    def resumed(self, step: int) -> None:
        """Start, or restart, after a step: metrics of later ones are dropped."""
        self._report_poison()
        if self.ranks.rank:
            return
        if self._metrics is not None:
            self._metrics.close()
        path = self.folder.path
        trackers = open_trackers(self.train.trackers, path, step=step, name=self.prepared.name, config=self.config)
        self._metrics = MetricsLog(path, step=step, trackers=trackers)
        self.context.report.figures["epochs"] = float(self.prepared.epochs)
        if self.device != CPU:
            self.context.report.figures["planned_bytes"] = float(self._planned_bytes(0))

    # A step

    @contextmanager
    def watching(self, number: int, share: RankShare, rng: RngState) -> Iterator[None]:
        """Surround a step, which began with these random numbers."""
        self._newest = self._running = ObservedStep(number, share.origin, rng, share.cuts)
        try:
            with self.leaks.watching():
                yield
        finally:
            self._running = None
            self._crash_note.off()

    def begin(self, piece: Piece) -> None:
        """Note the piece that runs now, in case it kills this process."""
        self.context.on(piece.ids)
        self.ranks.progress(f"{piece.ids[0]} and {len(piece) - 1} more")
        if (step := self._running) is None:
            return
        if any(not set(numbers).isdisjoint(piece.numbers) for numbers, _ in step.begun):  # it runs again
            step.begun.clear()
        step.begun.append((piece.numbers, piece.rung))
        self._crash_note.on(self._in_flight(step, piece))

    def oom(self, piece: Piece, error: str) -> None:
        """Report a piece of the running step that ran out of memory, with a bundle."""
        if (step := self._running) is None:  # a rehearsal cannot be replayed
            return
        self._ooms += 1
        counts = {"ooms": self._ooms, "oom_step": step.number, "oom_items": len(piece)}
        self.context.report.figures |= {name: float(count) for name, count in counts.items()}
        self.say(f"step {step.number}: out of memory at {len(piece)} items ({', '.join(piece.ids[:3])}): {error}")
        self._write(BundleKind.OOM, step, self._in_flight(step, piece), error)

    def poison(self, message: str) -> None:
        """Write a bundle of the newest step, which is not finite."""
        assert self._newest is not None
        self._write(BundleKind.NAN, self._newest, self._in_flight(self._newest, None), message)

    # Metrics

    def step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        memory = self.meter.read()
        if self._metrics is not None:
            self._metrics.log(step, {**metrics, "reserved_bytes": float(memory.reserved_bytes)})
        self.context.report.figures |= {name: float(value) for name, value in metrics.items() if value is not None}

    def slow_rank(self, what: str) -> None:
        """Report the rank that all others wait for, or that none is slow any longer."""
        if what and SLOW_RANK not in self.context.report.warnings:
            self.say(f"WARNING: {what}")
        self.context.report.warnings.pop(SLOW_RANK, None)
        if what:
            self.context.report.warnings[SLOW_RANK] = what

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log and print the metrics of a validation within an epoch."""
        if self._metrics is not None:
            self._metrics.log(step, {f"{VALIDATION}{name}": value for name, value in metrics.items()})
            self.say(f"step {step}: " + ", ".join(f"val {name} {value:.4g}" for name, value in metrics.items()))

    def epoch(self, totals: EpochTotals, step: int, metrics: Mapping[str, float | None], rate: float) -> None:
        """Log and print the metrics of an epoch; all ranks take part."""
        memory = self.meter.read()
        peak_bytes = max(memory.peak_reserved_bytes, memory.highest_reserved_bytes)
        sizes = memory.allocated_bytes or memory.reserved_bytes, memory.reserved_bytes, peak_bytes
        memories = [report["memory"] for report in self.ranks.exchange({"memory": sizes})]
        allocated, reserved, peak = map(max, zip(*memories, strict=True))
        self.meter.reset_peak()
        self.leaks.epoch()
        if self._metrics is None:
            return
        epoch = Epoch.of(
            totals,
            step=step,
            learning_rate=rate,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            peak_bytes=peak,
            planned_bytes=self._planned_bytes(totals.epoch),
            validation=metrics,
        )
        self._metrics.epoch(epoch)
        self.say(epoch.words())
        self._ooms_before += totals.ooms
        self._ooms = max(self._ooms, self._ooms_before)  # of all ranks
        figures = {"epoch": float(epoch.epoch), "ooms": float(self._ooms)}
        figures |= {f"{FIGURE}{name}": spent_s for name, spent_s in totals.seconds.items()}
        if self.device != CPU:
            figures["device_peak_bytes"] = float(peak)
            if totals.steps:
                self.remember(peak, totals.wall_s / totals.steps)
        self.context.report.figures |= figures

    def close(self) -> None:
        self.leaks.close()
        self._crash_note.close()
        if self._metrics is not None:
            self._metrics.close()

    def _planned_bytes(self, epoch: int) -> int:
        """Return the planned peak of an epoch: of a GPU, or of the only process of a machine."""
        if self.device == CPU:
            return self.prepared.mem_bytes if self.ranks.world == 1 else 0
        reserved_bytes = self.prepared.phases[self.prepared.phase_of(epoch)].reserved_bytes
        return int(reserved_bytes * (1 + self.prepared.margin))

    # Leaks

    def _live_bytes(self) -> int:
        """Return the GPU memory of live tensors, without a batch that was copied ahead, whose size varies."""
        ahead = self.model_step.ahead
        return Card(self.device).memory("allocated") - (ahead.bytes if ahead is not None else 0)

    def _leaking(self, leak: MemoryLeak) -> None:
        warning = f"memory leaks: {leak.words()}"
        self.say(f"WARNING: {warning}")
        place = f"rank {self.ranks.rank}, " if self.ranks.world > 1 else ""
        self.context.report.warnings[leak.key] = f"{place}{warning}"

    # Bundles

    def _in_flight(self, step: ObservedStep, piece: Piece | None) -> PieceInFlight:
        ids, numbers, rung = (piece.ids, piece.numbers, piece.rung) if piece else ((), (), 0)
        return PieceInFlight(step.number, step.origin.epoch, step.origin.step, ids, numbers, rung, self.budget())

    def _report_poison(self) -> None:
        """Write a bundle of the items on which this rank's process has now died twice."""
        on, self._crash_note.poison = self._crash_note.poison, None
        if on is None:
            return
        times = sum(not set(on.ids).isdisjoint(death.ids) for death in self._crash_note.deaths)
        message = f"the process crashed or was killed {times} times on these items"
        origin, rng = BatchOrigin(on.epoch, on.epoch_step, 0, 1), RngState.capture(self.device)
        step = ObservedStep(on.step, origin, rng, [(on.ids, on.numbers)], [(on.numbers, on.rung)])
        self._write(BundleKind.POISON, step, on, message)
        self.say(f"step {on.step}, {', '.join(on.ids[:3])}: {message}")

    def _write(self, kind: BundleKind, step: ObservedStep, at: PieceInFlight, message: str) -> None:
        """Write a bundle of a step, whose failed piece may be known."""
        of_piece = (place for place, (_, numbers) in enumerate(step.cuts) if at.numbers and {*at.numbers} <= {*numbers})
        bundle = Bundle(
            kind=kind,
            message=message,
            epoch=at.epoch,
            step=at.step,
            epoch_step=at.epoch_step,
            cuts=tuple(BundleCut(*cut) for cut in step.cuts),
            failed=next(of_piece, None),
            budget={"cost": at.budget},
            rank=self.ranks.rank,
            world=self.ranks.world,
            plan=plain(self.prepared),
            checkpoint=self.checkpoint(),
            time_s=time.time(),
            torch=str(torch.__version__),
            device=self.device,
            state={
                "items": at.numbers,
                "rung": at.rung,
                "pieces": [{"numbers": numbers, "rung": rung} for numbers, rung in step.begun],
                "micro_batches": step.origin.of,
                "careful": self.context.careful,
                "card": _card(self.device),
            },
        )
        is_written = step_bundle.write_bundle(self.folder.bundles, bundle, step.rng.tensors())
        again = f"to reproduce it: pipeline replay --step {at.step}"
        self.say(again if is_written else "no bundle: the disk is full")


def _card(device: str) -> dict[str, Any] | None:
    """Describe the GPU; None on a CPU."""
    if not is_card(device):
        return None
    card = Card(device)
    return {"name": card.name, "capability": list(card.capability or ()), "total_bytes": card.total_bytes}
