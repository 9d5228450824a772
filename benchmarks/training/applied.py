"""Evaluating and predicting a split, wall and processor time, against the forward passes alone on the same batches.

    python benchmarks/training/applied.py [--complexes N] [--rounds N] [--out FILE]

The model (`pipeline.tasks.interface`) is trained a little on made complexes. Then the two verbs' work, from loading
the checkpoint to the figures or the tables, and its forward passes take turns in one process, on one thread; a forward
pass is `Step.evaluate` of a batch that is in memory, collated. Ratios are of neighbours.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.circumstances import write  # noqa: E402 - the project is found only now
from benchmarks.train_parts import ours as parts  # noqa: E402
from benchmarks.training.loader import generate  # noqa: E402

REACH = {"evaluate": 1.15}


class Bench:
    """A trained model, and the complexes that it is applied to."""

    def __init__(self, scratch: Path, complexes: int) -> None:
        from pipeline.training.prepared import ModelFolder, Prepared

        self.root, self.model = scratch / "cache", ModelFolder(scratch / "model")
        self.key = generate(self.root, complexes, complexes)
        planned = parts.plan(self.root, self.key, 1)
        self.model.path.mkdir()
        self.train, self.table = parts.settings(), parts.table_of(self.root, self.key)
        self.work, self.prepared = parts.work_of(self.train), Prepared.from_json(planned)
        self.items = parts.items_of(self.table, self.work, self.prepared)
        self._train_once()
        self._count = 0

    def job(self, *, with_loss: bool) -> Any:
        """Return what a rank of the verbs is given, with outputs in a folder of their own."""
        import numpy as np

        from pipeline.memory.footprint import MemoryChoice
        from pipeline.records import TaskContext
        from pipeline.training.checkpoints.chosen_checkpoint import choose_checkpoint
        from pipeline.training.evaluating.apply_model import ApplyJob
        from pipeline.training.items.item_source import CachedGraphs
        from pipeline.training.items.item_table import table_digest
        from pipeline.training.items.residue_embeddings import Embeddings
        from pipeline.training.ranks.rank_protocol import SingleRank

        self._count += 1
        stores, made = parts.cache_of(self.root), self.root.parent / f"made-{self._count}"
        return ApplyJob(
            train=self.train,
            prepared=self.prepared,
            table=self.table,
            cost_N=self.items.cost_N,
            made=table_digest(self.table),
            data="made",
            make_step=lambda: self.work.step(MemoryChoice(precision="fp32"), device="cpu"),
            source=lambda items: CachedGraphs(stores.kind("graph"), items),
            embeddings=lambda: Embeddings(stores.kind("embed"), parts.ENCODER),
            choose=lambda without: choose_checkpoint(self.model.checkpoints, "best", without),
            parts=lambda _: made / ".parts",
            known_N=np.zeros(0, np.int64),
            ranks=SingleRank(),
            tell=TaskContext(lambda *_: None),
            say=lambda _: None,
            with_loss=with_loss,
        )

    def forward(self) -> Callable[[], Any]:
        """Return what runs the forward passes alone: of the batches that evaluating has, in memory and collated."""
        import numpy as np

        from pipeline.training.checkpoints.trained_weights import load_checkpoint
        from pipeline.training.evaluating.apply_model import _loader

        job = self.job(with_loss=True)
        step = job.make_step()
        load_checkpoint(step, job.ranks, job.choose, job.say)
        batches = list(_loader(job, np.arange(len(self.table)), step))
        return lambda: [step.evaluate(batch) for batch in batches]

    def evaluate(self) -> None:
        """Do the work of `pipeline submit --stage evaluate`."""
        from pipeline.stages import apply

        job = self.job(with_loss=True)
        assert sum(1 for _ in apply.evaluate(job, job.parts(None).parent, None)) == len(self.table)

    def predict(self) -> None:
        """Do the work of `pipeline submit --stage predict`."""
        from pipeline.stages import apply

        job = self.job(with_loss=False)
        assert sum(1 for _ in apply.predict(job, None)) == len(self.table)

    def _train_once(self) -> None:
        parts.ours(self.root, self.key, replace(self.prepared).to_json(), "0/1", self.model.path)


def timed(run: Callable[[], Any]) -> dict[str, float]:
    """Return the wall and the processor time of something."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def measure(scratch: Path, complexes: int, rounds: int) -> dict[str, Any]:
    """Make everything, and measure both verbs and the forward passes in turns."""
    bench = Bench(scratch, complexes)
    ways = {"forward": bench.forward(), "evaluate": bench.evaluate, "predict": bench.predict}
    for run in ways.values():
        run()  # it warms the cache
    turns = [{name: timed(run) for name, run in ways.items()} for _ in range(rounds)]
    return {
        "what": "evaluating and predicting made complexes with the interface model, one thread",
        "complexes": complexes,
        "options": parts.OPTIONS,
        "rounds": rounds,
        **{
            name: {what: round(statistics.median(turn[name][what] for turn in turns), 4) for what in WHAT}
            for name in ways
        },
        "to_forward": {name: {what: spread(turns, name, what) for what in WHAT} for name in ("evaluate", "predict")},
        "reach": REACH,
    }


WHAT = ("wall_s", "cpu_s")


def spread(turns: list[dict[str, dict[str, float]]], name: str, what: str) -> dict[str, float]:
    """Return how many times as long as the forward passes something takes: the median and the lowest."""
    found = [turn[name][what] / turn["forward"][what] for turn in turns]
    return {"median": round(statistics.median(found), 3), "lowest": round(min(found), 3)}


def main() -> int:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--complexes", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    scratch = Path(tempfile.mkdtemp(prefix="applied-"))
    try:
        result = measure(scratch, options.complexes, options.rounds)
    finally:
        shutil.rmtree(scratch)
    print(json.dumps(result, indent=2))
    write(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
