"""What of each kind of record stays when a cache is cleaned, and why."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import ConfigError, PipelineError
from pipeline.keys import recipe_tag
from pipeline.runs import embedding, graphing, scanning
from pipeline.runs.entering import told_by
from pipeline.runs.folder import runs_in
from pipeline.runs.going_on import hidden
from pipeline.runs.live import Needed, needed
from pipeline.runs.project import Project
from pipeline.runs.using import RECIPE_KINDS, recipes_of
from pipeline.store.keysets import sorted_pairs
from pipeline.store.sweep import Live

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pipeline.runs.going_on import Going
    from pipeline.runs.using import Recipes
    from pipeline.store.cache import Cache
    from pipeline.store.users import User

EVERYTHING, NOTHING = Live(everything=True), Live()
# Of the other kinds, `weights` (which checkpoint a file is) and `parity` (how close an encoder comes) stay: they are
# few, and took minutes each.
FILES, LIMITS, SETS = "files", "limits", "sets"


@dataclass(frozen=True, slots=True)
class Note:
    """Why something is kept, and what helps where anything does."""

    what: str
    remedy: str = ""


@dataclass(slots=True)
class Staying:
    """What is known of who needs what."""

    project: Project
    cache: Cache
    others: Sequence[User]  # that use the cache, too
    own: Sequence[User]  # what this project once said that it uses
    strangers: bool  # whether there are users of whom nothing can be read
    going: Sequence[Going]
    keep_recipes: bool
    recipes: Recipes = field(default_factory=dict)  # every one that is known
    notes: list[Note] = field(default_factory=list)
    wanted: Recipes = field(default_factory=dict)  # by which this project's records are made today

    def live(self, on: Callable[[int], None]) -> dict[str, Live]:
        """Return what of each kind stays."""
        self.recipes = described(self.cache)
        known = frozenset(self.recipes)
        has_weights = self._find_wanted()
        kept = _tags_of(self.others)
        for run in self.going:
            kept |= recipes_of_run(run).keys()
            self.notes.append(Note(f"run {run.folder.name} goes on: all that is made by its recipes stays"))
        found, certain = Needed(), False
        if self.keep_recipes:
            kept |= {
                *known,
                *self.wanted,
                *((kind, bytes.fromhex(tag)) for user in self.own for kind, tag in user.tags),
            }
        else:
            found = needed(self.project, embeddings=has_weights, on=on)
            certain = not found.unknown
            if not self.project.config.graph.cache:
                found.graph.clear()  # nobody reads them
            kept |= {*self.wanted} if not certain else set()
            self._say_doubt(found)
        live = dict.fromkeys(self.cache.kinds(), EVERYTHING)
        for kind in RECIPE_KINDS:
            live[kind] = Live(
                tags=frozenset(tag for one, tag in kept if one == kind),
                pairs=sorted_pairs(getattr(found, kind) if certain else b""),
            )
        if not has_weights:
            live[embedding.NAME] = EVERYTHING
        if certain and not (self.others or self.going):
            live[FILES] = Live(pairs=sorted_pairs(found.files))
        if self.strangers:
            live |= dict.fromkeys((*RECIPE_KINDS, FILES), EVERYTHING)
        live |= {LIMITS: NOTHING, SETS: self._tables()}
        return live

    def _find_wanted(self) -> bool:
        """Find out by which recipes this project's records are made; return whether its weights are known."""
        kinds = [scanning.NAME, *([graphing.NAME] if self.project.config.graph.cache else [])]
        self.wanted = recipes_of(self.project, kinds)
        try:
            self.wanted |= recipes_of(self.project, [embedding.NAME])
        except PipelineError as error:
            what = f"which embeddings are needed cannot be told, so all stay: {error.what.splitlines()[0]}"
            self.notes.append(Note(what, error.remedy))
            return False
        finally:
            self.recipes |= self.wanted
        return True

    def _say_doubt(self, found: Needed) -> None:
        if found.unknown:
            what = "what the data set needs cannot be told today, so all that is made by its recipes stays"
            self.notes.append(Note(f"{what}: {found.unknown}", found.remedy))

    def _tables(self) -> Live:
        """Return which tables of data sets stay: those that runs name."""
        keys = bytearray()
        folders = {self.project.config.cluster.runs, *(Path(user.runs) for user in (*self.others, *self.own))}
        for runs in folders | {run.folder.path.parent for run in self.going}:
            if self.strangers or hidden(runs):
                return EVERYTHING
            for folder in runs_in(runs):
                with suppress(OSError, ValueError):  # a run of other stages, or half of one
                    keys += bytes.fromhex(folder.table.read_text())
                keys += bytes.fromhex(told_by(folder).get("table", ""))  # which may not be checked yet
        return Live(pairs=sorted_pairs(keys))


def _tags_of(users: Iterable[User]) -> set[tuple[str, bytes]]:
    return {(kind, bytes.fromhex(tag)) for user in users for kind, tag in user.tags}


def described(cache: Cache) -> Recipes:
    """Return the recipes that the cache itself describes."""
    return {(kind, recipe_tag(kind, recipe)): recipe for _, kind, recipe in cache.described()}


def recipes_of_run(run: Going) -> Recipes:
    """Return by which recipes the records are made that a run needs."""
    name = run.folder.name
    try:
        if run.config is None:
            raise ConfigError("its configuration is of another version")
        return recipes_of(Project.open(run.config, remember=False, beside=run.folder.task_root))
    except PipelineError as error:
        what = f"run {name} goes on, and what it needs cannot be told: {error.what.splitlines()[0]}"
        remedy = f"pipeline status {name}   or   pipeline cancel {name}"
        raise ConfigError(what, where=str(run.folder.path), remedy=remedy) from error
