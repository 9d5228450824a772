"""Explains why work is missing or repeated: pure functions of the cache and of earlier runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.journal.run_status import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipeline.store.cache_folder import RecipeStat

# Name of a setting in recipes → its name in the configuration, or words, if it differs.
SECTION = {"scan": "structures", "graph": "graph", "embed": "embed", "train": "train"}
SETTINGS = {
    "scan": {"ligand": "data.ligand", "seqres": "structures.sequence"},
    "graph": {"atom_radius": "graph.atom.radius", "hops": "graph.atom.hops", "hydrogens": "graph.atom.hydrogens"},
    "embed": {"cut": "embed.long"},
    "train": {
        "code": "the task's code",
        "table": "the data set",
        "crop": "cropped items",
        "skipped": "items left out as too large",
        "files": "files of the task",
    },
}
GROUPED = ("reading", "policy")  # parts of a recipe whose settings stand in its section
SHORT = 12  # of a digest
DIGEST = 24  # a hexadecimal text of at least this length is a digest


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting that has changed."""

    setting: str
    was: Any
    now: Any

    def __str__(self) -> str:
        if self.was is None or self.now is None or _is_digest(self.was):
            return f"{self.setting}: was {_shown(self.was)}, is {_shown(self.now)}"
        return f"{self.setting}: {_shown(self.was)} → {_shown(self.now)}"


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) >= DIGEST and not set(value) - set("0123456789abcdef")


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f"{value[:SHORT]}…" if _is_digest(value) else value
    return "not set" if value is None else json.dumps(value)


@dataclass(frozen=True, slots=True)
class Because:
    """A state, why, and the settings that changed."""

    state: State
    why: str = ""
    changes: tuple[SettingChange, ...] = ()

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.why, "; ".join(map(str, self.changes)))))


def changes_between(kind: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[SettingChange, ...]:
    """Return the settings in which two recipes of a kind differ, by their names in the configuration."""
    before, after = dict(flat(was)), dict(flat(now))
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return tuple(SettingChange(setting_of(kind, name), before.get(name), after.get(name)) for name in names)


def flat(recipe: Mapping[str, Any], within: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the settings of a recipe by their full names; lists and tuples are the same."""
    for name, value in recipe.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{within}{name}.")
        else:
            yield f"{within}{name}", list(value) if isinstance(value, tuple) else value


def setting_of(kind: str, name: str) -> str:
    """Return the configuration's name of a setting of a recipe, or words for it."""
    first, _, rest = name.partition(".")
    if first == "version":
        return f"version of {kind} in this program"
    if first == "embeddings" and kind == "train":
        return setting_of("embed", rest)
    if first in GROUPED and rest:
        return setting_of(kind, rest)
    own = SETTINGS.get(kind, {})
    return own.get(name) or own.get(first) or f"{SECTION.get(kind, kind)}.{name}"


def nearest_changes(
    kind: str, recipe: Mapping[str, Any], others: Iterable[Mapping[str, Any]]
) -> tuple[SettingChange, ...]:
    """Return the differences of a recipe from the most similar of the others."""
    differing = (changes_between(kind, other, recipe) for other in others)
    return min((changes for changes in differing if changes), key=len, default=())


@dataclass(frozen=True, slots=True)
class RecordFound:
    """The state of one record in the cache, and other recipes with a record of the same input."""

    key: str
    is_whole: bool = False
    damage: str = ""  # why a present copy is unusable
    refused: str = ""  # the reason of a rejection, with details
    recipe: Mapping[str, Any] | None = None
    others: Sequence[Mapping[str, Any]] = ()
    listed_by: str = ""  # the newest run that listed the item
    listed_key: str = ""  # its key in that run


def why_record(kind: str, found: RecordFound) -> Because:
    """Return the state of a record, and why it must be computed."""
    if found.is_whole:
        return Because(State.REFUSED, found.refused) if found.refused else Because(State.DONE)
    if found.damage:
        return Because(State.TO_DO, f"its record is damaged and will be rebuilt: {found.damage}")
    if found.recipe is not None and (changes := nearest_changes(kind, found.recipe, found.others)):
        return Because(State.TO_DO, "it was made with other settings", changes)
    if found.listed_key == found.key and found.listed_by:
        return Because(State.TO_DO, f"run {found.listed_by} had this record, but the cache has lost it")
    if found.listed_key and found.listed_by:
        return Because(State.TO_DO, f"its input has changed since run {found.listed_by}")
    return Because(State.TO_DO, "not done before")


@dataclass(frozen=True, slots=True)
class FileFound:
    """A file of an item, and its state in earlier runs."""

    path: str
    refused: str = ""  # why it cannot be read, with details
    is_settled: bool = True  # False: changed too recently to trust its times
    is_known: bool = True  # whether a scan saw it with these path, size and times
    digest: str = ""  # digest of its bytes
    earlier: tuple[str, ...] = ()  # digests of the item's files in an earlier run
    run: str = ""

    @property
    def is_another(self) -> bool:
        """Whether its content has changed since an earlier run."""
        return bool(self.earlier and self.digest) and self.digest not in self.earlier


def why_files(files: Sequence[FileFound]) -> Because:
    """Describe the changes in the files of an item."""
    for file in files:
        if file.refused:
            return Because(State.REFUSED, file.refused)
    for file in files:
        if file.is_another:
            was = " and ".join(f"{digest[:SHORT]}…" for digest in dict.fromkeys(file.earlier))
            why = f"the content of {file.path} has changed since run {file.run}: was {was}, is {file.digest[:SHORT]}…"
            return Because(State.TO_DO, why)
    for file in files:
        if not file.is_settled:
            return Because(State.TO_DO, f"{file.path} changed moments ago and is read again")
        if not file.is_known:
            again = (
                f"touched, moved or copied since run {file.run}, with the same content"
                if file.earlier
                else "not read yet"
            )
            return Because(State.TO_DO, f"{file.path} is {again}")
    return Because(State.DONE)


def why_item(files: Sequence[FileFound], record: Because) -> Because:
    """Return the state of an item's scan, from its files and its record."""
    of_files = why_files(files)
    if State.REFUSED in (of_files.state, record.state):
        return of_files if of_files.state is State.REFUSED else record
    if of_files.state is State.DONE or (record.changes and not any(file.is_another for file in files)):
        return record
    if record.state is State.DONE:
        return Because(State.TO_DO, f"{of_files.why}; it is read again, but nothing is recomputed")
    return of_files


def why_all(parts: Sequence[Because], unit: str) -> Because:
    """Return the state of the worst of several records."""
    if not parts:
        return Because(State.NOTHING, f"it has no {unit}")
    for state in (State.REFUSED, State.TO_DO, State.WAITING):
        alike = [part for part in parts if part.state is state]
        if alike and len(parts) > 1:
            return Because(state, f"{len(alike)} of {len(parts)} {unit}s: {alike[0].why}", alike[0].changes)
        if alike:
            return alike[0]
    return Because(State.DONE, f"{len(parts)} {unit}s" if len(parts) > 1 else "")


def why_stage(
    kind: str, counts: Mapping[str, int], recipe: Mapping[str, Any] | None, recorded: Sequence[RecipeStat]
) -> Because:
    """Return the state of a stage from its counts, and why it has work."""
    missing, waiting, cached = (counts.get(name, 0) for name in ("missing", "waiting", "cached"))
    if counts.get("unplanned"):
        return Because(State.WAITING, "it waits for the stages before it")
    if not missing:
        if waiting:
            return Because(State.WAITING, f"{waiting:,} items are not scanned yet")
        return Because(State.DONE if cached or counts.get("unkept") else State.NOTHING)
    if cached:
        return Because(State.TO_DO, f"{missing:,} are new, changed or lost (pipeline explain ITEM)")
    others = [other for other in recorded if recipe is not None and changes_between(kind, other.recipe, recipe)]
    if recipe is None or not recorded:
        return Because(State.TO_DO, "not done before")
    if len(others) < len(recorded):
        return Because(State.TO_DO, "the cached records belong to other or changed files")
    had = sum(other.records for other in others)
    changes = nearest_changes(kind, recipe, (other.recipe for other in others))
    return Because(State.TO_DO, f"{had:,} cached records were made with other settings", changes)
