"""A project's use of a cache: the recipes of its records, its registration, and the records that cleaning keeps."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.command_line import Command, quoted
from pipeline.dataset import worklist
from pipeline.dataset.reader_items import is_reader, read_by_run
from pipeline.encoder.embedding_recipe import texts
from pipeline.errors import CacheDamaged, ConfigError, DataError, PipelineError, RecordMissing
from pipeline.files import read_json
from pipeline.journal.run_folder import hidden, runs_in
from pipeline.keys import parse_key, recipe_tag
from pipeline.project.project import Project
from pipeline.records import Item, Reason
from pipeline.stage_names import StageName
from pipeline.store.cache_folder import CacheFolder, RecipeStat
from pipeline.store.format.cache_layout import KindLayout
from pipeline.store.format.shard import column_keys
from pipeline.store.maintenance.damage_report import last_report, repair_of
from pipeline.store.maintenance.overview import CleanNote, Holdings, Missing
from pipeline.store.maintenance.shard_plans import Live
from pipeline.store.store import in_chunks
from pipeline.store.users import User, register, registered, sorted_keys, who_am_i
from pipeline.structures.inventory import plain_recipe
from pipeline.structures.scan_items import file_mark, look_up_items
from pipeline.training.items.item_table import pages_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pipeline.config.schema import Config
    from pipeline.encoder.embedding_recipe import EmbeddingRecipe
    from pipeline.journal.run_folder import RunFolder
    from pipeline.records import Rejection

log = logging.getLogger(__name__)

RECIPE_KINDS = (StageName.SCAN, StageName.EMBED, StageName.GRAPH)  # of records whose keys begin with a recipe's tag
Recipes = dict[tuple[str, bytes], "Mapping[str, Any]"]  # kind and tag → the recipe
EVERYTHING, NOTHING = Live(everything=True), Live()
# The kinds `weights` (facts about a checkpoint) and `parity` (how close an encoder came) always stay: they are few, and
# each took minutes.
FILES, SETS = "files", "sets"
SCAN_FIRST = Command.submit("scan")
AWAY = (Reason.MISSING_FILE, Reason.UNREADABLE_FILE)  # now; its disk may be mounted later


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


def tags_read(project: Project, stages: Iterable[str]) -> set[tuple[str, bytes]]:
    """Return the tags of the recipes whose records some stages read or make."""
    from pipeline.stages import table  # late: it imports every stage, which `cache stat` does not need

    wanted = {name for stage in stages for name in table.up_to(stage, project.config)}
    tags = set[tuple[str, bytes]]()
    for kind in wanted.intersection(RECIPE_KINDS):
        with suppress(PipelineError):  # without a recipe its records are unused: a script may need no weights
            tags |= recipes_of(project, [kind]).keys()
    return tags


def register_use(project: Project, stages: Iterable[str], file: Path | None) -> None:
    """Register a configuration as a user of the cache, before it relies on records there."""
    from pipeline.stages import table

    config, stages = project.config, list(stages)
    fills = any(table.known_stage(stage).kinds for stage in stages)
    tags = tags_read(project, stages)
    if not tags and not is_reader(config):  # whose tables are kept for the runs that name them
        return
    user = user_of(config_name(file), str(config.cluster.runs.absolute()), tags)
    for cache in (project.cache, *project.cache.under):
        is_there = fills or cache.root.is_dir()  # a missing cache has nothing to keep
        if is_there and not register(cache.disk, cache.root, user):
            problem = "this project could not be registered as a user of the cache: cleaning may remove its records"
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
        tally = cache.own(kind).tally(list(tags), *([wanted.keys] if wanted else []))
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
            missing.append(Missing(kind, len(wanted.keys), len(absent), wanted.at, changed))
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


@dataclass(slots=True)
class Staying:
    """Decides which records of each kind stay."""

    project: Project
    cache: CacheFolder
    others: Sequence[User]  # that use the cache, too
    own: Sequence[User]  # this project's earlier registration
    strangers: bool  # whether there are unreadable users
    going: Sequence[RunFolder]
    keep_recipes: bool
    recipes: Recipes = field(default_factory=dict)  # all known recipes
    notes: list[CleanNote] = field(default_factory=list)
    wanted: Recipes = field(default_factory=dict)  # the present recipes of this project

    def live(self, on: Callable[[int], None]) -> dict[str, Live]:
        """Return the records of each kind that stay."""
        self.recipes = described(self.cache)
        known = frozenset(self.recipes)
        has_weights = self._find_wanted()
        kept = {(kind, bytes.fromhex(tag)) for user in self.others for kind, tag in user.tags}
        all_stays = self.strangers
        for run in self.going:
            listed: Any = read_json(run.recipes)  # written at submission: code, maybe another user's, is not loaded
            try:
                kept |= {(str(kind), bytes.fromhex(tag)) for kind, tag in listed}
                stays = "all records of its recipes are kept"
            except (TypeError, ValueError):  # absent in runs of older versions
                all_stays, stays = True, "does not list its recipes, so all records are kept"
            self.notes.append(CleanNote(f"run {run.name} is active: {stays}"))
        need, certain = Needed(), False
        if self.keep_recipes:
            kept |= {
                *known,
                *self.wanted,
                *((kind, bytes.fromhex(tag)) for user in self.own for kind, tag in user.tags),
            }
        else:
            need = needed(self.project, embeddings=has_weights, on=on)
            certain = not need.unknown
            if not self.project.config.graph.cache:
                need.graph.clear()  # no stage reads them
            if need.unknown:
                kept |= {*self.wanted}
                what = "the data set cannot be listed now, so all records of its recipes are kept"
                self.notes.append(CleanNote(f"{what}: {need.unknown}", need.remedy))
        live = dict.fromkeys(self.cache.kinds(), EVERYTHING)
        for kind in RECIPE_KINDS:
            live[kind] = Live(
                tags=frozenset(tag for kept_kind, tag in kept if kept_kind == kind),
                keys=sorted_keys(getattr(need, kind) if certain else b""),
            )
        if not has_weights:
            live[StageName.EMBED] = EVERYTHING
        if certain and not (self.others or self.going):
            live[FILES] = Live(keys=sorted_keys(need.files))
        if all_stays:
            live |= dict.fromkeys((*RECIPE_KINDS, FILES), EVERYTHING)
        live[SETS] = self._tables()
        return live

    def _find_wanted(self) -> bool:
        """Find the recipes of this project's records; return whether its weights are known."""
        kinds = [StageName.SCAN, *([StageName.GRAPH] if self.project.config.graph.cache else [])]
        self.wanted = recipes_of(self.project, kinds)
        try:
            self.wanted |= recipes_of(self.project, [StageName.EMBED])
        except PipelineError as error:
            what = f"the needed embeddings are unknown, so all are kept: {error.what.splitlines()[0]}"
            self.notes.append(CleanNote(what, error.next))
            return False
        finally:
            self.recipes |= self.wanted
        return True

    def _tables(self) -> Live:
        """Return which tables of data sets stay: those that runs name."""
        keys = bytearray()
        folders = {self.project.config.cluster.runs, *(Path(user.runs) for user in (*self.others, *self.own))}
        for runs in folders | {run.path.parent for run in self.going}:
            if self.strangers or hidden(runs):
                return EVERYTHING
            for folder in runs_in(runs):
                with suppress(OSError, ValueError):  # a run of other stages, or half of one
                    keys += parse_key(folder.table.read_text())
                keys += bytes.fromhex(read_by_run(folder).get("table", ""))  # which may not be checked yet
        for key in column_keys(sorted_keys(keys)):
            with suppress(CacheDamaged, RecordMissing):
                keys += b"".join(pages_of(self.cache.kind(SETS).get(key)))
        return Live(keys=sorted_keys(keys))


def described(cache: CacheFolder) -> Recipes:
    """Return the recipes that the cache describes."""
    return {(kind, recipe_tag(kind, recipe)): recipe for _, kind, recipe in cache.described()}


@dataclass(slots=True)
class Needed:
    """The keys of the records that a data set needs, 16 bytes each, by kind."""

    scan: bytearray = field(default_factory=bytearray)
    files: bytearray = field(default_factory=bytearray)
    embed: bytearray = field(default_factory=bytearray)
    graph: bytearray = field(default_factory=bytearray)
    items: int = 0
    unknown: str = ""  # why the need is unknown; empty: it is known
    remedy: str | Command = ""

    def doubt(self, what: str, remedy: str | Command) -> None:
        """Note why the need is unknown; only the first reason is kept."""
        if not self.unknown:
            self.unknown, self.remedy = what, remedy


def needed(project: Project, *, embeddings: bool = True, on: Callable[[int], None] = lambda _items: None) -> Needed:
    """Return the keys that a data set needs, or why they are unknown at present.

    If part of a data set seems to be missing, because a disk is not mounted or a manifest is half written, records that
    took days must not count as unused.
    """
    need = Needed()
    if is_reader(project.config):
        return need  # the tables of what a reader gives stay for the runs that name them
    recipes = [view.encoding.recipe for view in project.encoders.values()] if embeddings else []
    if project.config.data.limit is not None:
        what = f"data.limit selects only {project.config.data.limit:,} items of the data set"
        need.doubt(what, "remove data.limit from the configuration, or --set data.limit=null")
        return need
    try:
        for chunk in in_chunks(worklist.list_items(project), worklist.LOOKED_UP_AT_ONCE):
            _take(project, chunk, recipes, need)
            on(need.items)
    except (ConfigError, DataError) as error:
        need.doubt(f"{error.where}: {error.what}", error.next)
    if not need.items:
        need.doubt("the data set is empty", f"ls -l {quoted(project.config.data.path)}")
    return need


def _take(
    project: Project, chunk: Sequence[Item | Rejection], recipes: Sequence[EmbeddingRecipe], need: Needed
) -> None:
    """Add what some entries of a data set need."""
    for entry in chunk:
        if not isinstance(entry, Item) and entry.reason in AWAY:
            need.doubt(f"{entry.id}: {entry.detail}", _mount_remedy(project))
    items = [entry for entry in chunk if isinstance(entry, Item)]
    need.items += len(items)
    for path in dict.fromkeys(path for item in items for path in project.recipe.paths(item)):
        mark = file_mark(path, project.recipe)
        need.files += mark if isinstance(mark, bytes) else b""
    inventories = []
    for item, seen in zip(items, look_up_items(items, project.recipe, project.shelves), strict=True):
        if seen.key is not None:
            need.scan += seen.key
            need.graph += project.graphs.recipe.key(seen.key)
        if seen.inventory is None:
            need.doubt(f"{item.id} is not scanned yet or has just changed", SCAN_FIRST)
        elif seen.key is None and seen.inventory.reason in AWAY:
            need.doubt(f"{item.id}: {seen.inventory.detail}", _mount_remedy(project))
        if seen.inventory is not None and seen.inventory.reason is None:
            inventories.append(seen.inventory)
    for recipe in recipes:
        for text in dict.fromkeys(text for inventory in inventories for text in texts(inventory, recipe.context)):
            for variant in recipe.accepted(len(text)):
                need.embed += recipe.key(text, variant)


def _mount_remedy(project: Project) -> str:
    return f"ls -l {quoted(project.config.data.path)}   (mount the data, or remove missing items from the data set)"
