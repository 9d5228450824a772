"""Saving a training's state by all ranks together, in the background where memory allows, and resuming from it."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from pipeline.device.accelerator import computing
from pipeline.device.rng import RngState
from pipeline.errors import JobFailed, PipelineError
from pipeline.memory.runtime.pinned_tensors import TensorRuns, layout_of
from pipeline.training.checkpoints.checkpoint_folder import NotSaved
from pipeline.training.checkpoints.sealed_folder import distinct
from pipeline.training.checkpoints.training_state import by_name, model_state, pack, plain_name, unpack
from pipeline.training.state import TRAINING, TrainingState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from pipeline.memory.runtime.meters import HostMeter
    from pipeline.training.checkpoints.checkpoint import Checkpoint, State
    from pipeline.training.checkpoints.checkpoint_folder import CheckpointFolder, Receipt
    from pipeline.training.ranks.rank_protocol import Ranks
    from pipeline.training.step.step import Step

ROOM = 0.8  # share of the host's memory limit that may be in use with the copies of a checkpoint


def staging_bytes(*groups: Mapping[str, Tensor]) -> int:
    """Return the bytes that copies of groups of tensors take; tied ones count once."""
    return layout_of(list(distinct(_numbered(groups))[0].values())).bytes


class StagingBuffers:
    """Copies of tensors in host memory, which is reused."""

    def __init__(self) -> None:
        self._runs = TensorRuns()

    @property
    def held_bytes(self) -> int:
        return self._runs.held_bytes

    def copied(self, *groups: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return copies of each group, valid until the next call; tied tensors stay tied."""
        kept, same = distinct(_numbered(groups))
        rooms = dict(zip(kept, self._runs.rooms(list(kept.values())), strict=True))
        for key, tensor in kept.items():
            rooms[key].copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensor in kept.values()}:
            computing(device).synchronize_stream()
        rooms |= {alias: rooms[first] for alias, first in same.items()}
        return [{name: rooms[number, name] for name in group} for number, group in enumerate(groups)]


def _numbered(groups: Sequence[Mapping[str, Tensor]]) -> dict[tuple[int, str], Tensor]:
    return {(number, name): tensor for number, group in enumerate(groups) for name, tensor in group.items()}


@dataclass(frozen=True, slots=True)
class ResumedTraining:
    """The state of a resumed training, and this rank's own data; empty at the beginning."""

    state: TrainingState
    own: Mapping[str, Any] = field(default_factory=dict)


class Keeper:
    """Saves and resumes a training; every rank makes the same calls.

        keeper.save(…)               each rank writes its part in a thread
        keeper.submit_receipts()     between later steps, once all ranks have written: rank 0 publishes, in its thread
        keeper.collect_results()     report a checkpoint that could not be saved
        keeper.finish()              wait for all of that

    `behind` says whether training continues while a checkpoint is written: always, never, or where the host has room
    for copies of the tensors (`auto`).
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
        self._fresh, self._tell, self._warn, self._behind, self._host = fresh, tell, warn, behind, host
        self.unsaved: list[NotSaved] = []  # of rank 0
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._staging = StagingBuffers()
        self._writing: Future[Receipt] | None = None
        self._publish: Callable[[Sequence[Receipt]], Path] = lambda _receipts: self.folder
        self._publishing: Future[Path] | None = None

    @property
    def folder(self) -> Path:
        return self.checkpoints.folder

    @property
    def is_written(self) -> bool:
        """Whether this rank has written its part of the checkpoint in progress."""
        return self._writing is not None and self._writing.done()

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
        state = self._packed(step, training, own)
        behind = not wait and self._goes_behind(state)
        if behind:
            tensors, own_tensors = self._staging.copied({} if self.ranks.rank else state.tensors, state.own)
            state = replace(state, tensors=tensors, own=own_tensors)
        computing(step.device).synchronize_stream()  # the thread has a stream of its own
        self._publish = partial(
            self.checkpoints.publish, data=state.data, step=training.done, figure=figure, lower_is_better=lower
        )
        self._writing = self._thread.submit(self.checkpoints.write, state, training.done, rank=self.ranks.rank)
        if behind:
            return True
        failed = len(self.unsaved)
        self.finish()
        return bool(self.ranks.exchange({"saved": len(self.unsaved) == failed})[0]["saved"])

    def submit_receipts(self) -> None:
        """Let rank 0 publish what all ranks have written, without waiting for it."""
        if self._writing is None:
            return
        written, self._writing = self._writing, None
        receipts = self.ranks.exchange(written.result())
        if self.ranks.rank == 0:
            self._publishing = self._thread.submit(self._publish, receipts)

    def finish(self) -> None:
        """Wait until the checkpoint in progress is saved; report a failure."""
        self.submit_receipts()
        self.collect_results(wait=True)

    def collect_results(self, *, wait: bool = False) -> None:
        """Report a save that failed in the background."""
        if self._publishing is None or not (wait or self._publishing.done()):
            return
        published, self._publishing = self._publishing, None
        try:
            published.result()
        except NotSaved as error:
            self.unsaved.append(error)
            self._tell(f"WARNING: {error}\n  training continues; the last good checkpoint is kept")
            count = len(self.unsaved)
            many = f"{count} checkpoints could not be saved; the last error: " if count > 1 else ""
            self._warn(f"{many}{error.what}   ({error.remedy})")

    def close(self) -> None:
        """Free threads and copies; waits for this rank's writing, but for no other rank."""
        self._thread.shutdown()
        self._staging = StagingBuffers()

    def _packed(self, step: Step, training: TrainingState, own: Mapping[str, Any]) -> State:
        """Return a snapshot of all data, with the tensors as they are."""
        state = pack(step.model, step.optimizer, averages=_averages(step), scaler=step.scaler)
        buffers = _buffers(step) if self.ranks.rank else {}  # rank 0's are among the shared tensors
        data = json.loads(json.dumps({**state.data, TRAINING: training.to_json()}))
        own_tensors = {**RngState.capture(step.device).tensors(), **buffers}
        return replace(state, data=data, own=own_tensors, own_data=json.loads(json.dumps(own))).parted

    def _goes_behind(self, state: State) -> bool:
        """Tell whether all ranks have room for copies of what they save."""
        if self._behind is False:
            return False
        has_room = self._behind is True or self._has_room(state)
        return all(reply["room"] for reply in self.ranks.exchange({"room": has_room}))

    def _has_room(self, state: State) -> bool:
        host = self._host.read() if self._host is not None else None
        if host is None or host.limit_bytes is None:
            return False  # unknown
        needed = staging_bytes({} if self.ranks.rank else state.tensors, state.own) - self._staging.held_bytes
        return host.used_bytes + max(0, needed) <= ROOM * host.limit_bytes

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
        return self._restore(loaded or self.checkpoints.open(reply["name"]), step)

    def _newest(self, *, of_all: bool) -> Checkpoint | None:
        """Return the newest intact checkpoint; an error is sent to the other ranks, too."""
        try:
            return self.checkpoints.newest(of_all=of_all)
        except PipelineError as error:
            self.ranks.exchange({"error": str(error)})
            raise

    def _restore(self, loaded: Checkpoint, step: Step) -> ResumedTraining:
        unpack(loaded, step.model, step.optimizer, averages=_averages(step), scaler=step.scaler)
        own = loaded.own(self.ranks.rank)
        if own is not None:
            RngState.from_tensors(own.own, step.device).restore()
            with torch.no_grad():
                for name, buffer in _buffers(step).items():
                    if name in own.own:
                        buffer.copy_(own.own[name])
        own = own or loaded.own(0)  # a rank that did not exist starts from rank 0's data
        if loaded.world != self.ranks.world:
            self._tell(f"{loaded.name} is of {loaded.world} ranks, now {self.ranks.world}: steps stay the same")
        return ResumedTraining(TrainingState.from_json(loaded.data[TRAINING]), own.own_data if own else {})


def _buffers(step: Step) -> dict[str, Tensor]:
    """Return the buffers, such as running means, which differ between ranks, under names of their own."""
    parameters = {plain_name(name) for name, _ in step.model.named_parameters(remove_duplicate=False)}
    return {f"buffer.{name}": tensor for name, tensor in model_state(step.model).items() if name not in parameters}


def _averages(step: Step) -> dict[str, Any] | None:
    return by_name(step.model, step.trained, step.averages) if step.averages else None
