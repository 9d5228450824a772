"""Write benchmarks/README.md from the results, and what other pages quote of them: `python benchmarks/page.py`.

A page under docs/ quotes a figure so: `<!-- figure: FILE.json PATH | FORMAT -->42%<!-- end -->`. None of it is
written by hand, and nothing of README.md beside this file.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.docking.picture import docked  # noqa: E402 - the project is found only now
from benchmarks.figures import RESULTS, Figure, day_and_machine, formatted, table, values  # noqa: E402 - the project is found only now

PAGE = ROOT / "benchmarks/README.md"
PICTURE = ROOT / "docs/docked.svg"
QUOTED = re.compile(r"(<!-- figure: (\S+\.json) ([^|>]+?)(?: \| ([^>]+?))? -->)(.*?)(?=<!-- end -->)")
COLUMNS = ("figure", "against", "reach", "measured", "command", "date, machine")


def page() -> str:
    """Return the page."""
    all_of_it, machines = table(), list[str]()
    promised = [one for name in all_of_it.promised for one in all_of_it.figures if one.promise == name]
    others = [one for one in all_of_it.figures if not one.promise]
    parts = [
        "# What was measured",
        all_of_it.beginning,
        "## What was set out to reach",
        rows(promised, machines),
        "## What was set later",
        rows(others, machines),
        "## The same records, kept in five ways",
        all_of_it.five_ways,
        kept_in_five_ways(json.loads((RESULTS / "cache_compare.json").read_text())),
        "## What fell short",
        "\n".join(f"- {one}" for one in shortfalls(all_of_it.figures)),
        "## What deserves a doubt",
        "\n".join(f"- {one}" for one in all_of_it.doubts),
        "## Machines",
        "\n".join(f"- {letter(place)}: {one}" for place, one in enumerate(machines)),
    ]
    return "\n\n".join(parts) + "\n"


def rows(figures: Sequence[Figure], machines: list[str]) -> str:
    """Return figures as a table; machines that are new are added to those that are known."""
    return as_table([COLUMNS, *(row(one, machines) for one in figures)])


def row(figure: Figure, machines: list[str]) -> tuple[str, ...]:
    """Return a figure as the cells of its row."""
    result = figure.read()
    measured, when = not_measured(figure), ""
    if result is not None:
        told = figure.told(result)
        measured = f"**{told}**" if figure.is_missed(result) else told
        day, machine = day_and_machine(result, figure.value)
        if machine not in machines:
            machines.append(machine)
        when = f"{day}, {letter(machines.index(machine))}"
    if figure.held:
        measured += f"; held by tests: {', '.join(map(link, figure.held))}"
    return figure.what, figure.against, str(figure.reach or ""), measured, f"`{figure.command}`", when


def not_measured(figure: Figure) -> str:
    return f"not measured: {figure.needs}" if figure.needs else "not measured yet"


def shortfalls(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield what did not reach what it was to, and why; what one thing stood in the way of is told together."""
    needed: dict[str, list[str]] = {}
    for figure in figures:
        result, against = figure.read(), f", against {figure.against}" if figure.against else ""
        if result is None and figure.needs:
            needed.setdefault(figure.needs, []).append(f"{figure.what}{against}")
        elif result is None:
            yield f"{figure.what}{against}: {not_measured(figure)}."
        elif figure.is_missed(result):
            told, why = figure.told(result), figure.short or "No reason is known yet."
            yield f"{figure.what}{against}: {told}; to reach {figure.reach}. {why}"
    for what, names in needed.items():
        yield f"Not measured, as {what}: {'; '.join(names)}."


def kept_in_five_ways(result: dict[str, Any]) -> str:
    """Return the comparison of the store with what else people keep records in."""
    asked, size = result["asked"], result["rows"][0]["bytes"] / 1e6
    head = (
        "",
        "write, MB/s",
        "cold read in random order, MB/s",
        "peak memory of a reader, MB",
        "files",
        f"{asked['flips']} flipped bits",
        f"{asked['kills']} kills: called safe before, lost or wrong of these",
    )
    told = f"{asked['records']:,} records, {size:,.0f} MB, {asked['runs']} turns: `cache_compare.py`, {result['date']}."
    return f"{told}\n\n{as_table([head, *map(way, result['rows'])])}"


def way(one: dict[str, Any]) -> tuple[str, ...]:
    """Return one way to keep records as cells."""
    flips = ", ".join(f"{count} {what}" for what, count in one["flips"].items())
    kills, lost = one["kills"], one["kills"]["of these lost"] + one["kills"]["wrong served"]
    safe = f"{kills['called safe']:,}, {lost or 'none'}" if kills["called safe"] else "nothing is safe before the end"
    paces = (one["write_mb_s"], one["read_mb_s"], one["read_peak_mb"])
    return one["way"], *map(str, paces), f"{one['files']:,}", flips, safe


def as_table(lines: Sequence[tuple[str, ...]]) -> str:
    """Return lines of cells as Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (lines[0], ("---",) * len(lines[0]), *lines[1:]))


def letter(place: int) -> str:
    """Return by what a machine is named."""
    return chr(ord("A") + place)


def link(test: str) -> str:
    """Return a test's name as a link to its file."""
    path, _, name = test.partition("::")
    return f"[{name.removeprefix('test_').replace('_', ' ')}](../{path})"


def quoting(text: str) -> str:
    """Return a text with what it quotes of results as they are."""

    def quoted(found: re.Match[str]) -> str:
        result = json.loads((RESULTS / found[2]).read_text())
        return found[1] + formatted(values(result, found[3]), found[4] or "")

    return QUOTED.sub(quoted, text)


def picture() -> str:
    """Return the picture of docked complexes."""
    return docked(json.loads((RESULTS / "docking_learning.json").read_text()))


def write_pages() -> None:
    """Write the page and its picture, and bring what others quote up to date."""
    PAGE.write_text(page())
    PICTURE.write_text(picture())
    for path in sorted((ROOT / "docs").glob("*.md")):
        if (text := path.read_text()) != (fresh := quoting(text)):
            path.write_text(fresh)


if __name__ == "__main__":
    write_pages()
