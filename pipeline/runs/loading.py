"""From a configuration to a loader: what training reads, and what people use in loops of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.load import find_config, from_resolved, load
from pipeline.errors import ConfigError, PipelineError
from pipeline.keys import content_digest
from pipeline.runs.folder import runs_in
from pipeline.runs.project import Project
from pipeline.training.dataset import Table
from pipeline.training.embeddings import Embeddings
from pipeline.training.sampler import Sampler
from pipeline.training.source import Built, Cached

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.config.schema import Config
    from pipeline.training.loader import Loader
    from pipeline.training.sampler import Settings

GRAPHS_FIRST = "pipeline submit --stage all"


def open_loader(
    config: str | Path | None,
    settings: Settings,
    *,
    split: str | None = None,
    embed: bool = True,
    rank: int = 0,
    ranks: int = 1,
    sets: Sequence[str] = (),
    **options: Any,
) -> Loader:
    """Return a loader of the graphs, and unless `embed` is false the embeddings, of a configuration's data set.

    The data set is that of the newest run that made graphs with this configuration. `sets` are as for --set, `options`
    those of the loader: slots, threads, collate, reject, seed.
    """
    from pipeline.training.loader import Loader  # which waits for torch

    chosen = load(find_config(Path(config) if config else None), sets).config
    project = Project.open(chosen, remember=False)
    table = table_of(project)
    table = table if split is None else table.of_split(split)
    graphs = project.graphs
    source = Cached(graphs.store, table) if chosen.graph.cache else Built(table, project.recipe, graphs.recipe)
    rows = Embeddings(project.encoding.shelves.embeddings, project.encoding.recipe) if embed else None
    data = content_digest(table.key_N16.tobytes()).hex()
    return Loader(source, rows, Sampler(table.sizes, settings, rank=rank, ranks=ranks, data=data), **options)


def table_of(project: Project) -> Table:
    """Return the table of the newest run that made graphs of this data set with this configuration."""
    config = project.config
    for folder in reversed(runs_in(config.cluster.runs)):
        if folder.table.exists() and _same_graphs(from_resolved(folder.config.read_text()), config):
            try:
                return Table.read(project.cache.kind("sets"), bytes.fromhex(folder.table.read_text()))
            except PipelineError as error:
                raise type(error)(error.what, where=error.where, remedy=GRAPHS_FIRST) from error
    what = "no run has made graphs of this data set with this configuration"
    raise ConfigError(what, where=str(config.cluster.runs), remedy=GRAPHS_FIRST)


def _same_graphs(one: Config, other: Config) -> bool:
    """Say whether two configurations make the same graphs of the same data set."""
    return (one.data, one.structures, one.graph) == (other.data, other.structures, other.graph)
