"""Steps a second against the settings of the five guides (shared/seeds): of a training, and of each recipe's step.

- A training of the interface model as planned; then with the cache emptied after every micro-batch, under the
  allocator's settings of the guides. They take turns; ratios are of neighbours, without the first epoch.
- A step of each recipe: cut as its guide cuts it, the cache emptied after each micro-batch; and cut as it is planned.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.gpu_parts.cards import described, opened, target_for
from benchmarks.gpu_parts.day import REHEARSED_AT_ONCE, Asking, Cases, Part
from benchmarks.gpu_parts.memory import RECIPES, model_of
from benchmarks.gpu_parts.training import CASE_S, PLAN_S, Ground
from pipeline.protocol import ITEMS

MAX_SPLIT = "max_split_size_mb:128"
GUIDES: dict[str, dict[str, Any]] = {
    "planned": {"allocator": None, "every": None},
    "expandable_and_max_split": {"allocator": f"expandable_segments:True,{MAX_SPLIT}", "every": 1},
    "max_split": {"allocator": MAX_SPLIT, "every": 1},
}
# Of each recipe: items at once and how often in a row, as its guide has it (shared by its GPUs where it has several).
CUTS = {
    "complex_docking": (8, 3),
    "rna_ligand": (2, 4),
    "spectra_finetune": (1, 2),
    "denovo_recursive": (48, 2),
    "contrastive_pair": (16, 8),
}
PACED_STEPS, PACED_S = 12, 30.0


# ---- one case, in a process of its own ----


def cut(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return in how few micro-batches a recipe's step fits the card, as it is planned."""
    from pipeline.memory.planning.memory_plan import CardSpec
    from pipeline.memory.planning.step_estimates import reserve

    model, whole = model_of(case), case["items"]
    choice = model.choice(case["precision"])
    oracle = model.work.oracle(model.sizes, target_for(case["about"]), padded=model.padded)
    budget = CardSpec.of(described(case["about"]), 1).budget_bytes
    for count in [one for one in range(1, whole + 1) if whole % one == 0]:
        micro = oracle.micro(choice, of_items(model, whole // count))
        standing = oracle.standing(choice)
        held = reserve(standing, [[micro] * min(2, count)] * 2)
        if held.bytes <= budget or count == whole:
            return {"micro": whole // count, "accumulation": count, "allocator": held.settings}
    raise AssertionError(whole)


def of_items(model: Any, items: int) -> dict[str, int]:
    """Return the sizes of a micro-batch of so many typical items."""
    return {ITEMS: items} | {
        name: size * (1 if model.padded else items) for name, size in model.sizes.items() if name != ITEMS
    }


def paced(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the seconds of a recipe's step, cut in one way."""
    import torch

    from pipeline.memory.runtime.meters import Habits, Upkeep

    torch.manual_seed(0)
    model, took = model_of(case), list[float]()
    batch = model.work.example(of_items(model, case["micro"]))
    upkeep = Upkeep(Habits(empty_cache_every=case["every"]), case["device"])
    upkeep.begin()
    with opened(case["device"], case["allocator"] if case["device"] == "cpu" and not case["every"] else "") as card:
        step = card.step(model.work, model.choice(case["precision"]))
        while len(took) < 3 or (len(took) < PACED_STEPS and sum(took) < PACED_S and not case["about"]["rehearsal"]):
            start = time.perf_counter()
            step.run(Emptied([batch] * case["accumulation"], upkeep))
            card.wait()
            took.append(time.perf_counter() - start)
        found = card.read()
        step = None
    return {"step_s": statistics.median(took[1:]), "reserved_bytes": found["reserved_bytes"]}


class Emptied(Sequence[Any]):
    """Micro-batches between which the cache is emptied, where the habits say so."""

    def __init__(self, batches: Sequence[Any], upkeep: Any) -> None:
        self._batches, self._upkeep = batches, upkeep

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, place: Any) -> Any:
        self._upkeep.after_micro_batch()
        return self._batches[place]


# ---- the part ----


def run_speed(asking: Asking) -> None:
    """Let our settings and the guides' take turns, in a training and in the steps of each recipe."""
    ground = Ground(asking)
    rounds = range(1, ground.size["rounds"] + 1)
    is_known = all(asking.known(f"round {number} {name}") for number in rounds for name in GUIDES)
    if not is_known and "error" not in ground.plan():
        for number, (name, one) in itertools.product(rounds, GUIDES.items()):
            how = {"allocator": one["allocator"], "every": one["every"], "epochs": ground.size["timed"]}
            ground.train(f"round {number} {name}", **how)
    asking.side_by_side((partial(_pace, asking, recipe) for recipe in RECIPES), REHEARSED_AT_ONCE)  # of two, one plans


def _pace(asking: Asking, recipe: str) -> None:
    """Time a recipe's step as its guide cuts it, and as it is planned."""
    micro, accumulation = CUTS[recipe]
    if asking.rehearsal:
        micro, accumulation = (4, 2) if recipe == "contrastive_pair" else (min(2, micro), 2)  # its loss is of 8
    case = {"model": recipe, "precision": "fp32" if recipe == "spectra_finetune" else "bf16"}
    if all(asking.known(f"{recipe} {way}") for way in ("planned", "guide")):
        return
    own = asking.ask(f"{recipe} cut", f"{__name__}:cut", PLAN_S, on_card=False, items=micro * accumulation, **case)
    if "error" not in own:
        cuts = {name: own[name] for name in ("micro", "accumulation", "allocator")}
        asking.ask(f"{recipe} planned", f"{__name__}:paced", CASE_S, every=None, **cuts, **case)
    cuts = {"micro": micro, "accumulation": accumulation, "allocator": MAX_SPLIT}
    asking.ask(f"{recipe} guide", f"{__name__}:paced", CASE_S, every=1, **cuts, **case)


def speed(cases: Cases) -> dict[str, Any]:
    """Return steps a second, and how many times those of each of the guides' settings ours are."""
    numbers = sorted({label.split()[1] for label in cases if label.startswith("round ")})
    rounds = [{name: cases.get(f"round {number} {name}") for name in GUIDES} for number in numbers]
    whole: list[dict[str, float]] = [
        {name: row["steps_per_s"] for name, row in one.items() if row} for one in rounds if all(one.values())
    ]
    steps = {
        recipe: cases[f"{recipe} guide"]["step_s"] / cases[f"{recipe} planned"]["step_s"]
        for recipe in RECIPES
        if f"{recipe} guide" in cases and f"{recipe} planned" in cases
    }
    found: dict[str, Any] = {"recipes": steps}
    if whole:
        found["steps_per_s"] = {name: statistics.median(one[name] for one in whole) for name in GUIDES}
        found["ratio"] = {
            name: statistics.median(one["planned"] / one[name] for one in whole) for name in list(GUIDES)[1:]
        }
    return found


PART = Part(
    "speed",
    "steps a second against the guides' settings",
    0.15,
    run_speed,
    speed,
    needs=("pytest", "h5py", "e3nn"),
)
