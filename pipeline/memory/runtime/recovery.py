"""The size of micro-batches, and recovery from out-of-memory: smaller pieces, then remedies, then without the item.

A budget has the unit of costs: bytes if there is a plan, else items. The rules:

- Measured before step 1: items take their cost times a ratio, and the budget is lowered until that fits.
- Out of memory at cost c: pieces of half of it for the rest of the step; then BACKOFF times c, or the largest cost
  below c that has run since, if that is more.
- The allocator had to free its cache to serve a block: PRESSURE times the cost that ran. It stays above FLOOR times the
  largest cost that ever ran, since smaller micro-batches take more time.
- The allocator's memory was full of unused blocks: they are freed, and if that did not help, PRESSURE again.
- The budget never grows, and never falls below the largest item, which cannot be cut and climbs the ladder of remedies.

Each rank wants a budget, and all get the least, between two steps. A resumed run takes the budget from its checkpoint,
so it cuts the same.

`Governor.failed` learns from a piece that did not fit, `Governor.cuts` applies this to any items. A training step runs
again from its start on all ranks (`StepSnapshot`): the failed piece has left half of its gradients, has drawn random
numbers and has moved statistics. That gives, bit for bit, what the step would have given with these cuts from the
beginning. An evaluation leaves nothing behind: only the piece that failed runs again (`each_that_fits`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pipeline.device.accelerator import RngState, after_freeing_caches, free_caches, out_of_memory_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from pipeline.memory.runtime.meters import Memory

BACKOFF = 0.9  # plans err by a few percent: a tenth less is mostly enough, and a second OOM costs a replay
PRESSURE = 0.95  # of the cost that ran, after a retry of the allocator: it fitted, only just
FLOOR = 0.5  # of the largest cost that ran is left by pressure
CROWDED = 0.95  # of the limit was reserved,
IDLE = 0.1  # and this share of it was in unused blocks, even at the peak: then the cache is emptied
OFF = 0.02  # predictions within this count as right: repeated runs differ as much
UNPLANNED = 1 << 62  # no budget was set


@dataclass(frozen=True, slots=True)
class Learned:
    """What a run has learned about its memory; saved in its checkpoints."""

    budget: int
    ran: int = 0  # the largest cost that ran since the last out-of-memory that was no larger
    rungs: Mapping[str, int] = field(default_factory=dict)  # the least cost of an item that needed a rung of the ladder


@dataclass(frozen=True, slots=True)
class Want:
    """What a rank asks for at the end of a step."""

    budget: int
    empty_cache: bool = False  # of this rank's allocator, before the next step
    why: str = ""  # empty: nothing has changed


@dataclass(frozen=True, slots=True)
class Cut:
    """A piece of consecutive items that run together; `rung` counts the remedies of the ladder that it needs."""

    start: int
    stop: int
    rung: int = 0


@dataclass(eq=False)
class Governor:
    """Cuts micro-batches to a budget and learns from those that do not fit; the budget changes only between steps."""

    planned: int = UNPLANNED  # the budget to begin with
    base_bytes: int = 0  # of memory, in addition to the items' costs
    limit_bytes: int | None = None  # what torch may reserve
    largest: int = 1  # cost of an item
    margin: float = OFF
    backoff: float = BACKOFF
    padded: bool = False  # a micro-batch costs its items times the largest of them
    ladder: Sequence[str] = ()  # remedies for a single item, from first to last

    _failed: int | None = field(default=None, init=False)  # the least cost that did not fit in this step
    _step_cost: int = field(default=0, init=False)
    _retries: int | None = field(default=None, init=False)  # as the allocator counted at the last boundary
    _was_crowded: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.learned = Learned(max(self.planned, self.largest))

    @property
    def budget(self) -> int:
        return self.learned.budget

    def state(self) -> dict[str, Any]:
        """Return the learned values as JSON data."""
        return asdict(self.learned)

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; if the new plan's budget is lower, it stays."""
        learned = Learned(**state)
        self.learned = replace(learned, budget=self._allowed(learned.budget))

    def _allowed(self, budget: int) -> int:
        return max(self.largest, min(budget, self.budget))

    def measured(self, memory: Memory, predicted_bytes: int) -> tuple[int, float]:
        """Return the budget that is safe by the measured peak of the worst micro-batch, and its ratio to the predicted.

        The base is known, so an error is attributed to the items' costs.
        """
        assert memory.peak_allocated_bytes is not None
        live_bytes, held_bytes = memory.peak_allocated_bytes, memory.peak_reserved_bytes
        ratio = live_bytes / max(1, predicted_bytes)
        limits = [limit for limit in (self.limit_bytes, memory.limit_bytes) if limit is not None]
        if not limits:
            return self.budget, ratio
        ratio_of_items = max(OFF, (live_bytes - self.base_bytes) / max(1, predicted_bytes - self.base_bytes))
        room_bytes = min(limits) / (1 + self.margin) - self.base_bytes - (held_bytes - live_bytes)
        return self._allowed(int(room_bytes / ratio_of_items)), ratio

    def cost(self, costs: Sequence[int]) -> int:
        """Return the memory cost of items that run together: with padding, each costs as much as the largest."""
        return max(costs) * len(costs) if self.padded else sum(costs)

    def cuts(self, costs: Sequence[int]) -> list[Cut]:
        """Cut items with these costs into pieces that fit, by the budget and the failures in this step."""
        limit = self.budget
        if self._failed is not None:  # an item without a cost still ends alone
            limit, costs = min(limit, max(1, (self._failed + 1) // 2)), [max(1, cost) for cost in costs]
        parts = _even_slices(costs, limit, padded=self.padded)
        return [
            Cut(part.start, part.stop, self.rung(costs[part.start]) if part.stop - part.start == 1 else 0)
            for part in parts
        ]

    def rung(self, cost: int) -> int:
        """Return how many remedies an item needs, as any of at most this cost has needed."""
        needed = (name for name, least in self.learned.rungs.items() if cost >= least and name in self.ladder)
        return max((self.ladder.index(name) + 1 for name in needed), default=0)

    def failed(self, costs: Sequence[int], rung: int = 0) -> bool:
        """Learn from a piece that did not fit; return False if nothing is left to try for its only item."""
        cost, learned = self.cost(costs), self.learned
        if len(costs) > 1:
            if learned.ran >= cost:  # memory has changed since a larger one ran
                self.learned = replace(learned, ran=0)
            self._failed = cost if self._failed is None else min(self._failed, cost)
            return True
        if rung == len(self.ladder):
            return False
        name = self.ladder[rung]
        self.learned = replace(learned, rungs={**learned.rungs, name: min(cost, learned.rungs.get(name, cost))})
        return True

    def ran(self, cost: int) -> None:
        """Note that a micro-batch of this cost ran."""
        self._step_cost = max(self._step_cost, cost)
        self.learned = replace(self.learned, ran=max(self.learned.ran, cost))

    def after_step(self, memory: Memory | None = None) -> Want:
        """Return the budget this rank wants from the next step on; nothing changes before `adopt`."""
        ran, failed, retries = self.learned.ran, self._failed, self._retries
        self._retries = memory.retries if memory else None
        if failed is not None:  # an out-of-memory also counts as a retry of the allocator: handle it once
            budget = min(max(int(self.backoff * failed), ran if ran < failed else 0), failed - 1)
            why = f"out of memory at a cost of {failed:,}" if self._allowed(budget) < self.budget else ""
            return Want(self._allowed(budget), why=why)
        if memory is None or not self._step_cost:
            return Want(self.budget)
        was_crowded, self._was_crowded = self._was_crowded, is_crowded(memory, self.limit_bytes)
        if retries is not None and memory.retries > retries:  # the first count is the baseline
            why = f"{memory.retries - retries} retries of the allocator"
        elif was_crowded and self._was_crowded:
            why = "the allocator was fragmented twice in a row"
        else:
            why = "the allocator was fragmented" if self._was_crowded else ""
            return Want(self.budget, empty_cache=self._was_crowded, why=why)
        budget = max(int(FLOOR * ran), int(PRESSURE * min(self._step_cost, self.budget)))
        return Want(self._allowed(budget), empty_cache=True, why=why)

    def adopt(self, budget: int) -> bool:
        """Set the budget that all ranks agreed on, between steps; return whether it changed."""
        self._failed, self._step_cost, before = None, 0, self.budget
        self.learned = replace(self.learned, budget=self._allowed(budget))
        return self.budget != before


def is_crowded(memory: Memory, limit_bytes: int | None = None) -> bool:
    """Tell whether an allocator was close to its limit at the peak, with many unused blocks."""
    limits = [limit for limit in (memory.limit_bytes, limit_bytes) if limit]
    if memory.peak_allocated_bytes is None or not limits:
        return False
    limit, idle_bytes = min(limits), memory.peak_reserved_bytes - memory.peak_allocated_bytes
    return memory.peak_reserved_bytes >= CROWDED * limit and idle_bytes >= IDLE * limit


def _even_slices(costs: Sequence[int], budget: int, *, padded: bool) -> list[slice]:
    """Return consecutive slices within a budget: as few as possible, and then as even as possible."""
    slices = _packed(costs, budget, padded=padded)
    if len(slices) < 2 or max(costs) > budget:
        return slices
    low, high = max(costs), budget  # every capacity from here on makes as few; the least one makes them even
    while low < high:
        middle = (low + high) // 2
        if len(_packed(costs, middle, padded=padded)) > len(slices):
            low = middle + 1
        else:
            high = middle
    return _packed(costs, low, padded=padded)


def _packed(costs: Sequence[int], budget: int, *, padded: bool) -> list[slice]:
    """Fill slice after slice up to the budget; an item above it gets a slice of its own."""
    starts, largest, total = [0], 0, 0
    for place, cost in enumerate(costs):
        largest, total = max(largest, cost), total + cost
        if place > starts[-1] and ((place - starts[-1] + 1) * largest if padded else total) > budget:
            starts.append(place)
            largest = total = cost
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(costs)], strict=True) if stop > start]


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
        after_freeing_caches(partial(self._keep, scaler), device)

    def _keep(self, scaler: torch.amp.GradScaler | None) -> None:
        known = {(id(buffer.module), buffer.name): buffer for buffer in self._buffers}
        buffers = [
            _Buffer.of(module, name, tensor, known.get((id(module), name)))
            for module in self._model.modules()
            for name, tensor in module._buffers.items()  # noqa: SLF001 - named_buffers() leaves out those that are None
        ]
        self.rng = RngState.capture(self._device)
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
        self.rng.restore()
        for buffer in self._buffers:
            buffer.restore()
        if self._restore_scale is not None:
            self._restore_scale()


@dataclass(slots=True)
class _Buffer:
    """A buffer of a module: the tensor itself, in case it is replaced, and a copy of its content.

    Most never change. Until one has, its only copy is in the host's memory, made at the first step.
    """

    module: nn.Module
    name: str
    tensor: Tensor | None
    kept: Tensor | None = None
    version: int = 0
    changes: bool = False
    is_new: bool = False  # no step of it was observed yet

    @classmethod
    def of(cls, module: nn.Module, name: str, tensor: Tensor | None, before: _Buffer | None) -> _Buffer:
        """Save a buffer; one that has not changed keeps its earlier copy."""
        if tensor is None:
            return cls(module, name, None)
        if before is None:
            return cls(module, name, tensor, tensor.detach().to("cpu", copy=True), _version(tensor), is_new=True)
        if before.has_changed(tensor):
            return cls(module, name, tensor, tensor.detach().clone(), _version(tensor), changes=True)
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
