"""Attempts at tasks: what one was given, how it ended, and everything that is known of a task so far."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pipeline.cluster.verdict import Cause, Word
from pipeline.journal.run_folder import writing_run
from pipeline.records import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pipeline.cluster.job_spec import JobId
    from pipeline.journal.run_folder import RunFolder

SILENCE = Word()
UNASKED = {"mem_bytes": 0, "time_s": 0}


@dataclass(frozen=True, slots=True)
class Ask:
    """What an attempt is given; tasks that ask for the same go into one job."""

    mem_bytes: int
    time_s: int
    shrink: int = 0  # how often the budget of a batch was halved because a GPU's memory ended
    careful: bool = False  # one thing at a time, so that the record of what a task was on names one

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ask_of(data: Mapping[str, Any]) -> Ask:
    """Read an ask; tasks that were given the same share one."""
    return _ask(tuple(sorted(data.items())))


@lru_cache(maxsize=1024)
def _ask(items: tuple[tuple[str, Any], ...]) -> Ask:
    return Ask(**dict(items))


@dataclass(frozen=True, slots=True)
class Attempt:
    """How one attempt at a task ended."""

    task: int
    number: int  # 1 is the first
    ask: Ask
    cause: Cause
    reason: str = ""  # in words
    state: str = ""  # the executor's word
    job: str = ""
    node: str = ""
    log: str = ""
    exit_code: int | None = None
    peak_rss_bytes: int | None = None
    gpu_peak_bytes: int | None = None
    ended_at: float = 0.0
    elapsed_s: float = 0.0
    cpu_s: float | None = None
    done: int = 0  # things it had worked through
    on: tuple[str, ...] = ()  # what it was on when it died
    said: str = ""  # what the worker said of its own failure

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"cause": self.cause.value, "on": list(self.on)}

    def to_event(self) -> dict[str, Any]:
        """Return what the ledger keeps: a run may have many, and most of them have little to say."""
        return {name: value for name, value in self.to_json().items() if value or name in ("task", "number")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Attempt:
        """Read what `to_json` wrote, of any version that had fewer or more figures."""
        plain = {"number": 1, **{name: value for name, value in data.items() if name in FIGURES}}
        plain["ask"], plain["cause"] = ask_of(data.get("ask", UNASKED)), Cause(data.get("cause", Cause.FAILED))
        plain["on"] = tuple(data.get("on", ()))
        return cls(**plain)


FIGURES = frozenset(column.name for column in fields(Attempt))


@dataclass(slots=True)
class TaskRecord:
    """What is known of one task of a stage."""

    number: int
    job: JobId | None = None  # that has it now
    ask: Ask | None = None  # of the attempt that goes on
    attempt: int = 0
    ended: list[Attempt] = field(default_factory=list)
    first: Ask | None = None  # where it is a part of another: what that asked for last
    words: dict[int, Word] = field(default_factory=dict)  # attempt → what its worker said
    then: dict[int, str] = field(default_factory=dict)  # attempt → what was done after it, in words
    split: tuple[int, ...] = ()  # the tasks that took its place

    @property
    def last(self) -> Attempt | None:
        """Return the newest attempt that has ended."""
        return self.ended[-1] if self.ended else None

    @property
    def good(self) -> bool:
        """Tell whether it has nothing more to do."""
        return bool(self.split) or (self.job is None and self.last is not None and self.last.cause is Cause.DONE)

    @property
    def open(self) -> bool:
        """Tell whether something has to be decided: no attempt goes on, and none has ended well."""
        return self.job is None and not self.good

    @property
    def word(self) -> Word:
        """Return what the worker of the newest attempt has said."""
        return self.words.get(self.attempt, SILENCE)

    def say(self, attempt: int, **facts: Any) -> Word:
        """Take down what a worker says of itself, and return all that it said."""
        self.words[attempt] = replace(self.words.get(attempt, SILENCE), **facts)
        return self.words[attempt]


def format_ranges(ascending: Sequence[int]) -> str:
    """Write ascending numbers as `0-4,7,9-11`."""
    parts: list[list[int]] = []
    for number in ascending:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def parse_ranges(text: str) -> list[int]:
    """Read what `ranges` wrote."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


Why = tuple[Reason, str]


def leave_out(folder: RunFolder, stage: str, names: Iterable[str], reason: Reason, detail: str) -> None:
    """Write down what a stage goes on without."""
    with writing_run(folder.left_out), folder.left_out.open("ab") as file:
        for name in names:
            line = {"stage": stage, "name": name, "reason": reason.value, "detail": detail}
            file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def left_out_items(folder: RunFolder | None, stage: str) -> dict[str, Why]:
    """Return what a stage goes on without, and why."""
    reasons: dict[str, Why] = {}
    if folder is None or not folder.left_out.exists():
        return reasons
    for line in folder.left_out.read_text().splitlines():
        try:
            data = json.loads(line)
        except ValueError:  # a full disk has cut it
            continue
        if data["stage"] == stage:
            reasons[data["name"]] = (Reason(data["reason"]), data["detail"])
    return reasons
