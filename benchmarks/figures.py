"""What a figure is: where it lies in a result, what it is to reach, how it is told; measured.yaml has them all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent
RESULTS, TABLE = FOLDER / "results", FOLDER / "measured.yaml"
UNITS = {"GB": 1e-9, "MiB": 2.0**-20, "MB": 1e-6, "kB": 1e-3}  # of bytes
ROW_NAMES = ("what", "way", "recipe", "member")  # by which a row of a list is found
FIELD = re.compile(r"\{([^{}|]+?)(?: \| ([^{}]+))?\}")


@dataclass(frozen=True)
class Reach:
    """What a value is to be: at most or at least so much."""

    at_most: float | None = None
    at_least: float | None = None
    told: str = ""  # as people read it

    def worst(self, values: Sequence[float]) -> float:
        """Return the one of several that is farthest from it."""
        return min(values) if self.at_most is None else max(values)

    def is_met(self, value: float) -> bool:
        above = self.at_most is None or value <= self.at_most
        return above and (self.at_least is None or value >= self.at_least)

    def __str__(self) -> str:
        sign, value = ("≥", self.at_least) if self.at_most is None else ("≤", self.at_most)
        return self.told or f"{sign} {value:g}"


@dataclass(frozen=True)
class Figure:
    """A figure: what it is of, where its value lies, what it is to reach."""

    what: str
    command: str  # that measures it, after `python benchmarks/`
    result: str  # the file in results/
    shown: str  # what is told: `{path | format}` is filled in from the result
    value: str = ""  # the path of what is compared with the reach; of several values, the worst is
    reach: Reach | None = None
    promise: str = ""  # which of what was promised it belongs to
    against: str = ""
    short: str = ""  # why it falls short, told only while it does
    needs: str = ""  # what a machine must have to measure it at all
    held: tuple[str, ...] = ()  # tests that hold it besides

    def read(self) -> Mapping[str, Any] | None:
        """Return the result that it lies in, if there is one."""
        path = RESULTS / self.result
        return json.loads(path.read_text()) if path.exists() else None

    def is_missed(self, result: Mapping[str, Any]) -> bool:
        """Tell whether it falls short of its reach."""
        return self.reach is not None and not self.reach.is_met(self.reach.worst(values(result, self.value)))

    def told(self, result: Mapping[str, Any]) -> str:
        """Return what people read of it."""
        return FIELD.sub(lambda field: formatted(values(result, field[1]), field[2] or ""), self.shown)


@dataclass(frozen=True)
class Table:
    """All figures, what was promised, and what deserves a doubt."""

    beginning: str
    five_ways: str
    promised: tuple[str, ...]
    figures: tuple[Figure, ...]
    doubts: tuple[str, ...]


def table(path: Path = TABLE) -> Table:
    """Read it."""
    told = yaml.safe_load(path.read_text())
    told["figures"] = [_figure(one) for one in told["figures"]]
    return Table(**{name: tuple(one) if isinstance(one, list) else one for name, one in told.items()})


def _figure(told: Mapping[str, Any]) -> Figure:
    reach = Reach(**told["reach"]) if "reach" in told else None
    return Figure(**{**told, "reach": reach, "held": tuple(told.get("held", ()))})


def values(result: Any, path: str) -> list[Any]:
    """Return what lies at a path, where `*` is every name; a row of a list is found by what it calls itself."""
    found = list(_at(result, path.split("/")))
    if not found:
        raise KeyError(f"nothing lies at {path}")
    return found


def _at(here: Any, path: Sequence[str]) -> Iterator[Any]:
    if not path:
        if isinstance(here, list):
            for one in here:
                yield from _at(one, path)
        else:
            yield here
        return
    name = path[0]
    if isinstance(here, list):
        inner = [row for row in here if isinstance(row, Mapping) and (name == "*" or name in map(row.get, ROW_NAMES))]
    else:  # a name that a row does not have matters only where no other has it
        inner = [here[one] for one in here if name in ("*", one)]
    for one in inner:
        if len(path) == 1 or isinstance(one, Mapping | list):
            yield from _at(one, path[1:])


def formatted(found: Sequence[Any], form: str) -> str:
    """Write values in a format, with a unit of bytes after it; of several the smallest and the largest."""
    if form in ("count", "sum"):
        return f"{len(found) if form == 'count' else sum(found):,}"
    unit = next((one for one in UNITS if form.endswith(f" {one}")), "")
    form = form.removesuffix(f" {unit}")
    low, high = (f"{one * UNITS[unit] if unit else one:{form}}" for one in (min(found), max(found)))
    return f"{low if low == high else f'{low} to {high}'} {unit}".rstrip()


def day_and_machine(result: Mapping[str, Any], path: str) -> tuple[str, str]:
    """Return when and on what a value was found: what stands closest above it says so, and of several the oldest."""
    above = list(_closest(result, path.split("/"))) or list(_dated(result))
    oldest = min(above, key=lambda one: str(one["date"]))
    return str(oldest["date"]), str(oldest["machine"])


def _closest(here: Any, path: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield what says when the values at a path were found, the closest above each."""
    if not isinstance(here, Mapping):
        return
    inner = [here[one] for one in here if path and path[0] in ("*", one)]
    below = [found for one in inner for found in _closest(one, path[1:])]
    yield from below or ([here] if _is_dated(here) else [])


def _dated(result: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield whatever says when it was found."""
    for one in result.values():
        if isinstance(one, Mapping):
            yield from [one] if _is_dated(one) else _dated(one)


def _is_dated(one: Mapping[str, Any]) -> bool:
    return {"date", "machine"} <= set(one)
