"""What is done to a cache while a fault strikes: each work begins with some cache, and reports what became safe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipeline.errors import PipelineError
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.cache_layout import REPORTS
from pipeline.store.format.disk import write_refused
from pipeline.store.format.shard import read_table
from pipeline.store.maintenance import checking, shard_plans, transfer
from pipeline.store.maintenance.damage_report import ReportWriter, Summary, read_report
from pipeline.store.users import User, forget, register, sorted_keys
from pipeline.training.checkpoints.sealed_folder import seal, unseal
from tests.faults.judged import KIND, NAME, HastyDisk
from tests.store.content import is_right, key_of, put
from tests.store.maintenance.damage import flip

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.store.store import Store

Say = Callable[[Iterable[bytes]], object]
HEADER_BYTES = 4096  # files stay small, so that many states of them can be tried


@dataclass(frozen=True, slots=True)
class Work:
    """What is there at first, what is done, and which records have to be there all along."""

    name: str
    act: Callable[[Path, CacheFolder, Say], object]  # in a folder that holds the cache
    before: Callable[[Path], object] = lambda folder: None
    numbers: Iterable[int] = ()  # that are there at first, and live
    new: Iterable[int] = ()  # that may come
    torn: bool = False  # whether damage is there at first
    judge: Callable[[Path, bool], Iterable[str]] = lambda folder, ended: ()  # complaints of its own; did it end?

    @property
    def live(self) -> frozenset[bytes]:
        return frozenset(map(key_of, self.numbers))

    @property
    def known(self) -> frozenset[bytes]:
        return self.live | frozenset(map(key_of, self.new))

    def begin(self, folder: Path) -> Path:
        """Make what is there at first, and return the folder of the cache."""
        folder.mkdir(exist_ok=True)
        self.before(folder)
        return folder / NAME

    def run(self, folder: Path, cache: CacheFolder, say: Say = lambda keys: None) -> None:
        self.act(folder, cache, say)


def fill(folder: Path, *numbers_of: Iterable[int], index: bool = True) -> tuple[Store, list[Path]]:
    """Make a cache with a shard for each of some runs of numbers, and return where they are."""
    store = CacheFolder(folder / NAME, HastyDisk()).kind(KIND)
    shards: list[Path] = []
    for numbers in numbers_of:
        before = set(store.layout.shards.iterdir()) if store.layout.shards.exists() else set()
        with store.writer(header_bytes=HEADER_BYTES) as writer:
            put(writer, *numbers)
        (made,) = set(store.layout.shards.iterdir()) - before
        shards.append(made)
    if index:
        store.write_index()
    return store, shards


def _read(folder: Path, cache: CacheFolder, say: Say) -> None:
    store = cache.kind(KIND)
    keys = [key_of(number) for number in range(6)]
    store.missing(keys)
    assert all(is_right(store.get(key), key) for key in keys)
    assert all(is_right(record, key) for record, key in zip(store.read(keys), keys, strict=True))


def _publish(folder: Path, cache: CacheFolder, say: Say) -> None:
    store = cache.kind(KIND)
    with store.writer(header_bytes=HEADER_BYTES) as writer:
        for first in (0, 3):
            put(writer, *range(first, first + 3))
            say(writer.flush())


def _publish_and_index(folder: Path, cache: CacheFolder, say: Say) -> None:
    store = cache.kind(KIND)
    for first in (6, 9):
        with store.writer(header_bytes=HEADER_BYTES) as writer:
            put(writer, *range(first, first + 3))
            say(writer.flush())
        store.write_index()


def _describe(folder: Path, cache: CacheFolder, say: Say) -> None:
    cache.describe(KIND, {"cutoff": 5})
    user = User("pipeline.yaml", "runs", frozenset({(KIND, "00")}))
    register(cache.disk, cache.root, user)
    register(cache.disk, cache.root, User("other.yaml", "runs", frozenset()))
    forget(cache.disk, cache.root, [user])


def _validate(folder: Path, cache: CacheFolder, say: Say) -> None:
    report = ReportWriter(cache.disk, cache.root / REPORTS)
    summary = Summary("full")
    try:
        for checked in checking.check(cache.kind(KIND)):
            for finding in checked.findings:
                report.add(finding)
                summary.count(finding)
        report.publish(summary)
    finally:
        report.discard()


def _damaged(folder: Path) -> None:
    """Damage a record, a header, a table and the index; a copy of what is lost with the table is in another shard."""
    store, shards = fill(folder, range(3), range(2, 6), range(6, 9), range(9, 12), range(9, 12), index=False)
    table = read_table(store.disk, shards[1])
    flip(shards[1], int(table.rows["offset"][0]))  # of number 2, which is in the first as well
    flip(shards[2], 9)
    flip(shards[3], read_table(store.disk, shards[3]).table_start)
    store.write_index()
    flip(store.layout.index, store.layout.index.stat().st_size - 1)


LOST = (key_of(4), key_of(7))  # of a shard that went away, and of damage


def _beyond_repair(folder: Path) -> None:
    """Remove a shard and damage another, so that records are lost whose keys are known only until something forgets."""
    store, shards = fill(folder, range(3), [3, 4], [3, 7, 8])
    table = read_table(store.disk, shards[2])
    flip(shards[2], int(table.rows["offset"][1]))
    shards[1].unlink()


def _lists_the_lost(folder: Path, ended: bool) -> Iterator[str]:
    if ended:
        reports = [read_report(path) for path in (folder / NAME / REPORTS).glob("*.jsonl")]
        listed = {one.key for report in reports for one in report.findings() if one.lost}
        yield from (f"unlisted: {key.hex()} is lost" for key in LOST if key.hex() not in listed)


def _repair(folder: Path, cache: CacheFolder, say: Say) -> None:
    shard_plans.repair(cache)


def _compact(folder: Path, cache: CacheFolder, say: Say) -> None:
    list(shard_plans.apply(shard_plans.plan_compaction(cache.kind(KIND)).small))


def _is_one_file(folder: Path, ended: bool) -> Iterator[str]:
    files = list((folder / NAME / KIND / "shards").iterdir())
    if ended and len(files) > 1:
        yield f"unfinished: {len(files)} files"


def _half_dead(folder: Path) -> None:
    fill(folder, [0, 1, 100], range(2, 4), [101, 102], [4, 5, 103, 104, 105])


def _sweep(folder: Path, cache: CacheFolder, say: Say) -> None:
    store = cache.kind(KIND)
    live = shard_plans.Live(keys=sorted_keys(b"".join(map(key_of, range(6)))))
    marked = shard_plans.mark(store, live, time.time() + 60)
    for fate in (shard_plans.Fate.GOES, shard_plans.Fate.REWRITTEN):
        list(shard_plans.apply(marked.of(fate)))


def _is_swept(folder: Path, ended: bool) -> Iterator[str]:
    worth_it = set(map(key_of, range(101, 106)))  # 100 is a small part of its shard
    if ended and worth_it & set(CacheFolder(folder / NAME, HastyDisk()).kind(KIND).keys()):
        yield "unfinished: records are left that nothing needs"


def _export(folder: Path, cache: CacheFolder, say: Say) -> None:
    transfer.export_cache(cache, folder / "export")


def _is_all_or_refused(folder: Path, ended: bool) -> Iterator[str]:
    """Import from an export, which is whole or is refused as unfinished."""
    other = CacheFolder(folder / "other", HastyDisk())
    try:
        refused = transfer.take_in(other, folder / "export").refused
    except PipelineError as error:
        if ended:
            yield f"unfinished: {error!r}"
        return
    if refused or other.kind(KIND).missing([key_of(number) for number in range(6)]):
        yield f"torn: an export lacks {refused}"


def _exported(folder: Path) -> None:
    (folder / "other").mkdir()
    fill(folder / "other", range(3), range(3, 6))
    transfer.export_cache(CacheFolder(folder / "other" / NAME, HastyDisk()), folder / "export")
    fill(folder, range(6, 9))


def _import(folder: Path, cache: CacheFolder, say: Say) -> None:
    if not transfer.take_in(cache, folder / "export").refused:
        say(map(key_of, range(6)))


def _seal(folder: Path, cache: CacheFolder, say: Say) -> None:
    tensors = {"weights": {"x": torch.arange(9.0), "n": torch.tensor(3)}, "rng": {"state": torch.zeros(5)}}
    path = folder / "sealed" / f"step-{len(_sealed(folder))}"
    try:
        seal(path, tensors, {"step": 3}, disk=cache.disk)
    except OSError as error:
        raise write_refused(cache.disk, path, error) from error


def _sealed(folder: Path) -> list[Path]:
    return list((folder / "sealed").glob("step-*"))


def _is_sealed_or_not_there(folder: Path, ended: bool) -> Iterator[str]:
    if ended and not _sealed(folder):
        yield "unfinished: nothing is sealed"
    for path in _sealed(folder):
        try:
            sealed = unseal(path)
        except PipelineError as error:
            yield f"torn: {error!r}"
        else:
            if sealed.data != {"step": 3} or not sealed.tensors("weights")["x"].equal(torch.arange(9.0)):
                yield "wrong: a sealed folder has other content"


WORKS = (
    Work("read", _read, lambda folder: (fill(folder, range(3)), fill(folder, range(3, 6), index=False)), range(6)),
    Work("publish", _publish, new=range(6)),
    Work("index", _publish_and_index, lambda folder: fill(folder, range(3), range(3, 6)), range(6), range(6, 12)),
    Work("describe", _describe, lambda folder: fill(folder, range(2)), range(2)),
    Work("validate", _validate, lambda folder: fill(folder, range(2)), range(2)),
    Work("repair", _repair, _damaged, range(12), torn=True),
    Work("repair_lost", _repair, _beyond_repair, [0, 1, 2, 3, 8], [4, 7], torn=True, judge=_lists_the_lost),
    Work(
        "compact",
        _compact,
        lambda folder: fill(folder, *([n, n + 1] for n in range(0, 6, 2)), [0, 5]),
        range(6),
        judge=_is_one_file,
    ),
    Work("sweep", _sweep, _half_dead, range(6), [*range(100, 106)], judge=_is_swept),
    Work("export", _export, lambda folder: fill(folder, range(3), range(3, 6)), range(6), judge=_is_all_or_refused),
    Work("import", _import, _exported, range(6, 9), range(6)),
    Work("seal", _seal, lambda folder: fill(folder, range(2)), range(2), judge=_is_sealed_or_not_there),
)
