"""How large micro-batches may be: as planned, as measured before step 1, and as training shows from then on.

A budget has the unit of costs: bytes if there is a plan, else items. The rules:

- Measured before step 1: items take their cost times a ratio, and the budget is lowered until that fits.
- Out of memory at cost c: BACKOFF times c, or the largest cost below c that has run since, if that is more.
- The allocator had to free its cache to serve a block: PRESSURE times the cost that ran. It stays above FLOOR times the
  largest cost that ever ran, since smaller micro-batches take more time.
- The allocator's memory was full of unused blocks: they are freed, and if that did not help, PRESSURE again.
- The budget never grows; a larger one that would have fitted is recorded for the next plan. It never falls below the
  largest item, which cannot be cut and climbs the ladder of remedies instead.

Each rank wants a budget, and all get the least, between two steps. A resumed run takes the budget from its checkpoint,
so it cuts the same.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.memory.runtime.meters import Memory

BACKOFF = 0.9  # plans err by a few percent: one step of a tenth mostly does, and a second OOM costs a replay
PRESSURE = 0.95  # of what ran is tried after a retry of the allocator: it did fit, only just
FLOOR = 0.5  # of the largest cost that ran is left by pressure
CROWDED = 0.95  # of the limit was reserved,
IDLE = 0.1  # and so much of it in unused blocks, even at the peak: then the cache is emptied
OFF = 0.02  # a prediction is right within this: a run that is repeated is no closer to itself
UNPLANNED = 1 << 62  # no budget was set


@dataclass(frozen=True, slots=True)
class Learned:
    """What a run has learned about its memory; saved in its checkpoints."""

    budget: int
    ran: int = 0  # the largest cost that ran since the last out-of-memory that was no larger
    ratio: float | None = None  # measured/predicted, of the worst bucket before step 1
    could_be: int | None = None  # the budget that this measurement would allow
    ooms: int = 0
    retries: int = 0  # steps after which pressure lowered the budget, or wanted to
    rungs: tuple[tuple[str, int], ...] = ()  # a rung of the ladder, and the least cost of an item that needed it

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Learned:
        if "budget" not in data or not set(data) <= {field.name for field in fields(cls)}:
            problem = f"a learned budget with {', '.join(sorted(data)) or 'nothing'} cannot be read"
            raise ConfigError(problem, remedy="use the version of pipeline that wrote this checkpoint")
        return cls(**{**data, "rungs": tuple((str(name), int(cost)) for name, cost in data.get("rungs", ()))})


@dataclass(frozen=True, slots=True)
class PredictionCheck:
    """The measured memory of the worst bucket, compared with its prediction."""

    predicted_bytes: int
    measured_bytes: int
    ratio: float  # of the two
    limit_bytes: int | None  # the plan's, or what there is now if that is less
    could_be: int | None  # the budget that fits by this measurement; None: there is no limit
    budget: int  # what is wanted from now on: lower than before, or as it was
    is_off: bool  # by more than the margin
    fits: bool  # the largest item does, alone


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


class Governor:
    """Cuts micro-batches to a budget and learns from those that do not fit; the budget changes only between steps."""

    def __init__(
        self,
        *,
        budget: int = UNPLANNED,
        base_bytes: int = 0,
        limit_bytes: int | None = None,
        largest: int = 1,
        margin: float = OFF,
        backoff: float = BACKOFF,
        padded: bool = False,
        ladder: Sequence[str] = (),
    ) -> None:
        """Start with the plan.

        `base_bytes` is the memory besides the items' costs, `limit_bytes` what torch may reserve, `largest` the cost
        of the largest item, `padded` whether a micro-batch costs its items times the largest of them, `ladder` the
        rungs from first to last.
        """
        self.base_bytes, self.limit_bytes = base_bytes, limit_bytes
        self.largest, self.margin, self.backoff, self.padded = largest, margin, backoff, padded
        self.ladder = tuple(ladder)
        self.learned = Learned(max(budget, largest))
        self._wanted: int | None = None  # within a step
        self._step_cost = 0
        self._retries: int | None = None  # as the allocator counted at the last boundary
        self._was_crowded = False

    @property
    def budget(self) -> int:
        return self.learned.budget

    def state(self) -> dict[str, Any]:
        """Return what is learned, as JSON data."""
        return {**asdict(self.learned), "rungs": [list(rung) for rung in self.learned.rungs]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; if the new plan's budget is lower, it stays."""
        learned = Learned.from_json(state)
        self.learned = replace(learned, budget=max(min(learned.budget, self.budget), self.largest))

    def verified(self, measured: Memory, predicted_bytes: int, *, before_bytes: int = 0) -> PredictionCheck:
        """Compare the worst bucket's peak with its prediction, before step 1, and remember both.

        Where tensors are counted, the prediction is of live tensors, else of resident memory. `before_bytes` was there
        before the model, and no plan counts it. The base is known, so an error is attributed to the items' costs.
        """
        held_bytes, live_bytes = measured.peak_reserved_bytes - before_bytes, measured.peak_allocated_bytes
        live_bytes = held_bytes if live_bytes is None else live_bytes - before_bytes
        limits = [] if self.limit_bytes is None else [self.limit_bytes]
        if measured.limit_bytes is not None:
            limits.append(measured.limit_bytes - before_bytes)
        ratio = live_bytes / max(1, predicted_bytes)
        could_be = None
        if limits:
            ratio_of_items = max(OFF, (live_bytes - self.base_bytes) / max(1, predicted_bytes - self.base_bytes))
            room_bytes = min(limits) / (1 + self.margin) - self.base_bytes - (held_bytes - live_bytes)
            could_be = max(0, int(room_bytes / ratio_of_items))
        self.learned = replace(self.learned, ratio=ratio, could_be=could_be)
        return PredictionCheck(
            predicted_bytes=predicted_bytes,
            measured_bytes=live_bytes,
            ratio=ratio,
            limit_bytes=min(limits, default=None),
            could_be=could_be,
            budget=self.budget if could_be is None else max(self.largest, min(self.budget, could_be)),
            is_off=abs(ratio - 1.0) > self.margin,
            fits=could_be is None or could_be >= self.largest,
        )

    def cost(self, costs: Sequence[int]) -> int:
        """Return the memory cost of items that run together: with padding, each costs as much as the largest."""
        return max(costs) * len(costs) if self.padded else sum(costs)

    def cuts(self, costs: Sequence[int]) -> list[Cut]:
        """Cut items with these costs into pieces that fit, by the budget and by what has failed in this step."""
        parts = _even_slices(costs, self.budget, padded=self.padded)
        if self._wanted is not None:
            parts = [smaller for part in parts for smaller in self._below_failed(part, costs[part])]
        return [
            Cut(part.start, part.stop, self._first_rung(costs[part.start]) if part.stop - part.start == 1 else 0)
            for part in parts
        ]

    def _below_failed(self, part: slice, costs: Sequence[int]) -> list[slice]:
        """Cut a piece that costs as much as one that failed into pieces of half that cost."""
        assert self._wanted is not None
        if len(costs) < 2 or self.cost(costs) < self._wanted:
            return [part]
        smaller = _even_slices([max(1, cost) for cost in costs], max(1, (self._wanted + 1) // 2), padded=self.padded)
        return [slice(part.start + piece.start, part.start + piece.stop) for piece in smaller]

    def failed(self, costs: Sequence[int], rung: int = 0) -> bool:
        """Learn from a piece that did not fit; return False if nothing is left to try for its only item."""
        if len(costs) > 1:
            self.out_of_memory(self.cost(costs))
        elif rung < len(self.ladder):
            self.climbed(self.cost(costs), self.ladder[rung])
        else:
            return False
        return True

    def ran(self, cost: int) -> None:
        """Note that a micro-batch of this cost ran."""
        self._step_cost = max(self._step_cost, cost)
        if cost > self.learned.ran:
            self.learned = replace(self.learned, ran=cost)

    def out_of_memory(self, cost: int) -> None:
        """Note that a micro-batch of this cost did not fit."""
        ran = self.learned.ran if self.learned.ran < cost else 0  # memory has changed since a larger one ran
        self.learned = replace(self.learned, ooms=self.learned.ooms + 1, ran=ran)
        self._wanted = cost if self._wanted is None else min(self._wanted, cost)

    def climbed(self, cost: int, rung: str) -> None:
        """Note that an item of this cost, alone, needed a rung of the ladder."""
        known = dict(self.learned.rungs)
        known[rung] = min(cost, known.get(rung, cost))
        self.learned = replace(self.learned, rungs=tuple(sorted(known.items(), key=lambda rung: self._height(rung[0]))))

    def rung(self, cost: int) -> str | None:
        """Return the highest rung that an item of at most this cost has needed; None if none did."""
        needed = [name for name, least in self.learned.rungs if cost >= least]
        return max(needed, key=self._height, default=None)

    def _first_rung(self, cost: int) -> int:
        rung = self.rung(cost)
        return self.ladder.index(rung) + 1 if rung in self.ladder else 0

    def _height(self, rung: str) -> int:
        return self.ladder.index(rung) if rung in self.ladder else len(self.ladder)

    def after_step(self, memory: Memory | None = None) -> Want:
        """Return the budget this rank wants from the next step on; nothing changes before `adopt`."""
        failed, cost = self._wanted, self._step_cost
        grown = 0
        if memory is not None:
            before, self._retries = self._retries, memory.retries
            grown = 0 if before is None else memory.retries - before  # the first count is only to compare with
        if failed is not None:  # an out-of-memory is a retry of the allocator, too: one reason is enough
            ran = self.learned.ran if self.learned.ran < failed else 0
            budget = max(self.largest, min(max(int(self.backoff * failed), ran), failed - 1))
            why = f"out of memory at a cost of {failed:,}" if budget < self.budget else ""
            return Want(min(budget, self.budget), why=why)
        if grown > 0 and cost:
            return self._pressed(cost, f"{grown} retries of the allocator")
        return self._crowded(memory, cost)

    def _crowded(self, memory: Memory | None, cost: int) -> Want:
        """Ask to empty a cache full of unused blocks; the second time in a row, also for a lower budget."""
        crowded = memory is not None and is_crowded(memory, self.limit_bytes)
        again, self._was_crowded = crowded and self._was_crowded, crowded
        if not crowded:
            return Want(self.budget)
        if again and cost:
            return self._pressed(cost, "the allocator was fragmented twice in a row")
        return Want(self.budget, empty_cache=True, why="the allocator was fragmented")

    def _pressed(self, cost: int, why: str) -> Want:
        self.learned = replace(self.learned, retries=self.learned.retries + 1)
        wanted = max(int(FLOOR * self.learned.ran), int(PRESSURE * min(cost, self.budget)))
        return Want(max(self.largest, min(wanted, self.budget)), empty_cache=True, why=why)

    def adopt(self, budget: int) -> bool:
        """Set the budget that all ranks agreed on, between steps; return whether it changed."""
        self._wanted, self._step_cost = None, 0
        budget = max(self.largest, min(budget, self.budget))
        changed = budget != self.budget
        self.learned = replace(self.learned, budget=budget)
        return changed


def is_crowded(memory: Memory, limit_bytes: int | None = None) -> bool:
    """Tell whether an allocator was close to its limit at the peak, with many unused blocks."""
    limits = [limit for limit in (memory.limit_bytes, limit_bytes) if limit]
    if memory.peak_allocated_bytes is None or not limits:
        return False
    limit, idle_bytes = min(limits), memory.peak_reserved_bytes - memory.peak_allocated_bytes
    return memory.peak_reserved_bytes >= CROWDED * limit and idle_bytes >= IDLE * limit


def _even_slices(costs: Sequence[int], budget: int, *, padded: bool = False) -> list[slice]:
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
