"""A data set that a reader gives: its reader, whether its files are as they were, what runs have read of it.

What a run read is in its folder: from which files, by which reader, and the key of the table. So a data set is read
again when any of that has changed, and what is made of a table stays as long as its items do.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.dataset.read_entries import EntriesTaken, take_entries
from pipeline.errors import CacheDamaged, ConfigError, DataError, PipelineError, RecordMissing
from pipeline.files import read_json, state_of
from pipeline.journal.run_folder import runs_in
from pipeline.keys import content_digest, is_settled
from pipeline.project.project import once
from pipeline.project.run_code import READER, load_reader, reading_digest, user_code_failed
from pipeline.training.items.item_source import arrays_digest, as_arrays
from pipeline.training.items.item_table import KIND, ItemTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.protocol import Reader

TRIED = 3  # items, before all are read
TRIED_MOST = 100  # where none of the first can be used
FORMAT = 1  # of what a run's folder says of it


def is_reader(config: Config) -> bool:
    """Tell whether the items come from a reader, not from structures."""
    return config.data.source == "reader"


@once
def reader_of(project: Project) -> Reader:
    """Return the reader of a configuration."""
    data = project.config.data
    return load_reader(data.reader or "", data.path, data.options, beside=project.beside)


def refuse_unreadable(project: Project) -> EntriesTaken:
    """Refuse what cannot be read: no class, no file, or one whose items are not found again; return the first few."""
    reader = reader_of(project)
    look_at_files(reader)
    taken = read_first(reader, TRIED)
    return taken if len(taken.table) or taken.entries < TRIED else read_first(reader, TRIED_MOST)


def refuse_crop(config: Config) -> None:
    """Refuse `oversize: crop` for a reader's items."""
    if is_reader(config) and config.train.oversize == "crop":
        what = "only graphs can be cropped, not the items of a reader"
        raise ConfigError(what, where="train.oversize is crop", remedy="--set train.oversize=skip   (or error)")


def read_first(reader: Reader, most: int) -> EntriesTaken:
    """Return the first few items, each of which must be the same when it is read again by its place."""
    taken = EntriesTaken()
    with blaming_reader():
        for entry in islice(reader.entries(), most):
            before = len(taken.table)
            list(take_entries([entry], taken))
            if len(taken.table) > before:
                table = taken.table.table()
                if arrays_digest(as_arrays(reader.read(table.place(before)))) != table.key(before):
                    what = f"read() and entries() of the reader return different arrays for {table.ids[before]}"
                    raise ConfigError(
                        what, where=READER.where, remedy="correct the reader: pipeline/protocol.py lists its methods"
                    )
    return taken


@contextmanager
def blaming_reader() -> Iterator[None]:
    """Report what the reader's code raises as a fault of that code."""
    try:
        yield
    except (PipelineError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise user_code_failed("reading the items", error, READER) from error


def reader_state(project: Project, files: str | None = None) -> dict[str, Any]:
    """Return what decides which items there are: the reader, its options, its code, and the state of its files."""
    data, reader = project.config.data, reader_of(project)
    return {
        "reader": data.reader,
        "path": str(data.path),
        "options": json.loads(json.dumps(data.options)),  # as a run's folder has them: lists, no tuples
        "limit": data.limit,
        "code": reading_digest(reader),
        "files": look_at_files(reader)[0] if files is None else files,
    }


def look_at_files(reader: Reader) -> tuple[str, bool]:
    """Return the digest of the reader's files by name, inode, size and times, and whether a change would show."""
    digests, is_still = list[bytes](), True
    with blaming_reader():
        for path in reader.files():
            try:
                state = Path(path).stat()
            except OSError as error:
                what = f"cannot be read: {error.strerror}"
                raise DataError(what, where=str(path), remedy="ls -l   (see data.path)") from error
            is_still = is_still and is_settled(state.st_mtime_ns, state.st_ctime_ns)
            digests.append(content_digest(json.dumps(state_of(path, state)).encode()))
    return content_digest(b"".join(sorted(digests))).hex(), is_still


def read_by_run(folder: RunFolder) -> dict[str, Any]:
    """Return what a run has recorded of reading a data set; nothing if it did not finish, or in another format."""
    record = read_json(folder.entered)
    return record if isinstance(record, dict) and record.get("format") == FORMAT else {}


def reader_tables(project: Project) -> Iterator[tuple[RunFolder, bytes, ItemTable]]:
    """Yield the tables that runs have read of the data set as it stands, newest first; raise last if one is lost."""
    wanted, lost = reader_state(project), None
    for folder in reversed(runs_in(project.config.cluster.runs)):
        record = read_by_run(folder)
        if record.get("made") == wanted:
            key = bytes.fromhex(record["table"])
            try:
                yield folder, key, ItemTable.read(project.cache.kind(KIND), key)
            except (CacheDamaged, RecordMissing) as error:
                lost = lost or error
    if lost:
        raise lost


def unmade(config: Config) -> str:
    """Say that the input of a training is missing."""
    if is_reader(config):
        return "the current version of this data set was not scanned"
    return "this data set has no graphs with this configuration"
