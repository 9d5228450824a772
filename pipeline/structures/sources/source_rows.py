"""Rows of tables that users made (CSV, TSV, JSON lines, perhaps gzipped), and items from rows; in bounded memory."""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import re
import zlib
from contextlib import closing
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pipeline.command_line import Command
from pipeline.errors import ConfigError, DataError
from pipeline.files import EXPANSION_FLOOR_BYTES, MAX_EXPANSION
from pipeline.records import Item, Part, Reason, Rejection, Role
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.sources.item_ids import checked_id
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Generator
    from io import BufferedReader
    from pathlib import Path

    Stream = gzip.GzipFile | BufferedReader
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pipeline.structures.sources.item_ids import SourceSpec

MAX_LINE_BYTES = 4 << 20
GZIP_MAGIC = b"\x1f\x8b"
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def text_lines(path: Path) -> Generator[str, None, None]:
    """Yield the lines of a file with their ends, without a byte order mark."""
    offset = 0
    with _opened(path) as stream:
        allowed_bytes = EXPANSION_FLOOR_BYTES + MAX_EXPANSION * path.stat().st_size
        while line := _next_line(stream, path):
            text = _decoded(line, offset, path)
            if offset == 0:
                text = text.removeprefix(codecs.BOM_UTF8.decode())
                if "\r" in text.rstrip("\r\n"):
                    remedy = f"tr '\\r' '\\n' < {quote(str(path))} > unix{path.suffix}"
                    raise _refused(path, "lines end with a bare carriage return", remedy)
            offset += len(line)
            if offset > allowed_bytes:
                what = f"unfolds to more than {MAX_EXPANSION} times its size"
                raise _refused(path, what, f"gzip -l {quote(str(path))}")
            yield text
    if offset == 0:
        raise _refused(path, "the file is empty", f"ls -l {quote(str(path))}")


def _opened(path: Path) -> Stream:
    try:
        return gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise cannot_open(path, error, "file") from error


def cannot_open(path: Path, error: OSError, wanted: str) -> ConfigError:
    """Return the error for a path that cannot be opened as the file or directory that is wanted."""
    name = quote(str(path))
    remedy: str | Command = f"ls -ld {name}"
    if isinstance(error, FileNotFoundError):
        what, remedy = f"{wanted} not found", Command.of("config show", then="   (shows where this path comes from)")
    elif isinstance(error, IsADirectoryError):
        what, remedy = "is a directory, expected a file", f"ls {name}   (then set data.path to one of these)"
    elif isinstance(error, NotADirectoryError):
        what, remedy = "is a file, expected a directory", f"ls {quote(str(path.parent))}"
    else:
        what = f"cannot be opened: {error.strerror or error}"
    return ConfigError(what, where=str(path), remedy=remedy)


def _next_line(stream: Stream, path: Path) -> bytes:
    name = quote(str(path))
    try:
        line = stream.readline(MAX_LINE_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _refused(path, f"damaged gzip file: {error}", f"gzip -t {name}") from error
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror or error}", f"ls -l {name}") from error
    if len(line) > MAX_LINE_BYTES:
        raise _refused(path, f"a line is longer than {MAX_LINE_BYTES >> 20} MiB", f"file {name}")
    return line


def _decoded(line: bytes, offset: int, path: Path) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        name = quote(str(path))
        if offset == 0 and line.startswith(GZIP_MAGIC):
            raise _refused(path, "gzip data without the suffix .gz", f"mv {name} {name}.gz") from error
        what = f"not UTF-8 text: byte {offset + error.start} is 0x{line[error.start]:02x}"
        written = "utf-16" if offset == 0 and line.startswith(UTF16_MARKS) else "latin1"
        raise _refused(path, what, f"iconv -f {written} -t utf-8 {name} > utf8{path.suffix}") from error


def _refused(path: Path, what: str, remedy: str) -> DataError:
    return DataError(what, where=str(path), remedy=remedy)


DELIMITERS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
JSON_LINES = (".jsonl", ".ndjson")
LIKELY, ALIKE, NEARLY_CERTAIN = 0.6, 0.8, 0.9  # two names, one of which must be or may be a typing error
# How other programs and people call a column, where it is not there: as a label it would be silently ignored.
OTHER_NAMES = {
    "id": "complex_name|name|pdb|pdb_id",
    "path": "protein_path|file|filename|pdb_path",
    "receptor_chains": "((rec|receptor|antibody|ab|heavy|h)_?)?chains?(_?(ids?|names?))?|rec|receptor|antibody",
    "ligand_chains": "(lig|ligand|antigen|ag)_?chains?(_?(ids?|names?))?|lig|ligand|antigen",
    "split": "(sub)?sets?|folds?|partition|split_?(name|id|set)",
    "cluster": "groups?(_?ids?)?|clusters?_?(ids?|names?)",
}


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row: its named columns, and its file and line."""

    values: Mapping[str, str]
    origin: str

    def __getitem__(self, column: str) -> str:
        return self.values.get(column, "")


@dataclass(frozen=True)
class Columns:
    """The columns that have a meaning; names match in any case, and every other column is a label.

    A column whose name is nearly one of these is an error: as a label it would be silently ignored.
    """

    required: tuple[str, ...]
    one_of: tuple[str, ...] = ()  # at least one of these is there too
    optional: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)  # further spellings
    labels: tuple[str, ...] = ()  # that are asked for by name
    unlabelled: bool = False  # labels need not be there

    @cached_property
    def known(self) -> tuple[str, ...]:
        return (*self.required, *self.one_of, *self.optional)

    @cached_property
    def _spellings(self) -> dict[str, str]:
        return {"cluster_id": "cluster", **self.aliases, **{name.lower(): name for name in (*self.labels, *self.known)}}

    def canonical(self, name: str) -> str:
        return self._spellings.get(name.strip().lower(), name.strip())

    def labels_of(self, row: SourceRow) -> dict[str, str]:
        """Return the labels of a row; `data.labels` may name a column that has a meaning, too."""
        return {name: text for name, text in row.values.items() if name in self.labels or name not in self.known}

    def problem(self, present: Sequence[str], path: Path) -> ConfigError | None:
        """Return the error in the columns of a file, if any: a duplicate, missing, misspelt or otherwise named one."""
        for name in present:
            if name and present.count(name) > 1:
                what = f"duplicate column {printable_text(name)!r}"
                return ConfigError(what, where=str(path), remedy=show_header(path))
        spare = {name.lower(): name for name in present if name not in (*self.known, *self.labels)}
        required = self.required if self.unlabelled else (*self.required, *self.labels)
        absent = [name for name in required if name not in present]
        if not any(name in present for name in self.one_of):
            absent += self.one_of[:1]
        for column in absent:
            return self._absent(column, _meant(column, spare, LIKELY), present, path)
        for column in self.known:
            meant = _meant(column, spare, ALIKE if column in ("split", "cluster") else NEARLY_CERTAIN)
            if meant and column not in present:
                what = (
                    f"unknown column {printable_text(meant)!r}: did you mean {column!r}?"
                    f" (to keep it as a label, add a column {column!r}; it may be empty)"
                )
                return ConfigError(what, where=str(path), remedy=_rename(meant, column, path))
        return None

    def _absent(self, column: str, meant: str, present: Sequence[str], path: Path) -> ConfigError:
        """Return the error for a missing column, with how to rename it in the file or in the setting."""
        is_label = column in self.labels
        there = ", ".join(printable_text(name) for name in present[:12] if name)
        what = f"no column {column!r}{' (data.labels)' * is_label}; found: {there}"
        if meant:
            what += f"; did you mean {printable_text(meant)!r}?"
        if len(present) == 1 and re.search(r"[;,\t]", present[0]):
            what += " (a .csv is separated by commas, a .tsv by tabs)"
        remedy = show_header(path) if is_label else _rename(meant, column, path)
        return ConfigError(what, where=str(path), remedy=remedy)


def _meant(column: str, spare: Mapping[str, str], cutoff: float) -> str:
    """Return which of the spare columns, by their lower-case names, must be meant by a column; empty if none is."""
    near = [name for name in spare if re.fullmatch(OTHER_NAMES.get(column, column), name)]
    near = near or get_close_matches(column.lower(), spare, n=1, cutoff=cutoff)
    return spare[near[0]] if near else ""


def _rename(name: str, column: str, path: Path) -> str:
    """Return the command that renames a column in a file, or shows its header where that is not easy."""
    is_easy = name.isidentifier() and path.suffix in DELIMITERS
    return f"sed -i '1s/\\b{name}\\b/{column}/' {quote(str(path))}" if is_easy else show_header(path)


def show_header(path: Path) -> str:
    """Return the command that shows the first line of a file."""
    name = quote(str(path))
    return f"gzip -dc {name} | head -n 1" if path.suffix == ".gz" else f"head -n 1 {name}"


def read_rows(path: Path, columns: Columns, *, quoted: bool = True) -> Iterator[SourceRow | Rejection]:
    """Yield the rows of a table; an unreadable row becomes a rejection, an unreadable table raises."""
    suffix = path.with_suffix("").suffix.lower() if path.suffix == ".gz" else path.suffix.lower()
    if suffix not in (*DELIMITERS, *JSON_LINES):
        with _opened(path):
            raise _wrong_kind(path, suffix)
    with closing(text_lines(path)) as lines:  # close it now, even while an error still refers to it
        if suffix in JSON_LINES:
            yield from _json_rows(path, lines, columns)
        else:
            yield from _separated_rows(path, lines, columns, DELIMITERS[suffix], quoted=quoted)


def _wrong_kind(path: Path, suffix: str) -> ConfigError:
    what = f"supported tables: {' '.join((*DELIMITERS, *JSON_LINES))} (or these with .gz), not {suffix!r}"
    remedy: str | Command = Command.of("config show", then="   (shows where this path comes from)")
    if suffix == ".parquet":
        code = "import pandas, sys; pandas.read_parquet(sys.argv[1]).to_csv(sys.argv[2], index=False)"
        remedy = f"python -c {quote(code)} {quote(str(path))} {quote(str(path.with_suffix('.csv')))}"
    return ConfigError(what, where=str(path), remedy=remedy)


def _separated_rows(
    path: Path, lines: Iterator[str], columns: Columns, delimiter: str, *, quoted: bool
) -> Iterator[SourceRow | Rejection]:
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, skipinitialspace=True, strict=True)
    header: list[str] = []
    while True:
        origin = f"{path.name}:{reader.line_num + 1}"
        try:
            cells = _next_cells(reader, path)
        except csv.Error as error:
            if not header:
                raise _refused(path, f"no header: {error}", show_header(path)) from error
            yield Rejection("", Reason.BAD_ROW, str(error), origin)
            continue
        if cells is None:
            return
        if header and any(cells):
            yield _row(header, cells, origin)
        elif any(cells):
            header = [columns.canonical(cell) for cell in cells]
            if problem := columns.problem(header, path):
                raise problem


def _next_cells(reader: Any, path: Path) -> list[str] | None:
    """Return the next row's cells, or None after the last; a quote that swallows lines is an error of the file."""
    start = reader.line_num + 1
    try:
        return [cell.strip() for cell in next(reader)]
    except StopIteration:
        return None
    except csv.Error as error:
        if reader.line_num <= start:
            raise
        what = "a quote opened here is never closed"
        raise DataError(what, where=f"{path}:{start}", remedy=f"sed -n {start}p {quote(str(path))}") from error


def _row(header: Sequence[str], cells: Sequence[str], origin: str) -> SourceRow | Rejection:
    """Pair cells with column names; columns without a name are dropped, and so are empty cells beyond the last."""
    if len(cells) < len(header) or any(cells[len(header) :]):
        name = printable_text(cells[header.index("id")]) if "id" in header[: len(cells)] else ""
        return Rejection(name, Reason.BAD_ROW, f"{len(cells)} fields, but the header has {len(header)}", origin)
    return SourceRow({name: cell for name, cell in zip(header, cells, strict=False) if name}, origin)


def _json_rows(path: Path, lines: Iterator[str], columns: Columns) -> Iterator[SourceRow | Rejection]:
    checked: tuple[str, ...] = ()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        origin = f"{path.name}:{number}"
        try:
            row = SourceRow(_json_values(line, columns), origin)
        except (ValueError, RecursionError) as error:
            yield Rejection("", Reason.BAD_ROW, f"not a JSON object on one line: {error}"[:200], origin)
            continue
        present = tuple(row.values)
        problem = None if present == checked else columns.problem(present, path)
        if problem is not None and not checked:
            raise problem
        if problem is None:
            checked = present
            yield row
        else:
            yield Rejection(printable_text(row["id"]), Reason.BAD_ROW, problem.what, origin)


def _json_values(line: str, columns: Columns) -> dict[str, str]:
    loaded = json.loads(line)
    if not isinstance(loaded, dict):
        raise ValueError(f"it is a {type(loaded).__name__}")
    values = {columns.canonical(name): _json_text(value) for name, value in loaded.items()}
    if len(values) < len(loaded):
        raise ValueError("it has a duplicate column")
    "".join((*values, *values.values())).encode()  # half a surrogate pair could be written nowhere later
    return values


def _json_text(value: object) -> str:
    """Return a JSON value as the text a CSV cell would hold."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list) and all(isinstance(element, str) for element in value):
        return ",".join(value)
    return json.dumps(value)


BETWEEN_CHAINS = re.compile(r"[,;|\s]+")
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


Files: TypeAlias = "tuple[tuple[Part, ...], tuple[Part, ...]]"  # of an item, and of its bound structures if unbound


def build_items(
    rows: Iterator[SourceRow | Rejection],
    columns: Columns,
    id_of: Callable[[SourceRow], str],
    files_of: Callable[[str, SourceRow], Files],
) -> Generator[Item | Rejection, None, None]:
    """Turn rows into items; `files_of` is called with checked ids only, and if it refuses one the row is rejected."""
    for row in rows:
        if isinstance(row, Rejection):
            yield row
            continue
        name = id_of(row)
        try:
            parts, bound = files_of(checked_id(name), row)
        except UnusableInput as error:
            yield Rejection(printable_text(name), error.reason, error.detail, row.origin)
            continue
        yield Item(name, parts, bound, None, row["split"], row["cluster"], columns.labels_of(row), row.origin)


def split_chains(names: str) -> tuple[str, ...]:
    """Divide chain names at commas, semicolons, bars and spaces only: `AB` is one chain, as mmCIF may name it."""
    return tuple(dict.fromkeys(name for name in BETWEEN_CHAINS.split(names) if name))


def model_number(text: str, first: int = 1) -> int | None:
    """Return the ordinal of a model, from 1, as given in a cell that counts from `first`; None for an empty cell."""
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and int(text[:9]) >= first):
        raise UnusableInput(Reason.BAD_ROW, f"the model {printable_text(text)!r} is not a number from {first}")
    return int(text[:9]) - first + 1


def clean_path(text: str) -> str:
    """Return a path from a cell; refuse one with control characters."""
    if CONTROL.search(text):
        raise UnusableInput(Reason.BAD_ROW, f"the path {printable_text(text)!r} contains a control character")
    return text


def one_file_parts(
    spec: SourceSpec, path: str, receptor: tuple[str, ...], ligand: tuple[str, ...], model: int | None = None
) -> tuple[Part, ...]:
    """Return the parts of an item in one file: two partners by their chains, or one part divided later or never."""
    if receptor and ligand:
        return (Part(Role.RECEPTOR, path, receptor, model), Part(Role.LIGAND, path, ligand, model))
    if (receptor or ligand) and spec.partners == "auto":
        named, absent = ("receptor", "ligand") if receptor else ("ligand", "receptor")
        what = f"the {named} has chains but the {absent} has none; for items of one partner set data.partners: none"
        raise UnusableInput(Reason.BAD_ROW, what)
    role = Role.COMPLEX if spec.partners == "auto" else Role.WHOLE
    return (Part(role, path, receptor or ligand, model),)
