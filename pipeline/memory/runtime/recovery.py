"""The rule for memory that ends: smaller pieces, then the remedies for a single item, then without the item.

`Governor.failed` learns from a piece that did not fit, `Governor.cuts` applies what is known to any items. So each
caller runs pieces as they are cut, and after a failure cuts again:

- A training step runs again from its start on all ranks (`until_it_fits`): the failed piece has left half of its
  gradients in `.grad`, has drawn random numbers and has moved statistics. That gives, bit for bit, what the step would
  have given with these cuts from the beginning. `StepSnapshot` brings the start back.
- An evaluation leaves nothing behind: only the piece that failed runs again (`each_that_fits`).
"""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch

from pipeline.device.accelerator import computing
from pipeline.device.out_of_memory import free_caches, out_of_memory_error
from pipeline.memory.runtime.governor import Cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor, nn

    from pipeline.memory.runtime.governor import Governor

Report = TypeVar("Report")
Part = TypeVar("Part")
Path: TypeAlias = tuple[int, ...]  # (3,): the fourth part; (3, 1): the second of what stands in its place; and so on


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


@dataclass(frozen=True, slots=True)
class Oom:
    """A part that ran out of memory."""

    path: Path
    attempt: int  # how often the step had begun again before
    error: str  # its first line
    is_single: bool  # it could not be halved


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """The out-of-memory errors of a step, and the parts that ran in the end."""

    ooms: tuple[Oom, ...]
    ran: tuple[Path, ...]  # the parts of which it consists, in order


class _Cuts(Generic[Part]):
    """Which parts are replaced by smaller ones; parts are iterated anew each time, and not kept."""

    def __init__(self, halve: Callable[[Part], Sequence[Part]], cost: Callable[[Part], float] | None) -> None:
        self._halve, self._cost = halve, cost
        self._replaced: dict[Path, Callable[[Part], Sequence[Part]]] = {}
        self._failed: list[tuple[Path, float]] = []

    def replace(self, path: Path, part: Part, by: Callable[[Part], Sequence[Part]]) -> None:
        """Replace a part that failed by the parts that `by` returns."""
        self._replaced[path] = by
        if self._cost is not None:
            self._failed.append((path, self._cost(part)))

    def of(self, parts: Iterable[Part]) -> Iterator[tuple[Path, Part]]:
        for place, part in enumerate(parts):
            yield from self._leaves((place,), part)

    def _leaves(self, path: Path, part: Part) -> Iterator[tuple[Path, Part]]:
        by = self._replaced.get(path)
        pieces = by(part) if by is not None else self._foreseen(path, part)
        if pieces is None:
            yield path, part
            return
        for place, piece in enumerate(pieces):
            yield from self._leaves((*path, place), piece)

    def _foreseen(self, path: Path, part: Part) -> Sequence[Part] | None:
        """Return the halves of a part that costs no less than one that failed before it; None for other parts."""
        if self._cost is None or not self._failed:
            return None
        cost = self._cost(part)
        if not any(path > failed and cost >= too_much for failed, too_much in self._failed):
            return None
        halves = self._halve(part)
        return halves if len(halves) > 1 else None


def replay_until_it_fits(
    parts: Iterable[Part],
    run: Callable[[Part], None],
    *,
    again: Callable[[], None],
    halve: Callable[[Part], Sequence[Part]],
    cannot: Callable[[Part, Oom], Callable[[Part], Sequence[Part]]],
    note: Callable[[Part, Oom], None] = lambda part, oom: None,  # noqa: ARG005
    cost: Callable[[Part], float] | None = None,
) -> ReplayedStep:
    """Run parts in order; whenever memory runs out, begin again with the failed part halved. Other errors are raised.

    `parts` is iterated anew each time; a part holds no device memory. `again` rewinds to the step's start
    (`StepSnapshot.rewind`). `halve` returns fewer than two parts for one that cannot be halved; then `cannot` raises,
    or returns a function from the part to its replacement: the same on the next rung, or nothing. `note` is called
    before `again`. With `cost`, later parts that cost no less are halved before they fail.
    """
    cuts = _Cuts(halve, cost)
    ooms: list[Oom] = []
    while True:
        ran: list[Path] = []
        with closing(cuts.of(parts)) as leaves:  # type: ignore[type-var]  # a generator
            for path, part in leaves:
                error = out_of_memory_error(run, part)
                if error is not None:
                    break
                ran.append(path)
            else:
                return ReplayedStep(tuple(ooms), tuple(ran))
        is_single = len(halve(part)) < 2
        oom = Oom(path, len(ooms), error, is_single)
        ooms.append(oom)
        note(part, oom)
        cuts.replace(path, part, cannot(part, oom) if is_single else halve)
        del part  # it may hold a slot that its like is read into again
        again()


def forget_failed_backward() -> None:
    """Release what a backward that raised keeps on the CPU; the threads of GPUs do so by themselves.

    On the CPU the caller's own thread works off the graph. After an error what was ready to run stays in its queue, and
    keeps what it saved, until the next backward (torch/csrc/autograd/engine.cpp: `local_ready_queue`).
    """
    torch.autograd.backward(torch.zeros((), requires_grad=True).clone())


class StepSnapshot:
    """Everything that a forward pass may change besides gradients: random states, buffers, the scaler.

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
        self._restore_numbers = _numbers_now(self._device)
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
        self._restore_numbers()
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
    """A buffer of a module: the tensor itself, in case another takes its place, and a copy of its content.

    Most never change. Until one has, its only copy is in the host's memory, made at the first step.
    """

    module: nn.Module
    name: str
    tensor: Tensor | None
    kept: Tensor | None
    version: int
    changes: bool
    is_new: bool  # nobody has seen a step of it

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


def _numbers_now(device: str) -> Callable[[], None]:
    """Return a function that restores the present state of all random generators, without synchronising."""
    own = computing(device)
    card = own.rng_state()
    python, numpy, host = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - users draw from it

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(host)
        if card is not None:
            own.set_rng_state(card)

    return restore


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


class WeightedMean:
    """A mean loss over several parts whose total weight is known only after the last of them.

    The sum of each part is divided by a guess, the weight of the first part; `settle` then corrects the gradients,
    which are those of the whole whatever the sizes of its parts.
    """

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.weight: Tensor | float = 0.0
        self._guess: Tensor | float | None = None

    @property
    def is_empty(self) -> bool:
        return self._guess is None

    def loss(self, total: Tensor, weight: Tensor | float) -> Tensor:
        """Return the loss to run backward for a part."""
        if self._guess is None:
            self._guess = guessed_weight(weight)
        return total / self._guess

    def add(self, total: Tensor, weight: Tensor | float) -> None:
        """Add a part whose backward has run."""
        self.total = self.total + total.detach()
        self.weight = self.weight + (weight.detach() if isinstance(weight, torch.Tensor) else weight)

    def settle(self, parameters: Iterable[Tensor], whole: float | None = None) -> Tensor:
        """Scale the gradients to those of the mean, or to their part in one of a larger weight; return the mean."""
        if self._guess is not None:
            scale_gradients(parameters, quotient(self._guess, self.weight if whole is None else whole))
        return torch.as_tensor(quotient(self.total, self.weight))


def guessed_weight(weight: Tensor | float) -> Tensor | float:
    """Return the divisor to use until the weight of the whole step is known: the weight of its first part."""
    return weight.detach().clamp(min=1.0) if isinstance(weight, torch.Tensor) else max(weight, 1.0)


def quotient(total: Any, weight: Tensor | float) -> Any:
    """Return total / weight, and 0 where the weight is 0."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight == 0, torch.zeros_like(weight), total / weight.where(weight != 0, 1))
    return total / weight if weight else total * 0.0


def scale_gradients(parameters: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply all gradients by a factor, in place."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and not (isinstance(factor, float) and factor == 1.0):
        torch._foreach_mul_(gradients, factor)
