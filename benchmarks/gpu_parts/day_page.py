"""The page of a day on a card: what was to be reached and what was measured, part by part, and what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, formatted, table, values
from benchmarks.gpu_parts.day import Day, Part, trouble
from benchmarks.page import as_table

PAGE = "README.md"
COMMAND = "gpu.py"
REACHED, MISSED, NOTHING_TO_REACH, NOT_MEASURED = "✓", "✗", "·", "not measured"
REHEARSED = (
    "**This is a rehearsal, on {card}, at toy sizes: it shows that everything runs from end to end. "
    "No figure below is a card's.**"
)


def day_page(day: Day, parts: Sequence[Part]) -> str:
    """Return the page, from the results on disk."""
    results = {part.name: day.read(part.name) for part in parts}
    known = {name: one for name, one in results.items() if one}
    dates = sorted({one["date"] for one in known.values()})
    about = (
        f"{day.about['card']}; driver {day.about['driver'] or 'not told'}; torch {day.about['torch']}; "
        f"{' and '.join(dates)}; made by `python benchmarks/gpu.py`"
    )
    lines = [f"# A day on {day.about['card']}", *([REHEARSED.format(**day.about)] if day.rehearsal else []), about]
    lines += ["## What was to be reached", as_table([("figure", "reach", "measured", ""), *_figures(results)])]
    lines += ["## What is missing", "\n".join(f"- {one}" for one in _missing(parts, results)) or "Nothing."]
    for part in parts:
        if part.name in known:
            lines += [f"## {part.name}: {part.what}", *_section(known[part.name])]
    machine = next((one["machine"] for one in known.values()), "")
    return "\n\n".join([*lines, *([f"Measured on {machine}."] if machine else [])]) + "\n"


def figures_of_the_day() -> list[Figure]:
    """Return the figures that this command measures."""
    return [one for one in table().figures if one.command.startswith(COMMAND)]


def part_of(figure: Figure) -> str:
    """Return the part that measures a figure."""
    return Path(figure.result).stem


def _figures(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for figure in figures_of_the_day():
        told, mark = judged(figure, results.get(part_of(figure), {}))
        against = f", against {figure.against}" if figure.against else ""
        yield f"{figure.what}{against}", str(figure.reach or ""), told, mark


def judged(figure: Figure, result: Mapping[str, Any]) -> tuple[str, str]:
    """Return what was measured, and whether that is what was to be reached."""
    try:
        told = figure.told(result)
        is_missed = figure.is_missed(result)
    except (KeyError, TypeError, ValueError):  # nothing lies there, or None does
        return NOT_MEASURED, ""
    return told, NOTHING_TO_REACH if figure.reach is None else MISSED if is_missed else REACHED


def _missing(parts: Sequence[Part], results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield what a day lacks, what was left out, and what failed."""
    for part in parts:
        result = results[part.name]
        if not result:
            yield f"{part.name}: not begun"
            continue
        yield from [*result["lacks"], *result.get("broken", ())]
        if result["left_out"]:
            yield f"{part.name}: the time was over before {', '.join(result['left_out'])}; run it again to take it up"
        for label, row in result["cases"].items():
            if why := trouble(row):
                yield f"{part.name}: {label}: {why}"


def _section(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables of a part."""
    figures, took_s = result["figures"], sum(row.get("took_s", 0.0) for row in result["cases"].values())
    for name, one in figures.items():
        rows = TABLES.get((result["part"], name), _plain)(one) if isinstance(one, Mapping) else []
        if rows:
            yield as_table([(name.replace("_", " "), *rows[0][1:]), *rows[1:]])
    single = [f"{name.replace('_', ' ')}: {_cell(one)}" for name, one in figures.items() if _is_single(one)]
    yield "; ".join([*single, f"{len(result['cases'])} cases took {took_s:,.0f} s"]) + "."


def _is_single(value: Any) -> bool:
    return not isinstance(value, Mapping | list) and value is not None


def _plain(figures: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return figures as rows: of names and values, or of names and columns."""
    rows = [(name, one) for name, one in figures.items() if one is not None]
    if not rows:
        return []
    if not all(isinstance(one, Mapping) for _, one in rows):
        return [("", ""), *((name, _cell(one)) for name, one in rows)]
    columns = list(dict.fromkeys(column for _, one in rows for column in one))
    cells = (tuple(_cell(one.get(column)) for column in columns) for _, one in rows)
    return [("", *columns), *((name, *cell) for (name, _), cell in zip(rows, cells, strict=True))]


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def _models(models: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the predictions of each model beside what was measured."""
    columns: dict[str, tuple[str, str]] = {
        "predicted": ("predicted_bytes", ",.1f MiB"),
        "measured": ("measured_bytes", ",.1f MiB"),
        "at first": ("first", "+.2%"),
        "live": ("live", "+.2%"),
        "after a probe": ("probed", "+.2%"),
        "s a step, predicted": ("predicted_s", ".3g"),
        "measured, s": ("step_s", ".3g"),
    }

    def cells(one: Mapping[str, Any]) -> Iterator[str]:
        for path, form in columns.values():
            yield formatted(values(one, path), form) if path in one else ""
        yield one["origin"] + (", out of memory" if one["died"] else "")

    return [("", *columns, "origin"), *((label, *cells(one)) for label, one in sorted(models.items()))]


TABLES: dict[tuple[str, str], Callable[[Mapping[str, Any]], list[tuple[str, ...]]]] = {("memory", "models"): _models}
