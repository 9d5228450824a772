"""Why something is to be done, perhaps again: pure functions of what is there and of what was recorded before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.report.stage_graph import WorkState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# What recipes call a setting → what people call it, where that is not its name in the section of its kind.
SECTION = {"scan": "structures", "graph": "graph", "embed": "embed", "train": "train"}
SETTINGS = {
    "scan": {"ligand": "data.ligand", "seqres": "structures.sequence"},
    "graph": {"atom_radius": "graph.atom.radius", "hops": "graph.atom.hops", "hydrogens": "graph.atom.hydrogens"},
    "embed": {"cut": "embed.long"},
    "train": {
        "code": "the task's code",
        "table": "the data set",
        "crop": "what is cropped",
        "skipped": "what is too large and left out",
        "files": "files that the task reads",
    },
}
GROUPED = ("reading", "policy")  # parts of a recipe whose settings stand in its section
SHORT = 12  # of a digest
DIGEST = 24  # from so many hexadecimal digits on it is one


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting that was another when something was made."""

    setting: str
    was: Any
    now: Any

    def __str__(self) -> str:
        if self.was is None or self.now is None or _is_digest(self.was):
            return f"{self.setting} was {_shown(self.was)}, is {_shown(self.now)}"
        return f"{self.setting}: {_shown(self.was)} → {_shown(self.now)}"


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) >= DIGEST and not set(value) - set("0123456789abcdef")


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f"{value[:SHORT]}…" if _is_digest(value) else value
    return "not set" if value is None else json.dumps(value)


@dataclass(frozen=True, slots=True)
class Because:
    """How something stands, why, and the settings that were others before."""

    state: WorkState
    why: str = ""
    changes: tuple[SettingChange, ...] = ()

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.why, "; ".join(map(str, self.changes)))))


def changes_between(kind: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[SettingChange, ...]:
    """Return the settings in which two recipes of a kind of records differ, by the names that people give them."""
    before, after = dict(_flat(was)), dict(_flat(now))
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return tuple(SettingChange(setting_of(kind, name), before.get(name), after.get(name)) for name in names)


def _flat(recipe: Mapping[str, Any], within: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the settings of a recipe with the names of those that they stand in; lists and tuples are the same."""
    for name, value in recipe.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{within}{name}.")
        else:
            yield f"{within}{name}", list(value) if isinstance(value, tuple) else value


def setting_of(kind: str, name: str) -> str:
    """Return the setting that a recipe calls by a name, or in words what else it is."""
    first, _, rest = name.partition(".")
    if first == "version":
        return f"how this program does {kind} (its version of that)"
    if first == "embeddings" and kind == "train":
        return setting_of("embed", rest)
    if first in GROUPED and rest:
        return setting_of(kind, rest)
    own = SETTINGS.get(kind, {})
    return own.get(name) or own.get(first) or f"{SECTION.get(kind, kind)}.{name}"


def nearest_changes(
    kind: str, recipe: Mapping[str, Any], others: Iterable[Mapping[str, Any]]
) -> tuple[SettingChange, ...]:
    """Return how a recipe differs from that of the others which is most like it; nothing where there are none."""
    differing = (changes_between(kind, other, recipe) for other in others)
    return min((changes for changes in differing if changes), key=len, default=())


@dataclass(frozen=True, slots=True)
class RecordFound:
    """What the cache has of one record, and by which other recipes it has the same."""

    key: str
    is_whole: bool = False
    damage: str = ""  # why a copy that is there cannot be used
    refused: str = ""  # the reason in the record, with details
    recipe: Mapping[str, Any] | None = None
    others: Sequence[Mapping[str, Any]] = ()
    listed_by: str = ""  # the newest run that listed the item
    listed_key: str = ""  # the key that it had there


def why_record(kind: str, found: RecordFound) -> Because:
    """Say how a record stands, and why it is to be made."""
    if found.is_whole:
        return Because(WorkState.REFUSED, found.refused) if found.refused else Because(WorkState.DONE)
    if found.damage:
        return Because(WorkState.TO_DO, f"its record is damaged, and made anew: {found.damage}")
    if found.recipe is not None and (changes := nearest_changes(kind, found.recipe, found.others)):
        return Because(WorkState.TO_DO, "it was done with other settings", changes)
    if found.listed_key == found.key and found.listed_by:
        return Because(WorkState.TO_DO, f"run {found.listed_by} had this record, and the cache has it no more")
    if found.listed_key and found.listed_by:
        return Because(WorkState.TO_DO, f"what it is made of is another than in run {found.listed_by}")
    return Because(WorkState.TO_DO, "it was never done")


@dataclass(frozen=True, slots=True)
class FileFound:
    """A file of an item as it stands, and what earlier runs knew of it."""

    path: str
    refused: str = ""  # why it cannot be read, with details
    is_settled: bool = True  # else it changed so lately that its times prove nothing
    is_known: bool = True  # as it stands: path, size and times
    digest: str = ""  # of its bytes
    earlier: tuple[str, ...] = ()  # digests of the item's files in an earlier run
    run: str = ""

    @property
    def is_another(self) -> bool:
        """Whether its bytes are others than an earlier run read."""
        return bool(self.earlier and self.digest) and self.digest not in self.earlier


def why_files(files: Sequence[FileFound]) -> Because:
    """Say whether the files of an item stand in the way of what is known, and how they changed."""
    for file in files:
        if file.refused:
            return Because(WorkState.REFUSED, file.refused)
    for file in files:
        if file.is_another:
            was = " and ".join(f"{digest[:SHORT]}…" for digest in dict.fromkeys(file.earlier))
            why = f"the bytes of {file.path} changed since run {file.run}: they were {was}, are {file.digest[:SHORT]}…"
            return Because(WorkState.TO_DO, why)
    for file in files:
        if not file.is_settled:
            return Because(WorkState.TO_DO, f"{file.path} changed just now: it is read again")
        if not file.is_known:
            again = (
                f"touched, moved or copied since run {file.run}, with the same bytes"
                if file.earlier
                else "not read yet"
            )
            return Because(WorkState.TO_DO, f"{file.path} is {again}")
    return Because(WorkState.DONE)


def why_item(files: Sequence[FileFound], record: Because) -> Because:
    """Say how the scan of an item stands, by its files and by its record."""
    of_files = why_files(files)
    if WorkState.REFUSED in (of_files.state, record.state):
        return of_files if of_files.state is WorkState.REFUSED else record
    if of_files.state is WorkState.DONE or (record.changes and not any(file.is_another for file in files)):
        return record
    if record.state is WorkState.DONE:
        return Because(WorkState.TO_DO, f"{of_files.why}; nothing is computed anew for that")
    return of_files


def why_all(parts: Sequence[Because], unit: str) -> Because:
    """Say how several records of an item stand together: as the first of the worst does."""
    if not parts:
        return Because(WorkState.NONE, f"it has no {unit}")
    for state in (WorkState.REFUSED, WorkState.TO_DO, WorkState.WAITING):
        alike = [part for part in parts if part.state is state]
        if alike and len(parts) > 1:
            return Because(state, f"{len(alike)} of {len(parts)} {unit}s: {alike[0].why}", alike[0].changes)
        if alike:
            return alike[0]
    return Because(WorkState.DONE, f"{len(parts)} {unit}s" if len(parts) > 1 else "")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recipe that the cache has records of, and how many."""

    recipe: Mapping[str, Any]
    records: int


def why_stage(
    kind: str, counts: Mapping[str, int], recipe: Mapping[str, Any] | None, recorded: Sequence[Recorded]
) -> Because:
    """Say how a stage stands by what was counted, and why there is something to do."""
    missing, waiting, cached = (counts.get(name, 0) for name in ("missing", "waiting", "cached"))
    if counts.get("unplanned"):
        return Because(WorkState.WAITING, "what it takes is known only when the stages before it are done")
    if not missing:
        if waiting:
            return Because(WorkState.WAITING, f"{waiting:,} items are not scanned yet")
        return Because(WorkState.DONE if cached or counts.get("unkept") else WorkState.NONE)
    if cached:
        return Because(
            WorkState.TO_DO, f"{missing:,} are new or changed, or their records went (pipeline explain ITEM)"
        )
    others = [other for other in recorded if recipe is not None and changes_between(kind, other.recipe, recipe)]
    if recipe is None or not recorded:
        return Because(WorkState.TO_DO, "it was never done")
    if len(others) < len(recorded):
        return Because(WorkState.TO_DO, "the records that are there are of other data, or of files that have changed")
    had = sum(other.records for other in others)
    changes = nearest_changes(kind, recipe, (other.recipe for other in others))
    return Because(WorkState.TO_DO, f"{had:,} records are there, made with other settings", changes)
