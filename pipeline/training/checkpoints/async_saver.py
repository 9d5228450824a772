"""Saves behind the training's back: tensors are copied into the host's memory, one thread writes them from there.

    saver.begin(state, step)             every rank; returns as soon as the copies are made
    saver.receipt()                      at later steps: nothing while it is being written, then what to tell rank 0
    saver.publish(receipts)              rank 0, once it has all of them
    saver.outcomes()                     rank 0: what has become of it

Without copies (`asynchronous=False`) each call does its work before it returns, and writes the same bytes.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from pipeline.training.checkpoints.checkpoint_folder import NotSaved, State
from pipeline.training.checkpoints.checkpoint_reader import plain_json
from pipeline.training.checkpoints.tensor_file import distinct, nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from pipeline.training.checkpoints.checkpoint_folder import CheckpointFolder, Receipt


def staging_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return what copies of tensors take, to plan for: each once, whatever its names."""
    return sum(map(nbytes, distinct(tensors)[0].values()))


class StagingBuffers:
    """Copies of tensors in the host's memory, made into buffers that are used again."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @property
    def held_bytes(self) -> int:
        return sum(map(nbytes, self._buffers.values()))

    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies, valid until the next call; tied tensors stay tied."""
        kept, same = distinct(tensors)
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in kept.items()}
        for name, tensor in kept.items():
            self._buffers[name].copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensor in kept.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return {name: self._buffers[same.get(name, name)] for name in tensors}

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        there = self._buffers.get(name)
        if there is not None and (there.shape, there.dtype) == (tensor.shape, tensor.dtype):
            return there
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class Saver:
    """Saves the checkpoints of one rank, one at a time."""

    def __init__(self, checkpoints: CheckpointFolder, *, rank: int = 0, asynchronous: bool = True) -> None:
        self.checkpoints, self.rank, self.asynchronous = checkpoints, rank, asynchronous
        self._thread = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._shared, self._own = StagingBuffers(), StagingBuffers()
        self._receipt: Future[Receipt] | None = None
        self._publishing: Future[Path | NotSaved] | None = None
        self._outcomes: list[Path | NotSaved] = []
        self._data: Mapping[str, Any] = {}
        self._publish_with: dict[str, Any] = {}

    @property
    def staged_bytes(self) -> int:
        return self._shared.held_bytes + self._own.held_bytes

    def begin(self, state: State, step: int, *, figure: float | None = None, lower_is_better: bool = True) -> None:
        """Copy a state and begin to write this rank's share; waits for the one before, if it is not done."""
        self.wait()
        if self.rank != 0:
            state = State(own=state.own, own_data=state.own_data)
        staged = self._staged(state) if self.asynchronous else state
        self._data = plain_json(state.data, "data")
        self._publish_with = {"step": step, "figure": figure, "lower_is_better": lower_is_better}
        self._receipt = self._started(lambda: self.checkpoints.write(staged, step, rank=self.rank))

    def receipt(self, *, wait: bool = False) -> Receipt | None:
        """Return what this rank has written, or why not; nothing while it is being written, or if nothing is."""
        if self._receipt is None or not (wait or self._receipt.done()):
            return None
        return self._receipt.result()

    def publish(self, receipts: Sequence[Receipt]) -> None:
        """Begin to make a checkpoint of what all ranks have written; rank 0 alone."""
        data, rest = self._data, self._publish_with
        self._receipt = None
        self._publishing = self._started(lambda: self._published(receipts, data, rest))

    def save(self, state: State, step: int, *, figure: float | None = None, lower_is_better: bool = True) -> None:
        """Begin to write and publish a checkpoint of one rank alone."""
        self.begin(state, step, figure=figure, lower_is_better=lower_is_better)
        written, data, rest = self._receipt, self._data, self._publish_with
        assert written is not None
        self._publishing = self._started(lambda: self._published([written.result()], data, rest))
        self._receipt = None

    def outcomes(self, *, wait: bool = False) -> list[Path | NotSaved]:
        """Return what has become of checkpoints since the last call: where each is, or why it was not saved."""
        if self._publishing is not None and (wait or self._publishing.done()):
            done, self._publishing = self._publishing, None
            self._outcomes.append(done.result())
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self) -> None:
        """Wait until nothing is in flight; what went wrong with the disk is told by `receipt` and `outcomes`."""
        if self._receipt is not None:
            try:
                self._receipt.result()
            except BaseException:
                self._receipt = None  # told once
                raise
        self._outcomes = self.outcomes(wait=True)

    def close(self) -> None:
        """Wait, and let the thread and the copies go."""
        self.wait()
        if self._thread is not None:
            self._thread.shutdown()
        self._shared, self._own = StagingBuffers(), StagingBuffers()

    def _staged(self, state: State) -> State:
        own_data = plain_json(state.own_data, "own_data")
        return State(self._shared.copied(state.tensors), {}, self._own.copied(state.own), own_data)

    def _started(self, work: Callable[[], Any]) -> Future[Any]:
        if self._thread is not None:
            return self._thread.submit(work)
        done: Future[Any] = Future()
        done.set_result(work())
        return done

    def _published(self, receipts: Sequence[Receipt], data: Mapping[str, Any], rest: Mapping[str, Any]) -> Any:
        try:
            return self.checkpoints.publish(receipts, data, **rest)
        except NotSaved as error:
            return error
