"""The results of validating, repairing and compacting a cache, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.report.tables import plural, text_table
from pipeline.store.maintenance.shard_plans import Compacted, Fate, Repaired, ShardPlan
from pipeline.units import format_bytes, short_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from pipeline.store.maintenance.damage_report import Summary

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


def mend_table(plans: Sequence[ShardPlan], more: int) -> list[RenderableType]:
    """Show the planned repair of each of the first shards."""
    if not plans:
        return []
    rows = [
        (
            plan.store.kind,
            plan.shard or "(index)",
            plan.why,
            plan.kept,
            "?" if plan.unknown else f"{len(plan.lost):,}",
            _fate(plan),
        )
        for plan in plans
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


def _fate(plan: ShardPlan) -> str:
    """Say what repair does with a shard or an index."""
    if plan.fate is Fate.LEFT:
        return f"leave alone: {plan.stays}"
    if plan.fate is Fate.INDEXED:
        return "rebuild from the shards"
    return "remove from the index" if plan.fate is Fate.GONE else "quarantine"


def plain_repair(plan: ShardPlan) -> dict[str, Any]:
    """Return the repair of a shard as JSON data."""
    return {
        "kind": plan.store.kind,
        "shard": plan.shard,
        "why": plan.why,
        "salvaged": plan.kept,
        "salvaged_bytes": plan.kept_bytes,
        "lost": [finding.to_json() for finding in plan.lost],
        "unknown": plan.unknown,
        "stays": plan.stays,
        "gone": plan.fate is Fate.GONE,
    }


def plain_compaction(kind: Compacted, *, did: bool) -> dict[str, Any]:
    """Return the compaction of a kind as JSON data."""
    small = [
        {"shard": plan.shard, "records": plan.kept + plan.dead, "size_bytes": plan.size_bytes} for plan in kind.small
    ]
    return {
        "kind": kind.kind,
        "shards": kind.shards,
        "records": kind.records,
        "size_bytes": kind.size_bytes,
        "small": small,
        "gone": len(kind.of(Fate.REWRITTEN)) if did else 0,
        "after": kind.after,
        "damaged": kind.of(Fate.LEFT),
        "taken": kind.of(Fate.GONE),
        "twice": len(kind.twice),
    }


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
        if did and any(kind.of(Fate.REWRITTEN) for kind in kinds)
        else "✓ Nothing to merge"
    )


def _after(kind: Compacted, did: bool) -> str:  # noqa: FBT001 - a fact about the table
    """Say what compaction does with the small files of a kind."""
    if not kind.small:
        return "-"
    left, gone = kind.of(Fate.LEFT), kind.of(Fate.GONE)
    damaged = f"; {plural(len(left), 'damaged file')} left alone" if left else ""
    taken = f"; {plural(len(gone), 'file')} removed meanwhile" if gone else ""
    return f"{plural(kind.after, 'file')}{damaged}{taken}" if did else "merge small files"
