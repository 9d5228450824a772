"""The planner against the truth: peaks of real steps, epochs under memory limits, a plan for a large model.

    python benchmarks/planner.py [--only accuracy,limits,blocks,large] [--members NAMES] [--save]

- accuracy: the live peak of three steps, planned as for users (real steps confirm the traces), and counted by a CPU
  allocator that knows every byte, for each model of tests/zoo at its sizes, with one and two micro-batches (6 minutes
  on a quiet core);
- limits: epochs of items of various sizes, planned for five limits each, and trained on a device that refuses the first
  byte above the limit (15 minutes);
- blocks: epochs of three recipes under a limit that no item fits below without checkpointing, with as few blocks
  checkpointed as the planner takes, and with all of them, in turn (10 minutes);
- large: a plan for a transformer of 650M parameters and 10,000 lengths, in a process of its own (30 seconds).

It needs gcc, or another C compiler, for the allocator.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # some kernels take memory per thread; torch reads it when it starts

from benchmarks.measure import Row, fail, itself, options, publish, run, say

if TYPE_CHECKING:
    from tests.zoo import Member

ACCURACY, USED, LARGE_S, LARGE_GB = 0.01, 0.8, 60.0, 2.0
STEPS, ITEMS, LEVELS = 3, 128, 5
FEWER_ITEMS = {"equivariant": 48}  # whose epoch takes long
RECIPES, ROUNDS = ("esm2_finetune", "docking", "interface"), 5
BETWEEN = 0.75  # of the way from what the largest item takes with all blocks checkpointed to what it takes with none
LADDER = "data_dependent"  # cannot be traced: planned from small real steps
LARGE = {"depth": 33, "width": 1280, "heads": 20}  # ESM-2 650M
LENGTHS, BATCH, CARD = 10_000, 64, "a100-80gb"


# ---- live peaks ----


def accuracy(members: Sequence[Member]) -> list[Row]:
    """Compare planned and real peaks of each model."""
    errors = {member.name: worst_error(member) for member in members if member.name != LADDER}
    worst = max(errors, key=errors.__getitem__)
    return [
        Row("planner_accuracy", f"planned live peak of {len(errors)} model families, worst error",
            "a CPU allocator that counts bytes, real steps", f"≤ {ACCURACY:.0%}", f"{errors[worst]:.2%}",
            "planner.py --only accuracy", "" if errors[worst] <= ACCURACY else f"It is that of {worst}."),
    ]  # fmt: skip


def worst_error(member: Member, choice: Any = None) -> float:
    """Return the largest error of a model at its sizes, under a choice or its own settings."""
    from pipeline.memory.footprint import MemoryChoice
    from pipeline.memory.planning.budget_search import ChoiceMemory
    from pipeline.planning.training_work import target_of
    from pipeline.protocol import ITEMS as COUNT
    from tests.memory.planning.planned import work_of

    work = work_of(member)
    choice = choice or MemoryChoice(checkpointing=member.settings.get("checkpointing", 0))
    least, errors = min(member.sizes, key=lambda sizes: sizes[COUNT]), []
    folder = tempfile.TemporaryDirectory()  # with a folder for its traces, as users have it, real steps confirm them
    oracle = work.oracle(least, target_of(None), padded=member.padded, kept=Path(folder.name))
    for sizes in member.sizes:
        for accumulate in (False, True):
            memory = ChoiceMemory(oracle, choice, tuple(sizes))
            planned = memory.peak_bytes(tuple(sizes.values()), accumulate=accumulate)
            real = real_peak(work, choice, sizes, 1 + accumulate)
            errors.append(abs(planned / real - 1))
            say(f"  {member.name:30}{1 + accumulate:3}{planned:15,}{real:15,}{planned / real:10.5f}")
    return max(errors)


def real_peak(work: Any, choice: Any, sizes: Mapping[str, int], micros: int) -> int:
    """Train some steps of such micro-batches; return the most that was live, from the making of the model on."""
    import torch

    from tests.testkit.limited.device import LimitedDevice

    torch.manual_seed(0)
    gc.collect()
    with LimitedDevice() as device:
        step = work.step(choice)
        for _ in range(STEPS):
            for _ in range(micros):
                step.accumulate(work.example(sizes))
            step.update()
        del step
    return device.peak_bytes


# ---- epochs under limits ----


def limits(members: Sequence[Member]) -> list[Row]:
    """Train epochs as planned for several limits."""
    rows = [row for member in members if member.name != LADDER for row in epochs_of(member)]
    ooms, used = sum(row["ooms"] for row in rows), sum(row["used"] >= USED for row in rows)
    why = "A plan pads as much as makes an epoch fastest, and may leave memory free."
    return [
        Row("planner_limits", f"planned epochs under {len(rows)} memory limits: out of memory; used ≥ {USED:.0%} of it",
            "a device that refuses the first byte above the limit", f"0; {len(rows)} of {len(rows)}",
            f"{ooms}; {used} of {len(rows)}", "planner.py --only limits",
            "" if not ooms and used == len(rows) else why),
    ]  # fmt: skip


def epochs_of(member: Member) -> list[dict[str, Any]]:
    """Plan and train one model under its limits."""
    from tests.memory.planning.planned import Ground, epoch, sampler_under
    from tests.memory.planning.planned import limits as limits_of

    ground, rows = Ground.of(member, FEWER_ITEMS.get(member.name, ITEMS)), []
    for limit in limits_of(ground, LEVELS):
        plan = ground.planned(limit)
        trained = epoch(ground, plan.choice, sampler_under(plan, ground.sizes), limit)
        row = {"ooms": trained.ooms, "used": trained.peak_bytes / limit}
        say(f"  {member.name:26}{limit:14,}{trained.ooms:4}{row['used']:8.1%}  {plan.cuts.limit.value}")
        rows.append(row)
    return rows


# ---- checkpointing some blocks ----


def blocks(members: Sequence[Member]) -> list[Row]:
    """Compare epochs that checkpoint as few blocks as fit with epochs that checkpoint all."""
    rows = [some_or_all(member) for member in members if member.name in RECIPES]
    ooms, error = sum(row["ooms"] for row in rows), max(row["error"] for row in rows)
    times = ", ".join(f"{row['times']:.2f} ({row['blocks']}, {row['name']})" for row in rows)
    slower = [row["name"] for row in rows if row["times"] >= 1]
    return [
        Row("planner_blocks", "checkpointing as few blocks as fit: epoch time; worst error of the peak; out of memory",
            "checkpointing all blocks, under the same limit", f"< 1 each; ≤ {ACCURACY:.0%}; 0",
            f"{times}; {error:.2%}; {ooms}", "planner.py --only blocks", f"Not faster: {slower}." if slower else ""),
    ]  # fmt: skip


def some_or_all(member: Member) -> dict[str, Any]:
    """Train a model in turn under both plans for one limit."""
    from pipeline.memory.footprint import MemoryChoice
    from tests.memory.planning.planned import Ground, epoch, request_for, sampler_under

    ground = Ground.of(member, ITEMS // 2)
    count = ground.work.blocks
    least, most = (ground.alone(MemoryChoice(checkpointing=blocks)) for blocks in (count, 0))
    limit = int((least + BETWEEN * (most - least)) * 1.03)
    pinned = request_for(member, count, offload=False), request_for(member, count, offload=False, checkpointing=count)
    plans = [ground.planned(limit, request) for request in pinned]
    seconds: list[list[float]] = [[], []]
    ooms = 0
    for _ in range(ROUNDS):
        for plan, taken in zip(plans, seconds, strict=True):
            begun = time.process_time()
            ooms += epoch(ground, plan.choice, sampler_under(plan, ground.sizes), limit).ooms
            taken.append(time.process_time() - begun)
    some, every = map(median, seconds)
    say(f"  {member.name:26}{limit:14,}{ooms:4}  {some:.2f} s, {every:.2f} s; load {os.getloadavg()[0]:.1f}")
    return {
        "name": member.name, "blocks": f"{plans[0].choice.checkpointing} of {count}", "times": some / every,
        "ooms": ooms, "error": worst_error(member, plans[0].choice),
    }  # fmt: skip


# ---- a large model ----


def large(_: Sequence[Member]) -> list[Row]:
    """Plan a large model in a process of its own, with all the machine's threads."""
    cost = run(itself(__file__, "--part", "plan"), env={"OMP_NUM_THREADS": str(os.cpu_count())})
    parameters, peak_bytes = map(int, cost.out.splitlines()[-1].split())
    reached = cost.wall_s <= LARGE_S and peak_bytes <= LARGE_GB * 1e9
    return [
        Row("planner_large", f"planning a {parameters / 1e6:.0f}M transformer, {LENGTHS:,} lengths; memory of that", "",
            f"≤ {LARGE_S:g} s; ≤ {LARGE_GB:g} GB", f"{cost.wall_s:.0f} s, {cost.cpu_s:.0f} s of it CPU; "
            f"{peak_bytes / 1e9:.2f} GB", "planner.py --only large", "" if reached else "The machine was busy."),
    ]  # fmt: skip


def plan_large() -> None:
    """Plan; print the parameters, and the memory that this process took."""
    import resource

    import numpy as np

    from pipeline.config.schema_train import TrainSection
    from pipeline.memory.hardware.gpus import device
    from pipeline.memory.planning.memory_plan import CardSpec
    from pipeline.memory.planning.planner import plan_memory
    from pipeline.planning.training_work import Work, data_of, least_of, target_of
    from pipeline.training.step.optimizers import StepSettings
    from tests.zoo.esm2 import Esm2
    from tests.zoo.spread import lengths

    train = TrainSection(effective_batch=BATCH, batching="padded", precision="auto")
    card, work = device(CARD), Work(Esm2(**LARGE), StepSettings(clip=1.0))
    sizes = lengths(LENGTHS, np.random.default_rng(0), median=300, most=1022)
    target, request = target_of(card.capability), work.request(train, 1)
    oracle = work.oracle(least_of(sizes), target, padded=True)
    plan = plan_memory(oracle, data_of(sizes, request, padded=True), request, [CardSpec.of(card, 1)])
    print(oracle.standing(plan.choice).parameters, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)


PARTS: dict[str, Callable[[Sequence[Member]], list[Row]]] = {
    "accuracy": accuracy,
    "limits": limits,
    "blocks": blocks,
    "large": large,
}


def members_of(typed: argparse.Namespace) -> Sequence[Member]:
    """Return the models that were asked for; stop where their bytes cannot be counted."""
    import torch

    from tests.testkit.limited.device import why_not
    from tests.zoo import ZOO

    if reason := why_not():
        fail(reason)
    torch.set_num_threads(1)
    return [ZOO[name] for name in typed.members.split(",")] if typed.members else list(ZOO.values())


def main() -> int:
    """Measure the parts."""
    typed = options(
        str(__doc__), 1,
        only={"default": ",".join(PARTS), "help": "parts, separated by commas (default: all)"},
        members={"default": "", "help": "models of tests/zoo, separated by commas (default: all)"},
    )  # fmt: skip
    if typed.part:
        plan_large()
        return 0
    begun, rows, names = time.perf_counter(), list[Row](), typed.only.split(",")
    if "large" in names:  # first: what it takes is not to count what this process holds
        rows += large(())
    members = members_of(typed) if set(names) - {"large"} else ()
    rows += [row for name in names if name != "large" for row in PARTS[name](members)]
    say(f"{time.perf_counter() - begun:.0f} s")
    return publish(rows, save=typed.save)


if __name__ == "__main__":
    sys.exit(main())
