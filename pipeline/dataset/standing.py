"""Results that still stand: what a stage found is taken over by a later run, if all that it rests on is as it was.

That is the data set, item by item, its files as they stand, the stage's settings, this code, and the parsers of files:
one digest names a result. And every record that was found then: each is read and verified again, but shard by shard and
unparsed. So are the lists that are laid into a run: people may write into what they are shown.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import xxhash

from pipeline.dataset import worklist
from pipeline.files import file_digest
from pipeline.journal.attempts import left_out_items, refused_parts
from pipeline.keys import KEY_BYTES, content_digest
from pipeline.project.project import once
from pipeline.project.run_code import package_digest
from pipeline.records import Item
from pipeline.stage_names import StageName
from pipeline.store.store import WholeRecords
from pipeline.structures.parsing.structure_files import parsers
from pipeline.structures.scan_items import glance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project

FOLDER = ".standing"  # of the runs
RESULT, KEYS = "result.json", "keys"
KEPT = 12  # results, of the stages of all data sets and configurations


@dataclass(slots=True)
class DataState:
    """A data set as it stands: 16 bytes a file."""

    digest: str = ""  # of all items, in order, and of their files; empty while the times of a file prove nothing
    items: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by the source: reason → how many
    marks: bytearray = field(default_factory=bytearray)  # the keys by which the store knows the files


@dataclass(frozen=True, slots=True)
class Standing:
    """A result of a stage that still stands."""

    counts: Mapping[str, int]  # of a survey: everything is there
    judged: Mapping[str, Any]


def recall_standing(
    project: Project, folder: RunFolder | None, stage: str, recipe: Mapping[str, Any]
) -> Standing | None:
    """Return the result of a stage that still stands, and lay its lists into the run; None where there is none.

    Whoever asks again in this process gets the same answer: what was verified once is verified for a run.
    """
    if folder is None or not project.only.is_all:
        return None
    return _recalled(project, folder, stage, json.dumps(recipe, sort_keys=True, default=str))


@once
def _recalled(project: Project, folder: RunFolder, stage: str, recipe: str) -> Standing | None:
    root = project.config.cluster.runs / FOLDER
    if next(root.glob(f"{stage}-*"), None) is None:  # of a new project no file is looked at for this
        return None
    place = root / _name(project, data_state(project, folder), stage, json.loads(recipe))
    try:
        result, keys = json.loads((place / RESULT).read_bytes()), (place / KEYS).read_bytes()
        if xxhash.xxh3_128_hexdigest(keys) != result["digest"] or not _verified(project, keys, result["kinds"]):
            return None
        if any(file_digest(place / name) != digest for name, digest in result["lists"].items()):
            return None
        if result["needed"]:  # what the data set needs was found out again, for whoever cleans the cache
            needed = worklist.recall_needed(project.cache, project.config, stage)
            if needed is None:
                return None
            worklist.remember_needed(project, stage, needed.keys.tobytes())
        for name in result["lists"]:
            (folder.path / name).unlink(missing_ok=True)
            _same_file(place / name, folder.path / name)
        os.utime(place)
        return Standing(result["counts"], result["judged"])
    except (OSError, KeyError, TypeError, ValueError):  # there is none, it is torn, or of another version
        return None


def remember_standing(
    project: Project,
    folder: RunFolder,
    stage: str,
    recipe: Mapping[str, Any],
    state: DataState,
    standing: Standing,
    keys: Mapping[str, bytearray],
    lists: Sequence[Path] = (),
) -> None:
    """Write down the result of a stage that lacks nothing, with the keys of its records by kind, and its lists.

    `state` was taken before anything was looked up: a file that changed meanwhile never looks so again. What this run
    alone left out is tried again by the next one, which therefore has another result.
    """
    told = (left_out_items, refused_parts)
    own = any(look(folder, name) for look in told for name in {StageName.SCAN.value, stage})
    root = project.config.cluster.runs / FOLDER
    if not state.digest or not project.only.is_all or own:
        return
    aside = root / f"{secrets.token_hex(8)}.partial"
    digest = xxhash.xxh3_128()
    for part in keys.values():
        digest.update(part)
    result = {
        "digest": digest.hexdigest(),
        "kinds": {kind: len(part) for kind, part in keys.items()},
        "needed": worklist.recall_needed(project.cache, project.config, stage) is not None,
        "counts": standing.counts,
        "judged": standing.judged,
    }
    with suppress(OSError):  # it is found out anew then
        result["lists"] = {path.name: file_digest(path) for path in lists}
        aside.mkdir(0o700, parents=True)
        for path in lists:
            _same_file(path, aside / path.name)
        with (aside / KEYS).open("wb") as file:
            file.writelines(keys.values())
        (aside / RESULT).write_text(json.dumps(result))
        place = root / _name(project, state, stage, recipe)
        shutil.rmtree(place, ignore_errors=True)
        aside.rename(place)
    shutil.rmtree(aside, ignore_errors=True)
    _keep_newest(root)


def data_state(project: Project, folder: RunFolder, *, anew: bool = False) -> DataState:
    """Return how a run's data set stands, as it was when this was first asked, or `anew` as it is now."""
    known = _known_state(project, folder)
    if anew or not known:
        known[:] = [_state(project, folder)]
    return known[0]


@once
def _known_state(project: Project, folder: RunFolder) -> list[DataState]:  # noqa: ARG001 - whose it is
    return []


def _state(project: Project, folder: RunFolder) -> DataState:
    state, digest, settled = DataState(), xxhash.xxh3_128(), True
    for line, entry in worklist.frozen_lines(project, folder):
        digest.update(line)
        state.items += 1
        if not isinstance(entry, Item):
            state.refused[entry.reason.value] += 1
            continue
        for path in project.recipe.paths(entry):
            mark = glance(path, project.recipe)
            if isinstance(mark, bytes):
                state.marks += mark
                digest.update(mark)
            elif mark is None:
                settled = False
            else:
                digest.update(f"{path}\0{mark.reason}\0{mark.detail}\0".encode())
    state.digest = digest.hexdigest() if settled else ""
    return state


def _name(project: Project, state: DataState, stage: str, recipe: Mapping[str, Any]) -> str:
    """Return the name of a stage's result, which digests everything that it follows from but the records."""
    layers = [str(layer.root) for layer in (project.cache, *project.cache.under)]
    settings = worklist.deciding(project.config, stage)
    asked = [stage, state.digest, dict(recipe), settings, layers, package_digest(), parsers()]
    return f"{stage}-{content_digest(json.dumps(asked, sort_keys=True, default=str).encode()).hex()}"


def _verified(project: Project, keys: bytes, kinds: Mapping[str, int]) -> bool:
    """Say whether all records are there and whole; embeddings are read up to `cache.verify_bytes`, as ever."""
    view, start = memoryview(keys), 0
    for kind, length in kinds.items():
        part, start = view[start : start + length], start + length
        store = project.cache.kind(kind)
        store = project.encoding.shelves.embeddings if kind == StageName.EMBED else store
        limit = (project.config.cache.verify_bytes,) if kind == StageName.EMBED else ()
        each = (bytes(part[at : at + KEY_BYTES]) for at in range(0, length, KEY_BYTES))
        if not WholeRecords(store, *limit).have(each):
            return False
    return True


def _same_file(known: Path, wanted: Path) -> None:
    """Give a file another name: all who write such lists replace them, and never write into them."""
    try:
        os.link(known, wanted)
    except OSError:
        shutil.copyfile(known, wanted)


def _keep_newest(root: Path) -> None:
    """Remove all results but the newest."""
    with suppress(OSError):
        by_age = sorted(root.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in by_age[:-KEPT]:
            shutil.rmtree(path, ignore_errors=True)
