"""What must hold of a cache after any fault, however it came about; each complaint is a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.errors import CacheDamaged, PipelineError, RecordMissing
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from pipeline.store.maintenance.checking import check
from pipeline.store.maintenance.damage_report import Fault
from tests.store.content import arrays_of, is_right

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from pipeline.store.maintenance.damage_report import DamageFinding
    from pipeline.store.store import Store
    from tests.faults.works import Work

KIND, NAME = "scan", "cache"


class HastyDisk(Disk):
    """A disk that is not waited for: what is done after a fault is not what is on trial."""

    def fsync(self, fd: int) -> None:
        pass

    def fsync_folder(self, path: Path) -> None:
        pass

    def wait(self, seconds: float) -> None:
        pass


def complaints(
    root: Path, safe: Collection[bytes], known: Collection[bytes], torn: bool = False, *, finish: bool = True
) -> list[str]:
    """Open a cache as a new process does, and say what is wrong with what it serves.

    `safe` are the keys that must be served, `known` all that may be; files are `torn` only where that was the fault.
    Then the work is finished, unless others do so.
    """
    try:
        store = CacheFolder(root, HastyDisk()).kind(KIND)
        unfinished = _unfinished(store, known) if finish else ()
        return [*_wrongly_served(store, safe, known), *_accused(store, safe, torn), *unfinished]
    except PipelineError as error:
        return [f"refused: {error!r}"]


def aftermath(work: Work, folder: Path, safe: set[bytes]) -> list[str]:
    """Say what is wrong with what an unfinished work left, then once it was done again."""
    root = folder / NAME
    found = [*complaints(root, safe, work.known, work.torn, finish=False), *work.judge(folder, False)]
    return found + finished(work, folder, safe)


def finished(work: Work, folder: Path, safe: set[bytes]) -> list[str]:
    """Do a work again, on a disk that works, and say what is wrong then."""
    root = folder / NAME
    work.run(folder, CacheFolder(root, HastyDisk()), safe.update)
    return [*work.judge(folder, True), *complaints(root, safe, work.known, work.torn)]


def served(store: Store, key: bytes) -> bool | None:
    """Say whether the right record is served, or a wrong one; None for an error that says which it is."""
    try:
        return is_right(store.get(key), key)
    except (CacheDamaged, RecordMissing):
        return None


def _wrongly_served(store: Store, safe: Collection[bytes], known: Collection[bytes]) -> Iterator[str]:
    there = list(store.keys())
    for key in set(there) - set(known):
        yield f"foreign: {key.hex()} is served"
    for key in {*there, *safe}:
        right = served(store, key)
        if right is False:
            yield f"wrong: {key.hex()} is served"
        if right is None and key in safe:
            yield f"lost: {key.hex()}"
    for key in store.missing(list(safe)):
        yield f"lost: {key.hex()} is said to be missing"


def _accused(store: Store, safe: Collection[bytes], torn: bool) -> Iterator[str]:
    """Complain of a validation that finds a torn file, or says that something safe is lost."""
    for quick in (True, False):
        for finding in (finding for checked in check(store, quick=quick) for finding in checked.findings):
            if finding.lost and bytes.fromhex(finding.key) in safe:
                yield f"accused: a check, {quick=}, says that {finding.key} is lost ({finding.what})"
            elif not torn and not is_of_gone(store, finding):
                what = f"{finding.fault.value} of {finding.shard or 'the index'}: {finding.what}"
                yield f"torn: a check, {quick=}, says {what}"


def is_of_gone(store: Store, finding: DamageFinding) -> bool:
    """Say whether a finding is about a shard that went away, or the index that still names it."""
    gone = finding.shard and not store.layout.shard(finding.shard).exists()
    return finding.fault is Fault.GONE or (finding.fault is Fault.INDEX and bool(gone))


def _unfinished(store: Store, known: Collection[bytes]) -> Iterator[str]:
    """Complain if the next process cannot put what is missing."""
    with store.writer(header_bytes=4096) as writer:
        for key in store.missing(sorted(known)):
            writer.put(key, arrays_of(key), {"name": key.hex()})
    store.write_index()
    for key in known:
        if not served(CacheFolder(store.layout.folder.parent).kind(KIND), key):
            yield f"unfinished: {key.hex()}"
