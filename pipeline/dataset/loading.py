"""From a configuration to a loader, for training and for users' own loops."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.command_line import Command
from pipeline.config.load import find_config, from_resolved, read_config
from pipeline.dataset import reader_items
from pipeline.errors import CacheDamaged, ConfigError, PipelineError, RecordMissing
from pipeline.journal.run_folder import runs_in
from pipeline.keys import content_digest, parse_key
from pipeline.project.project import Project, graph_recipe, scan_recipe_of, source_spec
from pipeline.training.items.item_source import BuiltGraphs, CachedGraphs, ReaderItems
from pipeline.training.items.item_table import ItemTable
from pipeline.training.items.residue_embeddings import Embeddings
from pipeline.training.sampling import BatchOrigin, Sampler, SamplerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pipeline.config.schema import Config
    from pipeline.training.items.item_source import DamagedItems, ItemSource
    from pipeline.training.items.loader import Collate, Loader


def open_loader(
    config: str | Path | None,
    settings: SamplerSettings,
    *,
    split: str | None = None,
    embed: bool = True,
    rank: int | None = None,
    ranks: int | None = None,
    sets: Sequence[str] = (),
    **options: Any,
) -> Loader:
    """Return a loader of the graphs, and unless `embed` is false the embeddings, of a configuration's data set.

    The data set is that of the newest run that made graphs with this configuration, or read what a reader gives. If
    `rank` and `ranks` are not given, they are those of torch's process group, looked up as each loop begins. `sets` are
    as for --set, `options` those of the loader: slots, threads, collate, reject, seed.
    """
    from pipeline.training.items.loader import Loader  # late: it imports torch
    from pipeline.training.ranks.process_group import end_after_gloo, place_in_group

    if (rank is None) != (ranks is None):
        problem = f"rank={rank}, ranks={ranks}: give both or neither"
        raise ConfigError(problem, where="open_loader", remedy="open_loader(…, rank=…, ranks=…), or neither")
    end_after_gloo()
    sets = [sets] if isinstance(sets, str) else list(sets)
    loaded = read_config(find_config(Path(config) if config else None), sets)
    project = Project.open(loaded.config, remember=False, beside=loaded.base_dir.absolute())
    try:
        table = table_of(project)
    except PipelineError as error:
        error.in_project(Command.about(config, sets))
        raise
    table = table if split is None else table.of_split(split)
    rows = rows_of(project) if embed else None
    data = content_digest(np.ascontiguousarray(table.key_N16).data).hex()
    place = place_in_group if rank is None else None
    sampler = Sampler(table.sizes, settings, rank=rank or 0, ranks=ranks or 1, data=data, place=place)
    return Loader(source_of(project, table), rows, sampler, **options)


def source_of(project: Project, table: ItemTable, mending: DamagedItems | None = None) -> ItemSource:
    """Return where a loader reads items from: the reader, cached graphs, or graphs built as they are read."""
    if reader_items.is_reader(project.config):
        return ReaderItems(reader_items.reader_of(project), table)
    graphs = project.graphs
    if project.config.graph.cache:
        return CachedGraphs(graphs.store, table, mending)
    return BuiltGraphs(table, project.recipe, graphs.recipe)


def batches_of(project: Project, table: ItemTable, collate: Collate | None = None) -> Callable[[Sequence[int]], Any]:
    """Return a function that makes a batch of some items of a table."""
    from pipeline.training.items.loader import Loader  # late: it imports torch

    sampler = Sampler(table.sizes, SamplerSettings(batch=len(table), by=tuple(table.sizes)[:1]))
    source, rows = source_of(project, table), rows_of(project)
    loader = Loader(source, rows, sampler, slots=2, threads=1, pin=False, collate=collate)
    return lambda items: loader.fetch(items, BatchOrigin(0, 0, 0, 1)).value


def rows_of(project: Project) -> Embeddings | None:
    """Return where a loader reads embeddings from; a reader's items have none."""
    if reader_items.is_reader(project.config):
        return None
    read = [view.encoding for view in project.encoders_read]
    return Embeddings(read[0].shelves.embeddings, *((encoding.recipe, encoding.weights.dim) for encoding in read))


def made_table(project: Project) -> str | None:
    """Return the key, in hex, of the table that `table_of` returns; None where there is none, or it was removed."""
    try:
        return next((key.hex() for key in _tables(project)), None)
    except (CacheDamaged, RecordMissing):  # the cache was cleaned: stage graph writes it again
        return None


def _tables(project: Project) -> Iterator[bytes]:
    """Yield the keys of the tables of successful runs that made these graphs of this data set, newest first."""
    if reader_items.is_reader(project.config):
        for folder, entered, _ in reader_items.reader_tables(project):
            if folder.table.exists():  # its check let it pass
                yield entered
        return
    wanted, lost = _made_from(project.config), None
    for folder in reversed(runs_in(project.config.cluster.runs)):
        try:
            key, frozen = parse_key(folder.table.read_text()), from_resolved(folder.config.read_text())
        except (PipelineError, OSError, ValueError):  # a run of other stages, of another version, or half of one
            continue
        if _made_from(frozen) == wanted:
            try:
                ItemTable.read(project.cache.kind("sets"), key, lambda page: page.take(np.empty(0, np.int64)))
                yield key
            except (CacheDamaged, RecordMissing) as error:
                lost = lost or error
    if lost:
        raise lost


def table_of(project: Project) -> ItemTable:
    """Return the table of the newest successful run that made these graphs, or read what a reader gives."""
    again = Command.submit("scan" if reader_items.is_reader(project.config) else "graph")
    try:
        for key in _tables(project):
            return ItemTable.read(project.cache.kind("sets"), key)
    except (CacheDamaged, RecordMissing) as error:
        raise type(error)(error.what, where=error.where, remedy=again) from error
    what = "this data set has no graphs with this configuration"
    what = reader_items.unmade(project.config) if reader_items.is_reader(project.config) else what
    raise ConfigError(what, where=str(project.config.cluster.runs), remedy=again)


def _made_from(config: Config) -> tuple[object, ...]:
    """Return the settings that decide which items there are and what their graphs are."""
    return source_spec(config), scan_recipe_of(config), graph_recipe(config).plain(), config.graph.cache
