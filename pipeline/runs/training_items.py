"""Which items a training is of, what each of them costs under its plan, and a few of them to try a task with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import CacheDamaged, DataError, RecordMissing, WeightsUnusable
from pipeline.runs.contract import GRAPH
from pipeline.runs.entering import inspect as inspect_entries
from pipeline.runs.entering import is_reader
from pipeline.runs.loading import rows_of, source_of
from pipeline.runs.planning import Work, sizes_of
from pipeline.runs.preparing import items_of
from pipeline.training.entries import NUMBERS
from pipeline.training.prepared import Prepared, likeness

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.runs.project import Project
    from pipeline.stages.train import Items
    from pipeline.training.dataset import Table


def trained_table(project: Project, prepared: Prepared) -> Table:
    """Return the items that are trained on."""
    table = items_of(project, prepared.table, project.config.train.split)
    if prepared.skipped:
        table = table.take(np.setdiff1d(np.arange(len(table)), np.array(prepared.skipped, np.int64)))
    return table


def tables_of(project: Project, prepared: Prepared) -> list[Table]:
    """Return all items that are read in a training."""
    looked_at = validation_items(project, prepared)
    return [trained_table(project, prepared), *([looked_at.table] if looked_at else [])]


def task_sizes(project: Project, prepared: Prepared, table: Table) -> dict[str, Any]:
    """Return the sizes of items as the task says them, cropped as planned."""
    found = sizes_of(Work.of(project.config, beside=project.beside).task, table.sizes)
    return {name: np.minimum(size_N, prepared.crop.get(name, size_N.max(initial=0))) for name, size_N in found.items()}


def steps_of(project: Project, prepared: Prepared) -> int:
    """Return how many steps a training has in all."""
    table = trained_table(project, prepared)
    sizes = task_sizes(project, prepared, table)
    batch = project.config.train.effective_batch
    return sum(-(-int(one.keeps(sizes).sum()) // batch) * one.epochs for one in prepared.stretches)


def stretch_items(table: Table, sizes: Mapping[str, Any], stretch: Any) -> Items:
    """Return the items of a stretch and what they cost."""
    from pipeline.stages.train import Items

    keep_N = np.flatnonzero(stretch.keeps(sizes))
    kept = {name: size_N[keep_N] for name, size_N in sizes.items()}
    return Items(table if len(keep_N) == len(table) else table.take(keep_N), stretch.cost(kept), likeness(kept))


def validation_items(project: Project, prepared: Prepared) -> Items | None:
    """Return the items that the model is looked at on while it is trained: always the same, where not all."""
    settings = project.config.train.validation
    if settings.split is None:
        return None
    whole = items_of(project, prepared.table, None)
    if settings.split not in whole.splits:
        return None
    return evaluated_items(project, prepared, whole.of_split(settings.split), settings.limit)


def evaluated_items(project: Project, prepared: Prepared, table: Table, limit: int | None = None) -> Items:
    """Return items and what they cost under the plan of the last stretch; so many of them at most."""
    from pipeline.stages.train import Items

    if limit is not None and limit < len(table):
        chosen = np.random.default_rng(project.config.train.seed).choice(len(table), limit, replace=False)
        table = table.take(np.sort(chosen))
    sizes = task_sizes(project, prepared, table)
    return Items(table, prepared.stretches[-1].cost(sizes), likeness(sizes))


def told_sizes(project: Project) -> list[str]:
    """Return the names of the sizes that a task is told of an item: of a graph, or of the first that a reader gives."""
    if not is_reader(project.config):
        return list(GRAPH)
    taken = inspect_entries(project)
    if not len(taken.table):
        what = f"none of the first {taken.entries} items can be used"
        raise DataError(what, where=str(project.config.data.path), remedy="pipeline submit --stage scan   (says why)")
    return list(taken.table.sizes)


def some_items(project: Project, most: int = 3) -> list[Any]:
    """Return a few items as a task gets them, small ones; none while their graphs are not there."""
    from pipeline.runs.loading import made_table
    from pipeline.training.loader import Loader
    from pipeline.training.sampler import Micro, Sampler, Settings

    key = made_table(project)
    if key is None:
        return []
    table = items_of(project, key, None)
    by = "nodes" if "nodes" in table.sizes else NUMBERS
    table = table.take(np.argsort(table.sizes[by], kind="stable")[:most])
    sampler = Sampler(table.sizes, Settings(batch=len(table), by=(by,)))
    try:
        loader = Loader(source_of(project, table), rows_of(project), sampler, slots=2, threads=1, pin=False)
        batch = loader.fetch(range(len(table)), Micro(0, 0, 0, 1, np.arange(len(table))))
    except (CacheDamaged, RecordMissing, WeightsUnusable):  # it may be tried later: the plan does not need them
        return []
    return list(batch.items)
