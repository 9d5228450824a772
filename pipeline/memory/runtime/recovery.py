"""What is done when memory ends within a step: back to its start, and through it again with smaller parts.

Nothing here knows what a part is. Whoever makes the step says how one is run, how one is halved, and what goes back.

A part that failed has left half of its gradients in `.grad`, has drawn random numbers and has moved statistics. So the
whole step is run again, from its start. That gives, bit for bit, what it would have given had it been cut like this
from the beginning.
"""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch

from pipeline.memory.runtime.out_of_memory import free_caches, is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor, nn

Part = TypeVar("Part")
Path: TypeAlias = tuple[int, ...]  # (3,): the fourth part; (3, 1): the second of what stands in its place; and so on

_TEXT = 500  # characters of an error that are kept


@dataclass(frozen=True, slots=True)
class Oom:
    """A part for which memory did not suffice."""

    path: Path
    attempt: int  # how often the step had begun again before
    error: str  # its first line
    is_single: bool  # it could not be halved


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """How a step came to its end."""

    ooms: tuple[Oom, ...]
    ran: tuple[Path, ...]  # the parts of which it consists, in order


@dataclass(frozen=True, slots=True)
class _Failure(Generic[Part]):
    path: Path
    part: Part
    error: str


class _Cuts(Generic[Part]):
    """What stands in whose place; the parts themselves are asked for anew each time, and not kept."""

    def __init__(self, halve: Callable[[Part], Sequence[Part]], cost: Callable[[Part], float] | None) -> None:
        self._halve, self._cost = halve, cost
        self._replaced: dict[Path, Callable[[Part], Sequence[Part]]] = {}
        self._failed: list[tuple[Path, float]] = []

    def replace(self, path: Path, part: Part, by: Callable[[Part], Sequence[Part]]) -> None:
        """Put what a call returns in the place of a part that failed."""
        self._replaced[path] = by
        if self._cost is not None:
            self._failed.append((path, self._cost(part)))

    def of(self, parts: Iterable[Part]) -> Iterator[tuple[Path, Part]]:
        """Yield what is to be run."""
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
        """Return the halves of a part that comes after one that failed, and costs no less."""
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
    """Run parts in order; whenever memory ends, begin again with the failed one halved. Other errors pass through.

    `parts` is gone through from its start each time: a list, or what reads again. A part holds nothing of the device.
    `again` brings everything back to the step's start (`rewind`). `halve` returns fewer than two parts for one that
    cannot be halved; then `cannot` raises, or returns what makes of the part that which stands in its place from now
    on: the same on the next rung, or nothing. `note` hears of it before `again`. With `cost`, parts that come later and
    cost no less are halved too, and need not fail first.
    """
    cuts = _Cuts(halve, cost)
    ooms: list[Oom] = []
    while True:
        ran: list[Path] = []
        failure = _first_failure(cuts.of(parts), run, ran)
        if failure is None:
            return ReplayedStep(tuple(ooms), tuple(ran))
        is_single = len(halve(failure.part)) < 2
        oom = Oom(failure.path, len(ooms), failure.error, is_single)
        ooms.append(oom)
        note(failure.part, oom)
        cuts.replace(failure.path, failure.part, cannot(failure.part, oom) if is_single else halve)
        del failure  # a part may hold a slot that its like is read into again
        again()


def _first_failure(
    leaves: Iterator[tuple[Path, Part]], run: Callable[[Part], None], ran: list[Path]
) -> _Failure[Part] | None:
    """Run parts until memory ends, note those that ran."""
    with closing(leaves):  # type: ignore[type-var]  # a generator
        for path, part in leaves:
            error = out_of_memory_error(run, part)
            if error is not None:
                return _Failure(path, part, error)
            ran.append(path)
    return None


def out_of_memory_error(run: Callable[[Part], object], part: Part) -> str | None:
    """Run a part; return what was said when memory did not suffice, else None.

    The error is gone when this returns: its traceback holds the tensors of the call, and the next one needs their room.
    """
    try:
        run(part)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return (str(error).strip().partition("\n")[0] or type(error).__name__)[:_TEXT]
    return None


def rewind(snapshot: StepSnapshot, parameters: Iterable[Tensor], device: str) -> None:
    """Go back to the start of a step: no gradients, nothing left of the failed pass, everything else as it was."""
    for parameter in parameters:
        parameter.grad = None
    forget_failed_backward()
    free_caches(device)
    snapshot.restore()


def forget_failed_backward() -> None:
    """Release what a backward that raised has left behind on the CPU; a GPU's thread does so by itself.

    On the CPU the caller's own thread works off the graph. After an error what was ready to run stays in its queue, and
    keeps what it saved, until the next backward (torch/csrc/autograd/engine.cpp: `local_ready_queue`).
    """
    torch.autograd.backward(torch.zeros((), requires_grad=True).clone())


class StepSnapshot:
    """Everything that a forward pass may change besides gradients: random numbers, buffers, the scaler.

    What a module keeps elsewhere, in a plain attribute, is not seen.
    """

    def __init__(self, buffers: list[_Buffer], numbers: _Numbers, scaler: _Scaler | None) -> None:
        self._buffers, self._numbers, self._scaler = buffers, numbers, scaler

    @classmethod
    def take(
        cls,
        model: nn.Module,
        *,
        device: str,
        scaler: torch.amp.GradScaler | None = None,
        before: StepSnapshot | None = None,
    ) -> StepSnapshot:
        """Keep what there is now; `before`, taken a step ago, knows which buffers never change and need no new copy."""
        known = {} if before is None else {(id(one.module), one.name): one for one in before._buffers}  # noqa: SLF001
        buffers = [
            _Buffer.of(module, name, tensor, known.get((id(module), name)))
            for module in model.modules()
            for name, tensor in module._buffers.items()  # noqa: SLF001 - named_buffers() leaves out those that are None
        ]
        used = None if scaler is None or not scaler.is_enabled() else _Scaler(scaler)
        return cls(buffers, _Numbers.now(device), used)

    def restore(self) -> None:
        """Make everything as it was; may be called any number of times."""
        self._numbers.restore()
        for buffer in self._buffers:
            buffer.restore()
        if self._scaler is not None:
            self._scaler.restore()

    @property
    def copied_bytes(self) -> int:
        """Return how much memory of the model's own device the copies take: those of buffers that change."""
        return sum(one.kept.nbytes for one in self._buffers if one.changes and one.kept is not None)


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
        """Keep a buffer; of one that stands still, what was kept before."""
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
        """Say whether the buffer is another one, or has other content, than when it was kept, or ever had."""
        if self.changes or self.tensor is not now or self.version != _version(now) or now.is_inference():
            return True
        # What is written through `.data` raises no version, so the first step is judged by content.
        return self.is_new and (self.kept is None or not _same_bits(self.kept, now))

    def restore(self) -> None:
        """Put the tensor back, with its content."""
        setattr(self.module, self.name, self.tensor)
        if self.tensor is None or self.kept is None:
            return
        moved = self.version != _version(self.tensor)
        if moved or self.changes or (self.is_new and not _same_bits(self.kept, self.tensor)):
            with torch.no_grad():
                self.tensor.copy_(self.kept)
            self.version, self.changes = _version(self.tensor), self.changes or moved


def _version(tensor: Tensor) -> int:
    """Return what grows whenever a tensor is written to."""
    return -1 if tensor.is_inference() else int(tensor._version)  # noqa: SLF001 - autograd's own, and the only one


def _same_bits(kept: Tensor, now: Tensor) -> bool:
    """Say whether two tensors have the same content, wherever they are; what is not a number equals itself."""
    return torch.equal(torch.nan_to_num(kept), torch.nan_to_num(now.detach().cpu()))


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Where each source of random numbers stands."""

    python: Any
    numpy: Any
    host: Tensor
    card: tuple[torch.device, Tensor] | None

    @classmethod
    def now(cls, device: str) -> _Numbers:
        """Ask all of them; none waits for the card."""
        on = torch.device(device)
        card = (on, torch.cuda.get_rng_state(on)) if on.type == "cuda" else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), card)  # noqa: NPY002 - users draw from it

    def restore(self) -> None:
        """Let each draw the same again."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.host)
        if self.card is not None:
            where, state = self.card
            torch.cuda.set_rng_state(state, where)


class _Scaler:
    """The scale of half precision losses. `state_dict()` would say it too, but wait for the card."""

    _TENSORS = ("_scale", "_growth_tracker")

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._kept = {name: _copy(getattr(scaler, name)) for name in self._TENSORS}

    def restore(self) -> None:
        """Set the scale back, and forget what was unscaled."""
        for name, kept in self._kept.items():
            setattr(self._scaler, name, _copy(kept))
        self._scaler._per_optimizer_states.clear()  # noqa: SLF001 - else a second unscale_() of this step is refused


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
