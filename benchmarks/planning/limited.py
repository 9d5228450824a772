"""Epochs trained as planned, on a device that refuses the first byte above its limit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from pipeline.errors import PipelineError
from pipeline.memory.planning.memory_plan import MicroBatchLimit
from tests.memory.planning.planned import (
    BATCH,
    Ground,
    epoch,
    fewer_cuts,
    filled_takes,
    limits,
    one_more,
    sampler_under,
)
from tests.zoo import Member

ITEMS, LEVELS = 128, 5
USED = 0.8
FEWER_ITEMS = {"recurrent_depth": 48, "equivariant": 48}  # an epoch of theirs takes long
SMALLER = {"recurrent_depth": {"width": 96, "steps": 3, "latent": 2, "encoder_layers": 1, "decoder_layers": 2}}
LADDER = "data_dependent"  # cannot be traced: answered for by small real steps


def measured(members: Sequence[Member], _: Path | None) -> list[dict[str, Any]]:
    """Return every figure; print them as they come."""
    print(f"{'member':26}{'limit':>14}{'OOMs':>6}{'used':>7}{'micros':>8}  why not larger")
    return [row for member in members for row in rows_of(member)]


def told(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the figures come to, without the model that cannot be traced."""
    counted = [row for row in rows if row["member"] != LADDER]
    done = [row for row in counted if "ooms" in row]
    filled = [row["filled_takes"] for row in done if row.get("filled_takes")]
    return {
        "what": f"an epoch of micro-batches as planned and cut by the sampler, effective batch {BATCH}, on a device of "
        "limited memory; used: the highest real peak, of the limit; filled_takes: the time of an epoch that is padded "
        "until memory is full, of that of the planned one",
        "reach": f"no OOM; at least {USED:.0%} used whenever one more item would not fit",
        "limits": "the first, with the planner's margin and 1%, is what the largest item takes with every remedy "
        "(checkpointing, offload); the others go in equal ratios from what it takes without remedies to what the "
        "largest step takes that no budget cuts",
        "smaller": SMALLER,
        "cases": len(counted),
        "refused": [[row["member"], row["limit"]] for row in counted if "refused" in row],
        "ooms": sum(row["ooms"] for row in done),
        "with_ooms": [[row["member"], row["limit"]] for row in done if row["ooms"]],
        "used_80": sum(row["used"] >= USED for row in done),
        "below_80_whole_share": sum(
            row["why"] == MicroBatchLimit.WHOLE_SHARE.value for row in done if row["used"] < USED
        ),
        "below_80_one_more_fits": sum(bool(row["one_more_fits"]) for row in done if row["used"] < USED),
        "below_80_one_more_does_not_fit": [
            [row["member"], row["limit"], row["used"]]
            for row in done
            if row["used"] < USED and row["one_more_fits"] is False
        ],
        "below_80_though_fewer_micro_batches_fit": [
            [row["member"], row["limit"], row["used"]]
            for row in done
            if row["used"] < USED and row["fewer_cuts_fit"] is True
        ],
        "filled_takes": {"cases": len(filled), "median": median(filled), "least": min(filled), "most": max(filled)}
        if filled
        else None,
        "beside": [row for row in rows if row["member"] == LADDER],
    }


def rows_of(member: Member) -> list[dict[str, Any]]:
    """Plan and train one model under its limits."""
    member = replace(member, small={**member.small, **SMALLER.get(member.name, {})})
    ground = Ground.of(member, FEWER_ITEMS.get(member.name, ITEMS))
    return [_row(ground, limit) for limit in limits(ground, LEVELS)]


def _row(ground: Ground, limit: int) -> dict[str, Any]:
    row: dict[str, Any] = {"member": ground.member.name, "limit": limit}
    start = time.perf_counter()
    try:
        made = ground.planned(limit)
    except PipelineError as error:
        print(f"{ground.member.name:26}{limit:14,} refused: {error.what}", flush=True)
        return row | {"refused": error.what}
    planned_s, start = time.perf_counter() - start, time.perf_counter()
    trained = epoch(ground, made.choice, sampler_under(made, ground.sizes), limit)
    row |= {
        "ooms": trained.ooms,
        "used": round(trained.peak_bytes / limit, 4),
        "predicted": round(made.live.value / limit, 4),
        "origin": made.live.origin.value,
        "remedies": list(made.remedies),
        "why": made.filled.value,
        "every_order": made.every_order,
        "items": len(next(iter(ground.sizes.values()))),
        "steps": trained.steps,
        "micros": trained.micros,
        "accumulation": round(made.accumulation_mean, 2),
        "questions": made.questions,
        "planned_s": round(planned_s, 2),
        "trained_s": round(time.perf_counter() - start, 2),
        "one_more_fits": None,
        "fewer_cuts_fit": None,
        "filled_takes": None,
    }
    if row["used"] < USED and made.filled is not MicroBatchLimit.WHOLE_SHARE:
        row |= {
            "one_more_fits": one_more(ground, made, trained, limit),
            "fewer_cuts_fit": fewer_cuts(ground, made, limit),
        }
        if made.filled is MicroBatchLimit.PADDING:
            row["filled_takes"] = round(filled_takes(ground, made), 3)
    why = f"{made.filled.value}; {', '.join(made.remedies) or 'no remedy'}"
    if row["one_more_fits"] is not None:
        why += f"; one more {'fits' if row['one_more_fits'] else 'does not fit'}"
    if row["fewer_cuts_fit"] is not None:
        why += f"; fewer micro-batches {'fit' if row['fewer_cuts_fit'] else 'do not fit'}"
    if row["filled_takes"] is not None:
        why += f"; padded until full {row['filled_takes']:.2f} times as long"
    print(
        f"{row['member']:26}{limit:14,}{trained.ooms:6}{row['used']:7.1%}{trained.micros:8}  {why}",
        flush=True,
    )
    return row
