"""What checking, repairing and compacting a cache found and did, as text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.report.tables import plural, text_table
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from pipeline.store.maintenance.damage_report import Summary
    from pipeline.store.maintenance.rewrite import Compacted
    from pipeline.store.maintenance.shard_repair import Mend, Repaired

SHOWN = 20  # shards of which each has a line
FAULTS = {  # fault → what is counted, and what is wrong with it
    "index": ("fault", "of the index"),
    "header": ("header", "damaged"),
    "table": ("table", "damaged"),
    "record": ("record", "damaged"),
    "gone": ("record", "gone"),
    "newer": ("file", "of a later version"),
    "foreign": ("file", "that no pipeline wrote"),
    "unreadable": ("place", "that cannot be read"),
    "meaning": ("record", "meaningless"),
}


def check_table(kinds: Mapping[str, Summary]) -> RenderableType:
    """Show what was found in each kind."""
    if not kinds:
        return "empty: nothing was stored yet"
    listed = any(tally.listed for tally in kinds.values())  # records that were not read are not called whole
    rows = [
        (
            kind,
            f"{tally.shards:,}",
            format_bytes(tally.bytes),
            f"{tally.records:,}",
            f"{tally.listed if listed else tally.whole:,}",
            f"{tally.lost:,}",
            ", ".join(_fault(*fault) for fault in sorted(tally.faults.items())) or "nothing",
        )
        for kind, tally in kinds.items()
    ]
    columns = ("kind", "shards", "read", "records", "listed" if listed else "whole", "lost", "what is wrong")
    return text_table(columns, rows, right="shards read records listed whole lost")


def whole_line(kinds: Mapping[str, Summary]) -> str:
    """Say that nothing is wrong, and how much was looked at."""
    records, files = sum(tally.records for tally in kinds.values()), sum(tally.shards for tally in kinds.values())
    unread = "   (--full reads the records, too)" if any(tally.listed for tally in kinds.values()) else ""
    return f"nothing is wrong: {plural(records, 'record')} in {plural(files, 'file')}{unread}"


def _fault(fault: str, count: int) -> str:
    noun, wrong = FAULTS[fault]
    return f"{plural(count, noun)} {wrong}"


def mend_table(mends: Sequence[Mend], more: int) -> list[RenderableType]:
    """Show what would be done about each of the first shards."""
    if not mends:
        return []
    rows = [
        (
            mend.kind,
            mend.shard or "(index)",
            mend.why,
            mend.salvaged,
            "not known" if mend.unknown else f"{len(mend.lost):,}",
            _fate(mend),
        )
        for mend in mends
    ]
    columns = ("kind", "file", "what is wrong", "salvaged", "lost", "what becomes of it")
    shown: list[RenderableType] = [text_table(columns, rows, right="salvaged lost")]
    return [*shown, f"… and {plural(more, 'file')} more (--json names all)"] if more else shown


def mended_table(kinds: Mapping[str, Repaired]) -> list[RenderableType]:
    """Show what was done in each kind."""
    if not kinds:
        return []
    columns = ("kind", "put into quarantine", "left alone", "salvaged", "lost")
    rows = [
        (kind, f"{done.quarantined:,}", f"{done.stay:,}", f"{done.salvaged:,}", f"{done.lost:,}")
        for kind, done in kinds.items()
    ]
    return [text_table(columns, rows, right=" ".join(columns[1:]))]


def _fate(mend: Mend) -> str:
    """Say what becomes of a shard or an index."""
    if mend.stays:
        return f"left alone: {mend.stays}"
    if not mend.shard:
        return "made anew from the shards"
    return "the index forgets it" if mend.gone else "put into quarantine"


def repaired_lines(repaired: Repaired, *, did: bool) -> list[str]:
    """Return the totals of a repair that was done, or would be."""
    if not (repaired.quarantined or repaired.indexes or repaired.stay or repaired.lost):
        return ["nothing is damaged"]
    would = "" if did else "would be "
    size = format_bytes(repaired.salvaged_bytes)
    lines = [
        f"{plural(repaired.salvaged, 'record')} ({size}) {would}carried over to new shards, "
        f"{plural(repaired.quarantined, 'shard')} {would}put into quarantine, "
        f"{repaired.indexes:,} {'index' if repaired.indexes == 1 else 'indexes'} {would}made anew"
    ]
    if repaired.lost:
        verb = "is" if repaired.lost == 1 else "are"
        lines.append(f"{plural(repaired.lost, 'record')} {verb} lost, to be computed again")
    if repaired.unknown:
        shards = plural(repaired.unknown, "shard")
        lines.append(f"of {shards} nobody knows what was in it: `pipeline submit` computes it")
    if repaired.stay:
        lines.append(f"{plural(repaired.stay, 'file')} left alone")
    return lines


def compact_table(kinds: Sequence[Compacted], *, did: bool) -> RenderableType:
    """Show what compaction does for each kind."""
    rows = [
        (
            kind.kind,
            f"{kind.shards:,}",
            f"{len(kind.small):,}",
            f"{kind.records:,}",
            format_bytes(kind.size_bytes),
            _after(kind, did),
        )
        for kind in kinds
    ]
    columns = ("kind", "files", "small", "records in them", "size", "after" if did else "what would be done")
    return text_table(columns, rows, right="files small records size")


def compacted_line(kinds: Sequence[Compacted]) -> str:
    """Return the totals of a compaction."""
    before, after = sum(kind.shards for kind in kinds), sum(kind.after for kind in kinds)
    return f"{plural(before, 'file')} became {after:,}" if any(kind.gone for kind in kinds) else "nothing was changed"


def _after(kind: Compacted, did: bool) -> str:  # noqa: FBT001 - a fact about the table
    """Say what compaction did, or would do, with the small files of a kind."""
    if not kind.small:
        return "nothing to do"
    damaged = f"; {plural(len(kind.damaged), 'damaged file')} left alone" if kind.damaged else ""
    taken = f"; {plural(len(kind.taken), 'file')} gone meanwhile" if kind.taken else ""
    return f"{plural(kind.after, 'file')}{damaged}{taken}" if did else "small files made into few"
