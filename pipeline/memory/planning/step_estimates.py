"""Estimates for steps: the memory that the allocator reserves, by simulation, and the time."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from pipeline.memory.footprint import Category, Provenance, StepTapes, Tape, least_sure, margin_of
from pipeline.memory.hardware.caching_allocator import DEFAULT, EXPANDABLE, replay_steps
from pipeline.memory.planning.memory_plan import Configuration, Figure, Reserved
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from pipeline.memory.footprint import Floats, MemoryChoice, MicroFootprint, StandingFootprint
    from pipeline.memory.planning.budget_search import ChoiceMemory, FoundBudget
    from pipeline.memory.planning.memory_plan import CardSpec, Micros, PlanRequest

    # Returns the most that is reserved during steps, each given by its micro-batches.
    Reserve: TypeAlias = Callable[[StandingFootprint, Sequence[Sequence[MicroFootprint]]], Reserved]

EFFICIENCY = 0.4  # of the best rate: what well-tuned training reaches (40-60% MFU: PaLM, arXiv:2204.02311, table 3)
BANDWIDTH = 0.7  # of the memory's
LINK_BYTES_PER_S = 12e9  # to the host; PCIe 3 x16 in practice
PEER_BYTES_PER_S = 10e9  # to the other ranks
_TOUCHED = 2  # times an allocated byte is moved at least: written and read
_UPDATE_TOUCHED = 7  # of an optimizer with two moments: reads four tensors, writes three
_REDUCED = 2.0  # times the gradients pass the wire in an all-reduce
_GATHERED = 3.0  # times the parameters pass it for a micro-batch: gathered twice, gradients scattered once
_GATHERED_HALF = 2.0  # the same where they are gathered in half precision


def micro_s(micro: MicroFootprint, standing: StandingFootprint, choice: MemoryChoice, card: CardSpec) -> float:
    """Return the time of a micro-batch; nothing is assumed to overlap.

    An offloaded activation is moved twice, and a sharded model's parameters are gathered every time.
    """
    seconds = work_s(micro, choice.precision, card) + 2 * micro.host_bytes / LINK_BYTES_PER_S
    if choice.shards == 1:
        return seconds
    own = sum(part.bytes for part in standing.parts if part.category is Category.PARAMETERS)
    times = _GATHERED_HALF if choice.precision != "fp32" else _GATHERED
    return seconds + times * choice.shards * own / PEER_BYTES_PER_S


def work_s(micro: MicroFootprint, precision: str, card: CardSpec) -> float:
    """Return the time to compute, to move memory and to launch kernels."""
    moved = micro.moved_bytes or _TOUCHED * float(np.maximum(micro.again.bytes_E, 0).sum())
    compute_s = micro.flops / (card.flops_per_s[precision] * EFFICIENCY)
    return compute_s + moved / (card.bytes_per_s * BANDWIDTH) + micro.kernels * card.launch_s


def update_s(standing: StandingFootprint, choice: MemoryChoice, card: CardSpec, ranks: int) -> float:
    """Return the time of a step in addition to its micro-batches: the optimizer and the reduction over ranks."""
    trained = 4.0 * standing.trained
    update = _UPDATE_TOUCHED * trained / choice.shards / (card.bytes_per_s * BANDWIDTH)
    return update + (_REDUCED * trained / PEER_BYTES_PER_S if ranks > choice.shards else 0.0)


def epoch_s(micros: Micros, time_M: Floats, step_s: float) -> tuple[float, float]:
    """Return the mean time of a step and the time of an epoch; each step takes as long as its slowest rank."""
    steps, step_M = np.unique(micros.step_M, return_inverse=True)
    ranks = int(micros.rank_M.max(initial=0)) + 1
    busy = np.bincount(step_M.ravel() * ranks + micros.rank_M, time_M, len(steps) * ranks).reshape(-1, ranks)
    total = float(busy.max(axis=1).sum()) + step_s * len(steps)
    return total / len(steps), total / micros.epochs


SETTINGS = (DEFAULT, EXPANDABLE)  # the plainest first
WITHIN = 1.02  # settings this close to the least count as equal, and the plainest is chosen
_AHEAD = -(1 << 40)  # blocks of inputs that are copied ahead, below those of any model
_MOST_EVENTS = 300_000  # that are simulated, in a few seconds
_MOST_SHARES = 64
_SIMULATED = 3  # steps of a configuration: the first makes the optimizer's state, later ones show how that fragments
_DISTINCT = 2  # micro-batches of a step: the first makes the gradients, all others are alike


def reserve(
    standing: StandingFootprint,
    steps: Sequence[Sequence[MicroFootprint]],
    allowed: Sequence[str] = SETTINGS,
) -> Reserved:
    """Return what torch's caching allocator reserves, with the settings that reserve least, and the comparison."""
    played = [StepTapes.of(standing, micros, first=place == 0) for place, micros in enumerate(steps)]
    replays = {settings: replay_steps(played, settings, standing.setup) for settings in allowed}
    least = min(replay.reserved_bytes for replay in replays.values())
    chosen, best = next(pair for pair in replays.items() if pair[1].reserved_bytes <= WITHIN * least)
    why = f"reserves {format_bytes(best.reserved_bytes)}, {best.fragmentation:.2f} times the live memory"
    others = (pair for pair in replays.items() if pair[0] != chosen)
    notes = (f"{settings or 'default'}: {format_bytes(replay.reserved_bytes)}" for settings, replay in others)
    why = "; ".join((f"{chosen or 'default'} {why}", *notes))
    return Reserved(best.reserved_bytes, chosen, notes=(why,))


def ahead_bytes(standing: StandingFootprint, micro: MicroFootprint, inputs: Sequence[int], settings: str) -> int:
    """Simulate how much more is reserved where the inputs of the next micro-batch are copied ahead."""
    sizes = np.array([size for size in inputs if size], np.int64)
    takes = [Tape(_AHEAD - np.arange(len(sizes)) - turn * len(sizes), sizes) for turn in (0, 1)]
    gives = [Tape(take.block_E, -sizes) for take in takes]
    plain = StepTapes((micro.first, micro.again, standing.update))
    first, again, update = plain.tapes
    doubled = StepTapes((takes[1], gives[0], first, takes[0], gives[1], again, update))
    begun = StepTapes.of(standing, [micro, micro], first=True)
    least = replay_steps([begun, plain, plain], settings, standing.setup).reserved_bytes
    most = replay_steps([begun, StepTapes((takes[0],)), doubled, doubled], settings, standing.setup).reserved_bytes
    return max(most - least, int(sizes.sum()))


def sample_steps(found: FoundBudget, micro_of: Sequence[MicroFootprint], seed: int) -> list[list[MicroFootprint]]:
    """Return a random sample of steps of one rank, each micro-batch replaced by that of its bucket.

    Every bucket occurs, also those that only another order of the epoch would produce.
    """
    share_M = found.micros.share_M
    group_M = np.zeros(len(share_M), np.int64)
    for number, group in enumerate(found.groups):
        group_M[group.places[group.places < len(group_M)]] = number
    generator = np.random.default_rng(seed)
    shares = generator.permutation(np.unique(share_M)).tolist()
    kept = [[micro] * (2 if found.micros.accumulate else 1) for micro in micro_of]
    events = sum(len(micro.again.bytes_E) for micros in kept for micro in micros)
    for share in shares[:_MOST_SHARES]:  # as many as can be simulated in time
        micros = [micro_of[number] for number in group_M[share_M == share].tolist()]
        events += sum(len(micro.again.bytes_E) for micro in micros)
        if events > _MOST_EVENTS:
            break
        kept.append(micros)
    return [kept[place] for place in generator.permutation(len(kept)).tolist()]


def compare_configurations(
    memory: ChoiceMemory,
    configurations: Sequence[tuple[int, int]],
    cards: Sequence[CardSpec],
    item: Mapping[str, int],
    request: PlanRequest,
    *,
    padded: bool = True,
    reserve: Reserve = reserve,
) -> list[Configuration]:
    """Return the memory of each (items, micro-batches) pair, corrected by the request's ratios of past runs."""
    rows, caching = [], any(card.caching for card in cards)
    for items, accumulation in configurations:
        row = (items, *(size if padded else items * size for size in item.values()))
        micro, live = memory.micro(row), memory.peak_bytes(row, accumulate=accumulation > 1)
        steps = [[micro] * min(accumulation, _DISTINCT)] * _SIMULATED
        reserved = reserve(memory.standing, steps) if caching else Reserved(live, origin=Provenance.TRACED)
        origin = least_sure((memory.standing.origin, micro.origin))
        margin = margin_of(origin, request.ratios, caching=caching, compiled=request.compiled)
        total, held = ceil(reserved.bytes * margin.factor), least_sure((origin, reserved.origin))
        figures = Figure(live, origin), Figure(reserved.bytes, held), Figure(total, least_sure((held, margin.origin)))
        fits = {card.name: total <= card.budget_bytes for card in cards}
        rows.append(Configuration(items, accumulation, *figures, fits))
    return rows
