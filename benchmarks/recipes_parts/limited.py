"""Each recipe planned for the memory of its guide, and trained for an epoch on a device of that memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.recipes_parts.bench import NAMES, Bench, Trained, cuts_of, train
from pipeline.errors import PipelineError
from pipeline.memory.footprint import MemoryChoice, Oracle, live_peak_bytes
from pipeline.memory.planning.memory_plan import MemoryPlan, MicroBatchLimit
from pipeline.memory.planning.planner import plan_memory
from pipeline.protocol import ITEMS
from pipeline.runs.model.training_work import data_of, host_card
from pipeline.training.prepared import COST, LIKENESS, likeness, sampler_settings
from pipeline.training.sampling.sampler import Sampler

RECIPES = NAMES
GIB = 1 << 30
USED = 0.8
REFUSED = 0.9
MEMORY = 16  # what the guide's memory is divided by, where widths are divided by 4


@dataclass(frozen=True)
class Case:
    """A recipe as this machine can train it, and the memory of its guide."""

    label: str
    guide: str
    guide_gib: float
    sets: Sequence[str]
    what: Any  # see `made_items`


SIDES = [(100 + 25 * (place % 7), 80 + 30 * (place % 5)) for place in range(26)] + [(600, 450), (750, 500)]
POCKETS = [12 + 3 * (place % 16) for place in range(14)] + [60, 90]


def scaled(**options: Any) -> list[str]:
    """Return what makes a model smaller."""
    return [f"train.options.{name}={value}" for name, value in options.items()]


SPECTRA = [*scaled(d_fourier=245, d_peak=11, fourier_width=128)]
UNNAMED = "its guide names no card: 24 GB"
CASES = {
    "complex_docking": [
        Case("memory / 64", "80 GB (A100)", 80 / 4, scaled(scalars=8, vectors=2), SIDES),
        Case("memory / 16", "80 GB (A100)", 80, scaled(scalars=8, vectors=2), SIDES),
    ],
    "rna_ligand": [
        Case(
            "2 of 6 layers",
            UNNAMED,
            24,
            scaled(hidden_irreps="8x0e+4x1o+2x2e", output_dim=384, feature_width=16, layers=2),
            POCKETS,
        )
    ],
    "spectra_finetune": [
        Case("2 a step", UNNAMED, 24, SPECTRA, 8),
        Case("256 a step", UNNAMED, 24, [*SPECTRA, "train.effective_batch=256"], 320),
    ],
    "denovo_recursive": [
        Case("4 × 3 steps", "24 GB (RTX 4090)", 24, scaled(width=96, supervision_steps=4, latent_steps=3), 120)
    ],
    "contrastive_pair": [
        Case(
            "2 of 12 layers, images of 112 pixels, fp32, memory / 32",
            "7.5 GB",
            7.5 / 2,
            [
                *scaled(
                    width=128, out=128, layers=2, heads=2, image_width=192, image_layers=2, image_size=112, patch=16
                ),
                "data.options.size=112",
                "train.precision=fp32",
            ],
            160,
        )
    ],
}


def measured(recipe: str) -> Iterator[dict[str, Any]]:
    """Yield every figure, and print it."""
    for case in CASES[recipe]:
        yield from rows_of(recipe, case)


def told(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the figures come to."""
    done = [row for row in rows if "ooms" in row]
    run = {(row["recipe"], row["case"]) for row in done}
    missing = [[name, case.label] for name, cases in CASES.items() for case in cases if (name, case.label) not in run]
    return {
        "what": "an epoch of real micro-batches of made items as planned and cut by the sampler, on a device that "
        "refuses the first byte above the limit; used: the highest real peak, of the limit",
        "scaled": f"widths are divided by 4, and the guide's memory by {MEMORY}: no model is at its full size here; "
        "what else is smaller is said by each case, and in sets",
        "reach": f"no OOM; at least {USED:.0%} used whenever one more item would not fit; a refusal with a remedy "
        f"at {REFUSED:.0%} of what the largest item takes with checkpointing, offload and half precision where allowed",
        "not_run": missing,
        "ooms": sum(row["ooms"] for row in done),
        "below_80_one_more_does_not_fit": [
            [row["recipe"], row["case"], row["used"]]
            for row in done
            if row["used"] < USED and row["one_more_fits"] is False
        ],
        "refused_as_wanted": sum("refused" in row and bool(row["remedy"]) for row in rows if row["must_refuse"]),
        "not_refused": [[row["recipe"], row["case"]] for row in rows if row["must_refuse"] and "refused" not in row],
    }


def rows_of(recipe: str, case: Case) -> Iterator[dict[str, Any]]:
    """Plan and train a case at its limit; plan for one that nothing can be done within."""
    bench = Bench.of(recipe, case.sets, case.what)
    oracle = bench.oracle()
    yield _row(bench, case, oracle, int(case.guide_gib * GIB / MEMORY))
    yield _row(bench, case, oracle, int(REFUSED * _least(bench, oracle)), must_refuse=True)


def _least(bench: Bench, oracle: Oracle) -> int:
    """Return what the item takes alone whose sizes are largest together, where all is done that saves memory."""
    largest = int(np.argmax(np.sum([*bench.sizes.values()], axis=0)))
    sizes = {ITEMS: 1, **{name: int(one[largest]) for name, one in bench.sizes.items()}}
    *_, precision = bench.work.request(bench.config.train, 1).precisions[:2]
    choices = [MemoryChoice(precision=precision, checkpointing=one, offload=True) for one in (False, True)]
    return min(live_peak_bytes(oracle.standing(one), oracle.micro(one, sizes), accumulate=True) for one in choices)


def planned(bench: Bench, oracle: Oracle, limit: int) -> MemoryPlan:
    """Plan as `plan_training` does, but for an oracle that remembers for all limits."""
    request = bench.work.request(bench.config.train, 1)
    return plan_memory(oracle, data_of(bench.sizes, request, padded=bench.padded), request, [host_card(limit)])


def sampler_of(bench: Bench, made: MemoryPlan) -> Sampler:
    """Return the sampler of training under a plan."""
    sizes, batch = bench.sizes, bench.config.train.effective_batch
    settings = sampler_settings(batch, made.budget[COST], padding=made.padding, micro_batch=made.micro_batch)
    return Sampler({COST: made.cost(sizes), LIKENESS: likeness(sizes)}, settings)


def _row(bench: Bench, case: Case, oracle: Oracle, limit: int, *, must_refuse: bool = False) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case.label, "guide": case.guide, "limit": limit, "must_refuse": must_refuse}
    row |= {"sets": list(case.sets), "items": len(next(iter(bench.sizes.values())))}
    start = time.perf_counter()
    try:
        made = planned(bench, oracle, limit)
    except PipelineError as error:
        told_row = {"refused": error.what, "where": error.where, "remedy": error.remedy, "exit": error.exit_code}
        print(f"{bench.name:18}{case.label:24}{limit:14,} refused: {error.what} → {error.remedy}", flush=True)
        return row | told_row
    planned_s, start = time.perf_counter() - start, time.perf_counter()
    steps = cuts_of(sampler_of(bench, made))
    trained = train(bench, made.choice, steps, limit)
    row |= _figures(made, trained, limit)
    row |= {"planned_s": round(planned_s, 2), "trained_s": round(time.perf_counter() - start, 2)}
    if row["used"] < USED and made.filled is not MicroBatchLimit.WHOLE_SHARE:
        row["one_more_fits"] = one_more(bench, made, steps[trained.worst], limit)
    print(
        f"{bench.name:18}{case.label:24}{limit:14,}{trained.ooms:4} OOMs{row['used']:8.1%}{row['predicted']:8.1%}"
        f"{trained.steps:4} steps{trained.micros:5} micros  {row['why']}; {', '.join(made.remedies) or 'no remedy'}; "
        f"one more fits: {row['one_more_fits']}",
        flush=True,
    )
    return row


def _figures(made: MemoryPlan, trained: Trained, limit: int) -> dict[str, Any]:
    return {
        "ooms": trained.ooms,
        "used": round(trained.peak_bytes / limit, 4),
        "predicted": round(made.live.value / limit, 4),
        "origin": made.live.origin.value,
        "precision": made.choice.precision,
        "remedies": list(made.remedies),
        "why": made.filled.value,
        "every_order": made.every_order,
        "steps": trained.steps,
        "micros": trained.micros,
        "items_most": made.items_most,
        "accumulation": round(made.accumulation_mean, 2),
        "questions": made.questions,
        "one_more_fits": None,
    }


def one_more(bench: Bench, made: MemoryPlan, cuts: Sequence[Sequence[int]], limit: int) -> bool | None:
    """Tell whether a step goes with one more item in its costliest micro-batch; None: there is none to take.

    It is the item of the step's other micro-batches that is most like those it has, by its cost.
    """
    cost_N = made.cost(bench.sizes)
    place = int(np.argmax([_cost(bench, cost_N, cut) for cut in cuts]))
    others = [number for other, cut in enumerate(cuts) if other != place for number in cut]
    if not others:
        return None
    more = min(others, key=lambda number: abs(cost_N[number] - cost_N[list(cuts[place])].mean()))
    grown = [[*cut, more] if other == place else [one for one in cut if one != more] for other, cut in enumerate(cuts)]
    return train(bench, made.choice, [[cut for cut in grown if cut]] * 2, limit).ooms == 0


def _cost(bench: Bench, cost_N: Any, cut: Sequence[int]) -> int:
    """Return what a micro-batch costs: padded, each item as much as the largest."""
    costs = cost_N[list(cut)]
    return int(costs.max() * len(costs) if bench.padded else costs.sum())
