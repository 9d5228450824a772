"""Attempts at tasks: their resources and their ends; the record of a task over all its attempts."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.cluster.verdict import Cause, Word
from pipeline.codec import plain, rebuilt
from pipeline.journal.ledger import LedgerReader
from pipeline.journal.run_folder import writing_run
from pipeline.records import EventKind, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pipeline.cluster.job_spec import JobId
    from pipeline.journal.run_folder import RunFolder

T = TypeVar("T")
SILENCE = Word()


@dataclass(frozen=True, slots=True)
class Ask:
    """The resources of an attempt; tasks with equal requests go into one job."""

    mem_bytes: int
    time_s: int
    shrink: int = 0  # how often the batch budget was halved after GPU memory ran out
    careful: bool = False  # one item at a time, so that the note of a crash names one item
    partition: str = ""  # chosen among several; empty: that of the job


@dataclass(frozen=True, slots=True)
class Attempt:
    """How one attempt at a task ended."""

    task: int
    number: int  # 1 is the first
    ask: Ask
    cause: Cause
    reason: str = ""  # in words
    state: str = ""  # as the executor reported it
    job: str = ""
    node: str = ""
    log: str = ""
    exit_code: int | None = None
    peak_rss_bytes: int | None = None
    gpu_peak_bytes: int | None = None
    gpu_total_bytes: int | None = None  # memory of one GPU
    gpu_busy: float | None = None  # share of time in which its GPUs ran a kernel; None: unknown
    ended_at: float = 0.0
    elapsed_s: float = 0.0
    earlier_s: float = 0.0  # run time before the scheduler requeued it
    cpu_s: float | None = None
    done: int = 0  # finished items
    on: tuple[str, ...] = ()  # items in work when it died
    said: str = ""  # the worker's own report on its failure

    def to_event(self) -> dict[str, Any]:
        """Return the JSON for the ledger, without empty values: a run may have many attempts."""
        kept = ("task", "gpu_busy")
        return {name: value for name, value in plain(self).items() if value or (name in kept and value is not None)}


def reported(of: type[T], data: Mapping[str, Any]) -> T:
    """Return a value from its fields in an event; ignore unknown fields of newer versions."""
    return rebuilt(of, {name: data[name] for name in data.keys() & of.__dataclass_fields__.keys()})  # type: ignore[attr-defined]


@dataclass(slots=True)
class TaskRecord:
    """The state of one task of a stage, over all its attempts."""

    number: int
    job: JobId | None = None  # its present job
    ask: Ask | None = None  # the request of the present attempt
    attempt: int = 0
    ended: list[Attempt] = field(default_factory=list)
    restarts: list[Attempt] = field(default_factory=list)  # earlier starts within the present attempt
    first: Ask | None = None  # its own first request; a part of a split task inherits the last one
    words: dict[int, Word] = field(default_factory=dict)  # attempt → the worker's report
    then: dict[int, str] = field(default_factory=dict)  # attempt → the decision after it, in words
    split: tuple[int, ...] = ()  # the tasks that replaced it
    cancelled: str = ""  # the user who cancelled it alone

    @property
    def last(self) -> Attempt | None:
        return self.ended[-1] if self.ended else None

    @property
    def history(self) -> list[Attempt]:
        """Every start that has ended, in order, including restarts within an attempt."""
        return sorted([*self.restarts, *self.ended], key=lambda start: start.number)

    @property
    def good(self) -> bool:
        """Whether it is done, or was split."""
        return bool(self.split) or (self.job is None and self.last is not None and self.last.cause is Cause.DONE)

    @property
    def open(self) -> bool:
        """Whether another attempt or a decision is due."""
        return self.job is None and not self.good and not self.cancelled

    @property
    def given_up(self) -> bool:
        """Whether its last attempt failed and none follows."""
        return self.open and bool(self.ended) and self.attempt in self.then

    @property
    def word(self) -> Word:
        """The report of the newest attempt's worker."""
        return self.words.get(self.attempt, SILENCE)

    def say(self, attempt: int, **facts: Any) -> None:
        """Update the report of an attempt's worker."""
        self.words[attempt] = replace(self.words.get(attempt, SILENCE), **facts)


Why = tuple[Reason, str]


def leave_out(folder: RunFolder, stage: str, names: Iterable[str], reason: Reason, detail: str) -> None:
    """Record items that a stage skips from now on."""
    with writing_run(folder.left_out), folder.left_out.open("ab") as file:
        for name in names:
            line = {"stage": stage, "name": name, "reason": reason.value, "detail": detail}
            file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def refused_parts(folder: RunFolder | None, stage: str) -> dict[str, Why]:
    """Return what the tasks of a stage could not make, by record key or item id, with the reasons."""
    events = LedgerReader(folder, whole=False).fresh() if folder else ()
    refused = (event.data for event in events if event.kind is EventKind.REFUSED)
    return {part["key"]: (Reason(part["reason"]), part["detail"]) for part in refused if part["stage"] == stage}


def left_out_items(folder: RunFolder | None, stage: str) -> dict[str, Why]:
    """Return the items that a stage skips, with the reasons."""
    reasons: dict[str, Why] = {}
    if folder is None or not folder.left_out.exists():
        return reasons
    for line in folder.left_out.read_text().splitlines():
        try:
            data = json.loads(line)
        except ValueError:  # truncated by a full disk
            continue
        if data["stage"] == stage:
            reasons[data["name"]] = (Reason(data["reason"]), data["detail"])
    return reasons
