"""The results of validating, repairing and compacting a cache, as text."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pipeline.report.tables import plural, table_of
from pipeline.store.maintenance.shard_plans import Compacted, Fate, Repaired, ShardPlan
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from pipeline.report.tables import Column
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
    intact = ("INTACT", lambda row: row[1].whole, "count")
    if any(tally.listed for tally in kinds.values()):  # unread records do not count as intact
        intact = ("LISTED", lambda row: row[1].listed, "count")
    columns: list[Column] = [
        ("KIND", 0), ("FILES", lambda row: row[1].shards, "count"), ("READ", lambda row: row[1].bytes, "bytes"),
        ("RECORDS", lambda row: row[1].records, "count"), intact, ("LOST", lambda row: row[1].lost, "count"),
        ("DAMAGE", lambda row: ", ".join(_fault(*fault) for fault in sorted(row[1].faults.items())) or "-"),
    ]  # fmt: skip
    return table_of(columns, kinds.items())


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
    columns: tuple[Column, ...] = (
        ("KIND", lambda plan: plan.store.kind), ("FILE", lambda plan: plan.shard or "(index)"), ("DAMAGE", "why"),
        ("SALVAGED", "kept", "count"), ("LOST", lambda plan: None if plan.unknown else len(plan.lost), "count"),
        ("ACTION", _fate),
    )  # fmt: skip
    shown: list[RenderableType] = [table_of(columns, plans, unknown="?")] if plans else []
    return [*shown, f"… and {plural(more, 'file')} more (--json lists all)"] if more else shown


def mended_table(kinds: Mapping[str, Repaired]) -> list[RenderableType]:
    """Show the repairs of each kind."""
    columns: tuple[Column, ...] = (
        ("KIND", 0), ("QUARANTINED", lambda row: row[1].quarantined, "count"),
        ("LEFT ALONE", lambda row: row[1].stay, "count"), ("SALVAGED", lambda row: row[1].salvaged, "count"),
        ("LOST", lambda row: row[1].lost, "count"),
    )  # fmt: skip
    return [table_of(columns, kinds.items())] if kinds else []


def _fate(plan: ShardPlan) -> str:
    """Say what repair does with a shard or an index."""
    if plan.fate is Fate.LEFT:
        return f"leave alone: {plan.stays}"
    if plan.fate is Fate.INDEXED:
        return "rebuild from the shards"
    return "remove from the index" if plan.fate is Fate.GONE else "quarantine"


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
    columns: tuple[Column, ...] = (
        ("KIND", "kind"), ("FILES", "shards", "count"), ("SMALL", lambda kind: len(kind.small), "count"),
        ("RECORDS IN SMALL", "records", "count"), ("SIZE", "size_bytes", "bytes"),
        ("AFTER" if did else "ACTION", partial(_after, did=did)),
    )  # fmt: skip
    return table_of(columns, kinds)


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


def _after(kind: Compacted, *, did: bool) -> str:
    """Say what compaction does with the small files of a kind."""
    if not kind.small:
        return "-"
    left, gone = kind.of(Fate.LEFT), kind.of(Fate.GONE)
    damaged = f"; {plural(len(left), 'damaged file')} left alone" if left else ""
    taken = f"; {plural(len(gone), 'file')} removed meanwhile" if gone else ""
    return f"{plural(kind.after, 'file')}{damaged}{taken}" if did else "merge small files"
