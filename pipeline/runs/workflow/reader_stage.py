"""Stage scan of items that are no structures: one task's work, its judgement."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.errors import CacheDamaged, DataError, RecordMissing
from pipeline.journal.ledger import write_rejections
from pipeline.journal.run_folder import writing_run
from pipeline.records import Entry, Rejection
from pipeline.runs.dataset.outcome import Judged, patiently
from pipeline.runs.dataset.reader_items import (
    FORMAT,
    TRIED,
    blaming_reader,
    look_at_files,
    read_by_run,
    read_first,
    reader_of,
    reader_state,
    reader_tables,
)
from pipeline.runs.dataset.worklist import Found, Shard
from pipeline.stages.read_entries import ITEMS_READ, Taken, read
from pipeline.structures.sources.item_ids import printable
from pipeline.training.items.item_table import KIND, ItemTable

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping

    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.protocol import Reader
    from pipeline.records import Reason, Tell

SCAN_AGAIN = "pipeline submit --stage scan"
BASE_BYTES = 1 << 30  # an interpreter, and what a reader holds of a file
TOLD_EVERY = 100  # items
SETTLING_S = 3.0  # after which the times of a file prove something, on any file system


def survey(project: Project, folder: RunFolder | None, _at_once: int) -> Found:
    """See whether the data set was read as it stands."""
    known = None
    with suppress(CacheDamaged, RecordMissing):
        known = next((found for found, _, _ in reader_tables(project)), None)
    if folder is not None:
        with writing_run(folder.items):
            folder.items.touch()  # of structures there are none
        if known is not None and known.path != folder.path:
            _take_over(known, folder)
    counts = {"items": 1, "refused": 0, "unusable": 0, "cached": int(known is not None), "missing": int(known is None)}
    return Found({**counts, "sets": 1}, () if known else (Shard(0, 1, 1),))  # one thing, which cannot be halved


def _take_over(known: RunFolder, folder: RunFolder) -> None:
    """Let a run say what an earlier one has read."""
    with writing_run(folder.entered):
        if known.rejected.exists():
            shutil.copyfile(known.rejected, folder.rejected)
        _write(folder, read_by_run(known))


def _write(folder: RunFolder, told: Mapping[str, Any]) -> None:
    partial = folder.entered.with_suffix(".partial")
    with writing_run(folder.entered):
        partial.write_text(json.dumps(told))
        partial.replace(folder.entered)


def mem_bytes(_project: Project) -> int:
    """Return the memory of the task."""
    return BASE_BYTES


def recipe(project: Project) -> Mapping[str, Any]:
    """Return under what measurements of such tasks are remembered."""
    data = project.config.data
    return {"reader": data.reader, "options": dict(data.options)}


def work(
    project: Project, folder: RunFolder, _task: int, tell: Tell, _part: tuple[int, int] = (0, 1)
) -> Generator[Reason | None, None, None]:
    """Read the data set, once from beginning to end."""
    reader = reader_of(project)
    made = reader_state(project, _still(reader))
    read_first(reader, TRIED)
    taken, entered = Taken(), Entered()
    write_rejections(folder.rejected, _rejections(_telling(reader, tell), taken, entered, project.config.data.limit))
    if reader_state(project) != made:
        what = "its files changed while they were read"
        raise DataError(what, where=str(project.config.data.path), remedy=SCAN_AGAIN)
    entered.finish(taken, taken.table.write(project.cache.kind(KIND)))
    _write(folder, {"format": FORMAT, "made": made, "table": entered.table, "judged": asdict(entered)})
    yield None


def _still(reader: Reader) -> str:
    """Return the digest of the reader's files, once their times prove that they stand still, or nearly so."""
    deadline = time.monotonic() + SETTLING_S
    while True:
        files, is_still = look_at_files(reader)
        if is_still or time.monotonic() > deadline:
            return files
        time.sleep(SETTLING_S / 30)


def _telling(reader: Reader, tell: Tell) -> Iterator[Entry | Rejection]:
    """Yield the items, telling now and then which was the last: a death says where it was."""
    for number, entry in enumerate(reader.entries()):
        if number % TOLD_EVERY == 0 and isinstance(entry, Entry | Rejection):
            tell.figures[ITEMS_READ] = number
            tell.on([f"item {number + 1:,} ({printable(entry.origin or str(entry.id))}) or one soon after it"])
        yield entry


def _rejections(
    entries: Iterable[Entry | Rejection], taken: Taken, entered: Entered, limit: int | None
) -> Iterator[dict[str, Any]]:
    with blaming_reader():
        for rejected in read(entries, taken, limit):
            entered.reject(rejected)
            yield rejected.to_json()


@dataclass(slots=True)
class Entered(Judged):
    """The numbers of a data set that a reader gives."""

    splits: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, dict[str, float]] = field(default_factory=dict)  # rows along each axis
    chains: dict[str, int] = field(default_factory=dict)  # of which there are none
    leaks: int = 0
    leak: str = ""
    table: str = ""  # its key

    def finish(self, taken: Taken, table: bytes) -> None:
        """Take down what has come of all items."""
        self.items += len(taken.table)
        self.splits = {name: count for name, count in taken.splits.items() if name}
        self.sizes, self.leaks, self.leak, self.table = taken.spreads(), taken.leaks, taken.leak, table.hex()


def judge(project: Project, folder: RunFolder, patience_s: float) -> Entered:
    """Say what has been read, where the store has the table of it."""
    store = project.cache.kind(KIND)

    def look() -> Entered:
        told = read_by_run(folder)
        with suppress(CacheDamaged, RecordMissing):
            if told:
                ItemTable.read(store, bytes.fromhex(told["table"]))
                return Entered(**told["judged"])
        return Entered(undone=1, first_undone=str(project.config.data.path))

    return patiently([store], look, patience_s)


def check(project: Project, folder: RunFolder, entered: Entered) -> list[str]:
    """Let the table be found; do with leaks what is configured."""
    data = project.config.data
    what = entered.leak + (f" (and {entered.leaks - 1:,} more)" if entered.leaks > 1 else "")
    if what and data.on_leak == "error":
        remedy = f"mend the splits   or   {SCAN_AGAIN} --set data.on_leak=warn"
        raise DataError(what, where=str(data.path), remedy=remedy)
    with writing_run(folder.table):
        folder.table.write_text(entered.table)
    return [what] if what and data.on_leak == "warn" else []
