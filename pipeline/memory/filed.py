"""The tasks of an index: found by whose they are (stage, recipe, cluster), the newest first."""

from __future__ import annotations

from enum import Enum
from heapq import nlargest
from typing import TYPE_CHECKING

from pipeline.memory.index import Index, Layout
from pipeline.memory.measured import TASKS
from pipeline.memory.policy import Past

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable
    from pathlib import Path

    from pipeline.memory.journal import Journal
    from pipeline.memory.lines import Row

    Wanted = dict[str, str | int]

_KINDS = 20  # the kinds (stage, recipe, cluster) of a look-up that were measured last
TASKS_INDEX_FORMAT = 1  # of the SQLite file, which is made anew where it is another
_SCHEMA = """
CREATE TABLE kinds (
    kind INTEGER PRIMARY KEY, stage TEXT, recipe TEXT, cluster TEXT, newest REAL, UNIQUE (stage, recipe, cluster)
);
CREATE TABLE tasks (
    kind INTEGER, at REAL, run TEXT, task INTEGER, attempt INTEGER, killed INTEGER, peak_bytes INTEGER,
    asked_bytes INTEGER, size INTEGER, items INTEGER, elapsed_s REAL, PRIMARY KEY (kind, at, run, task, attempt)
) WITHOUT ROWID;
"""
_KEPT = ("at", "run", "task", "attempt", "killed", "peak_bytes", "asked_bytes", "size", "items", "elapsed_s")
_TOLD = ("killed", "peak_bytes", "asked_bytes", "size", "items", "elapsed_s")
_INSERT = f"""
INSERT INTO tasks (kind, {", ".join(_KEPT)}) VALUES ({", ".join("?" * (1 + len(_KEPT)))})
ON CONFLICT (kind, at, run, task, attempt) DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in _TOLD)}
WHERE ({", ".join(f"ifnull(excluded.{name}, -1)" for name in _TOLD)})
    > ({", ".join(f"ifnull(tasks.{name}, -1)" for name in _TOLD)})
"""  # noqa: S608 - of a task told twice the same one counts, whichever came first
_NEWEST = f"SELECT {', '.join(_KEPT)} FROM tasks WHERE kind = ? ORDER BY at DESC, run DESC, task DESC LIMIT ?"  # noqa: S608
_AGE = "UPDATE kinds SET newest = (SELECT max(at) FROM tasks WHERE tasks.kind = kinds.kind)"
_COLUMN = {name: place for place, name in enumerate(TASKS.columns)}
_KEPT_COLUMNS = tuple(_COLUMN[name] for name in _KEPT)
_KIND_COLUMNS = tuple(_COLUMN[name] for name in ("stage", "recipe", "cluster"))


class Source(Enum):
    """Whose tasks are looked at, the most telling first."""

    RECIPE_HERE = "recipe = :recipe AND cluster = :cluster"
    RECIPE_ELSEWHERE = "recipe = :recipe AND cluster != :cluster"
    STAGE_HERE = "recipe != :recipe AND cluster = :cluster"
    STAGE_ELSEWHERE = "recipe != :recipe AND cluster != :cluster"


_KINDS_OF = {
    source: f"SELECT kind FROM kinds WHERE stage = :stage AND {source.value} ORDER BY newest DESC, kind LIMIT :kinds"  # noqa: S608
    for source in Source
}


def tasks_index(folder: Path, journal: Journal) -> Index:
    """Return the index of a folder of records of tasks."""
    return Index(folder, journal, Layout(0x70656B73, TASKS_INDEX_FORMAT, _SCHEMA, _Filing))


def newest(index: Index, source: Source, stage: str, recipe: str, cluster: str, limit: int) -> list[Past]:
    """Return the tasks that ended last, newest first, as of the last refresh."""
    wanted: Wanted = {"stage": stage, "recipe": recipe, "cluster": cluster, "kinds": _KINDS}

    def select(connection: sqlite3.Connection) -> list[Past]:
        kinds = connection.execute(_KINDS_OF[source], wanted).fetchall()
        found = [row for (kind,) in kinds for row in connection.execute(_NEWEST, (kind, limit))]
        return [Past(*row) for row in nlargest(limit, found, key=lambda row: row[:4])]

    return index.ask(select)


class _Filing:
    """Puts tasks into a draft."""

    def __init__(self, draft: sqlite3.Connection) -> None:
        self._draft = draft
        self._kinds: dict[Row, int] = {
            tuple(kind): number for number, *kind in draft.execute("SELECT kind, stage, recipe, cluster FROM kinds")
        }

    def add(self, rows: Iterable[Row]) -> None:
        """Add what was read of a file."""
        filed = ((self._kind(row), *(row[column] for column in _KEPT_COLUMNS)) for row in rows)
        self._draft.executemany(_INSERT, filed)

    def finish(self) -> None:
        """Write down when each kind was measured last."""
        self._draft.execute(_AGE)

    def _kind(self, row: Row) -> int:
        kind = tuple(row[column] for column in _KIND_COLUMNS)
        if kind not in self._kinds:
            self._kinds[kind] = len(self._kinds) + 1
            self._draft.execute("INSERT INTO kinds VALUES (?, ?, ?, ?, 0)", (self._kinds[kind], *kind))
        return self._kinds[kind]
