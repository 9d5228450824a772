"""The index: the records in an SQLite file for quick look-up, made from them alone and never written in place.

Two writers on one SQLite file over NFS destroy it. So whoever finds the index behind the records makes a new one under
a name of its own, without locks, and moves it over the old; readers keep what they have opened. Where that cannot
be done the index lives in memory. A damaged, foreign or old one is made anew: the records are the truth.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import Enum
from heapq import nlargest
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import quote

from pipeline.memory.history.task_records import TASKS, Mark, Past

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from pipeline.memory.history.task_records import Journal, Part, Row

    Wanted = dict[str, str | int]

_STALE_S = 3600.0  # a draft that is older was left by a process that died
_FILES = "CREATE TABLE files (name TEXT PRIMARY KEY, taken INTEGER, seen INTEGER) WITHOUT ROWID;"

Answer = TypeVar("Answer")


class Filing(Protocol):
    """Puts rows into a draft."""

    def add(self, rows: Iterable[Row]) -> None:
        """Add what was read of a file."""

    def finish(self) -> None:
        """Hear that there is no more."""


@dataclass(frozen=True)
class Layout:
    """What an index holds beside the files that it was made of, and how rows get into it."""

    application: int
    format: int
    schema: str
    filing: Callable[[sqlite3.Connection], Filing]

    @property
    def script(self) -> str:
        """Return what makes an empty one."""
        about = f"PRAGMA application_id = {self.application}; PRAGMA user_version = {self.format};"
        return f"{about}\n{_FILES}{self.schema}"

    def marks(self, connection: sqlite3.Connection) -> dict[str, Mark]:
        """Return what an index was made of; one of another program or format raises."""
        for name, value in (("application_id", self.application), ("user_version", self.format)):
            if connection.execute(f"PRAGMA {name}").fetchone() != (value,):
                raise sqlite3.DatabaseError("not an index of this format")
        rows = connection.execute("SELECT name, taken, seen FROM files")
        return {name: Mark(int(taken), int(seen)) for name, taken, seen in rows}


class Index:
    """The index of a folder of records."""

    def __init__(self, folder: Path, journal: Journal, layout: Layout) -> None:
        self._folder, self._layout = folder, layout
        self._path = folder / "index.sqlite"
        self._journal = journal
        self._connection: sqlite3.Connection | None = None
        self._marks: dict[str, Mark] = {}

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the open file."""
        if self._connection is not None:
            self._connection.close()
        self._connection, self._marks = None, {}

    def ask(self, select: Callable[[sqlite3.Connection], list[Answer]]) -> list[Answer]:
        """Return what is selected from it, as of the last refresh."""
        try:
            return self._ask(select)
        except sqlite3.DatabaseError:  # only its first pages were right, or a file server has let go of it
            self.close()
            self._renew(self._journal.sizes())
            return self._ask(select)

    def _ask(self, select: Callable[[sqlite3.Connection], list[Answer]]) -> list[Answer]:
        return select(self._connection) if self._connection is not None else []

    def refresh(self) -> None:
        """Bring the index up to the records."""
        sizes = self._journal.sizes()
        if self._covers(sizes):
            return
        self._open(self._path)  # another process may have made a newer one
        if not self._covers(sizes):
            self._renew(sizes)

    def _covers(self, sizes: Mapping[str, int]) -> bool:
        return {name: mark.seen for name, mark in self._marks.items()} == sizes

    def _open(self, path: Path) -> None:
        """Open an index; one that is damaged, foreign or not there leaves nothing open."""
        self.close()
        try:
            connection = _connect(path, "mode=ro&immutable=1")
        except sqlite3.Error:
            return
        try:
            self._marks = self._layout.marks(connection)
            self._connection = connection
        except (sqlite3.Error, TypeError):
            connection.close()

    def _renew(self, sizes: Mapping[str, int]) -> None:
        """Make an index of the records: from the one there is, else from nothing, else in memory."""
        for _ in range(2):
            try:
                return self._publish(sizes)
            except (OSError, sqlite3.Error):
                self.close()
        draft = sqlite3.connect(":memory:", isolation_level=None)
        self._fill(draft, sizes)
        self._marks, self._connection = self._layout.marks(draft), draft
        return None

    def _publish(self, sizes: Mapping[str, int]) -> None:
        partial = self._folder / f".index-{secrets.token_hex(8)}.partial"
        self._sweep()
        try:
            with closing(_connect(partial, "mode=rwc&nolock=1")) as draft:
                draft.execute("PRAGMA journal_mode = OFF")
                draft.execute("PRAGMA synchronous = OFF")
                self._fill(draft, sizes)
            _sync(partial)
            self._open(partial)
            if self._connection is None:
                raise sqlite3.DatabaseError("what was written cannot be read")
            partial.replace(self._path)
        finally:
            partial.unlink(missing_ok=True)

    def _fill(self, draft: sqlite3.Connection, sizes: Mapping[str, int]) -> None:
        """Copy the open index, if it is of these files, and add what the records have gained."""
        if self._connection is not None and not self._lost(sizes):
            self._connection.backup(draft)
        else:
            self._marks = {}
            draft.executescript(self._layout.script)
        draft.execute("BEGIN")
        filing = self._layout.filing(draft)
        for name, part in self._gained(sizes):
            filing.add(part.rows)
            draft.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", (name, part.mark.taken, part.mark.seen))
        filing.finish()
        draft.execute("COMMIT")

    def _lost(self, sizes: Mapping[str, int]) -> bool:
        """Tell whether files that were read are gone, or shorter than they were."""
        return any(sizes.get(name, -1) < mark.taken for name, mark in self._marks.items())

    def _gained(self, sizes: Mapping[str, int]) -> Iterator[tuple[str, Part]]:
        for name, size in sorted(sizes.items()):
            mark = self._marks.get(name, Mark(0, -1))
            part = self._journal.read(name, mark.taken) if size != mark.seen else None
            if part is not None:
                yield name, part

    def _sweep(self) -> None:
        """Remove the drafts of processes that died."""
        for left in self._folder.glob(".index-*.partial"):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _STALE_S:
                    left.unlink()


def _connect(path: Path, how: str) -> sqlite3.Connection:
    name = f"file:{quote(os.fsencode(path.absolute()))}?{how}"
    # Whatever thread collects garbage may close it: a loader's, too.
    return sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
