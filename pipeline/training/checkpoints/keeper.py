"""Saving a training's state by all ranks together, in the background where memory allows, and resuming from it.

A `Saver` saves in the background: it copies tensors into host memory, and a thread writes them from there.

    saver.begin(state, step)             every rank; returns as soon as the copies are made
    saver.receipt()                      at later steps: None while writing, then the receipt for rank 0
    saver.publish(receipts)              rank 0, once it has all of them
    saver.outcomes()                     rank 0: the published folder, or why it was not saved
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from pipeline.device.accelerator import computing
from pipeline.device.rng import RngState
from pipeline.errors import JobFailed, PipelineError
from pipeline.memory.runtime.pinned_tensors import TensorRuns, layout_of
from pipeline.training.checkpoints.checkpoint_folder import NotSaved, State
from pipeline.training.checkpoints.checkpoint_reader import plain_json
from pipeline.training.checkpoints.tensor_file import distinct
from pipeline.training.checkpoints.training_state import by_name, model_state, pack, plain_name, unpack
from pipeline.training.state import TRAINING, TrainingState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from pipeline.memory.runtime.meters import HostMeter
    from pipeline.training.checkpoints.checkpoint_folder import CheckpointFolder, Receipt
    from pipeline.training.checkpoints.checkpoint_reader import LoadedCheckpoint
    from pipeline.training.ranks.rank_protocol import Ranks
    from pipeline.training.step.step import Step


def staging_bytes(*groups: Mapping[str, Tensor]) -> int:
    """Return the bytes that copies of groups of tensors take; tied ones count once."""
    return layout_of([tensor for group in groups for tensor in distinct(group)[0].values()]).bytes


class StagingBuffers:
    """Copies of tensors in host memory, which is used again."""

    def __init__(self) -> None:
        self._runs = TensorRuns()

    @property
    def held_bytes(self) -> int:
        return self._runs.held_bytes

    def copied(self, *groups: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return copies of each group, valid until the next call; tied tensors stay tied."""
        parts = [distinct(group) for group in groups]
        tensors = [tensor for kept, _ in parts for tensor in kept.values()]
        rooms = self._runs.rooms(tensors)
        for room, tensor in zip(rooms, tensors, strict=True):
            room.copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensor in tensors}:
            computing(device).synchronize_stream()
        left = iter(rooms)
        copies = [dict(zip(kept, left, strict=False)) for kept, _ in parts]
        return [
            {name: copy[same.get(name, name)] for name in group}
            for group, copy, (_, same) in zip(groups, copies, parts, strict=True)
        ]


class Saver:
    """Saves the checkpoints of one rank, one at a time."""

    def __init__(self, checkpoints: CheckpointFolder, *, rank: int = 0) -> None:
        self.checkpoints, self.rank = checkpoints, rank
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._staging = StagingBuffers()
        self._receipt: Future[Receipt] | None = None
        self._publishing: Future[Path | NotSaved] | None = None
        self._outcomes: list[Path | NotSaved] = []
        self._publish_with: dict[str, Any] = {}

    @property
    def staged_bytes(self) -> int:
        return self._staging.held_bytes

    def begin(self, state: State, step: int, *, figure: float | None = None, lower_is_better: bool = True) -> None:
        """Copy a state and start writing this rank's part; waits for an unfinished save first."""
        self.wait()
        tensors, data = (state.tensors, plain_json(state.data, "data")) if self.rank == 0 else ({}, {})
        own_data = plain_json(state.own_data, "own_data")
        shared, own = self._staging.copied(tensors, state.own)
        staged = State(shared, {}, own, own_data)
        self._publish_with = {"data": data, "step": step, "figure": figure, "lower_is_better": lower_is_better}
        self._receipt = self._thread.submit(self.checkpoints.write, staged, step, rank=self.rank)

    def receipt(self, *, wait: bool = False) -> Receipt | None:
        """Return this rank's receipt; None while it is being written, or if nothing is."""
        if self._receipt is None or not (wait or self._receipt.done()):
            return None
        return self._receipt.result()

    def publish(self, receipts: Sequence[Receipt]) -> None:
        """Start publishing what all ranks have written; rank 0 only."""
        self._receipt = None
        self._publishing = self._thread.submit(self._published, receipts, self._publish_with)

    def outcomes(self, *, wait: bool = False) -> list[Path | NotSaved]:
        """Return the checkpoints that ended since the last call: each one's folder, or why it was not saved."""
        if self._publishing is not None and (wait or self._publishing.done()):
            published, self._publishing = self._publishing, None
            self._outcomes.append(published.result())
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self) -> None:
        """Wait until nothing is in flight; disk errors are not raised but part of `receipt` and `outcomes`."""
        if self._receipt is not None:
            try:
                self._receipt.result()
            except BaseException:
                self._receipt = None  # raised once
                raise
        self._outcomes = self.outcomes(wait=True)

    def close(self) -> None:
        """Wait, then end the thread and free the copies."""
        self.wait()
        self._thread.shutdown()
        self._staging = StagingBuffers()

    def _published(self, receipts: Sequence[Receipt], arguments: Mapping[str, Any]) -> Path | NotSaved:
        try:
            return self.checkpoints.publish(receipts, **arguments)
        except NotSaved as error:
            return error


ROOM = 0.8  # share of the host's memory limit that may be in use with the copies of a checkpoint


@dataclass(frozen=True, slots=True)
class ResumedTraining:
    """The state of a resumed training, and this rank's own data; empty at the beginning."""

    state: TrainingState
    own: Mapping[str, Any] = field(default_factory=dict)


class Keeper:
    """Saves and resumes a training; every rank makes the same calls.

    `behind` says whether training goes on while a checkpoint is written: always, never, or where the host has room for
    copies (`auto`). Then each rank writes its part in a thread; once all have (`is_written`, at the boundary of a
    step), they `hand_in` their receipts, and the first rank publishes, also in its thread.
    """

    def __init__(
        self,
        checkpoints: CheckpointFolder,
        ranks: Ranks,
        *,
        fresh: Callable[[Step], None],
        tell: Callable[[str], None],
        warn: Callable[[str], None] = lambda _warning: None,
        behind: bool | Literal["auto"] = False,
        host: HostMeter | None = None,
    ) -> None:
        """Take the folder of checkpoints; `fresh` resets a step to the start of its training.

        `tell` prints what happens now, `warn` keeps what people must know of the whole run.
        """
        self.checkpoints, self.ranks = checkpoints, ranks
        self._fresh, self._tell, self._warn_of, self._behind, self._host = fresh, tell, warn, behind, host
        self.unsaved: list[NotSaved] = []  # of rank 0
        self._saver: Saver | None = None
        self._is_open = False  # a checkpoint is being written, whose receipts are not handed in yet

    @property
    def folder(self) -> Path:
        return self.checkpoints.folder

    @property
    def is_written(self) -> bool:
        """Whether this rank has written its part of the checkpoint in progress."""
        return self._is_open and self._saver is not None and self._saver.receipt() is not None

    def save(
        self,
        training: TrainingState,
        step: Step,
        *,
        own: Mapping[str, Any],
        figure: float | None,
        lower: bool = True,
        wait: bool = True,
    ) -> bool:
        """Save a checkpoint; return whether it was saved or, without `wait`, at least started.

        A failure is reported as a warning; training goes on.
        """
        self.finish()
        packed = pack(step.model, step.optimizer, averages=_averages(step), scaler=step.scaler)
        data = {**packed.data, TRAINING: training.to_json()}
        buffers = _buffers(step) if self.ranks.rank else {}  # rank 0's are among the shared tensors
        tensors = packed.tensors
        parts: dict[str, Tensor] = {}
        part_data: dict[str, Any] = {}
        if step.is_spread:
            from pipeline.training.checkpoints.sharded_checkpoint import divided  # which is slow to import

            tensors, parts, part_data = divided(packed.tensors)
        own_tensors = {**RngState.capture(step.device).tensors(), **buffers, **parts}
        state = State(tensors=tensors, data=data, own=own_tensors, own_data={**own, **part_data})
        if wait or not self._goes_behind(state):
            return self._saved(state, training.done, figure, lower=lower)
        if self._saver is None:
            self._saver = Saver(self.checkpoints, rank=self.ranks.rank)
        self._saver.begin(state, training.done, figure=figure, lower_is_better=lower)
        self._is_open = True
        return True

    def _saved(self, state: State, done: int, figure: float | None, *, lower: bool) -> bool:
        """Save a checkpoint before this returns."""
        receipts = self.ranks.exchange(self.checkpoints.write(state, done, rank=self.ranks.rank))
        why = ""
        if self.ranks.rank == 0:
            try:
                self.checkpoints.publish(receipts, state.data, done, figure=figure, lower_is_better=lower)
            except NotSaved as error:
                why = self._warn(error)
        return not self.ranks.exchange({"why": why})[0]["why"]

    def _goes_behind(self, state: State) -> bool:
        """Say whether all ranks have room for copies of what they save."""
        if self._behind is False:
            return False
        has_room = self._behind is True or self._has_room(state)
        return all(reply["room"] for reply in self.ranks.exchange({"room": has_room}))

    def _has_room(self, state: State) -> bool:
        host = self._host.read() if self._host is not None else None
        if host is None or host.limit_bytes is None:
            return False  # unknown
        needed = staging_bytes({} if self.ranks.rank else state.tensors, state.own)
        needed -= self._saver.staged_bytes if self._saver is not None else 0
        return host.used_bytes + max(0, needed) <= ROOM * host.limit_bytes

    def hand_in(self) -> None:
        """Let rank 0 publish what all ranks have written, without waiting for that."""
        if not self._is_open or self._saver is None:
            return
        self._is_open = False
        receipt = self._saver.receipt(wait=True)
        assert receipt is not None
        receipts = self.ranks.exchange(receipt)
        if self.ranks.rank == 0:
            self._saver.publish(receipts)

    def finish(self) -> None:
        """Wait until the checkpoint in progress is saved; report a failure."""
        if self._saver is None:
            return
        self.hand_in()
        self.listen(wait=True)

    def listen(self, *, wait: bool = False) -> None:
        """Report background saves that failed."""
        if self._saver is None or self.ranks.rank:
            return
        for outcome in self._saver.outcomes(wait=wait):
            if isinstance(outcome, NotSaved):
                self._warn(outcome)

    def close(self) -> None:
        """Free threads and copies; waits for this rank's writing, but for no other rank."""
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    def _warn(self, error: NotSaved) -> str:
        self.unsaved.append(error)
        self._tell(f"WARNING: {error}\n  training continues; the last good checkpoint is kept")
        count = len(self.unsaved)
        many = f"{count} checkpoints could not be saved; the last error: " if count > 1 else ""
        self._warn_of(f"{many}{error.what}   ({error.remedy})")
        return str(error)

    def resume(self, step: Step, *, of_all: bool = False) -> ResumedTraining:
        """Restore a step from the newest checkpoint, `of_all`: that all items made, or reset it where there is none."""
        self.finish()
        loaded = self._newest(of_all=of_all) if self.ranks.rank == 0 else None
        reply = self.ranks.exchange({"name": loaded.name if loaded else ""})[0]
        if reply.get("error"):
            raise JobFailed(f"rank 0 found no checkpoint to continue from: {reply['error']}", where=str(self.folder))
        if not reply["name"]:
            self._fresh(step)
            return ResumedTraining(TrainingState())
        return self._restore(loaded or self.checkpoints.open(reply["name"], verified=True), step)

    def _newest(self, *, of_all: bool) -> LoadedCheckpoint | None:
        """Return the newest intact checkpoint; an error is sent to the other ranks, too."""
        try:
            return self.checkpoints.newest(of_all=of_all)
        except PipelineError as error:
            self.ranks.exchange({"error": str(error)})
            raise

    def _restore(self, loaded: LoadedCheckpoint, step: Step) -> ResumedTraining:
        if step.is_spread or loaded.is_divided:
            from pipeline.training.checkpoints.sharded_checkpoint import assembled

            loaded = assembled(loaded)
        unpack(loaded, loaded.data, step.model, step.optimizer, averages=_averages(step), scaler=step.scaler)
        own = loaded.own(self.ranks.rank)
        if own is not None:
            RngState.from_tensors(own.tensors, step.device).restore()
            with torch.no_grad():
                for name, buffer in _buffers(step).items():
                    if name in own.tensors:
                        buffer.copy_(own.tensors[name])
        elif (first := loaded.own(0)) is not None:  # this rank did not exist: it starts from rank 0's data
            own = first
        if loaded.world != self.ranks.world:
            self._tell(f"{loaded.name} is of {loaded.world} ranks, now {self.ranks.world}: steps stay the same")
        return ResumedTraining(TrainingState.from_json(loaded.data[TRAINING]), own.data if own else {})


def _buffers(step: Step) -> dict[str, Tensor]:
    """Return the buffers, such as running means, which differ between ranks, under names of their own."""
    parameters = {plain_name(name) for name, _ in step.model.named_parameters(remove_duplicate=False)}
    return {f"buffer.{name}": tensor for name, tensor in model_state(step.model).items() if name not in parameters}


def _averages(step: Step) -> dict[str, Any] | None:
    return by_name(step.model, step.trained, step.averages) if step.averages else None
