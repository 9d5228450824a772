"""What checking, repairing and compacting a cache found and did, as text for a terminal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.report.tables import plural, text_table
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from pipeline.store.maintenance.damage_report import Checked
    from pipeline.store.maintenance.rewrite import Compacted
    from pipeline.store.maintenance.shard_repair import Mend, Repaired

SHOWN = 20  # shards of which each has a line
FAULTS = {  # what of it there can be several, and what is wrong with each
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


@dataclass(slots=True)
class KindTally:
    """What was found in one kind."""

    shards: int = 0
    bytes: int = 0
    records: int = 0
    whole: int = 0
    listed: int = 0
    lost: int = 0
    faults: dict[str, int] = field(default_factory=dict)

    def take(self, checked: Checked) -> None:
        """Count what was found in one file."""
        self.shards += bool(checked.shard)
        self.bytes += checked.read_bytes
        self.records += checked.judged
        self.whole += len(checked.whole)
        self.listed += len(checked.listed)
        self.lost += sum(finding.lost for finding in checked.findings)
        for finding in checked.findings:
            self.faults[finding.fault.value] = self.faults.get(finding.fault.value, 0) + 1


def check_table(kinds: Mapping[str, KindTally]) -> RenderableType:
    """Show what was found in each kind."""
    if not kinds:
        return "empty: nothing was stored yet"
    listed = any(
        tally.listed for tally in kinds.values()
    )  # of records that nobody read, nobody says that they are whole
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


def whole_line(kinds: Mapping[str, KindTally]) -> str:
    """Say that nothing is wrong, and with how much."""
    records, files = (sum(tally.records for tally in kinds.values()), sum(tally.shards for tally in kinds.values()))
    unread = "   (--full reads the records, too)" if any(tally.listed for tally in kinds.values()) else ""
    return f"nothing is wrong: {plural(records, 'record')} in {plural(files, 'file')}{unread}"


def _fault(fault: str, count: int) -> str:
    noun, wrong = FAULTS[fault]
    return f"{plural(count, noun)} {wrong}"


def mend_table(mends: Sequence[Mend], more: int) -> list[RenderableType]:
    """Show what would be done about each shard, the first of them."""
    if not mends:
        return []
    rows = [(mend.kind, mend.shard or "(index)", mend.why, mend.salvaged, _lost(mend), _fate(mend)) for mend in mends]
    columns = ("kind", "file", "what is wrong", "salvaged", "lost", "what becomes of it")
    shown: list[RenderableType] = [text_table(columns, rows, right="salvaged lost")]
    return [*shown, f"… and {plural(more, 'file')} more (--json names all)"] if more else shown


def mended_table(kinds: Mapping[str, Repaired]) -> list[RenderableType]:
    """Show what was done in each kind."""
    if not kinds:
        return []
    columns = ("kind", "put into quarantine", "left alone", "salvaged", "lost")
    rows = [(kind, *_counts(done.quarantined, done.stay, done.salvaged, done.lost)) for kind, done in kinds.items()]
    return [text_table(columns, rows, right=" ".join(columns[1:]))]


def _counts(*numbers: int) -> tuple[str, ...]:
    return tuple(f"{number:,}" for number in numbers)


def _lost(mend: Mend) -> str:
    return "not known" if mend.unknown else f"{len(mend.lost):,}"


def _fate(mend: Mend) -> str:
    """Say what becomes of a shard or an index."""
    if mend.stays:
        return f"left alone: {mend.stays}"
    if not mend.shard:
        return "made anew from the shards"
    return "the index forgets it" if mend.gone else "put into quarantine"


def repaired_lines(told: Repaired, *, did: bool) -> list[str]:
    """Say in all what was done, or would be."""
    if not (told.quarantined or told.indexes or told.stay or told.lost):
        return ["nothing is damaged"]
    would = "" if did else "would be "
    lines = [
        f"{plural(told.salvaged, 'record')} ({format_bytes(told.salvaged_bytes)}) {would}carried over to new shards, "
        f"{plural(told.quarantined, 'shard')} {would}put into quarantine, "
        f"{told.indexes:,} {'index' if told.indexes == 1 else 'indexes'} {would}made anew"
    ]
    if told.lost:
        lines.append(f"{plural(told.lost, 'record')} {'is' if told.lost == 1 else 'are'} lost, to be computed again")
    if told.unknown:
        lines.append(f"of {plural(told.unknown, 'shard')} nobody knows what was in it: `pipeline submit` computes it")
    if told.stay:
        lines.append(f"{plural(told.stay, 'file')} left alone")
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
    """Say in all what a compaction did."""
    before, after = sum(kind.shards for kind in kinds), sum(kind.after for kind in kinds)
    return f"{plural(before, 'file')} became {after:,}" if any(kind.gone for kind in kinds) else "nothing was changed"


def _after(kind: Compacted, did: bool) -> str:  # noqa: FBT001 - a fact about the table
    """Say what became, or would become, of the small files of a kind."""
    if not kind.small:
        return "nothing to do"
    damaged = f"; {plural(len(kind.damaged), 'damaged file')} left alone" if kind.damaged else ""
    taken = f"; {plural(len(kind.taken), 'file')} gone meanwhile" if kind.taken else ""
    return f"{plural(kind.after, 'file')}{damaged}{taken}" if did else "small files made into few"
