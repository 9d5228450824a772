"""How a project uses a cache: the recipes of its records, its entry among the users, and what the cache holds."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError
from pipeline.keys import recipe_tag
from pipeline.report.cache_tables import Holdings, Missing
from pipeline.runs.dataset import worklist
from pipeline.runs.dataset.reader_items import is_reader
from pipeline.runs.workflow import table
from pipeline.stage_names import StageName
from pipeline.store.cache_folder import CacheFolder, RecipeStat
from pipeline.store.format.cache_layout import KindLayout
from pipeline.store.maintenance.damage_report import last_report, repair_of
from pipeline.store.maintenance.leftovers import User, register, registered, who_am_i
from pipeline.structures.inventory import plain_recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path
    from typing import Any

    from pipeline.config.schema import Config
    from pipeline.project.project import Project

log = logging.getLogger(__name__)

RECIPE_KINDS = (StageName.SCAN, StageName.EMBED, StageName.GRAPH)  # of records whose keys begin with a recipe's tag
Recipes = dict[tuple[str, bytes], "Mapping[str, Any]"]  # kind and tag → the recipe


def recipes_of(project: Project, kinds: Iterable[str] = RECIPE_KINDS) -> Recipes:
    """Return the recipes of the records that a project reads, of some kinds."""
    if is_reader(project.config):  # which makes no such records
        return {}
    of_kind: dict[str, Callable[[], list[Mapping[str, Any]]]] = {
        StageName.SCAN: lambda: [plain_recipe(project.recipe)],
        StageName.EMBED: lambda: [
            recipe.plain(variant)
            for recipe in (view.encoding.recipe for view in project.encoders.values())
            for variant in recipe.variants()
        ],
        StageName.GRAPH: lambda: [project.graphs.recipe.plain()],
    }
    return {(kind, recipe_tag(kind, recipe)): recipe for kind in kinds for recipe in of_kind[kind]()}


def register_use(project: Project, stages: Iterable[str], file: Path | None) -> None:
    """Register in the cache that a configuration uses it, before anything relies on what is there."""
    config, tags, stages = project.config, set[tuple[str, bytes]](), list(stages)
    fills = any(table.known_stage(stage).kinds for stage in stages)
    by_reader = is_reader(config)
    wanted = set[str]() if by_reader else {name for stage in stages for name in table.up_to(stage, config)}
    for kind in RECIPE_KINDS:
        with suppress(PipelineError):  # without a recipe nothing of it is used: a script may do without weights
            tags |= recipes_of(project, [kind] if kind in wanted else ()).keys()
    if not tags and not by_reader:  # whose tables are kept for the runs that name them
        return
    user = user_of(config_name(file), str(config.cluster.runs.absolute()), tags)
    for cache in (project.cache, *project.cache.under):
        is_there = fills or cache.root.is_dir()  # what is not there, and stays so, has nothing to keep
        if is_there and not register(cache.disk, cache.root, user):
            problem = "it cannot be written down that this project uses the cache: who cleans it does not know"
            log.warning("%s: %s", cache.root, problem)


def user_of(config: str, runs: str, tags: Iterable[tuple[str, bytes]]) -> User:
    """Return a project as the cache registers its users."""
    return User(config, runs, frozenset((kind, tag.hex()) for kind, tag in tags), time.time(), who_am_i())


def config_name(file: Path | None) -> str:
    """Return the name under which a configuration file is registered."""
    return str(file.absolute()) if file else ""


def holdings(config: Config) -> Holdings:
    """Return what the cache of a configuration holds."""
    cache = CacheFolder.over(config.cache.root, config.cache.under)
    described: dict[str, list[Mapping[str, Any]]] = {}
    for _, kind, recipe in cache.described():
        described.setdefault(kind, []).append(recipe)
    stats, missing, recipes, undescribed = [], [], {}, {}
    unknown = list(_needed_kinds(config))
    for kind in dict.fromkeys([*cache.kinds(), *unknown]):
        tags = {recipe_tag(kind, recipe): recipe for recipe in described.get(kind, ())}
        wanted = worklist.recall_needed(cache, config, kind) if kind in worklist.REMEMBERED else None
        tally = cache.own(kind).tally(list(tags), *([wanted.pairs] if wanted else []))
        if tally.stat.shards or tally.stat.unreadable:
            stats.append(tally.stat)
        counted = (RecipeStat(recipe, *tally.tagged[tag]) for tag, recipe in tags.items())
        recipes[kind] = sorted((stat for stat in counted if stat.records), key=lambda stat: -stat.records)
        if kind in worklist.REMEMBERED:
            undescribed[kind] = tally.stat.records - sum(stat.records for stat in recipes[kind])
        if wanted is not None:
            unknown = [name for name in unknown if name != kind]
            absent = tally.absent
            for layer in cache.under if len(absent) else ():
                absent = layer.own(kind).tally(wanted=absent).absent
            changed = _changed(config.data.path) > wanted.at
            missing.append(Missing(kind, len(wanted.pairs), len(absent), wanted.at, changed))
    report = last_report(cache.disk, cache.root)
    return Holdings(
        root=cache.root,
        is_there=cache.is_there,
        stats=tuple(stats),
        recipes=recipes,
        undescribed=undescribed,
        missing=tuple(missing),
        unknown=tuple(unknown),
        report=report,
        repair=report and repair_of(cache.disk, cache.root, report),
        users=tuple(registered(cache.disk, cache.root)[0]),
        quarantine=_quarantine(cache),
        under=tuple(layer.root for layer in cache.under),
        left_out=cache.left_out,
    )


def _needed_kinds(config: Config) -> tuple[str, ...]:
    """Return the kinds of records that a data set needs: no graphs of bare sequences, nothing of a reader's items."""
    if is_reader(config):
        return ()
    has_graphs = config.graph.cache and config.data.source != "fasta"
    return tuple(kind for kind in worklist.REMEMBERED if kind != "graph" or has_graphs)


def _changed(path: Path) -> float:
    """Return when a file or folder was last changed; 0 where it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _quarantine(cache: CacheFolder) -> dict[str, tuple[int, int]]:
    """Return how many damaged shards of each kind were put aside, and their bytes."""
    quarantined = {}
    for kind in cache.kinds():
        folder = KindLayout(cache.root / kind).quarantine
        if sizes := [cache.disk.size_of(folder / name) for name in cache.disk.list_folder(folder)]:
            quarantined[kind] = (len(sizes), sum(sizes))
    return quarantined
