"""Stage scan of items that are no structures: whether the files are as they were, one task's work, its judgement.

What a run read of them is in its folder: from which files, by which reader, and the key of the table. So a data set is
read again when any of that has changed, and what is made of a table stays as long as its items do.
"""

from __future__ import annotations

import json
import shutil
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import CacheDamaged, ConfigError, DataError, PipelineError, RecordMissing
from pipeline.journal.ledger import write_rejections
from pipeline.journal.run_folder import runs_in, writing
from pipeline.keys import content_digest, is_settled
from pipeline.project.user_code import READER, failed, load_reader, reading_digest
from pipeline.records import Entry, Rejection
from pipeline.runs.dataset.outcome import Judged, patiently
from pipeline.runs.dataset.worklist import Found, Shard
from pipeline.stages.read_entries import ITEMS_READ, Taken, read
from pipeline.structures.sources.item_ids import shown
from pipeline.training.items.item_source import as_arrays, digest_of
from pipeline.training.items.item_table import KIND, Table

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping

    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.protocol import Reader
    from pipeline.records import Reason, Tell

SCAN_AGAIN = "pipeline submit --stage scan"
BASE_BYTES = 1 << 30  # an interpreter, and what a reader holds of a file
TRIED, TRIED_MOST = 3, 100  # items, before all are read; and where none of the first can be used
FORMAT = 1  # of what a run's folder says of it
TOLD_EVERY = 100  # items
SETTLING_S = 3.0  # after which the times of a file prove something, on any file system


def is_reader(config: Config) -> bool:
    """Tell whether the items are what a reader gives, and no structures."""
    return config.data.source == "reader"


def reader_of(project: Project) -> Reader:
    """Return the reader of a configuration."""
    data = project.config.data
    if READER.name not in project.memo:
        project.memo[READER.name] = load_reader(data.reader or "", data.path, data.options, beside=project.beside)
    reader: Reader = project.memo[READER.name]
    return reader


def inspect(project: Project) -> Taken:
    """Refuse what cannot be read: no class, no file, or one whose items are not found again; return the first few."""
    reader = reader_of(project)
    _look(reader)
    taken = tried(reader, TRIED)
    return taken if len(taken.table) or taken.entries < TRIED else tried(reader, TRIED_MOST)


def refuse_crop(config: Config) -> None:
    """Refuse to cut items out of which nobody knows what may be cut."""
    if is_reader(config) and config.train.oversize == "crop":
        what = "only graphs can be cropped: what may be cut out of a reader's items is not known"
        raise ConfigError(what, where="train.oversize is crop", remedy="--set train.oversize=skip   (or error)")


def tried(reader: Reader, most: int) -> Taken:
    """Return what comes of the first few items, each of which is read again where it is said to be."""
    taken = Taken()
    with _blamed():
        for entry in islice(reader.entries(), most):
            before = len(taken.table)
            list(read([entry], taken))
            if len(taken.table) > before:
                table = taken.table.table()
                if digest_of(as_arrays(reader.read(table.place(before)))) != table.key(before):
                    what = f"read() of the reader gives other arrays of {table.ids[before]} than entries()"
                    raise ConfigError(what, where=READER.where, remedy="what a reader must have: pipeline/protocol.py")
    return taken


@contextmanager
def _blamed() -> Iterator[None]:
    """Let what a reader's code raises be told as its own."""
    try:
        yield
    except (PipelineError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise failed("reading the items", error, READER) from error


def made_from(project: Project) -> dict[str, Any]:
    """Return what decides which items there are: the reader and its options, its code, its files as they stand."""
    return _made_from(project, _look(reader_of(project))[0])


def _made_from(project: Project, files: str) -> dict[str, Any]:
    data = project.config.data
    code = reading_digest(reader_of(project))
    options = json.loads(json.dumps(data.options))  # as a run's folder has them: lists, no tuples
    told = {"reader": data.reader, "path": str(data.path), "options": options, "limit": data.limit}
    return {**told, "code": code, "files": files}


def _look(reader: Reader) -> tuple[str, bool]:
    """Return the digest of the reader's files by name, size and times, and whether their next change would show."""
    digests, is_still = list[bytes](), True
    with _blamed():
        for path in reader.files():
            try:
                state = Path(path).stat()
            except OSError as error:
                what = f"cannot be read: {error.strerror}"
                raise DataError(what, where=str(path), remedy="ls -l   (see data.path)") from error
            is_still = is_still and is_settled(state.st_mtime_ns, state.st_ctime_ns)
            line = json.dumps([str(path), state.st_size, state.st_mtime_ns, state.st_ctime_ns])
            digests.append(content_digest(line.encode()))
    return content_digest(b"".join(sorted(digests))).hex(), is_still


def told_by(folder: RunFolder) -> dict[str, Any]:
    """Return what a run has read of a data set; nothing where it has read none to the end, or tells it otherwise."""
    with suppress(OSError, ValueError):
        told = json.loads(folder.entered.read_text())
        if isinstance(told, dict) and told.get("format") == FORMAT:
            return told
    return {}


def tables(project: Project) -> Iterator[tuple[RunFolder, bytes, Table]]:
    """Yield what runs have read of the data set as it stands, newest first; one that is lost is an error in the end."""
    wanted, lost = made_from(project), None
    for folder in reversed(runs_in(project.config.cluster.runs)):
        told = told_by(folder)
        if told.get("made") == wanted:
            key = bytes.fromhex(told["table"])
            try:
                yield folder, key, Table.read(project.cache.kind(KIND), key)
            except (CacheDamaged, RecordMissing) as error:
                lost = lost or error
    if lost:
        raise lost


def survey(project: Project, folder: RunFolder | None, _at_once: int) -> Found:
    """See whether the data set was read as it stands."""
    known = None
    with suppress(CacheDamaged, RecordMissing):
        known = next((found for found, _, _ in tables(project)), None)
    if folder is not None:
        with writing(folder.items):
            folder.items.touch()  # of structures there are none
        if known is not None and known.path != folder.path:
            _take_over(known, folder)
    counts = {"items": 1, "refused": 0, "unusable": 0, "cached": int(known is not None), "missing": int(known is None)}
    return Found({**counts, "sets": 1}, () if known else (Shard(0, 1, 1),))  # one thing, which cannot be halved


def _take_over(known: RunFolder, folder: RunFolder) -> None:
    """Let a run say what an earlier one has read."""
    with writing(folder.entered):
        if known.rejected.exists():
            shutil.copyfile(known.rejected, folder.rejected)
        _write(folder, told_by(known))


def _write(folder: RunFolder, told: Mapping[str, Any]) -> None:
    partial = folder.entered.with_suffix(".partial")
    with writing(folder.entered):
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
    made = _made_from(project, _still(reader))
    tried(reader, TRIED)
    taken, entered = Taken(), Entered()
    write_rejections(folder.rejected, _rejections(_telling(reader, tell), taken, entered, project.config.data.limit))
    if made_from(project) != made:
        what = "its files changed while they were read"
        raise DataError(what, where=str(project.config.data.path), remedy=SCAN_AGAIN)
    entered.finish(taken, taken.table.write(project.cache.kind(KIND)))
    _write(folder, {"format": FORMAT, "made": made, "table": entered.table, "judged": asdict(entered)})
    yield None


def _still(reader: Reader) -> str:
    """Return the digest of the reader's files, once their times prove that they stand still, or nearly so."""
    deadline = time.monotonic() + SETTLING_S
    while True:
        files, is_still = _look(reader)
        if is_still or time.monotonic() > deadline:
            return files
        time.sleep(SETTLING_S / 30)


def _telling(reader: Reader, tell: Tell) -> Iterator[Entry | Rejection]:
    """Yield the items, telling now and then which was the last: a death says where it was."""
    for number, entry in enumerate(reader.entries()):
        if number % TOLD_EVERY == 0 and isinstance(entry, Entry | Rejection):
            tell.figures[ITEMS_READ] = number
            tell.on([f"item {number + 1:,} ({shown(entry.origin or str(entry.id))}) or one soon after it"])
        yield entry


def _rejections(
    entries: Iterable[Entry | Rejection], taken: Taken, entered: Entered, limit: int | None
) -> Iterator[dict[str, Any]]:
    with _blamed():
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
        told = told_by(folder)
        with suppress(CacheDamaged, RecordMissing):
            if told:
                Table.read(store, bytes.fromhex(told["table"]))
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
    with writing(folder.table):
        folder.table.write_text(entered.table)
    return [what] if what and data.on_leak == "warn" else []


def unmade(config: Config) -> str:
    """Say that what a training reads is not there."""
    if is_reader(config):
        return "this data set was not read as it stands"
    return "the graphs of this data set are not made with this configuration"
