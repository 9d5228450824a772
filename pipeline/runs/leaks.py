"""What stands in several splits, and makes every test score wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.errors import DataError
from pipeline.runs import todo

if TYPE_CHECKING:
    from pipeline.runs.folder import RunFolder
    from pipeline.runs.project import Project
    from pipeline.structures.census import Census


def check(project: Project, folder: RunFolder, census: Census) -> list[str]:
    """Do with leaks what is configured: refuse to go on, warn, or nothing."""
    data = project.config.data
    if not census.leaks or data.on_leak == "ignore":
        return []
    what = describe(census, folder)
    if data.on_leak == "warn":
        return [what]
    remedy = "mend the splits   or   pipeline submit --stage scan --set data.on_leak=warn"
    raise DataError(what, where=str(data.path), remedy=remedy)


def describe(census: Census, folder: RunFolder) -> str:
    """Say what stands in several splits, with a few items of each kind by name."""
    wanted = {ordinal for leak in census.leaks for ordinal in leak.items}
    names = {number: entry.id for number, entry in enumerate(todo.read_items(folder.items)) if number in wanted}
    lines = []
    for leak in {leak.what: leak for leak in reversed(census.leaks)}.values():
        items = ", ".join(names[ordinal] for ordinal in leak.items)
        more = f" (and {leak.total - 1:,} more)" if leak.total > 1 else ""
        lines.append(f"the same {leak.what} is in the splits {' and '.join(leak.splits)}: {items}{more}")
    return "\n  ".join(lines)
