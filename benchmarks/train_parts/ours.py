"""Our side: planned as before a submission, and trained by the loop that a job runs."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.training.loader import ENCODER

TASK = "pipeline.tasks.interface:Interface"
OPTIONS = {"embedding_dim": 1280, "width": 16, "layers": 2, "pair_width": 4, "pair_layers": 0}
BATCH = 8
EPOCHS = 3  # of which the first is not timed
LIMIT_BYTES = 4 << 30  # of a process
SEED = 0


def settings(micro_batch: int | None = None) -> Any:
    """Return what a configuration would say of the training."""
    from pipeline.config.schema_train import TrainSection, ValidationSection

    return TrainSection(
        task=TASK,
        options={**OPTIONS},
        effective_batch=BATCH,
        epochs=EPOCHS,
        split=None,
        validation=ValidationSection(split=None),
        micro_batch=micro_batch or "auto",
    )


def work_of(train: Any) -> Any:
    """Return the task as it is trained."""
    from pipeline.project.run_code import load_task
    from pipeline.runs.model.training_work import Work, step_settings

    return Work(load_task(train.task, train.options), step_settings(train, "cpu"), "cpu")


def table_of(root: Path, key: bytes) -> Any:
    from pipeline.store.cache_folder import CacheFolder
    from pipeline.training.items.item_table import ItemTable

    return ItemTable.read(CacheFolder(root).kind("sets"), key)


def plan(root: Path, key: bytes, ranks: int, micro_batch: int | None = None) -> dict[str, Any]:
    """Plan the training, as it is done before a submission."""
    from pipeline.memory.footprint import MemoryChoice
    from pipeline.runs.model.training_work import host_card, request_of, sizes_of, target_of
    from tests.testkit.remembering_plan import plan_with_oracle

    train = settings(micro_batch)
    work = work_of(train)
    sizes = sizes_of(work.task, table_of(root, key).sizes)
    made, _ = plan_with_oracle(work, train, sizes, [host_card(LIMIT_BYTES)], target_of(None), request_of(train, ranks))
    assert made.choice == MemoryChoice(precision="fp32"), made.choice
    return prepared_of(made, key.hex(), EPOCHS, ranks)


def prepared_of(made: Any, key: str, epochs: int, ranks: int) -> dict[str, Any]:
    """Return what a submission makes of a plan."""
    from pipeline.training.prepared import Prepared, stretch_of

    return Prepared(
        name=f"bench-{ranks}",
        recipe={},
        table=key,
        precision=made.choice.precision,
        checkpointing=made.choice.checkpointing,
        offload=made.choice.offload,
        sharded=False,
        stretches=(stretch_of("all items", epochs, made, kept=made.accumulation_most),),
        limit_bytes=made.limit_bytes,
        margin=made.margin.factor - 1,
        ranks=ranks,
        cpus=1,
        mem_bytes=ranks * LIMIT_BYTES,
        mem_why="",
        allocator=made.allocator.settings,
        step_s=made.step_s.value,
    ).to_json()


def ours(
    root: Path, key: bytes, prepared: dict[str, Any], part: str, folder: Path, micro_batch: int | None = None
) -> dict[str, Any]:
    """Train, as one rank of those that there are; return what the first of them measured."""
    from pipeline.memory.footprint import MemoryChoice
    from pipeline.records import RankPlace, TaskContext
    from pipeline.stages.train import Job, train
    from pipeline.training.items.item_source import CachedGraphs
    from pipeline.training.items.residue_embeddings import Embeddings
    from pipeline.training.loop.metrics_log import read_epochs
    from pipeline.training.prepared import ModelFolder, Prepared
    from pipeline.training.ranks.process_group import join_process_group

    table, planned = table_of(root, key), Prepared.from_json(prepared)
    train_section = settings(micro_batch)
    work = work_of(train_section)
    reads: list[CountedReads] = []

    def source(items: Any) -> CountedReads:
        reads.append(CountedReads(CachedGraphs(stores.kind("graph"), items)))
        return reads[-1]

    stores = cache_of(root)
    made = ModelFolder(folder)
    made.path.mkdir(parents=True, exist_ok=True)
    tell = TaskContext(lambda *_: None)
    clock = Clock()
    with closing(join_process_group(RankPlace.told(part, folder.name), folder)) as ranks:
        job = Job(
            train=train_section,
            prepared=planned,
            folder=made,
            make_step=lambda begin: work.begun(MemoryChoice(precision="fp32"), device="cpu", begin=begin),
            source=source,
            embeddings=lambda: Embeddings(stores.kind("embed"), ENCODER),
            stretches=[(planned.stretches[0], items_of(table, work, planned))],
            validation=None,
            ranks=ranks,
            tell=tell,
            say=lambda line: print(line, file=sys.stderr),
            task=work.task,
        )
        for _ in train(job):
            clock.tick()
    if not part.startswith("0/"):
        return {}
    epochs = read_epochs(made.path)
    assert [one.items for one in epochs] == [len(table)] * EPOCHS, epochs
    assert part != "0/1" or sum(one.ahead for one in reads) == EPOCHS * len(table), reads
    return {
        **clock.figures(len(table)),
        "beside_the_model": max(beside_the_model(one.seconds) for one in epochs[1:]),
        "seconds": dict(epochs[-1].seconds),
        "items_read_again": sum(one.again for one in reads),
        "wait_share": max(one.wait_share for one in epochs[1:]),
        "micro_batches_per_step": epochs[-1].micro_batches / epochs[-1].steps,
        "loss": dict(epochs[-1].loss),
        "ooms": sum(one.ooms for one in epochs),
    }


def beside_the_model(seconds: Any) -> float:
    """Return the share of an epoch that the main thread does, or waits for, beside model, reduction and optimizer."""
    from pipeline.training.step_clock import MODEL_PHASES

    return 1 - sum(seconds.get(name, 0.0) for name in MODEL_PHASES) / sum(seconds.values())


@dataclass
class CountedReads:
    """A source of items that counts those that are read ahead, and those that the main thread reads meanwhile."""

    source: Any
    ahead: int = 0
    again: int = 0

    def read(self, numbers: Any) -> Any:
        """Read items; what is tried out before the first step does not count."""
        if threading.current_thread() is threading.main_thread():
            self.again += len(numbers) if self.ahead else 0
        else:
            self.ahead += len(numbers)
        return self.source.read(numbers)


class Clock:
    """Notes when each step of all epochs has ended."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []

    def tick(self) -> None:
        """Note a step."""
        self._marks.append((time.perf_counter(), time.process_time()))

    def figures(self, complexes: int) -> dict[str, float]:
        """Return what came after the first epoch."""
        first = -(-complexes // BATCH) - 1
        assert len(self._marks) == EPOCHS * (first + 1), len(self._marks)
        wall, cpu = (np.array(column[first:]) for column in zip(*self._marks, strict=True))
        timed = (EPOCHS - 1) * complexes
        return {
            "complexes_per_s": timed / (wall[-1] - wall[0]),
            "step_s": statistics.median(np.diff(wall).tolist()),
            "cpu_ms_per_complex": 1e3 * (cpu[-1] - cpu[0]) / timed,
        }


def cache_of(root: Path) -> Any:
    from pipeline.store.cache_folder import CacheFolder

    return CacheFolder(root)


def items_of(table: Any, work: Any, planned: Any) -> Any:
    """Return the items and what they cost under the plan."""
    from pipeline.runs.model.training_work import sizes_of
    from pipeline.stages.train import Items
    from pipeline.training.prepared import likeness

    sizes = sizes_of(work.task, table.sizes)
    return Items(table, planned.stretches[0].cost(sizes), likeness(sizes))
