"""The findings of a validation, as values and as a file: a summary line, then a line for each finding.

The summary is known last and read first, so room is reserved for it; memory does not grow with the findings.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from pipeline.codec import plain, rebuilt
from pipeline.command_line import UPGRADE, Command, quoted
from pipeline.errors import CacheDamaged, ConfigError
from pipeline.store.format.cache_layout import REPORTS
from pipeline.store.format.disk import Disk, Draft

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

REPORT_FORMAT = 1
REPORT_SUFFIX = ".jsonl"
SUMMARY_BYTES = 4096
ALL = "1/1"
REPAIR = "repair"  # how a list of what a repair could not save came about
# Why a repair leaves a file alone.
NEWER = "a later version of pipeline wrote it"
FOREIGN = "pipeline does not write files with this name"
FORBIDDEN = "you cannot read it"
REFUSED = "the disk cannot read it"
UNREAD = "its intact records could not be read again"
REPAIR_ALL = Command.of("cache repair --yes")
_WAYS_ON = {
    NEWER: f"{UPGRADE}   (for {{file}})",
    FOREIGN: "mv {file} elsewhere   (pipeline did not write it)",
    FORBIDDEN: "ls -l {file}   (ask its owner: chmod a+r {file})",
    REFUSED: "mv {file} {file}.unreadable   (then: {repair})",
    UNREAD: "{repair}   (again, for {file})",
}
_HOPELESS = {NEWER, FOREIGN, FORBIDDEN}  # a repair need not be tried
_NAMED = 5  # such files are named in a summary
_LONGEST_SUMMARY = 1 << 16
_NOTE_CHARACTERS = 200
_NEWEST = 100  # reads at most this many reports, by name, to find the last one
_WRITE_BYTES = 1 << 20
_LATEST_S = 1 << 40  # a time that a calendar can show


class Fault(StrEnum):
    """Kinds of damage, by their consequence."""

    INDEX = "index"  # damaged, or not what the shards say: look-ups are slow or wrong until it is rebuilt
    HEADER = "header"  # of a shard: other readers cannot open it; the store reads it by its table
    TABLE = "table"  # of a shard: only the index may still list its records
    RECORD = "record"  # its bytes are not those that were written
    GONE = "gone"  # named by the index, but its shard is not there
    NEWER = "newer"  # of a shard: a later version wrote it; it is left alone
    FOREIGN = "foreign"  # a file among the shards that no pipeline wrote
    UNREADABLE = "unreadable"  # the disk or its permissions refuse it
    MEANING = "meaning"  # its bytes are as written, but its content is wrong


@dataclass(frozen=True, slots=True)
class DamageFinding:
    """One thing that is wrong: with a record, or with a file around records."""

    kind: str
    fault: Fault
    what: str
    shard: str = ""  # empty: the index
    key: str = ""  # of the record, in hex; empty: the file
    lost: bool = False  # no whole copy of the record is left

    @property
    def forbidden(self) -> bool:
        """Whether the only problem is that this user may not read it."""
        return self.fault is Fault.UNREADABLE and self.what.startswith(FORBIDDEN)

    @property
    def stays(self) -> str:
        """Why a repair leaves this shard alone; empty if it does not, or for a record or the index."""
        if self.key or not self.shard:
            return ""
        if self.fault is Fault.UNREADABLE:
            return FORBIDDEN if self.forbidden else REFUSED
        return {Fault.NEWER: NEWER, Fault.FOREIGN: FOREIGN}.get(self.fault, "")


@dataclass(slots=True)
class Summary:
    """What a validation has looked at, and its counts of findings."""

    how: str  # quick, full, semantic; or repair, for a list of lost records
    subset: str = ALL  # the part of the shards; of a repair, the name of the list that it went by
    begun: float = 0.0  # seconds since 1970
    seconds: float = 0.0
    bytes: int = 0  # that were read
    shards: int = 0
    records: int = 0  # judged
    whole: int = 0
    listed: int = 0  # known only from their table; not read
    findings: int = 0
    lost: int = 0  # records
    faults: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, dict[str, int]] = field(default_factory=dict)  # kind → records, whole, lost
    notes: dict[str, int] = field(default_factory=dict)  # further actions, done or failed → how often
    only: list[str] = field(default_factory=list)  # the kinds that were asked for; empty: all
    root: str = ""  # the folder of the cache
    hopeless: int = 0  # findings that no repair can do anything about
    stay: dict[str, str] = field(default_factory=dict)  # some files that such are about → why a repair leaves them

    def note(self, notes: Mapping[str, int]) -> None:
        """Count remarks that are no findings; only the beginning of each is kept, for there is little room."""
        for text, number in notes.items():
            _add_to(self.notes, {text.partition("\n")[0][:_NOTE_CHARACTERS]: number})

    def count(self, finding: DamageFinding) -> None:
        self.findings += 1
        self.lost += finding.lost
        _add_to(self.faults, {finding.fault.value: 1})
        self.hopeless += finding.forbidden or finding.stays in _HOPELESS
        if finding.stays in _HOPELESS and len(self.stay) < _NAMED:
            self.stay[f"{finding.kind}/shards/{finding.shard}"] = finding.stays

    def take(self, checked: Checked) -> None:
        """Add the counts of one file."""
        self.bytes += checked.read_bytes
        self.shards += bool(checked.shard)
        self.listed += len(checked.listed)
        lost = sum(finding.lost for finding in checked.findings)
        self.of_kind(checked.kind, records=checked.judged, whole=len(checked.whole), lost=lost)
        self.note(checked.notes)
        for finding in checked.findings:
            self.count(finding)

    def of_kind(self, kind: str, *, records: int, whole: int, lost: int) -> None:
        """Add counts of judged records of one kind."""
        self.records += records
        self.whole += whole
        _add_to(self.kinds.setdefault(kind, {}), {"records": records, "whole": whole, "lost": lost})

    def add(self, other: Summary) -> None:
        """Add the summary of another part of the same validation."""
        for name in ("bytes", "shards", "listed", "findings", "lost", "hopeless"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        _add_to(self.faults, other.faults)
        for kind, counts in other.kinds.items():
            self.of_kind(kind, **counts)
        self.note(other.notes)
        self.root = self.root or other.root
        self.stay = dict([*self.stay.items(), *other.stay.items()][:_NAMED])
        self.begun = min(filter(None, (self.begun, other.begun)), default=0.0)


def _add_to(counts: dict[str, int], more: Mapping[str, int]) -> None:
    for name, number in more.items():
        counts[name] = counts.get(name, 0) + number


class ReportWriter:
    """Writes findings to a temporary file, and publishes it with its summary."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._draft, self._folder = Draft(disk, folder), folder
        self._end, self._lines = SUMMARY_BYTES, bytearray()

    def add(self, *findings: DamageFinding) -> None:
        """Write down findings."""
        for finding in findings:
            self._lines += json.dumps(plain(finding), separators=(",", ":")).encode() + b"\n"
            if len(self._lines) >= _WRITE_BYTES:
                self._flush()

    def publish(self, summary: Summary, name: str = "") -> Path:
        """Finish the report; `name` replaces one of the same name, else it gets a name of its own."""
        self._flush()
        self._draft.write(_fitting(summary).ljust(SUMMARY_BYTES - 1) + b"\n", 0)
        path = self._folder / (name or self._draft.stem + REPORT_SUFFIX)
        self._draft.publish(path, replace=bool(name))
        return path

    def discard(self) -> None:
        self._draft.discard()

    def _flush(self) -> None:
        self._draft.write(bytes(self._lines), self._end)
        self._end += len(self._lines)
        self._lines.clear()


@dataclass(frozen=True, slots=True)
class DamageReport:
    """A report on disk."""

    path: Path
    summary: Summary

    def findings(self) -> Iterator[DamageFinding]:
        """Yield the findings one at a time."""
        with self.path.open("rb") as file:
            file.readline()
            for line in file:
                try:
                    finding = rebuilt(DamageFinding, line)
                    bytes.fromhex(finding.key)
                except ValueError as error:
                    raise _no_report(self.path, "one of its lines cannot be read") from error
                yield finding


def read_report(path: Path) -> DamageReport:
    """Open a report; only its summary is read."""
    try:
        with os.fdopen(Disk().open_read(path), "rb") as file:
            text = file.readline(_LONGEST_SUMMARY)
        content = json.loads(text)
        if content.pop("report") == REPORT_FORMAT:
            summary = rebuilt(Summary, content)
            if 0 <= summary.begun < _LATEST_S and math.isfinite(summary.seconds):
                return DamageReport(path, summary)
    except OSError as error:
        raise _no_report(path, error.strerror or str(error)) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise _no_report(path, "this is not a damage list of this version")


def refuse_of_another(report: DamageReport, root: Path) -> None:
    """Refuse a list of another cache: its shards would not be found here, and nothing would be repaired."""
    list_root = report.summary.root
    if list_root and list_root != str(root.resolve()):
        what = f"this damage list belongs to the cache {list_root}, not to {root.resolve()}"
        moved = "   (writes a list of this cache, also after moving it)"
        remedy = Command.of("cache validate --full", then=moved)
        raise ConfigError(what, where=str(report.path), remedy=remedy)


def last_report(disk: Disk, root: Path) -> DamageReport | None:
    """Return the report of the newest validation of a cache, if it can be read."""
    return next((report for report in reports(disk, root) if report.summary.how != REPAIR), None)


def repair_of(disk: Disk, root: Path, found: DamageReport) -> DamageReport | None:
    """Return the newest repair since a validation, of all or of what it found; None where there was none."""
    subsets, begun = (ALL, found.path.name), found.summary.begun
    repairs = (report for report in reports(disk, root) if report.summary.how == REPAIR)
    return next((one for one in repairs if one.summary.subset in subsets and one.summary.begun > begun), None)


def reports(disk: Disk, root: Path) -> list[DamageReport]:
    """Return the newest readable reports of a cache, the newest first; those dated in the future come last."""
    names = sorted((name for name in disk.list_folder(root / REPORTS) if name.endswith(REPORT_SUFFIX)), reverse=True)
    readable: list[DamageReport] = []
    for name in names[:_NEWEST]:  # they begin with the time
        try:
            readable.append(read_report(root / REPORTS / name))
        except ConfigError:
            continue
    now = time.time()
    return sorted(readable, key=lambda report: (report.summary.begun <= now, report.summary.begun), reverse=True)


def damage_found(summary: Summary, root: Path, path: Path | None) -> CacheDamaged:
    """Return the error to show when a validation has findings."""
    faults, gone = summary.findings, summary.lost
    lost_text = f"; {gone:,} {'record has' if gone == 1 else 'records have'} no intact copy left" if gone else ""
    stay = {root / file: why for file, why in summary.stay.items() if why in _HOPELESS}
    what = "\n  ".join((f"found {faults:,} {'fault' if faults == 1 else 'faults'}{lost_text}", *_stay_lines(stay)))
    if stay and summary.hopeless == faults:
        return CacheDamaged(what, where=str(root), remedy=ways_on(stay))
    remedy = Command.of("cache repair", *(("--list", path) if path else ()))
    return CacheDamaged(what, where=str(root), remedy=remedy)


def ways_on(stay: Mapping[Path, str], repair: Command = REPAIR_ALL) -> str:
    """Return for each file that a repair leaves alone a line with what the user can do about it."""
    lines = (_WAYS_ON[why].format(file=quoted(file), repair=repair) for file, why in stay.items())
    return "\n        ".join(lines)


def stays_left(stay: Mapping[Path, str], count: int, root: Path, repair: Command) -> CacheDamaged:
    """Return the error to show when a repair has left files alone; `stay` are the first of them."""
    headline = f"{count:,} {'file is' if count == 1 else 'files are'} not changed and still reported by validation"
    return CacheDamaged("\n  ".join((headline, *_stay_lines(stay))), where=str(root), remedy=ways_on(stay, repair))


def _stay_lines(stay: Mapping[Path, str]) -> Iterator[str]:
    return (f"{file}: {why}" for file, why in stay.items())


def _fitting(summary: Summary) -> bytes:
    """Return a summary as JSON, without the fields for which there is no room."""
    content = {"report": REPORT_FORMAT, **asdict(summary)}
    for left_out in ("", "notes", "only", "kinds", "stay", "root"):
        content.pop(left_out, None)
        text = json.dumps(content, separators=(",", ":")).encode()
        if len(text) < SUMMARY_BYTES:
            break
    return text


def _no_report(path: Path, what: str) -> ConfigError:
    return ConfigError(what, where=str(path), remedy=Command.of("cache validate --full", then="   (writes a new one)"))


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome of judging one file: a shard, or the index (whose name is empty)."""

    kind: str
    shard: str
    read_bytes: int
    whole: tuple[bytes, ...] = ()  # the keys of records that are as they were written
    findings: tuple[DamageFinding, ...] = ()
    notes: Mapping[str, int] = field(default_factory=dict)  # further remarks → how often
    listed: tuple[bytes, ...] = ()  # the keys of records known only from their table; not read

    @property
    def judged(self) -> int:
        """How many records were looked for, at least in a table."""
        return len(self.whole) + len(self.listed) + sum(bool(finding.key) for finding in self.findings)
