"""Pieces of HTML from text that others wrote: all of it is escaped here, and nowhere else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from typing import TYPE_CHECKING, Any

from pipeline.report.tables import duration, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

UNKNOWN = "–"
SHORT = 24  # characters: a cell with more of them is kept wide enough to be read
_MANY, _HUGE, _FEW, _HUNDREDTH = 1e3, 1e10, 1e-3, 0.01


class Html(str):
    """Text that is HTML already; everything else is escaped."""

    __slots__ = ()


def html(value: Any) -> Html:
    """Return a value as HTML."""
    return value if isinstance(value, Html) else Html(escape(str(value), quote=True))


def joined(parts: Iterable[Any], between: str = "") -> Html:
    """Put pieces together."""
    return Html(between.join(map(html, parts)))


def tag(name: str, *inside: Any, **attributes: Any) -> Html:
    """Return an element; `class_` is `class`, `data_v` is `data-v`, and what is None or False is left out."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{said}>{joined(inside)}</{name}>")


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: what is shown, and by what it is sorted."""

    shown: Any
    by: float | str | None = None  # None: by what is shown
    is_number: bool = True


def number(value: float | None, shown: str | None = None) -> Cell:
    """Return a cell with a number; one that nobody knows comes last."""
    if value is None or not math.isfinite(value):
        return Cell(UNKNOWN, "")
    return Cell(figure(value) if shown is None else shown, value)


def count(value: float | None) -> Cell:
    """Return a cell with a whole number."""
    return number(value, None if value is None else f"{value:,.0f}")


def bytes_cell(value: float | None) -> Cell:
    """Return a cell with an amount of memory."""
    return number(value, None if value is None else size(value))


def time_cell(seconds: float | None) -> Cell:
    """Return a cell with a duration."""
    return number(seconds, None if seconds is None else duration(seconds))


def percent_cell(share: float | None) -> Cell:
    """Return a cell with a share."""
    return number(share, None if share is None else f"{share:.0%}")


def code_cell(text: str) -> Cell:
    """Return a cell with something that is typed: a name, a path, a command."""
    return Cell(tag("code", text) if text else "", text, is_number=False)


def at_cell(at: float | None) -> Cell:
    """Return a cell with a time of day."""
    return number(at or None, moment(at) if at else UNKNOWN)


def figure(value: float) -> str:
    """Return a number as people read it."""
    if value == int(value) or abs(value) >= _MANY:
        return f"{value:,.0f}" if abs(value) < _HUGE else f"{value:.3g}"
    return f"{value:.4g}" if abs(value) >= _FEW else f"{value:.2e}"


def hours(value: float) -> str:
    """Return core hours as people read them."""
    return f"{value:,.2f}" if value >= _HUNDREDTH else "< 0.01"


def moment(at: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a moment in UTC: who reads a page may be anywhere."""
    return datetime.fromtimestamp(at, tz=timezone.utc).strftime(form)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, caption: str = "") -> Html:
    """Return a table that is sorted by a click on a column's name."""
    made = [[one if isinstance(one, Cell) else Cell(one, is_number=False) for one in row] for row in rows]
    numbers = [all(row[place].is_number for row in made) for place in range(len(columns))]
    head = joined(
        tag("th", tag("button", name, type="button"), scope="col", class_="n" if is_number else None)
        for name, is_number in zip(columns, numbers, strict=True)
    )
    body = joined(tag("tr", *map(_cell, row)) for row in made)
    titled = tag("caption", caption) if caption else ""
    inner = tag("table", titled, tag("thead", tag("tr", head)), tag("tbody", body), class_="sorts")
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption or "table")


def _cell(cell: Cell) -> Html:
    css = "n" if cell.is_number else "words" if len(str(cell.by or cell.shown)) > SHORT else None
    return tag("td", cell.shown, class_=css, data_v=cell.by)


def badge(word: str, kind: str = "") -> Html:
    """Return a word in a box of its colour."""
    return tag("span", word, class_=f"badge {kind or word.split()[0]}")


def note(*inside: Any, kind: str = "") -> Html:
    """Return a remark."""
    return tag("p", *inside, class_=f"note {kind}".strip())


def left_out(more: int, what: str, where: str = "") -> Html:
    """Say how many are not shown, and where they are."""
    if more <= 0:
        return Html("")
    place = joined([": ", tag("code", where)]) if where else ""
    return note(f"and {more:,} more {what} that this page leaves out", place)


def section(key: str, title: str, *inside: Any, lead: Any = "") -> Html:
    """Return a part of the page with its title."""
    said = tag("p", lead, class_="lead") if lead else ""
    return tag("section", tag("h2", title), said, *inside, id=key)


NEXT = "\n  next: "


def error_box(error: str) -> Html:
    """Show an error, with what to do next set apart."""
    what, _, command = error.rpartition(NEXT) if NEXT in error else (error, "", "")  # a task's own comes before
    then = tag("p", tag("b", "Next: "), tag("code", command)) if command else ""
    return tag("div", tag("pre", what), then, class_="note bad", role="alert")
