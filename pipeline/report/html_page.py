"""The HTML reports: self-contained files; their content security policy forbids loading anything."""

from __future__ import annotations

import base64
import hashlib
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pipeline.report import tables
from pipeline.report.charts import figure, moment, path
from pipeline.report.tables import clip, kind_of, plural, value_in
from pipeline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipeline.report.tables import Column

HERE = Path(__file__).parent / "html"
UNKNOWN = "–"
LISTS: Mapping[str, Callable[[Any], str]] = {
    "names": ", ".join,
    "remedies": lambda items: ", ".join(f"{count:,} by {rung}" for rung, count in items.items()),
}
NUMBERS: Mapping[str, Callable[[Any], str]] = {
    **tables.NUMBERS, "bytes": format_bytes, "figure": figure, "moment": moment, "span": format_seconds,
}  # fmt: skip


def render(name: str, **data: Any) -> str:
    """Return an HTML report: data in a template."""
    return _environment().get_template(name).render(**data)


@cache
def _environment() -> Environment:
    """Return the jinja2 environment of the reports: text is escaped, and cut where it is long."""
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else clip(str(value)),
    )
    environment.filters |= {"moment": moment, "plural": plural}
    environment.globals |= {
        "css": _file("page.css"),
        "js": _file("page.js"),
        "numbers": NUMBERS,
        "css_digest": _digest("page.css"),
        "js_digest": _digest("page.js"),
    }
    used = (clip, kind_of, path, shown)
    environment.globals |= {function.__name__: function for function in used}
    return environment


@cache
def _file(name: str) -> Markup:
    """Return our style sheet or script unescaped: neither contains a closing tag."""
    return Markup((HERE / name).read_text(encoding="utf-8"))  # noqa: S704


def _digest(name: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(_file(name).encode()).digest()).decode()}"


def shown(row: Any, column: Column) -> tuple[str, float | str | None]:
    """Return the text of a cell and, for a number, its sort key; unknown numbers come last."""
    value, kind = value_in(row, column), kind_of(column)
    if kind not in NUMBERS:
        text = "" if value is None else LISTS[kind](value) if kind in LISTS else str(value)
        return text or UNKNOWN, None
    number = value[1] if isinstance(value, tuple) else value
    return (NUMBERS[kind](value), number) if number is not None and math.isfinite(number) else (UNKNOWN, "")
