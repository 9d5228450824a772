"""Long trainings by the product's own loop and loader on a device of limited memory: what is live between steps."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.recipes_parts.bench import Bench, Entries
from benchmarks.recipes_parts.limited import planned
from pipeline.memory.planning.memory_plan import MemoryPlan
from pipeline.records import TaskContext
from pipeline.runs.model.training_work import sizes_of
from pipeline.stages.train import Items, Job, close, trainer_of
from pipeline.training.items.item_source import ReaderItems
from pipeline.training.items.item_table import ItemTable
from pipeline.training.loop.metrics_log import read_epochs
from pipeline.training.loop.trainer import Trainer
from pipeline.training.prepared import ModelFolder, Prepared, likeness, stretch_of
from pipeline.training.ranks.rank_protocol import SingleRank
from tests.testkit.limited.device import LimitedDevice

SMALL = ["train.validation.limit=null", "train.checkpoints.asynchronous=false", "train.log_every=1"]


@dataclass(frozen=True)
class Case:
    """A recipe with a small model, and how long it is trained."""

    epochs: int
    items: int
    batch: int
    limit_bytes: int
    sets: Sequence[str]  # options of the task


CASES = {
    "spectra_finetune": Case(
        60, 30, 6, 6 << 20, ["d_fourier=60", "d_peak=4", "fourier_width=32", "finest=0.01", "layers=5", "heads=4"]
    ),
    "contrastive_pair": Case(
        20,
        80,
        32,
        16 << 20,
        [
            *("width=64", "out=64", "layers=2", "heads=1", "vocabulary=1000"),
            *("image_size=224", "patch=32", "image_width=64", "image_layers=2"),
        ],
    ),
}
RECIPES = tuple(CASES)


def measured(recipe: str) -> list[dict[str, Any]]:
    """Return the figures of a training."""
    case = CASES[recipe]
    sets = [*SMALL, *(f"train.options.{one}" for one in case.sets)]
    sets += [f"train.epochs={case.epochs}", f"train.effective_batch={case.batch}"]
    bench = Bench.of(recipe, sets, case.items)
    made = planned(bench, bench.oracle(), case.limit_bytes)
    folder = Path(tempfile.mkdtemp(prefix="epochs-"))
    trainer, live = trained(bench, made, case, folder)
    return [_row(case, made, trainer, live, folder)]


def told(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the figures come to."""
    return {
        "what": "bytes that are live on the limited device at every step boundary, by the step's place in its epoch, "
        "from the second epoch on; trained by stages.train with its loader, reader, validation and checkpoints; "
        "checkpoints are written at once, for in the background they are copies in memory that a card would not hold",
        "reach": "each place has one value in all epochs but the first",
        "flat": {row["recipe"]: row["is_flat"] for row in rows},
    }


def trained(bench: Bench, made: MemoryPlan, case: Case, folder: Path) -> tuple[Trainer, dict[int, list[int]]]:
    """Train on the device; return what was live after each step, by epoch."""
    live: dict[int, list[int]] = {}
    trainer = trainer_of(job(bench, made, case, folder))
    for loader in trainer.loaders * trainer.train.slots:  # every slot of their rings, which are in the host's memory,
        for _ in loader:  # has its own before the device counts
            pass
    gc.collect()
    model_bytes = sum(one.nbytes for one in (*trainer.step.model.parameters(), *trainer.step.model.buffers()))
    with LimitedDevice(case.limit_bytes - model_bytes) as device:
        try:
            for done in trainer.run():
                if done:
                    live.setdefault(trainer.standing.epoch, []).append(device.live_bytes)
        finally:
            close(trainer)
        trainer.refused, trainer.peak_bytes = device.refused, device.peak_bytes + model_bytes  # type: ignore[attr-defined]
    return trainer, live


def job(bench: Bench, made: MemoryPlan, case: Case, folder: Path) -> Job:
    """Return what the stage is given."""
    assert isinstance(bench.data, Entries)
    data, train = bench.data, bench.config.train
    stretch = stretch_of("all", case.epochs, made)

    def items(split: str) -> Items:
        table = data.table.of_split(split)
        sizes = sizes_of(bench.work.task, table.sizes)
        return Items(table, stretch.cost(sizes), likeness(sizes))

    def source(table: ItemTable) -> Any:
        return ReaderItems(data.source.reader, table)

    path = folder / "model"
    path.mkdir(parents=True)
    return Job(
        train=train,
        prepared=_prepared(bench, made, stretch),
        folder=ModelFolder(path),
        make_step=lambda begin: bench.work.begun(made.choice, device="cpu", begin=begin),
        source=source,
        embeddings=lambda: None,
        stretches=[(stretch, items("train"))],
        validation=items("val"),
        ranks=SingleRank(),
        tell=TaskContext(refuse=lambda *_: None),
        say=lambda _line: None,
        task=bench.work.task,
    )


def _prepared(bench: Bench, made: MemoryPlan, stretch: Any) -> Prepared:
    return Prepared(
        name=bench.name,
        recipe={},
        table="",
        precision=made.choice.precision,
        checkpointing=made.choice.checkpointing,
        offload=made.choice.offload,
        sharded=False,
        stretches=(stretch,),
        limit_bytes=made.limit_bytes,
        margin=0.02,
        ranks=1,
        cpus=1,
        mem_bytes=1 << 30,
        mem_why="",
        step_s=0.1,
        allocator="",
    )


def _row(case: Case, made: MemoryPlan, trainer: Trainer, live: Mapping[int, list[int]], folder: Path) -> dict[str, Any]:
    places = list(zip(*[live[epoch] for epoch in sorted(live) if epoch], strict=True))
    values = [sorted(set(of_place)) for of_place in places]
    epochs = read_epochs(folder / "model")
    row = {
        "sets": list(case.sets),
        "batch": case.batch,
        "epochs": len(live),
        "steps": trainer.done,
        "micros_per_epoch": [epochs[0].micro_batches, epochs[-1].micro_batches],
        "ooms": sum(one.ooms for one in epochs),
        "limit": case.limit_bytes,
        "predicted": made.live.value,
        "remedies": list(made.remedies),
        "precision": made.choice.precision,
        "peak": trainer.peak_bytes,  # type: ignore[attr-defined]
        "refused": trainer.refused,  # type: ignore[attr-defined]
        "first_epoch": live[0],
        "live_by_place": values,
        "is_flat": all(len(of_place) == 1 for of_place in values),
    }
    print(row, flush=True)
    return row
