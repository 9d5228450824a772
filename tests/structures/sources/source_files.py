"""What the tests of the sources share: files to bring, and what came of them."""

from __future__ import annotations

import gzip
from pathlib import Path

from pipeline.records import Item, Reason, Rejection
from pipeline.structures.sources.data_source import items
from pipeline.structures.sources.item_ids import SourceSpec


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        write(folder / name, "ATOM\n")
    return folder


def read(source: str, path: Path, **settings: object) -> list[Item | Rejection]:
    return list(items(SourceSpec(source, path, **settings)))


def only_item(entries: list[Item | Rejection]) -> Item:
    assert len(entries) == 1, entries
    assert isinstance(entries[0], Item), entries
    return entries[0]


def only_rejection(entries: list[Item | Rejection]) -> Rejection:
    assert len(entries) == 1, entries
    assert isinstance(entries[0], Rejection), entries
    return entries[0]


def ids(entries: list[Item | Rejection]) -> list[str]:
    return [entry.id for entry in entries if isinstance(entry, Item)]


def reasons(entries: list[Item | Rejection]) -> list[Reason]:
    return [entry.reason for entry in entries if isinstance(entry, Rejection)]
