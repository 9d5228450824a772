"""A day on a card: its parts in order of worth, the time that each may take, and what is known so far, on disk.

A part is a function that asks for cases, each by a name. What a case has said before is not asked again; what is not
begun when the time is over is left out, and told.
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.circumstances import circumstances
from benchmarks.gpu_parts import children
from pipeline.files import write_whole

LEFT_OUT = "left_out"  # of a row: why its case was not begun
REHEARSED_AT_ONCE = 2  # cases that nothing is read from
LEAST_S = 5.0  # without so much time no case begins
ABOUT = ("device", "card", "driver", "torch", "rehearsal")  # that must be alike for results to be of one day
Row = dict[str, Any]
Cases = Mapping[str, Row]


@dataclass(frozen=True)
class Part:
    """A part of the day."""

    name: str
    what: str
    share: float  # of the whole time that it may take before all others had theirs
    run: Callable[[Asking], None]
    figures: Callable[[Cases], dict[str, Any]]  # what its cases come to
    needs: tuple[str, ...] = ()  # modules without which it cannot be run
    likes: tuple[str, ...] = ()  # those without which some of it is left out


def trouble(row: Mapping[str, Any]) -> str:
    """Say what went wrong with a case, or with some of it; empty: nothing did."""
    return str(row.get("error", "")) or "; ".join(f"{name}: {why}" for name, why in row.get("failed", {}).items())


def lacking(modules: Iterable[str]) -> list[str]:
    """Return those that are not installed."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


@dataclass
class Day:
    """Where it happens and what it is of."""

    folder: Path
    scratch: Path
    about: Mapping[str, Any]  # the card, as `cards.facts` tells of it, and whether this is a rehearsal
    end: float  # by the monotonic clock
    on_card: threading.Semaphore = field(init=False)  # held by what is to be alone there

    def __post_init__(self) -> None:
        self.on_card = threading.BoundedSemaphore(REHEARSED_AT_ONCE if self.rehearsal else 1)

    @property
    def rehearsal(self) -> bool:
        return bool(self.about["rehearsal"])

    def path(self, part: str) -> Path:
        """Return the file of a part's results."""
        return self.folder / f"{part}.json"

    def read(self, part: str) -> dict[str, Any]:
        """Return what is known of a part."""
        path = self.path(part)
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def others(self, parts: Iterable[str]) -> str:
        """Say of what else there are results here already; empty: of nothing else."""
        for part in parts:
            known = self.read(part)
            for name in ABOUT if known else ():
                if known.get(name) != self.about[name]:
                    return f"{self.path(part)} is of {name} {known.get(name)!r}, and this is {self.about[name]!r}"
        return ""

    def run(self, part: Part, until: float) -> bool:
        """Run what is missing of a part until a time; tell whether it is whole."""
        asking = Asking(self, part, until)
        absent = lacking(part.needs)
        if absent:
            asking.lacks.append(f"{part.name}: {', '.join(absent)} is not installed, so that none of it can be run")
            asking.write()
            return True
        asking.lacks += [f"{part.name}: {name} is not installed: left out" for name in lacking(part.likes)]
        try:
            part.run(asking)
        except Exception as error:  # noqa: BLE001 - the other parts may do
            asking.broken.append(f"{part.name}: it ended early: {type(error).__name__}: {error}")
        asking.write()
        return not asking.left_out


class Asking:
    """What a part asks for its cases, and where what they said is written at once."""

    def __init__(self, day: Day, part: Part, until: float) -> None:
        self.day, self.until, self.part = day, until, part
        known = day.read(part.name)
        self.cases: dict[str, Row] = dict(known.get("cases", {}))
        self.lacks: list[str] = []
        self.broken: list[str] = []  # what went wrong beside the cases
        self.left_out: list[str] = []
        self._writing = threading.Lock()

    @property
    def rehearsal(self) -> bool:
        return self.day.rehearsal

    @property
    def about(self) -> Mapping[str, Any]:
        return self.day.about

    def known(self, name: str) -> bool:
        """Tell whether a case has been measured."""
        return name in self.cases and not trouble(self.cases[name])

    def ask(
        self,
        name: str,
        call: str,
        limit_s: float,
        *,
        allocator: str = "",
        on_card: bool = True,
        alone: bool = True,
        keep: bool = True,
        **given: Any,
    ) -> Row:
        """Return what a case says; `alone`: nothing else is on the card meanwhile; `keep`: it is a result."""
        if keep and self.known(name):
            return self.cases[name]
        with self.day.on_card if on_card and alone else nullcontext():
            left_s = min(self.until, self.day.end) - time.monotonic()
            if left_s < LEAST_S:
                self.left_out.append(name)
                return {LEFT_OUT: "the time was over", "error": "left out: the time was over"}
            began = time.monotonic()
            case = {"device": self.about["device"], "about": dict(self.about), "allocator": allocator, **given}
            log = self.day.folder / "logs" / f"{self.part.name}-{re.sub(r'[^a-z0-9_.]+', '-', name.lower())}.log"
            limit_s = min(limit_s, max(LEAST_S, self.day.end - time.monotonic()))
            row = children.ask(call, case, limit_s, log, allocator=allocator, on_card=on_card)
        row |= {"took_s": round(time.monotonic() - began, 1)}
        self.cases.pop(name, None)  # an error of earlier, of what is no result
        if keep or "error" in row:
            self.cases[name] = row
        self.write()
        self._tell(name, row)
        return row

    def side_by_side(self, work: Iterable[Callable[[], object]], workers: int) -> None:
        """Do several things at once; only cases that may share the card really are on it together."""
        with ThreadPoolExecutor(workers) as pool:
            for future in [pool.submit(one) for one in work]:
                future.result()

    def write(self) -> None:
        """Write all that is known of the part."""
        with self._writing:
            rows = {name: dict(row) for name, row in self.cases.items()}
            document = {
                "part": self.part.name,
                "what": self.part.what,
                **{name: self.about[name] for name in ABOUT},
                **circumstances(),
                "figures": self._figures(rows),
                "lacks": self.lacks,
                "broken": list(dict.fromkeys(self.broken)),
                "left_out": sorted(self.left_out),
                "cases": rows,
            }
            document["machine"] = f"{self.about['card']}; {document['machine']}"
            write_whole(self.day.path(self.part.name), json.dumps(document, indent=1) + "\n")

    def _figures(self, rows: Cases) -> dict[str, Any]:
        """Return what the cases come to; what they said stays, whatever is wrong with that."""
        try:
            return self.part.figures({name: row for name, row in rows.items() if "error" not in row})
        except Exception as error:  # noqa: BLE001 - the day goes on
            self.broken.append(f"{self.part.name}: its figures: {type(error).__name__}: {error}")
            return {}

    def _tell(self, name: str, row: Row) -> None:
        print(f"  {self.part.name}: {name}: {trouble(row) or 'done'} ({row['took_s']} s)", flush=True)
