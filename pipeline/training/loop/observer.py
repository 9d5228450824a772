"""Reports what happens in a training: metrics, bundles of what went wrong, leaks, and notes for a crash."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import psutil
import torch

from pipeline.device.accelerator import Card, is_card
from pipeline.device.kinds import CPU
from pipeline.device.rng import RngState
from pipeline.memory.leaks.leak_detector import Leaks
from pipeline.memory.runtime.meters import HostMeter
from pipeline.training.forensics import step_bundle
from pipeline.training.forensics.step_bundle import Bundle, BundleCut, BundleKind, CrashNote, PieceInFlight
from pipeline.training.loop.metrics_log import VALIDATION, Epoch, MetricRange, MetricsLog, open_trackers
from pipeline.training.step_clock import FIGURE, OBSERVE, READ

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pipeline.config.schema_train import TrainSection
    from pipeline.memory.leaks.leak_detector import MemoryLeak
    from pipeline.memory.runtime.meters import Meter
    from pipeline.records import TaskContext
    from pipeline.training.items.batch import BatchOrigin
    from pipeline.training.prepared import ModelFolder, Prepared
    from pipeline.training.ranks.rank_protocol import Ranks
    from pipeline.training.state import EpochTotals
    from pipeline.training.step.micro_batches import Piece, RankShare
    from pipeline.training.step.step import Step


@dataclass(eq=False)
class TrainingObserver:
    """Writes a training's metrics, bundles and messages; rank 0 for all, but each rank its own failures."""

    train: TrainSection
    prepared: Prepared
    folder: ModelFolder
    model_step: Step
    ranks: Ranks
    tell: TaskContext
    say: Callable[[str], None]  # to people
    meter: Meter
    checkpoint: Callable[[], step_bundle.BundleCheckpoint | None]
    config: Mapping[str, Any] | None = None
    remember: Callable[[int, float], None] = lambda _bytes, _s: None

    def __post_init__(self) -> None:
        self.device = self.model_step.device
        self.budget: Callable[[], int] = lambda: 0  # of the present governor
        self._figures: MetricsLog | None = None
        self._rng: RngState | None = None  # at the start of the step
        self._step: tuple[int, RankShare] | None = None  # its number, while it runs
        self._begun: list[tuple[tuple[int, ...], int]] = []  # numbers and rungs of the pieces of the present pass
        self._leaks = Leaks(
            device=self.device,
            live=None if self.device == CPU else self._live_bytes,
            tell=self._leaking,
            limit_bytes=_limit(self.prepared, self.device),
        )
        self._breath = CrashNote(self.folder.path / f".on-rank-{self.ranks.rank}")
        self._now = 0  # the step, since training began
        self._ooms = self._ooms_before = 0  # since this process began: so far, and up to the last epoch's end
        self._origin: BatchOrigin | None = None  # of the last piece of a step

    def expect(self, steps: int, buffers: Callable[[], list[torch.Tensor]]) -> None:
        """Expect a training of so many steps, with buffers of loaders that may grow and are no leak."""
        self._leaks.steps, self._leaks.own = steps, buffers

    def _live_bytes(self) -> int:
        """Return what tensors take of the card, but for a batch that was copied ahead, of whatever size."""
        ahead = self.model_step.ahead
        return Card(self.device).allocated_bytes - (ahead.bytes if ahead is not None else 0)

    def _leaking(self, leak: MemoryLeak) -> None:
        warning = f"memory leaks: {leak.words()}"
        self.say(f"WARNING: {warning}")
        place = f"rank {self.ranks.rank}, " if self.ranks.world > 1 else ""
        self.tell.report.warnings[leak.key] = f"{place}{warning}"

    def resumed(self, step: int) -> None:
        """Start, or restart, after a step: metrics of later ones are dropped."""
        self._now, self._origin = step, None
        self._leave_poison()
        if self.ranks.rank:
            return
        if self._figures is not None:
            self._figures.close()
        path = self.folder.path
        trackers = open_trackers(self.train.trackers, path, step=step, name=self.prepared.name, config=self.config)
        self._figures = MetricsLog(path, step=step, trackers=trackers)
        self.tell.report.figures["epochs"] = float(self.prepared.epochs)
        if self.device != CPU:
            self.tell.report.figures["planned_bytes"] = float(self._planned_bytes(0))

    def _planned_bytes(self, epoch: int) -> int:
        """Return the planned peak of an epoch: of a GPU, or of the only process of a machine."""
        if self.device == CPU:
            return self.prepared.mem_bytes if self.ranks.world == 1 else 0
        ends = accumulate(phase.epochs for phase in self.prepared.phases)
        phases = zip(self.prepared.phases, ends, strict=True)
        reserved_bytes = next((phase.reserved_bytes for phase, end in phases if epoch < end), 0)
        return int(reserved_bytes * (1 + self.prepared.margin))

    def begin(self, piece: Piece) -> None:
        """Note the micro-batch in flight, in case it kills this process."""
        self.tell.on(piece.ids)
        self.ranks.progress(f"{piece.ids[0]} and {len(piece) - 1} more")
        if self._step is None:  # a validation keeps nothing of its pieces
            return
        if any(not set(numbers).isdisjoint(piece.numbers) for numbers, _ in self._begun):  # the step begins again
            self._begun.clear()
        self._begun.append((piece.numbers, piece.rung))
        origin, last = piece.batch.origin, self._origin
        if last is None or last.epoch != origin.epoch:
            self._now += 1
        else:
            self._now += origin.step - last.step  # 0 in a step; more than 1 where some were left out
        self._origin = origin
        self._breath.on(
            PieceInFlight(self._now, origin.epoch, origin.step, piece.ids, piece.numbers, piece.rung, self.budget())
        )

    def oom(self, piece: Piece, error: str) -> None:
        """Write a bundle of a micro-batch of the present step that ran out of memory, and say so."""
        if self._step is None:  # the rehearsal: no step to replay
            return
        step, share = self._step
        self._ooms += 1
        self.tell.report.figures |= {"ooms": float(self._ooms), "oom_step": float(step), "oom_items": float(len(piece))}
        self.say(f"step {step}: out of memory at {len(piece)} items ({', '.join(piece.ids[:3])}): {error}")
        self._bundle(BundleKind.OOM, step, share, piece, error)

    def poison(self, step: int, share: RankShare, message: str) -> None:
        """Write a bundle of a step that is not finite."""
        self._bundle(BundleKind.NAN, step, share, None, message)

    def _bundle(self, kind: BundleKind, step: int, share: RankShare, piece: Piece | None, message: str) -> None:
        numbers = piece.numbers if piece else ()
        cuts = tuple(BundleCut(ids, kept) for ids, kept in share.cuts)
        holding = (place for place, cut in enumerate(cuts) if numbers and set(numbers) <= set(cut.numbers))
        state = {
            "items": list(numbers),
            "rung": piece.rung if piece else 0,
            "pieces": [{"numbers": list(numbers), "rung": rung} for numbers, rung in self._begun],
            "micro_batches": share.origin.of,
            "careful": self.tell.careful,
        }
        at = {"epoch": share.origin.epoch, "step": step, "epoch_step": share.origin.step}
        self._write(kind, message, state, cuts=cuts, failed=next(holding, None), budget={"cost": self.budget()}, **at)

    def _leave_poison(self) -> None:
        """Write a bundle of the items on which this rank's process has now died twice."""
        on, self._breath.poison = self._breath.poison, None
        if on is None:
            return
        times = sum(not set(on.ids).isdisjoint(death.ids) for death in self._breath.deaths)
        message = f"the process crashed or was killed {times} times on these items"
        state = {"items": list(on.numbers), "rung": on.rung, "micro_batches": 1}
        state["pieces"] = [{"numbers": list(on.numbers), "rung": on.rung}]
        at = {"epoch": on.epoch, "step": on.step, "epoch_step": on.epoch_step}
        self._rng = RngState.capture(self.device)
        cuts = (BundleCut(on.ids, on.numbers),)
        self._write(BundleKind.POISON, message, state, cuts=cuts, failed=0, budget={"cost": on.budget}, **at)
        self.say(f"step {on.step}, {', '.join(on.ids[:3])}: {message}")

    def _write(self, kind: BundleKind, message: str, state: Mapping[str, Any], **where: Any) -> None:
        """Write a bundle; `state` is what else a replay needs."""
        bundle = Bundle(
            kind=kind,
            message=message,
            **where,
            rank=self.ranks.rank,
            world=self.ranks.world,
            choice={"precision": self.prepared.precision, "checkpointing": self.prepared.checkpointing},
            plan=self.prepared.to_json(),
            seed=self.train.seed,
            checkpoint=self.checkpoint(),
            time_s=time.time(),
            torch=str(torch.__version__),
            device=self.device,
            state={**state, "card": _card(self.device)},
        )
        is_written = step_bundle.write_bundle(self.folder.bundles, bundle, self._rng.tensors() if self._rng else {})
        again = f"to reproduce it: pipeline replay --step {bundle.step}"
        self.say(again if is_written else "no bundle: the disk is full")

    def step(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Log the metrics of a step."""
        memory = self.meter.read()
        if self._figures is not None:
            self._figures.log(step, {**figures, "reserved_bytes": float(memory.reserved_bytes)})
        self.tell.report.figures |= {name: float(value) for name, value in figures.items() if value is not None}

    def validated(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a validation within an epoch, and print them."""
        if self._figures is not None:
            self._figures.log(step, {f"{VALIDATION}{name}": value for name, value in figures.items()})
            self.say(f"step {step}: " + ", ".join(f"val {name} {value:.4g}" for name, value in figures.items()))

    def epoch(self, tally: EpochTotals, step: int, figures: Mapping[str, float | None], rate: float) -> None:
        """Log the metrics of an epoch, and print them."""
        memory = self.meter.read()
        peak_bytes = max(memory.peak_reserved_bytes, memory.highest_reserved_bytes)
        sizes = memory.allocated_bytes or memory.reserved_bytes, memory.reserved_bytes, peak_bytes
        memories = [report["memory"] for report in self.ranks.exchange({"memory": sizes})]
        allocated, reserved, peak = map(max, zip(*memories, strict=True))
        self.meter.reset_peak()
        self._leaks.epoch()
        if self._figures is None:
            return
        epoch = Epoch(
            epoch=tally.epoch + 1,
            step=step,
            steps=tally.steps,
            loss=tally.losses,
            learning_rate=rate,
            batch=MetricRange(tally.fewest, tally.items / max(1, tally.steps), tally.most),
            items=tally.items,
            items_per_s=tally.items / tally.wall_s if tally.wall_s else 0.0,
            wait_share=tally.seconds.get(READ, 0.0) / tally.wall_s if tally.wall_s else 0.0,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            peak_bytes=peak,
            ooms=tally.ooms,
            micro_batches=tally.micros,
            rejected=tally.rejected,
            cropped=tally.cropped,
            remedied=tally.remedied,
            wall_s=tally.wall_s,
            seconds=tally.seconds,
            validation=figures,
            planned_bytes=self._planned_bytes(tally.epoch),
            more={"left_out_steps": float(tally.left_out), "skipped_items": float(tally.skipped)},
        )
        self._figures.epoch(epoch)
        if self.device != CPU and tally.steps:
            self.remember(peak, tally.wall_s / tally.steps)
        self.say(epoch.words())
        self._ooms_before += tally.ooms
        self._ooms = max(self._ooms, self._ooms_before)  # of all ranks
        self.tell.report.figures |= {"epoch": float(epoch.epoch), "ooms": float(self._ooms)}
        self.tell.report.figures |= {f"{FIGURE}{name}": spent_s for name, spent_s in tally.seconds.items()}
        if self.device != CPU:
            self.tell.report.figures["device_peak_bytes"] = float(peak)

    def between(self, bucket: int) -> None:
        """Look for memory leaks, between two steps."""
        self._leaks.step(bucket)

    @contextmanager
    def watching(self, step: int, share: RankShare) -> Iterator[None]:
        """Surround a step."""
        with self.model_step.clock.within(OBSERVE):
            self._rng = RngState.capture(self.device)  # for a bundle
        self._begun.clear()
        self._step = step, share
        try:
            with self._leaks.watching():
                yield
        finally:
            self._step = None
            self._breath.off()

    def close(self) -> None:
        self._leaks.close()
        self._breath.close()
        if self._figures is not None:
            self._figures.close()


def _card(device: str) -> dict[str, Any] | None:
    """Describe the GPU; None on a CPU."""
    if not is_card(device):
        return None
    card = Card(device)
    return {"name": card.name, "capability": list(card.capability or ()), "total_bytes": card.total_bytes}


def _limit(prepared: Prepared, device: str) -> int:
    """Return the memory at which a leak ends a run: of the GPU, the job, or the machine."""
    if device != CPU:
        return prepared.limit_bytes
    return HostMeter().read().limit_bytes or psutil.virtual_memory().total
