"""The results of validating, repairing and compacting a cache, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.report.tables import plural, text_table
from pipeline.units import format_bytes, short_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from pipeline.store.maintenance.damage_report import Summary
    from pipeline.store.maintenance.rewrite import Compacted
    from pipeline.store.maintenance.shard_repair import Mend, Repaired

SHOWN = 20  # shards that have a line each
FAULTS = {  # fault → the noun, and the damage
    "index": ("fault", "of the index"),
    "header": ("header", "damaged"),
    "table": ("table", "damaged"),
    "record": ("record", "damaged"),
    "gone": ("record", "missing"),
    "newer": ("file", "of a newer version"),
    "foreign": ("file", "not written by pipeline"),
    "unreadable": ("path", "unreadable"),
    "meaning": ("record", "inconsistent"),
}


def check_table(kinds: Mapping[str, Summary]) -> RenderableType:
    """Show the findings of each kind."""
    if not kinds:
        return "The cache is empty."
    listed = any(tally.listed for tally in kinds.values())  # unread records do not count as intact
    rows = [
        (
            kind,
            f"{tally.shards:,}",
            short_bytes(tally.bytes),
            f"{tally.records:,}",
            f"{tally.listed if listed else tally.whole:,}",
            f"{tally.lost:,}",
            ", ".join(_fault(*fault) for fault in sorted(tally.faults.items())) or "-",
        )
        for kind, tally in kinds.items()
    ]
    columns = ("KIND", "FILES", "READ", "RECORDS", "LISTED" if listed else "INTACT", "LOST", "DAMAGE")
    return text_table(columns, rows, right=columns[1:6])


def check_line(kinds: Mapping[str, Summary], summary: Summary) -> str:
    """Say whether anything is damaged, and how much was checked."""
    if summary.findings:
        return f"✗ {plural(summary.findings, 'problem')} found, {plural(summary.lost, 'record')} lost"
    records, files = sum(tally.records for tally in kinds.values()), sum(tally.shards for tally in kinds.values())
    unread = "   (--full also reads the records)" if any(tally.listed for tally in kinds.values()) else ""
    return f"✓ No damage: {plural(records, 'record')} in {plural(files, 'file')}{unread}"


def _fault(fault: str, count: int) -> str:
    noun, wrong = FAULTS[fault]
    return f"{plural(count, noun)} {wrong}"


def mend_table(mends: Sequence[Mend], more: int) -> list[RenderableType]:
    """Show the planned repair of each of the first shards."""
    if not mends:
        return []
    rows = [
        (
            mend.kind,
            mend.shard or "(index)",
            mend.why,
            mend.salvaged,
            "?" if mend.unknown else f"{len(mend.lost):,}",
            _fate(mend),
        )
        for mend in mends
    ]
    columns = ("KIND", "FILE", "DAMAGE", "SALVAGED", "LOST", "ACTION")
    shown: list[RenderableType] = [text_table(columns, rows, right="SALVAGED LOST")]
    return [*shown, f"… and {plural(more, 'file')} more (--json lists all)"] if more else shown


def mended_table(kinds: Mapping[str, Repaired]) -> list[RenderableType]:
    """Show the repairs of each kind."""
    if not kinds:
        return []
    columns = ("KIND", "QUARANTINED", "LEFT ALONE", "SALVAGED", "LOST")
    rows = [
        (kind, f"{done.quarantined:,}", f"{done.stay:,}", f"{done.salvaged:,}", f"{done.lost:,}")
        for kind, done in kinds.items()
    ]
    return [text_table(columns, rows, right=columns[1:])]


def _fate(mend: Mend) -> str:
    """Say what repair does with a shard or an index."""
    if mend.stays:
        return f"leave alone: {mend.stays}"
    if not mend.shard:
        return "rebuild from the shards"
    return "remove from the index" if mend.gone else "quarantine"


def repaired_lines(repaired: Repaired, *, did: bool) -> list[str]:
    """Return the totals of a repair or its dry run."""
    if not (repaired.quarantined or repaired.indexes or repaired.stay or repaired.lost):
        return ["✓ Nothing is damaged"]
    would = "" if did else "to be "
    size = format_bytes(repaired.salvaged_bytes)
    lines = [
        f"{plural(repaired.salvaged, 'record')} ({size}) {would}copied to new shards, "
        f"{plural(repaired.quarantined, 'shard')} {would}quarantined, "
        f"{repaired.indexes:,} {'index' if repaired.indexes == 1 else 'indexes'} {would}rebuilt"
    ]
    if repaired.lost:
        lines.append(f"! {plural(repaired.lost, 'record')} lost, to be computed again")
    if repaired.unknown:
        shards = plural(repaired.unknown, "shard")
        lines.append(f"! {shards} with unknown records: `pipeline submit` computes missing records")
    if repaired.stay:
        lines.append(f"! {plural(repaired.stay, 'file')} left alone")
    return lines


def compact_table(kinds: Sequence[Compacted], *, did: bool) -> RenderableType:
    """Show the compaction of each kind."""
    rows = [
        (
            kind.kind,
            f"{kind.shards:,}",
            f"{len(kind.small):,}",
            f"{kind.records:,}",
            short_bytes(kind.size_bytes),
            _after(kind, did),
        )
        for kind in kinds
    ]
    columns = ("KIND", "FILES", "SMALL", "RECORDS IN SMALL", "SIZE", "AFTER" if did else "ACTION")
    return text_table(columns, rows, right=columns[1:5])


def compacted_line(kinds: Sequence[Compacted], *, did: bool) -> str:
    """Return the totals of a compaction or its dry run."""
    if not did and (small := sum(len(kind.small) for kind in kinds)):
        return f"{plural(small, 'small file')} to merge"
    before, after = sum(kind.shards for kind in kinds), sum(kind.after for kind in kinds)
    return (
        f"✓ {plural(before, 'file')} merged into {after:,}"
        if any(kind.gone for kind in kinds)
        else "✓ Nothing to merge"
    )


def _after(kind: Compacted, did: bool) -> str:  # noqa: FBT001 - a fact about the table
    """Say what compaction does with the small files of a kind."""
    if not kind.small:
        return "-"
    damaged = f"; {plural(len(kind.damaged), 'damaged file')} left alone" if kind.damaged else ""
    taken = f"; {plural(len(kind.taken), 'file')} removed meanwhile" if kind.taken else ""
    return f"{plural(kind.after, 'file')}{damaged}{taken}" if did else "merge small files"
