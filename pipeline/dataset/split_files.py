"""Splits as a table for `data.splits`, and the items that leak, as files."""

from __future__ import annotations

import csv
from contextlib import ExitStack
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from pipeline.command_line import Command
from pipeline.dataset.split_data import leaking_items
from pipeline.dataset.worklist import list_items
from pipeline.errors import ConfigError, DataError
from pipeline.files import csv_table, replacing, what_is_no_file
from pipeline.records import Item
from pipeline.structures.sources.table_sources import PAIRS_SUBFOLDERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeline.dataset.split_data import Division, SharedItems
    from pipeline.project.project import Project
    from pipeline.structures.sources.item_ids import SourceSpec


def check_place(spec: SourceSpec, out: Path) -> None:
    """Refuse a file that is the data set itself, or cannot be written."""
    if any(own is not None and out.resolve() == own.resolve() for own in (spec.path, spec.splits)):
        what = "this is the data set's own file, which is never overwritten"
        raise ConfigError(what, where=str(out), remedy=f"choose another name, for example {out.stem}.split{out.suffix}")
    if not out.absolute().parent.is_dir():
        raise ConfigError("its folder does not exist", where=str(out), remedy=f"mkdir -p {quote(str(out.parent))}")
    if other := what_is_no_file(out):
        raise ConfigError(f"{other} is not a file", where=str(out), remedy="name a file")


def check_out(spec: SourceSpec, out: Path, folds: int) -> None:
    """Refuse a file that could not be used as `data.splits`, or whose folds could not."""
    if out.suffix.lower() != ".csv":
        what = "the splits are a .csv file"
        raise ConfigError(what, where=str(out), remedy=f"--out {out.name.partition('.')[0]}.csv")
    for path in (out, *fold_files(out, folds)):
        check_place(spec, path)


def fold_files(out: Path, folds: int) -> list[Path]:
    """Return the file of each fold."""
    return [out.with_name(f"{out.stem}.fold{fold}{out.suffix}") for fold in range(folds)]


def write_splits(project: Project, shared: SharedItems, division: Division, files: Sequence[Path], folds: int) -> None:
    """Write the table of splits, or one for each fold; each appears whole or not at all."""
    of_pairs = project.source.path.absolute() if project.source.source == "pairs" else None
    with ExitStack() as stack:
        asides = [stack.enter_context(replacing(path)) for path in files]
        opened = [stack.enter_context(aside.open("w", encoding="utf-8", newline="")) for aside in asides]
        writers = [csv.writer(file, lineterminator="\n") for file in opened]
        for writer in writers:
            writer.writerow(("path" if of_pairs else "id", "split", "cluster", *(("fold",) if folds else ())))
        for number, item in _usable(project, shared):
            name = _pair(item, of_pairs) if of_pairs else item.id
            split, component = int(division.split_N[number]), division.component_name(number, shared.draws)
            # In the file of fold K, fold K is the test, the next one validates, and all others train.
            roles = [{0: "test", 1: "val"}.get((split - fold) % folds, "train") for fold in range(folds)]
            for writer, role in zip(writers, roles or [division.names[split]], strict=True):
                writer.writerow((name, role, component, *((split,) if folds else ())))


def _pair(item: Item, root: Path) -> str:
    """Return a pair as lists of pairs name it: with the folder that it is in."""
    folder = Path(item.parts[0].path).parent.relative_to(root)
    parts = folder.parts[1:] if folder.parts[:1] == PAIRS_SUBFOLDERS else folder.parts
    return "/".join((*parts, item.id.removeprefix("".join(f"{part}." for part in parts))))


def _usable(project: Project, shared: SharedItems) -> Iterator[tuple[int, Item]]:
    """Yield each usable item of the data set again with its number."""
    number = 0
    for entry in list_items(project):
        if isinstance(entry, Item) and number < len(shared) and shared.is_item(number, entry.id):
            yield number, entry
            number += 1
    if number < len(shared):
        what = "it changed while being read"
        raise DataError(what, where=str(project.source.path), remedy=Command.of("data split --out FILE"))


def write_leaking(project: Project, shared: SharedItems, out: Path) -> None:
    """Write every item that shares something with another split: the level, what of it, its split and its id."""
    rows = leaking_items(shared)
    with csv_table(out, ("level", "partners", "group", "split", "id")) as add:
        for number, entry in _usable(project, shared):
            for told in rows.get(number, ()):
                add((*told, entry.split, entry.id))
