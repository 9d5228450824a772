"""Reserved memory, and time, of steps: predicted on the CPU, then measured on the card; of all families and recipes.

Each model is asked for two sizes of micro-batches that fill a share of the card: the smaller is met for the first
time; the larger is a probe, by which the smaller's prediction is then corrected as plans are.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.gpu_parts.cards import NOT_CARDS, described, forget, opened, planned_for, target_for
from benchmarks.gpu_parts.day import REHEARSED_AT_ONCE, Asking, Cases, Part, Row
from pipeline.memory.footprint import MemoryChoice, StepTapes
from pipeline.memory.hardware.caching_allocator import AllocatorSettings
from pipeline.memory.planning.memory_plan import CardSpec, CardSpecs
from pipeline.memory.planning.step_estimates import SETTINGS, micro_time, reserve, update_s
from pipeline.protocol import ITEMS

STEPS, MICROS = 4, 2  # as a probe: the first makes the optimizer's state
SHARES = {"first": 0.2, "probe": 0.5}  # of the card that the two sizes fill
REHEARSED_BYTES = {"first": 4 << 20, "probe": 8 << 20}
PRECISIONS = ("bf16", "fp32", "fp16")  # of which a rehearsal has the first, and recipes the first two
SLOW = ("recurrent_depth", "equivariant")  # to trace; begun first
THINKERS = 6  # that predict beside each other at most
PREDICT_S, MEASURE_S = 480.0, 120.0
RECIPES: dict[str, dict[str, int]] = {  # a typical item of each
    "complex_docking": {"nodes": 425, "pairs": 45000},
    "rna_ligand": {"atoms": 600, "bonds": 1300, "angles": 900, "dihedrals": 1300, "near": 9000},
    "spectra_finetune": {"peaks": 100},
    "denovo_recursive": {"peaks": 100, "residues": 30},
    "contrastive_pair": {"left": 256, "right": 256},
}
SMALL_ITEMS: dict[str, dict[str, int]] = {
    "complex_docking": {"nodes": 90, "pairs": 2000},
    "rna_ligand": {"atoms": 60, "bonds": 130, "angles": 90, "dihedrals": 130, "near": 600},
    "spectra_finetune": {"peaks": 20},
    "denovo_recursive": {"peaks": 20, "residues": 12},
    "contrastive_pair": {"left": 32, "right": 32},
}


@dataclass(frozen=True)
class Model:
    """A family of the zoo, or a recipe, as it is trained on a device."""

    work: Any
    padded: bool
    sizes: Mapping[str, int]  # of a micro-batch that can be traced and grown
    checkpointing: bool
    most: int | None = None  # items at once, of a loss that compares those of a step

    def choice(self, precision: str) -> MemoryChoice:
        return MemoryChoice(precision=precision, checkpointing=self.checkpointing)


def model_of(case: Mapping[str, Any]) -> Model:
    """Return the model that a case names."""
    if case["model"] in RECIPES:
        return _recipe(case["model"], planned_for(case["device"]), small=case["about"]["rehearsal"])
    from tests.memory.planning.planned import work_of
    from tests.zoo import ZOO

    member = ZOO[case["model"]]
    sizes = min(member.sizes, key=lambda one: one[ITEMS])
    work = replace(work_of(member), device=planned_for(case["device"]))
    return Model(work, member.padded, sizes, bool(member.settings.get("checkpointing")))


def _recipe(name: str, device: str, *, small: bool) -> Model:
    """Return a recipe at its own sizes, or as small as tests run it."""
    from pipeline.project.run_code import load_task
    from pipeline.runs.model.training_work import Work, step_settings
    from tests.recipes.projects import ALL, config_of

    config = config_of(ALL[name], *(ALL[name].small if small else ()))
    task = load_task(config.train.task, config.train.options)
    work = Work(task, step_settings(config.train, device, task), device)
    item = (SMALL_ITEMS if small else RECIPES)[name]
    most = config.train.effective_batch // MICROS if work.is_contrastive else None
    return Model(work, config.train.batching == "padded", {ITEMS: 1, **item}, checkpointing=False, most=most)


# ---- one case, in a process of its own ----


def predicted(case: Mapping[str, Any]) -> dict[str, Any]:
    """Predict bytes and seconds of a model's sizes, each grown until it fills its share of the card."""
    model = model_of(case)
    choice = model.choice(case["precision"])
    oracle = model.work.oracle(model.sizes, target_for(case["about"]), padded=model.padded)
    first = grown(oracle, choice, model, case["targets"]["first"], SETTINGS)
    alike = [one for one in SETTINGS if one.text == first["allocator"]]  # a process has one of them
    sizes = {"first": first, "probe": grown(oracle, choice, model, case["targets"]["probe"], alike)}
    cards = CardSpecs.of([CardSpec.of(described(case["about"]), 1)])
    standing = oracle.standing(choice)
    for row in sizes.values():
        micro = oracle.micro(choice, row["sizes"])
        pace_s = MICROS * micro_time(micro, standing, choice, cards).total_s + update_s(standing, choice, cards, 1)
        row["predicted_s"] = pace_s
    card = described(case["about"])
    beside, context = (0, 0) if case["device"] in NOT_CARDS else (card.workspace_bytes, card.context_bytes)
    return {"sizes": sizes, "beside_bytes": beside, "context_bytes": context}


def grown(
    oracle: Any, choice: MemoryChoice, model: Model, target_bytes: int, allowed: Sequence[AllocatorSettings]
) -> dict[str, Any]:
    """Return the prediction for so many times the items that about the target is reserved, not more."""
    standing = oracle.standing(choice)
    known: dict[int, dict[str, Any]] = {}

    def ask(times: int) -> int:
        larger = {
            name: size * (times if name == ITEMS or not model.padded else 1) for name, size in model.sizes.items()
        }
        micro = oracle.micro(choice, larger)
        held = reserve(standing, [[micro] * MICROS] * STEPS, allowed)
        known[times] = {
            "sizes": larger,
            "origin": micro.origin.value,
            "reserve_bytes": held.bytes,
            "live_bytes": max(live_of(standing, micro, first=first) for first in (True, False)),
            "allocator": held.settings,
        }
        return held.bytes

    if model.most is not None:  # a step's items are what its loss compares: as many as that at most
        ask(model.most if len(allowed) == 1 else max(1, model.most // 2))
        return next(iter(known.values()))
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
    before = standing.setup.left_bytes if first else standing.bytes
    return StepTapes.of(standing, [micro] * MICROS, first=first).peak_bytes(before)


def measured(case: Mapping[str, Any]) -> dict[str, Any]:
    """Run steps of each size, the smaller first, and measure them."""
    found: dict[str, Any] = {}
    for size, sizes in case["sizes"].items():
        alike = [one for one in found if case["sizes"][one] == sizes]  # the least of it is larger than was asked for
        found[size] = found[alike[0]] if alike else one_size(case, sizes)
    return found


def one_size(case: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Run steps of one size, as a probe does, and measure them."""
    import torch

    torch.manual_seed(0)
    model, died, took = model_of(case), "", list[float]()
    batch = model.work.example(sizes)
    model.work.task.model()  # whatever is loaded once is no step's
    with opened(case["device"], case["allocator"]) as card:
        try:
            step = card.step(model.work, model.choice(case["precision"]))
            for _ in range(STEPS):
                start = time.perf_counter()
                step.run([batch] * MICROS)
                card.wait()
                took.append(time.perf_counter() - start)
        except torch.OutOfMemoryError as error:
            died = str(error).partition("\n")[0]
        found = card.read()
        step = None
        forget(case["device"])
    return {**found, "step_s": statistics.median(took[1:]) if len(took) > 1 else 0.0, "died": died}


# ---- the part ----


def run(asking: Asking) -> None:
    """Predict and measure everything, the breadth of models before further precisions."""
    from tests.zoo import ZOO

    names = [*(name for name in SLOW if name in ZOO), *RECIPES, *(name for name in ZOO if name not in SLOW)]
    precisions = PRECISIONS[:1] if asking.rehearsal else PRECISIONS
    pairs = [(name, kind) for kind in precisions for name in names if name in ZOO or kind in PRECISIONS[:2]]
    workers = min(THINKERS, max(REHEARSED_AT_ONCE, len(os.sched_getaffinity(0)) - 2))
    asking.side_by_side((partial(one_model, asking, *pair) for pair in pairs), workers)


def one_model(asking: Asking, name: str, precision: str) -> None:
    """Predict a model's sizes, then measure each."""
    case = {"model": name, "precision": precision}
    budget = CardSpec.of(described(asking.about), 1).budget_bytes
    full = {size: int(share * budget) for size, share in SHARES.items()}
    label = f"{name} {precision}"
    if asking.known(f"{label} measured"):
        return
    targets = REHEARSED_BYTES if asking.rehearsal else full
    told = asking.ask(f"{label} predicted", f"{__name__}:predicted", PREDICT_S, on_card=False, targets=targets, **case)
    if "error" not in told:
        sizes = {size: row["sizes"] for size, row in told["sizes"].items()}
        allocator = told["sizes"]["first"]["allocator"]
        asking.ask(f"{label} measured", f"{__name__}:measured", MEASURE_S, allocator=allocator, sizes=sizes, **case)


def figures(cases: Cases) -> dict[str, Any]:
    """Return how far predictions are off, at first and after a probe."""
    models = {
        label.removesuffix(" predicted"): found
        for label, told in cases.items()
        if label.endswith(" predicted") and (found := _compared(label.removesuffix(" predicted"), told, cases))
    }
    traced = [one for one in models.values() if one["origin"] == "traced"]
    return {
        "models": models,
        "measured": len(models),
        "died": sum(one["died"] for one in models.values()),
        "not_traced": [label for label, one in models.items() if one["origin"] != "traced"],
        "worst_first": max((abs(one["first"]) for one in traced), default=None),
        "worst_live": max((abs(one["live"]) for one in traced), default=None),
        "worst_probed": max((abs(one["probed"]) for one in models.values() if "probed" in one), default=None),
    }


def _compared(label: str, told: Row, cases: Cases) -> dict[str, Any]:
    """Return a model's predictions beside what was measured; nothing if nothing was."""
    measured = cases.get(f"{label} measured")
    if measured is None:
        return {}
    sizes = {size: told["sizes"][size] | measured[size] for size in SHARES}
    whole = {size: row for size, row in sizes.items() if not row["died"]}
    found: dict[str, Any] = {"origin": next(iter(sizes.values()))["origin"], "died": len(sizes) - len(whole)}
    for row in whole.values():
        row["predicted_bytes"] = row["reserve_bytes"] + told["beside_bytes"] + told["context_bytes"]
        row["measured_bytes"] = row["reserved_bytes"] + row["outside_bytes"]
    if not whole:
        return found | {"first": -1.0, "live": -1.0}
    row = whole.get("first") or whole["probe"]
    found |= {name: row[name] for name in ("predicted_bytes", "measured_bytes", "predicted_s", "step_s")}
    found["first"] = row["predicted_bytes"] / row["measured_bytes"] - 1
    found["live"] = (row["live_bytes"] + told["beside_bytes"]) / max(1, row["allocated_bytes"]) - 1
    if len(whole) == len(SHARES):
        probe, beside = whole["probe"], told["beside_bytes"]  # which is served by the allocator, too
        ratio = probe["reserved_bytes"] / (probe["reserve_bytes"] + beside)  # as plans correct themselves
        corrected = ratio * (row["reserve_bytes"] + beside) + probe["outside_bytes"]
        found["probed"] = corrected / row["measured_bytes"] - 1
        found["probed_s"] = row["predicted_s"] * whole["probe"]["step_s"] / whole["probe"]["predicted_s"]
    return found


PART = Part(
    "memory",
    "reserved memory of every family of the zoo and every recipe, predicted and measured",
    0.35,
    run,
    figures,
    needs=("pytest", "h5py"),
)
