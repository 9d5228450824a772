"""What is predicted, without the card: sizes that fill a share of it, and a plan for an epoch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from pipeline.memory.footprint import MemoryChoice
from pipeline.memory.hardware.gpus import Device
from pipeline.memory.planning.memory_plan import CardSpec
from pipeline.memory.planning.step_estimates import reserve
from pipeline.protocol import ITEMS

STEPS, MICROS = 4, 2  # as a probe: the first makes the optimizer's state
BATCHES, CUTS, MOST_ITEMS = 2, 2.5, 8192  # steps of an epoch, micro-batches that a step needs about, items in it


def work_for(case: Mapping[str, Any]) -> Any:
    """Return a member of the zoo as it is trained on a card."""
    from tests.memory.planning.planned import work_of
    from tests.zoo import ZOO

    return replace(work_of(ZOO[case["member"]]), device="cpu" if case["dry"] else "cuda")


def member_of(case: Mapping[str, Any]) -> Any:
    from tests.zoo import ZOO

    return ZOO[case["member"]]


def choice_of(case: Mapping[str, Any]) -> MemoryChoice:
    checkpointing = bool(member_of(case).settings.get("checkpointing"))
    return MemoryChoice(precision=case["precision"], checkpointing=checkpointing)


def target_for(case: Mapping[str, Any]) -> Any:
    """Return what is traced: the card's way, or with --dry that of the CPU which stands in for it."""
    from pipeline.runs.model.training_work import target_of

    return target_of(None if case["dry"] else tuple(case["capability"]))


def predicted(case: Mapping[str, Any], _: Callable[[], None]) -> dict[str, Any]:
    """Predict a model's three sizes, each grown until it fills its share of its card."""
    from pipeline.runs.model.probe import model_name

    work, member, choice = work_for(case), member_of(case), choice_of(case)
    least = min(member.sizes, key=lambda sizes: sizes[ITEMS])
    oracle = work.oracle(least, target_for(case), padded=member.padded)
    model, rows = model_name(work, choice), []
    for sizes, (card, target_bytes) in zip(member.sizes, case["targets"], strict=False):
        start = time.perf_counter()
        try:
            row = grown(oracle, choice, sizes, target_bytes, padded=member.padded)
        except Exception as error:  # noqa: BLE001 - the other sizes may do
            row = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        rows.append({"card": card, "predicted_s": round(time.perf_counter() - start, 1), **row})
    return {"model": model, "choice": asdict(choice), "rows": rows}


def grown(
    oracle: Any, choice: MemoryChoice, sizes: Mapping[str, int], target_bytes: int, *, padded: bool
) -> dict[str, Any]:
    """Return the prediction for so many times the items that about the target is reserved, not more."""
    standing = oracle.standing(choice)
    known: dict[int, dict[str, Any]] = {}

    def ask(times: int) -> int:
        larger = {name: size * (times if name == ITEMS or not padded else 1) for name, size in sizes.items()}
        micro = oracle.micro(choice, larger)
        held = reserve(standing, [[micro] * MICROS] * STEPS)
        live = max(live_of(standing, micro, first=first) for first in (True, False))
        known[times] = {
            "sizes": larger,
            "times": times,
            "origin": micro.origin.value,
            "reserve_bytes": held.bytes,
            "live_bytes": live,
            "allocator": held.settings,
            "notes": list(micro.notes),
        }
        return held.bytes

    low, low_bytes = 1, ask(1)
    high = max(2, min(16, target_bytes // max(1, low_bytes)))
    for _ in range(4 if low_bytes < target_bytes else 0):
        high_bytes = ask(high)
        slope = max(1.0, (high_bytes - low_bytes) / (high - low))
        guess = max(1, int(high + (0.98 * target_bytes - high_bytes) / slope))
        if 0.93 * target_bytes <= high_bytes <= target_bytes or guess in known:
            break
        low, low_bytes, high = high, high_bytes, guess
    fitting = [times for times, row in known.items() if row["reserve_bytes"] <= target_bytes]
    return known[max(fitting, default=1)]


def live_of(standing: Any, micro: Any, *, first: bool) -> int:
    """Return what is live at most in a step, the first or a later one."""
    from pipeline.memory.footprint import StepTapes

    before = standing.setup.left_bytes if first else standing.bytes
    return StepTapes.of(standing, [micro] * MICROS, first=first).peak_bytes(before)


def planned(case: Mapping[str, Any], _: Callable[[], None]) -> dict[str, Any]:
    """Plan a data set whose steps need several micro-batches on a card."""
    from pipeline.config.schema_train import TrainSection
    from pipeline.runs.model.training_work import Work, least_of, request_of
    from tests.remembering_plan import plan_with_oracle

    @dataclass(frozen=True)
    class Remembering(Work):
        """Asked twice, it answers from one trace."""

        made: list[Any] = field(default_factory=list)

        def oracle(self, least: Any, target: Any, *, padded: bool) -> Any:
            """Return the one oracle."""
            self.made or self.made.append(super().oracle(least, target, padded=padded))
            return self.made[0]

    given, member, choice, target = work_for(case), member_of(case), choice_of(case), target_for(case)
    work = Remembering(given.task, given.settings, given.device)
    card = CardSpec.of(Device(**{**case["device"], "capability": tuple(case["capability"])}), 1)
    some = member.items(256, np.random.default_rng(0))
    oracle = work.oracle(least_of(some), target, padded=member.padded)
    batch = batch_for(oracle, choice, some, card.budget_bytes, padded=member.padded)
    sizes = member.items(BATCHES * batch, np.random.default_rng(0))
    train = TrainSection(
        effective_batch=batch,
        batching="padded" if member.padded else "concatenated",
        precision=case["precision"],
        checkpointing=choice.checkpointing,
        offload=False,
        oversize="skip",
    )
    made, _oracle = plan_with_oracle(work, train, sizes, [card], target, request_of(train, 1))
    if made.oversize:
        return {"error": f"{len(made.oversize)} items are too large for this card: {made.oversize[0].remedy}"}
    return {"cost": made.cost(sizes).tolist(), "batch": batch, "items": BATCHES * batch, **_told(made)}


def _told(made: Any) -> dict[str, Any]:
    """Return what is trained by, and what was predicted, of a plan."""
    return {
        "choice": asdict(made.choice),
        "budget": made.budget["cost"],
        "micros": made.micros,
        "items_median": made.items_median,
        "allocator": made.allocator.settings,
        "origin": made.total.origin.value,
        "predicted_used": made.used,
        "filled": made.filled.value,
        "remedies": list(made.remedies),
        "every_order": made.every_order,
        "total_bytes": int(made.total.value),
        "limit_bytes": made.limit_bytes,
    }


def batch_for(oracle: Any, choice: MemoryChoice, items: Mapping[str, Any], budget_bytes: int, *, padded: bool) -> int:
    """Return the items of a step that needs several micro-batches."""
    mean = {name: max(1, int(values_N.mean())) for name, values_N in items.items()}

    def live(count: int) -> int:
        sizes = {ITEMS: count} | {name: size * (1 if padded else count) for name, size in mean.items()}
        return live_of(oracle.standing(choice), oracle.micro(choice, sizes), first=False)

    few, many = 4, 20
    each = max(1.0, (live(many) - live(few)) / (many - few))
    return int(np.clip(CUTS * budget_bytes / each, 16, MOST_ITEMS))
