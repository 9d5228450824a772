"""Explains the state of one item from its files, its records and the lists of earlier runs.

It reads only this item: run lists are searched as bytes, and the data source is read only if no list has the item.
"""

from __future__ import annotations

import csv
import io
import json
import mmap
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.codec import plain
from pipeline.command_line import Command
from pipeline.dataset import worklist
from pipeline.dataset.reader_items import is_reader, reader_tables
from pipeline.encoder.embedding_recipe import texts
from pipeline.errors import CacheDamaged, ConfigError, PipelineError, RecordMissing
from pipeline.files import csv_cell
from pipeline.journal.run_folder import runs_in
from pipeline.journal.run_status import State
from pipeline.keys import content_digest, tagged_key
from pipeline.project.project import once
from pipeline.records import Inventory, Item, Rejection
from pipeline.stage_names import StageName
from pipeline.stages.embed import name_of, refusal
from pipeline.stages.table import everything
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.inventory import item_key, item_subject, plain_recipe
from pipeline.structures.parsing.amber import coordinates_beside
from pipeline.structures.parsing.structure_files import item_paths, read_file
from pipeline.structures.scan_items import file_mark
from pipeline.views.stage_states import explain_training
from pipeline.views.why import (
    Because,
    FileFound,
    RecordFound,
    why_all,
    why_files,
    why_item,
    why_record,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.store.store import Store

RUNS_LOOKED_AT = 50
LATER = (StageName.EMBED, StageName.GRAPH, StageName.TRAIN)  # stages after the scan that process items
NAMED, COMPARED = 5, 200_000  # similar names in an error; names that are compared


@dataclass(frozen=True, slots=True)
class StageOfItem:
    """The state of one stage's work on an item."""

    stage: str
    because: Because
    keys: Mapping[str, str] = field(default_factory=dict)  # record name → its state

    def to_json(self) -> dict[str, Any]:
        return {"stage": self.stage, **plain(self.because), "keys": dict(self.keys)}


@dataclass(frozen=True, slots=True)
class ItemExplained:
    """The state of an item in each stage."""

    id: str
    origin: str
    stages: Sequence[StageOfItem]
    next: Command | None

    def to_json(self) -> dict[str, Any]:
        stages = [stage.to_json() for stage in self.stages]
        return {"item": self.id, "origin": self.origin, "stages": stages, "next": str(self.next or "")}


@dataclass(frozen=True, slots=True)
class Listed:
    """Records of an item in earlier runs."""

    run: str = ""  # the newest run that could use the item
    keys: Mapping[str, str] = field(default_factory=dict)  # stage → keys of its records in that run
    refused_by: str = ""  # the newest run that rejected it
    refused: str = ""


def explain_item(project: Project, name: str) -> ItemExplained:
    """Return the state of an item in each stage, and why."""
    if is_reader(project.config):
        return _explain_entry(project, name)
    entry = find_item(project, name)
    if isinstance(entry, Rejection):
        because = Because(State.REFUSED, f"{entry.reason.value}: {entry.detail}")
        return ItemExplained(name, entry.origin, [StageOfItem("scan", because)], None)
    listed = last_listed(project, name)
    scan, inventory, key = _scan(project, entry, listed)
    stages, wanted = [StageOfItem("scan", scan, {"inventory": key.hex()} if key else {})], everything(project.config)
    later = [name for name in wanted if name in LATER]
    if scan.state is State.REFUSED:
        stages += [StageOfItem(stage, Because(State.NOTHING, "the item is rejected")) for stage in later]
        return ItemExplained(name, entry.origin, stages, Command.submit("scan", then="   (after you fix that)"))
    looks = {
        StageName.EMBED: lambda: _embed(project, inventory),
        StageName.GRAPH: lambda: _graph(project, inventory, key, listed),
        StageName.TRAIN: lambda: _train(project, entry),
    }
    stages += [looks[StageName(stage)]() for stage in later]
    first = next((at for at, stage in enumerate(stages) if stage.because.state is State.TO_DO), None)
    if first is None:
        return ItemExplained(name, entry.origin, stages, None)
    because = stages[first].because
    if listed.refused and not because.changes:  # it will be retried
        why = f"{because.why} (run {listed.refused_by} rejected it: {listed.refused})"
        stages[first] = replace(stages[first], because=replace(because, why=why))
    return ItemExplained(name, entry.origin, stages, Command.submit(stages[first].stage))


def find_item(project: Project, name: str) -> Item | Rejection:
    """Return an item of the data set; if there is none, raise ConfigError with similar names."""
    listing = _newest_listing(project)
    found = _in_listing(listing.items, name) if listing is not None else None
    if isinstance(found, Item) and all(Path(path).exists() for path in item_paths(found)):
        return found
    names = list[str]()
    for entry in worklist.list_items(project):
        if entry.id == name:
            return entry
        names.append(entry.id)
    raise no_item(name, names, str(project.config.data.path))


def no_item(name: str, names: Sequence[str], where: str) -> ConfigError:
    """Return the error for an unknown item."""
    near = near_names(name, names)
    what = f"no item {name!r}" + (f"; did you mean {', '.join(near)}?" if near else f" among {len(names):,}")
    return ConfigError(what, where=where, remedy=Command.of("data items", then="   (lists them; --json lists all)"))


def near_names(name: str, names: Sequence[str]) -> list[str]:
    """Return a few similar names: first longer names (ignoring case), then close matches."""
    holding = sorted((other for other in names if name.lower() in other.lower()), key=len)
    alike = [other for other in islice(names, COMPARED) if abs(len(other) - len(name)) <= 2]
    return list(dict.fromkeys([*holding, *get_close_matches(name, alike, n=NAMED)]))[:NAMED]


def _newest_listing(project: Project) -> RunFolder | None:
    """Return the newest run that listed this data set in its present state, or None."""
    data = project.config.data.model_dump(mode="json")
    named = [path for path in (project.config.data.path, project.config.data.splits) if path and path.is_file()]
    for folder in islice(reversed(runs_in(project.config.cluster.runs)), RUNS_LOOKED_AT):
        with suppress(OSError, ValueError, KeyError):
            at = folder.items.stat().st_mtime_ns
            if json.loads(folder.config.read_text())["data"] == data:
                return folder if all(path.stat().st_mtime_ns < at for path in named) else None
    return None


def _in_listing(path: Path, name: str) -> Item | Rejection | None:
    """Return an entry of a frozen data set by its name."""
    data = _entry_in(path, name)
    return (Rejection.from_json(data) if "reason" in data else Item.from_json(data)) if data else None


def _entry_in(path: Path, name: str) -> dict[str, Any]:
    """Return the line of an item in a list, or an empty text."""
    entry: dict[str, Any] = json.loads(line_with(path, f'"id": {json.dumps(name)}'.encode()) or "{}")
    return entry


def line_with(path: Path, part: bytes) -> bytes:
    """Return the first line of a file that contains a text; empty without such a line or file."""
    none = (ValueError, OSError)  # an empty file cannot be mapped
    with suppress(*none), path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        if (at := mapped.find(part)) >= 0:
            at += part.startswith(b"\n")  # the end of the previous line
            end = mapped.find(b"\n", at)
            return mapped[mapped.rfind(b"\n", 0, at) + 1 : end if end >= 0 else len(mapped)]
    return b""


def last_listed(project: Project, name: str) -> Listed:
    """Return what runs have listed of an item: its last keys, and why the newest run rejected it."""
    refused = ("", "")
    for folder in islice(reversed(runs_in(project.config.cluster.runs)), RUNS_LOOKED_AT):
        if not refused[1] and (why := _refusal_in(folder.rejected, name)):
            refused = folder.name, why
        if keys := _keys_in(folder.inventory, name):
            return Listed(folder.name, keys, *refused)
    return Listed("", {}, *refused)


def _keys_in(path: Path, name: str) -> dict[str, str]:
    """Return the keys of an item's records in a list of usable items, if it is listed."""
    cell = io.StringIO()
    csv.writer(cell, lineterminator="").writerow([csv_cell(name), ""])
    if not (line := line_with(path, f"\n{cell.getvalue()}".encode())):
        return {}
    with suppress(OSError, StopIteration, ValueError), path.open(encoding="utf-8", newline="") as file:
        row = dict(zip(next(csv.reader(file)), next(csv.reader([line.decode()])), strict=False))
        return {part: row.get(f"{part}_key", "") for part in ("scan", "graph")}
    return {}


def _refusal_in(path: Path, name: str) -> str:
    """Return the reason of an item in a list of rejected ones, or an empty text."""
    with suppress(ValueError, KeyError):
        found = _entry_in(path, name)
        return f"{found['reason']}: {found['detail']}"
    return ""


def _scan(project: Project, item: Item, listed: Listed) -> tuple[Because, Inventory | None, bytes | None]:
    """Return the state of an item's scan, with its inventory and key if known."""
    store, recipe = project.shelves.inventories, project.recipe
    earlier = _contents(store, listed.keys.get("scan", ""))
    # an inventory has no digests of companion files, and a joint one of a topology and its coordinates
    alone = {part.path for part in (*item.parts, *item.bound) if not coordinates_beside(part.path)}
    files = [_file(project, path, earlier if path in alone else (), listed.run) for path in recipe.paths(item)]
    if (of_files := why_files(files)).state is State.REFUSED:
        return of_files, None, None
    digests = {file.path: file.digest for file in files if file.digest}
    key, subject = item_key(item, recipe, digests), item_subject(item, digests)
    found = _record(project, store, "scan", key, plain_recipe(recipe), subject, listed)
    inventory = _inventory(store, key) if found.is_whole else None
    because = why_item(files, why_record("scan", found))
    return because, inventory if because.state is not State.REFUSED else None, key


def _file(project: Project, path: str, earlier: tuple[str, ...], run: str) -> FileFound:
    """Read a file of an item as the scan does."""
    mark = file_mark(path, project.recipe)
    if isinstance(mark, Inventory):
        return FileFound(path, refused=f"{mark.reason.value}: {mark.detail}" if mark.reason else "")
    try:
        digest = content_digest(read_file(Path(path), project.recipe.max_file_bytes)).hex()
    except UnusableInput as problem:
        return FileFound(path, refused=f"{problem.reason.value}: {problem.detail}")
    is_known = isinstance(mark, bytes) and mark in project.shelves.files
    return FileFound(path, "", mark is not None, is_known, digest, earlier, run)


def _contents(store: Store, key: str) -> tuple[str, ...]:
    """Return the digests of the files of an earlier inventory."""
    inventory = _inventory(store, bytes.fromhex(key)) if key else None
    sides = (*inventory.partners, *inventory.bound) if inventory else ()
    return tuple(dict.fromkeys(partner.content for partner in sides if partner.content))


def _inventory(store: Store, key: bytes) -> Inventory | None:
    with suppress(CacheDamaged, RecordMissing, LookupError, TypeError, ValueError):
        return Inventory.from_json(store.get(key).meta)
    return None


@once
def _described(project: Project) -> list[tuple[bytes, str, Mapping[str, Any]]]:
    return [known for layer in (project.cache, *project.cache.under) for known in layer.described()]


def _record(
    project: Project, store: Store, kind: str, key: bytes, recipe: Mapping[str, Any], subject: str, listed: Listed,
    ours: Sequence[Mapping[str, Any]] = (),
) -> RecordFound:  # fmt: skip
    """Read a record and return its state; `ours` are recipes that are not variants of this one."""
    others = [
        other
        for _, of_kind, other in _described(project)
        if of_kind == kind and other != recipe and other not in ours and tagged_key(kind, other, subject) in store
    ]
    damage = ""
    meta: Mapping[str, Any] = {}
    try:
        meta = store.get(key).meta
    except CacheDamaged as error:
        damage = f"{error.what} ({error.where})"
    except RecordMissing:
        pass
    refused = f"{meta['reason']}: {meta.get('detail', '')}" if "reason" in meta else ""
    return RecordFound(key.hex(), bool(meta), damage, refused, recipe, others, listed.run, listed.keys.get(kind, ""))


def _embed(project: Project, inventory: Inventory | None) -> StageOfItem:
    """Return the state of the embeddings of an item's sequences."""
    if inventory is None:
        return StageOfItem("embed", Because(State.WAITING, "waits for its scan"))
    keys, parts, several = dict[str, str](), list[Because](), len(project.encoders) > 1
    ours: list[Mapping[str, Any]] = []  # another encoder's record is not a variant of this one
    for view in project.encoders.values():
        with suppress(PipelineError):
            ours.append(view.encoding.recipe.plain(view.encoding.recipe.wanted(0)))
    for name, view in project.encoders.items():
        try:
            parts += _embedded_by(view, inventory, keys, name if several else "", ours)
        except PipelineError as error:
            parts.append(Because(State.WAITING, f"{error.where}: {error.what}"))
    return StageOfItem("embed", why_all(parts, "embedding" if several else "sequence"), keys)


def _embedded_by(
    project: Project, inventory: Inventory, keys: dict[str, str], of: str, ours: Sequence[Mapping[str, Any]]
) -> Iterator[Because]:
    """Yield the state of the embedding of each sequence of an item; add their keys."""
    recipe, store = project.encoding.recipe, project.encoding.shelves.embeddings
    for text in texts(inventory, recipe.context):
        if why := refusal(text, recipe):
            yield Because(State.REFUSED, f"{why[0].value}: {why[1]}")
            continue
        accepted = [recipe.key(text, variant) for variant in recipe.accepted(len(text))]
        key = next((key for key in accepted if key in store), accepted[0])
        keys[name_of(text, of)], made_by = key.hex(), recipe.plain(recipe.wanted(len(text)))
        yield why_record("embed", _record(project, store, "embed", key, made_by, text, Listed(), ours))


def _graph(project: Project, inventory: Inventory | None, scanned: bytes | None, listed: Listed) -> StageOfItem:
    """Return the state of the graph of an item."""
    if inventory is None or scanned is None:
        return StageOfItem("graph", Because(State.WAITING, "waits for its scan"))
    if not project.config.graph.cache:
        return StageOfItem("graph", Because(State.NOTHING, "graphs are built during training (graph.cache: false)"))
    graphs, key = project.graphs, project.graphs.recipe.key(scanned)
    found = _record(project, graphs.store, "graph", key, graphs.recipe.plain(), scanned.hex(), listed)
    return StageOfItem("graph", why_record("graph", found), {"graph": key.hex()})


def _train(project: Project, item: Item) -> StageOfItem:
    """Return whether an item is trained on, with the state of the training."""
    split = project.config.train.split
    if item.split and split is not None and item.split != split:
        why = f"not used for training: its split is {item.split}, train.split is {split}"
        return StageOfItem("train", Because(State.NOTHING, why))
    if project.config.train.task is None:
        return StageOfItem("train", Because(State.WAITING, "trained by a script: unknown"))
    try:
        return StageOfItem("train", explain_training(project).because)
    except PipelineError as error:
        return StageOfItem("train", Because(State.WAITING, f"{error.where}: {error.what}"))


def _explain_entry(project: Project, name: str) -> ItemExplained:
    """Return the state of a reader's item: all items are read together."""
    where = str(project.config.data.path)
    for folder, key, table in reader_tables(project):
        names = [table.ids[number] for number in range(len(table))]
        if name in names:
            place = json.dumps(table.place(names.index(name)))
            because = Because(State.DONE, f"read by run {folder.name}")
            return ItemExplained(name, place, [StageOfItem("scan", because, {"table": key.hex()})], None)
        if found := _entry_in(folder.rejected, name):
            because = Because(State.REFUSED, f"{found['reason']}: {found['detail']}")
            return ItemExplained(name, found.get("origin", ""), [StageOfItem("scan", because)], None)
        raise no_item(name, names, where)
    why = "no run has read this data set with the current reader, options, code and files"
    return ItemExplained(name, where, [StageOfItem("scan", Because(State.TO_DO, why))], Command.submit(StageName.SCAN))
