"""A plan for a transformer of 650M parameters, in a process of its own: how long, and how much memory.

    python -m benchmarks.planning.large

is that process; it prints what came of it as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REACH_S, REACH_BYTES = 60.0, 2 << 30
MODEL = {"depth": 33, "width": 1280, "heads": 20}  # ESM-2 650M
ITEMS, BATCH, CARD = 10_000, 64, "a100-80gb"


def measured(*_: object) -> list[dict[str, Any]]:
    """Return every figure, after printing them."""
    start = time.perf_counter()
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.planning.large"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    row = {
        "member": "esm2-650m",
        "wall_s": round(time.perf_counter() - start, 1),
        **json.loads(done.stdout.splitlines()[-1]),
    }
    print(
        f"{row['parameters'] / 1e6:.0f}M parameters, {ITEMS:,} items: {row['wall_s']:.1f} s to the plan (to reach "
        f"{REACH_S:.0f}), {row['rss_bytes'] / 2**30:.2f} GiB (to reach {REACH_BYTES / 2**30:.0f}), "
        f"{row['questions']} questions, {len(row['buckets'])} buckets"
    )
    for trial in row["trials"]:
        print(f"  {trial['remedy']:60}{trial['verdict']:14}{trial['why']}")
    return [row]


def told(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the figures come to."""
    (row,) = rows
    return {
        "what": f"plan of a {row['parameters'] / 1e6:.0f}M-parameter transformer ({MODEL}) for {CARD}, {ITEMS:,} "
        f"padded lengths, effective batch {BATCH}; precision, checkpointing and offload left to the planner",
        "reach": f"at most {REACH_S:.0f} s and {REACH_BYTES:,} bytes",
        **{name: row[name] for name in ("wall_s", "cpu_s", "rss_bytes", "questions", "used", "chosen")},
        "reached": row["wall_s"] <= REACH_S and row["rss_bytes"] <= REACH_BYTES,
    }


def plan_it() -> dict[str, Any]:
    """Plan; return what came of it, and what this process took."""
    import resource

    import numpy as np

    start = time.perf_counter()
    from pipeline.config.schema_train import TrainSection
    from pipeline.memory.hardware.gpus import device
    from pipeline.memory.planning.memory_plan import CardSpec
    from pipeline.runs.model.training_work import Work, request_of, target_of
    from pipeline.training.step.optimizers import StepSettings
    from tests.testkit.remembering_plan import plan_with_oracle
    from tests.zoo.esm2 import Esm2
    from tests.zoo.spread import lengths

    train = TrainSection(effective_batch=BATCH, batching="padded", precision="auto")
    card = device(CARD)
    work = Work(Esm2(**MODEL), StepSettings(clip=1.0))
    sizes = lengths(ITEMS, np.random.default_rng(0), median=300, most=1022)
    made, oracle = plan_with_oracle(
        work, train, sizes, [CardSpec.of(card, 1)], target_of(card.capability), request_of(train, 1)
    )
    return {
        "plan_s": round(time.perf_counter() - start, 1),
        "cpu_s": round(time.process_time(), 1),  # of all threads; what else the machine does is not in it
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "parameters": oracle.standing(made.choice).parameters,
        "questions": made.questions,
        "chosen": list(made.remedies),
        "precision": made.choice.precision,
        "items_median": made.items_median,
        "total_bytes": made.total.value,
        "limit_bytes": made.limit_bytes,
        "used": round(made.used, 3),
        "filled": made.filled.value,
        "every_order": made.every_order,
        "trials": [{"remedy": one.remedy, "verdict": one.verdict.value, "why": one.why} for one in made.trials],
        "notes": list(made.notes),
        "buckets": [
            {"sizes": dict(one.sizes), "live_bytes": one.live.value, "micros": one.micros} for one in made.buckets
        ],
    }


if __name__ == "__main__":
    print(json.dumps(plan_it()))
