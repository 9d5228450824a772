"""The rule for memory that ends: smaller pieces, then the remedies for a single item, then without the item.

`Governor.failed` learns from a piece that did not fit, `Governor.cuts` applies what is known to any items. So each
caller runs pieces as they are cut, and after a failure cuts again:

- A training step runs again from its start on all ranks (`until_it_fits`): the failed piece has left half of its
  gradients in `.grad`, has drawn random numbers and has moved statistics. That gives, bit for bit, what the step would
  have given with these cuts from the beginning. `StepSnapshot` brings the start back.
- An evaluation leaves nothing behind: only the piece that failed runs again (`each_that_fits`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from pipeline.device.accelerator import RngState
from pipeline.device.out_of_memory import free_caches, out_of_memory_error
from pipeline.memory.runtime.governor import Cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

    from pipeline.memory.runtime.governor import Governor

Report = TypeVar("Report")


def until_it_fits(
    attempt: Callable[[], Report], *, fits: Callable[[Report], bool], rewind: Callable[[], None]
) -> Report:
    """Make a step of all ranks: where memory ended on any of them, all run it again from its start.

    `attempt` runs this rank's pieces up to the first that does not fit, and returns what all ranks report; so `fits`
    decides the same on all of them. `rewind` goes back to the start of the step.
    """
    while not fits(report := attempt()):
        rewind()
    return report


def each_that_fits(
    governor: Governor, costs: Sequence[int], run: Callable[[Cut], object], *, device: str
) -> Iterator[tuple[Cut, str]]:
    """Run items in pieces, each of which leaves nothing behind when it fails; yield each piece that is done.

    With a piece comes an empty string, or, for a single item that fits in no way, the error.
    """
    waiting = governor.cuts(costs)
    while waiting:
        cut = waiting.pop(0)
        error = out_of_memory_error(run, cut)
        if error is not None:
            forget_failed_backward()
            free_caches(device)
            own = costs[cut.start : cut.stop]
            if governor.failed(own, cut.rung):
                waiting[:0] = [
                    Cut(cut.start + part.start, cut.start + part.stop, part.rung) for part in governor.cuts(own)
                ]
                continue
        yield cut, error or ""


def forget_failed_backward() -> None:
    """Release the tensors that a failed backward keeps on the CPU; the threads of GPUs do so by themselves.

    On the CPU the caller's own thread works off the graph. After an error the nodes that were ready to run stay in its
    queue, with the tensors they saved, until the next backward (torch/csrc/autograd/engine.cpp: `local_ready_queue`).
    """
    torch.autograd.backward(torch.zeros((), requires_grad=True).clone())


class StepSnapshot:
    """The state that a forward pass may change besides gradients: random generators, buffers, the scaler.

    Plain attributes of a module are not restored.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: str,
        scaler: torch.amp.GradScaler | None = None,
        before: StepSnapshot | None = None,
    ) -> None:
        """Save the present state; `before`, taken a step ago, knows which buffers never change and need no new copy."""
        self._model, self._device = model, device
        self._buffers: list[_Buffer] = [] if before is None else before._buffers  # noqa: SLF001
        if out_of_memory_error(self._keep, scaler) is not None:
            free_caches(device)  # once more, without what is held for reuse
            self._keep(scaler)

    def _keep(self, scaler: torch.amp.GradScaler | None) -> None:
        known = {(id(buffer.module), buffer.name): buffer for buffer in self._buffers}
        buffers = [
            _Buffer.of(module, name, tensor, known.get((id(module), name)))
            for module in self._model.modules()
            for name, tensor in module._buffers.items()  # noqa: SLF001 - named_buffers() leaves out those that are None
        ]
        self._numbers = RngState.capture(self._device)
        self._restore_scale = _scale_now(scaler) if scaler is not None and scaler.is_enabled() else None
        self._buffers = buffers

    def rewind(self) -> None:
        """Go back to the start of the step: drop gradients and the failed pass, and restore everything else."""
        self._model.zero_grad(set_to_none=True)
        forget_failed_backward()
        free_caches(self._device)
        self.restore()

    def restore(self) -> None:
        """Restore the saved state; may be called any number of times."""
        self._numbers.restore()
        for buffer in self._buffers:
            buffer.restore()
        if self._restore_scale is not None:
            self._restore_scale()

    @property
    def copied_bytes(self) -> int:
        """Return the bytes of copies on the model's device: those of buffers that change."""
        return sum(buffer.kept.nbytes for buffer in self._buffers if buffer.changes and buffer.kept is not None)


@dataclass(slots=True)
class _Buffer:
    """A buffer of a module: the tensor itself, in case it is replaced, and a copy of its content.

    Most never change. Until one has, its only copy is in the host's memory, made at the first step.
    """

    module: nn.Module
    name: str
    tensor: Tensor | None
    kept: Tensor | None
    version: int
    changes: bool
    is_new: bool  # no step of it was observed yet

    @classmethod
    def of(cls, module: nn.Module, name: str, tensor: Tensor | None, before: _Buffer | None) -> _Buffer:
        """Save a buffer; one that has not changed keeps its earlier copy."""
        if tensor is None:
            return cls(module, name, None, None, 0, changes=False, is_new=False)
        version = _version(tensor)
        if before is None:
            return cls(module, name, tensor, tensor.detach().to("cpu", copy=True), version, changes=False, is_new=True)
        if before.has_changed(tensor):
            return cls(module, name, tensor, tensor.detach().clone(), version, changes=True, is_new=False)
        before.is_new = False
        return before

    def has_changed(self, now: Tensor) -> bool:
        """Tell whether the buffer was replaced or written to since it was saved, or in any earlier step."""
        if self.changes or self.tensor is not now or self.version != _version(now) or now.is_inference():
            return True
        # What is written through `.data` raises no version, so the first step is judged by content.
        return self.is_new and (self.kept is None or not _same_bits(self.kept, now))

    def restore(self) -> None:
        setattr(self.module, self.name, self.tensor)
        if self.tensor is None or self.kept is None:
            return
        moved = self.version != _version(self.tensor)
        if moved or self.changes or (self.is_new and not _same_bits(self.kept, self.tensor)):
            with torch.no_grad():
                self.tensor.copy_(self.kept)
            self.version, self.changes = _version(self.tensor), self.changes or moved


def _version(tensor: Tensor) -> int:
    """Return autograd's count of in-place writes to a tensor."""
    return -1 if tensor.is_inference() else int(tensor._version)  # noqa: SLF001 - autograd's own, and the only one


def _same_bits(kept: Tensor, now: Tensor) -> bool:
    """Tell whether two tensors, on any devices, have the same content; NaN equals NaN."""
    return torch.equal(torch.nan_to_num(kept), torch.nan_to_num(now.detach().cpu()))


def _scale_now(scaler: torch.amp.GradScaler) -> Callable[[], None]:
    """Return a function that restores the scaler; `state_dict()` would synchronise with the card."""
    kept = {name: _copy(getattr(scaler, name)) for name in ("_scale", "_growth_tracker")}

    def restore() -> None:
        for name, tensor in kept.items():
            setattr(scaler, name, _copy(tensor))
        scaler._per_optimizer_states.clear()  # noqa: SLF001 - else a second unscale_() of this step is refused

    return restore


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
