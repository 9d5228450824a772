"""Cleans a cache: first finds and shows records that no user needs, then removes them.

Three kinds of records stay: those that this project's data set needs by its present recipes; those of the recipes of
other projects that use the cache, and of active runs; and those younger than a grace period.
"""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.command_line import Command, quoted, status_or_cancel
from pipeline.errors import CacheUnusable, ConfigError
from pipeline.files import whose
from pipeline.journal.run_folder import hidden
from pipeline.journal.run_view import active_runs
from pipeline.keys import recipe_tag
from pipeline.store.cache_folder import RECIPES, CacheFolder
from pipeline.store.format.cache_layout import MARKER, USERS
from pipeline.store.format.disk import remove
from pipeline.store.maintenance.leftovers import Left, find_leftovers, refuse_links
from pipeline.store.maintenance.overview import FORGOTTEN_S, Cleaning, CleanNote, CleanRequest
from pipeline.store.maintenance.shard_plans import Fate, Live, apply, mark, why_kept
from pipeline.store.users import USER_NAME, forget, register, registered, sorted_keys, who_am_i
from pipeline.upkeep.retention import EVERYTHING, NOTHING, Staying, config_name, described, user_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.store.maintenance.leftovers import LeftoverFile
    from pipeline.store.maintenance.overview import Recipes
    from pipeline.store.maintenance.shard_plans import Marked, ShardPlan
    from pipeline.store.users import User


@dataclass(frozen=True, slots=True)
class Removed:
    """A file that was removed, or had to stay."""

    name: str
    bytes: int
    stays: str = ""  # why


def foresee_cleaning(
    project: Project, file: Path | None, asked: CleanRequest, *, on: Callable[[int], None] = lambda _items: None
) -> Cleaning:
    """Plan what to remove; nothing is changed. `on` is called with the number of items of the data set looked at."""
    cache = CacheFolder(project.config.cache.root)
    try:
        if not cache.disk.list_folder(cache.root):
            return Cleaning(cache, asked, {})
        _refuse_unmarked(cache)
        return _foresee_readable(project, cache, file, asked, on)
    except PermissionError as error:
        what = f"the cache cannot be read: {error.strerror}; {whose(Path(error.filename))}"
        remedy = f"ls -ld {quoted(error.filename)}   (and ask its owner to clean it)"
        raise CacheUnusable(what, where=str(error.filename), remedy=remedy) from error


def _foresee_readable(
    project: Project, cache: CacheFolder, file: Path | None, asked: CleanRequest, on: Callable[[int], None]
) -> Cleaning:
    refuse_links(cache)
    user_files, now = _user_files(cache), _cache_time(cache)
    users, strangers = registered(cache.disk, cache.root)
    mine = [user for user in users if file and (user.config, user.who) == (config_name(file), who_am_i())]
    ours = dict.fromkeys([project.config.cluster.runs, *(Path(user.runs) for user in mine)])
    runs = ours | dict.fromkeys(Path(user.runs) for user in users)  # a run continues without its configuration file
    going = [run for folder in runs for run in active_runs(folder, cache.root)]
    busy = {run.path.parent for run in going}  # a user with an active run counts as present
    others = [user for user in users if user not in mine]
    gone = [user for user in others if Path(user.runs) not in busy and has_vanished(user, now, asked.grace_s)]
    others = [user for user in others if user not in gone]
    if asked.all:
        _refuse_going(cache, going, [*ours, *(Path(user.runs) for user in others)])
    staying = Staying(project, cache, others, mine, bool(strangers), going, asked.keep_recipes)
    live = dict.fromkeys(cache.kinds(), NOTHING) if asked.all else staying.live(on)
    recipes, forgotten, own = staying.recipes or described(cache), gone, None
    if mine and not (asked.keep_recipes or going):
        today = user_of(mine[0].config, str(project.config.cluster.runs.absolute()), staying.wanted)
        forgotten = [*gone, *(user for user in mine if asked.all or not user.tags <= today.tags)]
        own = None if asked.all else today
    leftovers, foreign = find_leftovers(cache)
    by_age: dict[bool, list[LeftoverFile]] = {True: [], False: []}
    for leftover in leftovers:
        by_age[now - leftover.since > asked.grace_of(leftover.what)].append(leftover)
    cleaning = Cleaning(
        cache=cache,
        asked=asked,
        users=user_files,
        others=tuple(others),
        forgotten=tuple(forgotten),
        own=own,
        settle_s=project.config.cache.visibility_s if going or others else 0.0,
        marked=_marked(cache, asked, now, {kind: live.get(kind, EVERYTHING) for kind in cache.kinds()}, recipes),
        recipes=recipes,
        wanted=frozenset() if asked.all else frozenset(staying.wanted),
        leftovers=by_age[True],
        young=[leftover for leftover in by_age[False] if leftover.what is not Left.MEMORY],
        foreign=foreign,
        notes=[*_notes_of_users(gone, others, strangers, now, asked, cache), *staying.notes],
    )
    _refuse_unwritable(cleaning)
    return cleaning


def _refuse_unmarked(cache: CacheFolder) -> None:
    """Refuse a folder without a cache's marker; nothing else is ever cleaned."""
    if not cache.disk.exists(cache.root / MARKER):
        what = f"this is not a cache: it has no {MARKER}"
        remedy = Command.of("config show", then="   (set cache.root to a cache folder, or --set cache.root=FOLDER)")
        raise CacheUnusable(what, where=str(cache.root), remedy=remedy)


def _cache_time(cache: CacheFolder) -> float:
    """Return the time by the cache's file system; by this host's clock where it cannot be written."""
    try:
        return min(time.time(), cache.disk.time_in(cache.root))  # either clock may be wrong
    except OSError:
        return time.time()


def _user_files(cache: CacheFolder) -> dict[str, tuple[float, float]]:
    """Return the files that register users, with their times, which change when a new user registers."""
    folder = cache.root / USERS
    names = filter(USER_NAME.fullmatch, cache.disk.list_folder(folder))
    return {name: cache.disk.times_of(folder / name) for name in names}


def _notes_of_users(
    gone: list[User], others: list[User], strangers: list[str], now: float, asked: CleanRequest, cache: CacheFolder
) -> Iterator[CleanNote]:
    """Yield notes on users that are gone, that may be gone, and whose needs cannot be read."""
    for place in dict.fromkeys(user.config or user.runs for user in gone):
        yield CleanNote(f"{place} no longer exists; nothing is kept for it")
    missing = [user for user in others if _is_gone(_place(user))]
    for path in dict.fromkeys(map(_place, missing)):
        mine = [user for user in missing if _place(user) == path]
        until = max(_counts_until(user, asked.grace_s) for user in mine)
        then = f"counts until {_day(until)}" if until > now else "counts while its run is active"
        files = shlex.join(str(cache.root / USERS / user.name) for user in mine)
        what = f"{path} no longer exists; it was last used {_day(max(user.last for user in mine))}, and {then}"
        yield CleanNote(what, f"rm {files}   (if it was removed for good)")
    for name in strangers:
        what = f"{name} cannot be read: the cache is in use, but its user's needs are unknown"
        yield CleanNote(what, f"ls -l {quoted(cache.root / USERS / name)}")


def has_vanished(user: User, now: float, grace_s: float) -> bool:
    """Tell whether a configuration was deleted for good.

    If its folder is missing too, its disk may not be mounted; and it may have a run that only its owner can see.
    """
    return _is_gone(_place(user)) and now > _counts_until(user, grace_s)


def _place(user: User) -> Path:
    return Path(user.config or user.runs)


def _counts_until(user: User, grace_s: float) -> float:
    """Return the time until which a deleted configuration still counts as a user."""
    certain = not _is_gone(_place(user).parent) and not hidden(Path(user.runs))
    return user.last + (grace_s if certain else max(grace_s, FORGOTTEN_S))


def _day(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M}"


def _is_gone(path: Path) -> bool:
    """Tell whether a path does not exist; False in a folder that this user cannot look into."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _refuse_going(cache: CacheFolder, going: list[RunFolder], folders: list[Path]) -> None:
    """Refuse to remove everything while a run is active, or may be."""
    if going:
        name = going[0].name
        what = f"run {name} is active and needs this cache"
        raise ConfigError(what, where=str(cache.root), remedy=status_or_cancel(name))
    if closed := next(filter(hidden, folders), None):
        what = f"other users use this cache, and whether their runs are active is unknown: {closed}"
        remedy = Command.of("cache clean", then=f"   (without --all)   or ask whose {closed} is")
        raise ConfigError(what, where=str(cache.root), remedy=remedy)


def _marked(
    cache: CacheFolder, asked: CleanRequest, now: float, live: Mapping[str, Live], recipes: Recipes
) -> dict[str, Marked]:
    """Mark the records that are not needed; last the descriptions of recipes, by the records that stay."""
    before = now - asked.grace_s
    marked: dict[str, Marked] = {}
    for kind, needed in live.items():
        tags = [tag for recipe_kind, tag in recipes if recipe_kind == kind]
        if kind != RECIPES and not needed.everything:
            marked[kind] = mark(cache.own(kind), needed, before, tags)
    if RECIPES in live:
        needed = live[RECIPES] if asked.all else EVERYTHING if asked.keep_recipes else _described(cache, marked)
        marked[RECIPES] = mark(cache.own(RECIPES), needed, before)
    return marked


def _described(cache: CacheFolder, marked: Mapping[str, Marked]) -> Live:
    """Return as live the descriptions of the recipes of which any record stays."""
    keys = bytearray()
    for key, kind, recipe in cache.described():
        of_kind, tag = marked.get(kind), recipe_tag(kind, recipe)
        if of_kind is None or of_kind.left.get(tag, 1) or of_kind.of(Fate.YOUNG, Fate.SPARSE, Fate.FOREIGN):
            keys += key
    return Live(keys=sorted_keys(keys))


def _refuse_unwritable(cleaning: Cleaning) -> None:
    """Refuse if this user may not remove the planned files."""
    folders = {leftover.path.parent for leftover in cleaning.leftovers}
    for kind, marked in cleaning.marked.items():
        if marked.of(Fate.GOES, Fate.REWRITTEN):
            folders.add(cleaning.cache.own(kind).layout.shards)
    for folder in sorted(folders):
        if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            what = f"no permission to remove files: {whose(folder)}"
            raise CacheUnusable(
                what, where=str(folder), remedy=f"ls -ld {quoted(folder)}   (and ask its owner to clean it)"
            )


def carry_out(cleaning: Cleaning, waits: Callable[[], object] = lambda: None) -> Iterator[Removed]:
    """Carry out a plan, and yield each removed file; stop if a new user registers meanwhile.

    `waits` is called before a pause in which other hosts notice the change.
    """
    cache, check = cleaning.cache, partial(_refuse_newcomers, cleaning)
    for leftover in cleaning.leftovers:
        check()
        name = str(leftover.path.relative_to(cache.root))
        if why := why_kept(cache.disk, leftover.path):
            yield Removed(name, 0, why)
            continue
        remove(cache.disk, leftover.path)
        yield Removed(name, leftover.bytes)
    for plans in _room_first(cleaning):
        for plan in apply(plans, settle_s=cleaning.settle_s, check=check, waits=waits):
            yield Removed(f"{plan.store.kind}/shards/{plan.shard}", plan.freed_bytes, plan.stays)
    check()
    forget(cache.disk, cache.root, cleaning.forgotten)
    if cleaning.own is not None:
        register(cache.disk, cache.root, cleaning.own)


def _room_first(cleaning: Cleaning) -> Iterator[list[ShardPlan]]:
    """Order the plans: removed shards before rewritten ones, which take room first; descriptions at the end."""
    of_recipes = [marked for kind, marked in cleaning.marked.items() if kind == RECIPES]
    others = [marked for kind, marked in cleaning.marked.items() if kind != RECIPES]
    for marks in (others, of_recipes):
        for fate in (Fate.GOES, Fate.REWRITTEN):
            yield [plan for marked in marks for plan in marked.of(fate)]


def _refuse_newcomers(cleaning: Cleaning) -> None:
    """Stop if a new user has registered: its needed records were not looked up."""
    if _user_files(cleaning.cache) != cleaning.users:
        what = "a run was submitted while the cache was being cleaned; nothing more was removed"
        raise ConfigError(what, where=str(cleaning.cache.root), remedy=Command.of("cache clean"))
