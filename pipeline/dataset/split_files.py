"""Splits as files that a configuration can name: the data set's own table with its splits, or a new one."""

from __future__ import annotations

import csv
import json
import os
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from pipeline.command_line import Command
from pipeline.dataset.split_data import leaking_items
from pipeline.dataset.worklist import list_items
from pipeline.errors import ConfigError, DataError
from pipeline.files import csv_table, json_object, replacing, what_is_no_file
from pipeline.records import Item, Rejection
from pipeline.structures.sources.source_rows import DELIMITERS, JSON_LINES, text_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeline.dataset.split_data import Division, SharedItems
    from pipeline.project.project import Project
    from pipeline.structures.sources.item_ids import SourceSpec

TABLES = ("manifest", "sabdab", "pinder")  # sources whose table has a column split
SPELLINGS = {"split": ("split",), "cluster": ("cluster", "cluster_id"), "fold": ("fold",)}


Cells: TypeAlias = "tuple[dict[str, str], ...]"  # for each file


@dataclass(frozen=True, slots=True)
class Placed:
    """An entry of a data set, with what a table is to say of it; nothing, where it cannot be used."""

    entry: Item | Rejection
    cells: Cells


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
    """Refuse a file that could not be used as the splits of this data set, or whose folds could not."""
    table = own_table(spec)
    wanted = _kind(table) if table else ".csv"
    if _kind(out) != wanted or out.suffix == ".gz":
        what = f"the splits of this data set are a {wanted} file"
        raise ConfigError(what, where=str(out), remedy=f"--out {out.name.partition('.')[0]}{wanted}")
    for path in (out, *fold_files(out, folds)):
        check_place(spec, path)
    needs_folder = spec.source in TABLES and spec.structures_dir is None
    if table and needs_folder and out.parent.resolve() != table.parent.resolve():
        what = "the paths in the table are relative to its folder, so the new table must be there"
        raise ConfigError(what, where=str(out), remedy=f"--out {table.parent / out.name}, or set data.structures_dir")


def own_table(spec: SourceSpec) -> Path | None:
    """Return the table of a data set that names splits, if it has one."""
    return spec.path if spec.source in TABLES else spec.splits


def _kind(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def use_of(spec: SourceSpec, out: Path) -> tuple[tuple[str, str], ...]:
    """Return the settings with which a written file is used; none where sequences have no table to name."""
    if spec.source == "fasta":
        return ()
    if spec.source in TABLES:
        return (("data.path", str(out)),)
    if spec.source == "pairs":
        return (("data.splits", str(out)),)
    return (("data.source", "manifest"), ("data.path", str(out)))


def fold_files(out: Path, folds: int) -> list[Path]:
    """Return the file of each fold."""
    return [out.with_name(f"{out.stem}.fold{fold}{out.suffix}") for fold in range(folds)]


def write_splits(project: Project, shared: SharedItems, division: Division, files: Sequence[Path], folds: int) -> None:
    """Write the file of splits, or one for each fold; each appears whole or not at all."""
    placed = _placed(project, shared, division, folds)
    with ExitStack() as stack:
        asides = [stack.enter_context(replacing(path)) for path in files]
        opened = [stack.enter_context(aside.open("w", encoding="utf-8", newline="")) for aside in asides]
        table = own_table(project.source)
        if table is None:
            _write_new(project.source, placed, opened, [path.parent for path in files])
        elif _kind(table) in JSON_LINES:
            _rewrite_json(table, placed, opened)
        else:
            _rewrite_cells(table, placed, opened, quoted=project.source.source != "sabdab" or ".csv" in table.suffixes)


def _placed(project: Project, shared: SharedItems, division: Division, folds: int) -> Iterator[Placed]:
    """Yield the entries of the data set again, with what is to be written of each."""
    number, nothing = 0, dict.fromkeys(("split", "cluster", "fold") if folds else ("split", "cluster"), "")
    for entry in list_items(project):
        if isinstance(entry, Rejection) or number == len(shared) or not shared.is_item(number, entry.id):
            yield Placed(entry, (nothing,) * max(1, folds))
            continue
        split = int(division.split_N[number])
        cluster = {"cluster": division.component_name(number, shared.draws)}
        # In the file of fold K, fold K is the test, the next one validates, and all others train.
        roles = ({0: "test", 1: "val"}.get((split - fold) % folds, "train") for fold in range(folds))
        rows = tuple({"split": role, **cluster, "fold": str(split)} for role in roles)
        yield Placed(entry, rows if folds else ({"split": division.names[split], **cluster},))
        number += 1
    if number < len(shared):
        what = "it changed while being read"
        raise DataError(what, where=str(project.source.path), remedy=Command.of("data split --out FILE"))


def _write_new(spec: SourceSpec, placed: Iterator[Placed], files: Sequence[IO[str]], folders: Sequence[Path]) -> None:
    """Write a table of items that no table names: of pairs by path, of files as a manifest, of sequences by id."""
    writers = [csv.writer(file, lineterminator="\n") for file in files]
    header: tuple[str, ...] = ()
    for entry, cells in ((each.entry, each.cells) for each in placed):
        if isinstance(entry, Rejection):
            continue
        for writer, told, folder in zip(writers, cells, folders, strict=True):
            row = {**_row_of(spec, entry, folder), **told}
            if not header:
                for each in writers:
                    each.writerow(tuple(row))
                header = tuple(row)
            writer.writerow(row.values())


def _row_of(spec: SourceSpec, item: Item, folder: Path) -> dict[str, str]:
    if spec.source == "pairs":
        return {"path": item.id}
    if spec.source == "fasta":
        return {"id": item.id}
    path, root = item.parts[0].path, os.path.abspath(folder)  # noqa: PTH100 - as sources do
    relative = os.path.relpath(path, root) if path.startswith(root + os.sep) else path
    chains = {part.role.value: ",".join(part.chains) for part in item.parts}
    first = chains.get("receptor", "") or chains.get("complex", "") or chains.get("whole", "")
    return {"id": item.id, "path": relative, "receptor_chains": first, "ligand_chains": chains.get("ligand", "")}


def _by_line(placed: Iterator[Placed]) -> Iterator[tuple[int, Cells]]:
    """Yield the line of each entry in its table, and what is to be written there; at last line 0."""
    for each in placed:
        yield int(each.entry.origin.rpartition(":")[2] or 0), each.cells
    yield 0, ()


def _rewrite_cells(table: Path, placed: Iterator[Placed], files: Sequence[IO[str]], *, quoted: bool) -> None:
    """Copy a table with its columns of splits replaced, or added; rows that are no items get none."""
    delimiter = DELIMITERS[_kind(table)]
    quoting: Any = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    reader = csv.reader(_lines_of(table), delimiter=delimiter, quoting=quoting, skipinitialspace=True)
    told = _by_line(placed)
    line, cells = next(told)
    columns: dict[str, int] = {}
    for number, row in _numbered(reader):
        values: Cells = (dict.fromkeys(columns, ""),) * len(files)
        if not columns:
            columns = _columns(row, next(iter(cells), {"split": "", "cluster": ""}))
            values = ({name: row[at] if at < len(row) else name for name, at in columns.items()},) * len(files)
            width = max(len(row), *(at + 1 for at in columns.values()))
        elif number == line:
            values = cells
            line, cells = next(told)
        for file, cells_of_file in zip(files, values, strict=True):
            _write_row(file, _filled(row, width, columns, cells_of_file), delimiter, quoted=quoted)
    if line:
        raise DataError("its rows do not match its lines", where=f"{table}:{line}", remedy="correct its quotes")


def _numbered(reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield each row that is not empty with the line where it begins."""
    number = 1
    for row in reader:
        if any(row):
            yield number, row
        number = reader.line_num + 1


def _lines_of(table: Path) -> Iterator[str]:
    """Yield the lines of a table, which is closed when they end."""
    with closing(text_lines(table)) as lines:
        yield from lines


def _columns(header: Sequence[str], wanted: dict[str, str]) -> dict[str, int]:
    """Return where each column is that is written; new ones come last."""
    names = [name.strip().lower() for name in header]
    columns: dict[str, int] = {}
    for name in wanted:
        known = [names.index(spelling) for spelling in SPELLINGS[name] if spelling in names]
        columns[name] = known[0] if known else max([len(names) - 1, *columns.values()]) + 1
    return columns


def _filled(row: Sequence[str], width: int, columns: dict[str, int], values: dict[str, str]) -> list[str]:
    cells = [*row[:width], *[""] * (width - len(row))]
    for name, at in columns.items():
        cells[at] = values[name]
    return cells


def _write_row(file: IO[str], cells: Sequence[str], delimiter: str, *, quoted: bool) -> None:
    if quoted:
        csv.writer(file, delimiter=delimiter, lineterminator="\n").writerow(cells)
    else:
        file.write(delimiter.join(cells) + "\n")


def _rewrite_json(table: Path, placed: Iterator[Placed], files: Sequence[IO[str]]) -> None:
    """Copy a table of JSON lines with its splits replaced."""
    told = _by_line(placed)
    line, cells = next(told)
    for number, text in enumerate(_lines_of(table), 1):
        if number != line:
            for file in files if text.strip() else ():
                file.write(text)
            continue
        row = json_object(text)
        for file, values in zip(files, cells, strict=True):
            kept = {name: value for name, value in row.items() if not _is_replaced(name, values)}
            file.write(json.dumps({**kept, **values}) + "\n" if row else text)
        line, cells = next(told)


def _is_replaced(name: str, values: dict[str, str]) -> bool:
    return any(name.strip().lower() in SPELLINGS[column] for column in values)


def write_leaking(project: Project, shared: SharedItems, out: Path) -> None:
    """Write every item that shares something with another split: the level, what of it, its split and its id."""
    rows = leaking_items(shared)
    number = 0
    with csv_table(out, ("level", "partners", "group", "split", "id")) as add:
        for entry in list_items(project):
            if isinstance(entry, Item) and number < len(shared) and shared.is_item(number, entry.id):
                for told in rows.get(number, ()):
                    add((*told, entry.split, entry.id))
                number += 1
