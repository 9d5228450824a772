"""Who is told what happens in a training, and hands it on: figures, bundles of what went wrong, leaks, notes."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from pipeline.memory.leaks.leak_detector import Leaks, MemoryLeak
from pipeline.memory.runtime.meters import HostMeter
from pipeline.training.forensics import step_bundle
from pipeline.training.forensics.crash_note import CrashNote, PieceInFlight
from pipeline.training.forensics.step_bundle import Bundle, BundleCut, BundleKind
from pipeline.training.loop.metrics_log import Epoch, MetricRange, MetricsLog, open_trackers
from pipeline.training.random_state import rng_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pipeline.config.schema_train import TrainSection
    from pipeline.memory.runtime.meters import Memory, Meter
    from pipeline.records import Tell
    from pipeline.training.items.batch import BatchOrigin
    from pipeline.training.loop.progress import EpochTotals
    from pipeline.training.prepared import ModelFolder, Prepared
    from pipeline.training.ranks.rank_protocol import Ranks
    from pipeline.training.step.micro_batches import Piece, RankShare
    from pipeline.training.step.step import Step


class TrainingObserver:
    """Tells files, trackers, the run and people; the first rank speaks for all, but of what went wrong on each."""

    def __init__(
        self,
        train: TrainSection,
        prepared: Prepared,
        folder: ModelFolder,
        step: Step,
        ranks: Ranks,
        tell: Tell,
        say: Callable[[str], None],
        *,
        meter: Meter,
        checkpoint: Callable[[], step_bundle.BundleCheckpoint | None],
        config: Mapping[str, Any] | None = None,
        remember: Callable[[int, float], None] = lambda _bytes, _s: None,
    ) -> None:
        self.train, self.prepared, self.folder, self.ranks, self.tell = train, prepared, folder, ranks, tell
        self.budget: Callable[[], int] = lambda: 0  # of the present governor
        self._step, self._say = step, say
        self._meter, self._checkpoint, self._config = meter, checkpoint, config
        self._remember = remember
        self._figures: MetricsLog | None = None
        self._rng: Mapping[str, torch.Tensor] = {}
        self._begun: list[tuple[tuple[int, ...], int]] = []  # numbers and rungs of the pieces of the present pass
        self._seen: set[int] = set()  # their numbers
        self._leaks = Leaks(device=step.device, tell=self._leaking, limit_bytes=_limit(prepared, step.device))
        self._items = 0
        self._breath = CrashNote(folder.path / f".on-rank-{ranks.rank}")
        self._now = 0  # the step, since training began
        self._ooms = self._ooms_before = 0  # since this process began: so far, and up to the last epoch's end
        self._origin: BatchOrigin | None = None  # of the last piece of a step
        self._is_in_step = False

    def taken_up(self, step: int) -> None:
        """Hear after which step training goes on: what is known of later ones is forgotten."""
        self._now, self._origin = step, None
        self._leave_poison()
        if self.ranks.rank:
            return
        if self._figures is not None:
            self._figures.close()
        trackers = open_trackers(
            self.train.trackers, self.folder.path, step=step, name=self.prepared.name, config=self._config
        )
        self._figures = MetricsLog(self.folder.path, step=step, trackers=trackers)
        self.tell.figures["epochs"] = float(self.prepared.epochs)
        if self._step.device != "cpu":
            self.tell.figures["planned_bytes"] = float(self._planned_bytes(0))

    def _planned_bytes(self, epoch: int) -> int:
        """Return what was planned for the peak of an epoch: on a card, or of the only process of a machine."""
        if self._step.device == "cpu":
            return self.prepared.mem_bytes if self.ranks.world == 1 else 0
        ends = accumulate(stretch.epochs for stretch in self.prepared.stretches)
        stretch = next((one for one, end in zip(self.prepared.stretches, ends, strict=True) if epoch < end), None)
        return int(stretch.reserved_bytes * (1 + self.prepared.margin)) if stretch else 0

    def say(self, line: str) -> None:
        """Say something to people."""
        self._say(line)

    def begin(self, piece: Piece) -> None:
        """Note what is worked on, in case it kills this process."""
        self.tell.on(piece.ids)
        self.ranks.progress(f"{piece.ids[0]} and {len(piece) - 1} more")
        if not self._is_in_step:  # a validation keeps nothing of its pieces
            return
        if not self._seen.isdisjoint(piece.numbers):  # the step begins again
            self._forget_pieces()
        self._begun.append((piece.numbers, piece.rung))
        self._seen.update(piece.numbers)
        self._note(piece)

    def _forget_pieces(self) -> None:
        self._begun.clear()
        self._seen.clear()

    def _note(self, piece: Piece) -> None:
        """Note what is worked on where the next start finds it, should this one be killed."""
        origin, last = piece.batch.origin, self._origin
        if last is None or last.epoch != origin.epoch:
            self._now += 1
        else:
            self._now += origin.step - last.step  # 0 in a step; more than 1 where some were left out
        self._origin = origin
        self._breath.on(
            PieceInFlight(self._now, origin.epoch, origin.step, piece.ids, piece.numbers, piece.rung, self.budget())
        )

    def step_begins(self) -> None:
        """Keep where random numbers stand, for a bundle."""
        self._rng = rng_state(self._step.device)
        self._forget_pieces()

    def oom(self, step: int, share: RankShare, piece: Piece, error: str) -> None:
        """Leave a bundle, and say so."""
        self._ooms += 1
        self.tell.figures["ooms"] = float(self._ooms)
        self.say(f"step {step}: out of memory at {len(piece)} items ({', '.join(piece.ids[:3])}): {error}")
        self._bundle(BundleKind.OOM, step, share, piece, error)

    def poison(self, step: int, share: RankShare, what: str) -> None:
        """Leave a bundle."""
        self._bundle(BundleKind.NAN, step, share, None, what)

    def _bundle(self, kind: BundleKind, step: int, share: RankShare, piece: Piece | None, message: str) -> None:
        numbers = piece.numbers if piece else ()
        cuts = tuple(BundleCut(ids, seen) for ids, seen in share.cuts)
        failed = next((place for place, one in enumerate(cuts) if numbers and set(numbers) <= set(one.numbers)), None)
        at = {"epoch": share.origin.epoch, "step": step, "epoch_step": share.origin.step}
        self._write(kind, at, cuts, failed, self.budget(), message, self._state(share, piece))

    def _write(
        self,
        kind: BundleKind,
        at: Mapping[str, int],
        cuts: tuple[BundleCut, ...],
        failed: int | None,
        budget: int,
        message: str,
        state: Mapping[str, Any],
    ) -> None:
        bundle = Bundle(
            kind=kind,
            **at,
            rank=self.ranks.rank,
            world=self.ranks.world,
            cuts=cuts,
            failed=failed,
            budget={"cost": budget},
            choice={"precision": self.prepared.precision, "checkpointing": self.prepared.checkpointing},
            plan=self.prepared.to_json(),
            seed=self.train.seed,
            message=message,
            checkpoint=self._checkpoint(),
            time_s=time.time(),
            torch=str(torch.__version__),
            device=self._step.device,
            state=state,
        )
        where = step_bundle.write_bundle(self.folder.bundles, bundle, self._rng)
        self.say(
            f"to make it again: pipeline replay RUN --step {bundle.step}" if where else "no bundle: the disk is full"
        )

    def _leave_poison(self) -> None:
        """Leave a bundle of what took this rank's process with it, the last time and once before."""
        on, self._breath.poison = self._breath.poison, None
        if on is None:
            return
        times = sum(not set(on.ids).isdisjoint(one.ids) for one in self._breath.deaths)
        cut = BundleCut(on.ids, on.numbers)
        message = f"the process died {times} times while it was on these items: it crashed, or was killed"
        state = {"items": list(on.numbers), "rung": on.rung, "micro_batches": 1, "card": _card(self._step.device)}
        state["pieces"] = [{"numbers": list(on.numbers), "rung": on.rung}]
        at = {"epoch": on.epoch, "step": on.step, "epoch_step": on.epoch_step}
        self._rng = rng_state(self._step.device)
        self._write(BundleKind.POISON, at, (cut,), 0, on.budget, message, state)
        self.say(f"step {on.step}, {', '.join(on.ids[:3])}: {message}")

    def _state(self, share: RankShare, piece: Piece | None) -> dict[str, Any]:
        """Return what else replaying needs: how this pass was cut, and which card it was."""
        return {
            "items": list(piece.numbers) if piece else [],
            "rung": piece.rung if piece else 0,
            "pieces": [{"numbers": list(numbers), "rung": rung} for numbers, rung in self._begun],
            "micro_batches": share.origin.of,
            "careful": self.tell.careful,
            "card": _card(self._step.device),
        }

    def step(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Note a step's figures."""
        memory = self._meter.read()
        if self._figures is not None:
            self._figures.log(step, {**figures, "reserved_bytes": float(memory.reserved_bytes)})
        self.tell.figures |= {name: float(value) for name, value in figures.items() if value is not None}

    def epoch(self, tally: EpochTotals, step: int, figures: Mapping[str, float | None], rate: float) -> None:
        """Note what an epoch came to, and say it."""
        memories = [_sizes(self._meter.read())]
        if self.ranks.world > 1:
            memories = [one["memory"] for one in self.ranks.exchange({"memory": memories[0]})]
        allocated, reserved, peak = (max(one[place] for one in memories) for place in range(3))
        self._meter.reset_peak()
        self._leaks.epoch()
        if self._figures is None:
            return
        told = Epoch(
            epoch=tally.epoch + 1,
            step=step,
            steps=tally.steps,
            loss=tally.losses,
            learning_rate=rate,
            batch=MetricRange(tally.fewest, tally.items / max(1, tally.steps), tally.most),
            items=tally.items,
            items_per_s=tally.items / tally.wall_s if tally.wall_s else 0.0,
            wait_share=tally.wait_s / tally.wall_s if tally.wall_s else 0.0,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            peak_bytes=peak,
            ooms=tally.ooms,
            micro_batches=tally.micros,
            rejected=tally.rejected,
            cropped=tally.cropped,
            remedied=tally.remedied,
            wall_s=tally.wall_s,
            validation=figures,
            planned_bytes=self._planned_bytes(tally.epoch),
            more={"left_out_steps": float(tally.left_out), "skipped_items": float(tally.skipped)},
        )
        self._figures.epoch(told)
        if self._step.device != "cpu" and tally.steps:
            self._remember(peak, tally.wall_s / tally.steps)
        self.say(told.words())
        self._ooms_before += tally.ooms
        self._ooms = max(self._ooms, self._ooms_before)  # of all ranks
        self.tell.figures |= {"epoch": float(told.epoch), "ooms": float(self._ooms)}
        if self._step.device != "cpu":
            self.tell.figures["device_peak_bytes"] = float(peak)

    def between(self, bucket: int) -> None:
        """Look for leaks."""
        self._leaks.step(bucket)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Surround a step."""
        self.step_begins()
        self._is_in_step = True
        try:
            with self._leaks.watching():
                yield
        finally:
            self._is_in_step = False
            self._breath.off()

    def _leaking(self, leak: MemoryLeak) -> None:
        self.say(f"WARNING: memory leaks: {leak.words()}")

    def close(self) -> None:
        """Let go of what is open."""
        self._leaks.close()
        self._breath.close()
        if self._figures is not None:
            self._figures.close()


def _card(device: str) -> dict[str, Any] | None:
    """Return which card this is; None: a processor."""
    if torch.device(device).type != "cuda":
        return None
    told = torch.cuda.get_device_properties(device)
    return {"name": told.name, "capability": [told.major, told.minor], "total_bytes": told.total_memory}


def _limit(prepared: Prepared, device: str) -> int:
    """Return the memory at which a leak ends a run: of the card, of the job, or of the machine."""
    if device != "cpu":
        return prepared.limit_bytes
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return HostMeter().read().limit_bytes or whole


def _sizes(memory: Memory) -> tuple[int, int, int]:
    return memory.allocated_bytes or memory.reserved_bytes, memory.reserved_bytes, memory.peak_reserved_bytes
