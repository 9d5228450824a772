"""Prints tables and text on a terminal; formats counts, ages and clipped texts."""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from io import TextIOWrapper
from operator import attrgetter, itemgetter
from textwrap import wrap
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from pipeline.units import format_bytes, format_seconds, hours_text, short_bytes, short_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import RenderableType

NO_TERMINAL, MESSAGE = 200, 100  # columns of tables without a terminal, and in messages
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
TEXT_MOST = 600  # most characters of a text on a page


SYMBOLS = {"✓": "ok", "✗": "x", "·": "-", "…": "...", "→": "->", "━": "=", "─": "-", "×": "x"} | dict.fromkeys(
    SPINNER, "*"
)
# Kinds of columns; numbers are right-aligned.
NUMBERS: dict[str, Callable[[Any], str]] = {
    "count": "{:,.0f}".format,
    "bytes": short_bytes,
    "span": short_seconds,
    "percent": "{:.0%}".format,
    "figure": "{:.4g}".format,
    "hours": hours_text,
    "long bytes": format_bytes,
    "long span": format_seconds,
    "words": str,
    "worded": itemgetter(0),  # a text and its number
}
# A heading, the place of a row's value (an attribute such as `live.value`, an index, or a function), and a kind.
Column: TypeAlias = "tuple[str, str | int | Callable[[Any], Any], str] | tuple[str, str | int | Callable[[Any], Any]]"


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that a stream cannot encode."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(SYMBOLS.get(symbol, "?") for symbol in error.object[error.start : error.end]), error.end


codecs.register_error("symbols", _in_ascii)


@lru_cache(maxsize=2)
def _console_of(stream: IO[str]) -> Console:
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="symbols")
    return Console(file=stream, highlight=False, soft_wrap=not stream.isatty())


def the_console(*, to_stderr: bool = False) -> Console:
    """Return this process's only Console for stdout or stderr; a live bar moves down for its output."""
    stream = sys.stderr if to_stderr else sys.stdout
    return _console_of(getattr(stream, "rich_proxied_file", stream))


def show_parts(*parts: RenderableType, to_stderr: bool = False, columns: int = 0) -> None:
    """Print for a person; without a terminal there is no colour and, without `columns`, no wrapping."""
    console = the_console(to_stderr=to_stderr)
    columns = console.width if console.file.isatty() else columns
    if console.file.isatty():
        console.print(grouped(parts, columns))
        return
    console.width = columns or NO_TERMINAL
    with console.capture() as printed:
        for part in parts:
            console.print(_wrapped(part, columns) if columns else part, markup=False)
    console.file.write("".join(f"{line.rstrip()}\n" for line in printed.get().splitlines()))


def grouped(parts: Iterable[RenderableType], columns: int) -> Group:
    """Format parts for a terminal of this width."""
    wrapped = (_wrapped(part, columns) for part in parts)
    return Group(*(_coloured(part) if isinstance(part, str) else part for part in wrapped))


def _coloured(text: str) -> Text:
    """Colour the verdicts at the start of lines."""
    coloured = Text(text)
    for symbol, colour in (("✓", "green"), ("✗", "red"), ("!", "yellow")):
        coloured.highlight_regex(rf"(?m)^ *{symbol}(?= )", colour)
    return coloured


def columns() -> int:
    """Return the width of stdout."""
    console = the_console()
    return console.width if console.file.isatty() else NO_TERMINAL


def _wrapped(text: RenderableType, columns: int) -> RenderableType:
    """Wrap the lines of a text at a width; continued lines are indented."""
    if isinstance(text, Text) and text.cell_len > columns:
        return Text(str(_wrapped(text.plain, columns)), text.style)
    if not isinstance(text, str):
        return text
    lines = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        lines += wrap(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join(lines)


def fitted(line: Text, width: int) -> Text:
    """Clip a line to the width of the screen, without trailing blanks."""
    line = line.copy()
    line.truncate(width, overflow="ellipsis")
    line.rstrip()
    return line


def text_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: str | Sequence[str] = "") -> Table:
    """Return a plain table; the columns named in `right` (a text: space-separated) hold numbers."""
    numbers = right.split() if isinstance(right, str) else right
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        shown.add_column(Text(column, style="bold"), justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return shown


def value_in(row: Any, column: Column) -> Any:
    """Return a row's value for a column."""
    where = column[1]
    if callable(where):
        return where(row)
    if isinstance(row, Mapping):
        return row.get(where)
    return row[where] if isinstance(where, int) else attrgetter(where)(row)


def kind_of(column: Column) -> str:
    """Return the kind of a column: one of NUMBERS, or of text."""
    return column[2] if len(column) > 2 else ""


def table_of(columns: Sequence[Column], rows: Iterable[Any], *, unknown: str = "") -> Table:
    """Return a plain table of rows, with numbers as their columns' kinds say."""
    forms = [NUMBERS.get(kind_of(column)) for column in columns]

    def cell(value: Any, form: Callable[[Any], str] | None) -> str:
        return unknown if value is None else form(value) if form else str(value)

    cells = ([cell(value_in(row, column), form) for column, form in zip(columns, forms, strict=True)] for row in rows)
    right = [column[0] for column, form in zip(columns, forms, strict=True) if form]
    return text_table([column[0] for column in columns], cells, right=right)


def plural(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('batch') else 's'}"


def counts_text(counts: Mapping[str, int]) -> str:
    """Format counts in a line, each before its noun."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def age(moment: datetime | float) -> str:
    """Format the time since a moment, in one unit."""
    seconds = max(0.0, time.time() - (moment.timestamp() if isinstance(moment, datetime) else moment))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def clip(text: str, most: int = TEXT_MOST) -> str:
    """Clip text to a length; it says how much it leaves out."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"
