"""The points of a sweep: the settings in which its trainings differ.

`train.sweep.points` holds the points of a typed grid, or of a file with a row for each. A point is the same training as
in a plain run with its settings. So a sweep reuses earlier trainings, and later runs reuse those of a sweep.
"""

from __future__ import annotations

import csv
import fnmatch
import io
import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from pipeline.command_line import Command
from pipeline.config.load import dump_resolved, with_settings
from pipeline.config.schema import FIELDS, PATHS, Config
from pipeline.config.schema_parts import CONFLICT
from pipeline.config.site_profiles import anchored
from pipeline.config.yaml_document import Document, explain
from pipeline.errors import ConfigError
from pipeline.planning.prepare import DECISIVE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pydantic_core import ErrorDetails


SWEEP, FILE = "--sweep", "--sweep-file"
MOST, LISTED = 1000, 10  # most points of a run, and in an error
SWEPT = {  # settings of section `train` that make another training
    *DECISIVE, "embeddings", "schedule", "epochs", "precision",
    "pretrained", "pretrained_as", "pretrained_map", "pretrained_entry",
} - {"task"}  # fmt: skip
RANGE = re.compile(r"(-?\d+):(-?\d+)(?::([1-9]\d*))?")
EXAMPLE = Command.of("submit train --sweep train.seed=0:5 --sweep train.learning_rate=1e-4,3e-4")


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """One training of a sweep: its name and its settings."""

    name: str  # seed=3 learning_rate=1e-4
    settings: Mapping[str, Any]
    config: Config  # for a plain submit


# Parse points


def typed_points(words: Sequence[str], file: Path | None) -> str:
    """Return the points of `--sweep` and `--sweep-file`, as YAML: each row of the file with each point of the grid."""
    rows = [{}] if file is None else _listed(file)
    grid = _grid(words)
    count = len(rows) * math.prod(map(len, grid.values()))
    if count > MOST:
        raise refused(f"{count:,} points are more than the {MOST:,} of one run: submit parts of it", SWEEP)
    if twice := sorted(grid.keys() & {key for row in rows for key in row}):
        raise refused(f"{twice[0]} is in {file} and in a {SWEEP}: keep one of the two", FILE)
    cells = [_placed(dict(zip(grid, values, strict=True)), Path.cwd()) for values in product(*grid.values())]
    return json.dumps([{**row, **cell} for row in rows for cell in cells])


def _grid(words: Sequence[str]) -> dict[str, Sequence[Any]]:
    """Return the values of each key: whole numbers as `A:B`, half open, or values between commas."""
    grid: dict[str, Sequence[Any]] = {}
    for word in words:
        key, _, text = (part.strip() for part in word.partition("="))
        if key in grid:
            raise refused(f"{key} is swept twice: name all its values in one", f"{SWEEP} {word}")
        if numbers := RANGE.fullmatch(text):
            first, end, step = (int(number or 1) for number in numbers.groups())
            grid[key] = range(first, end, step)
        else:
            grid[key] = _yaml(f"[{text}]", f"{SWEEP} {word}")
        if not key or not grid[key]:
            wants = "wants KEY=VALUES, such as train.seed=0:5 or train.learning_rate=1e-4,3e-4"
            raise refused(wants, f"{SWEEP} {word}")
    return grid


def _placed(row: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Return settings with absolute paths."""
    is_path = {key: tuple(key.split(".")) in PATHS for key in row}
    is_path |= {key: str(row[key]).startswith(("./", "../")) for key in row if key.startswith("train.options.")}
    return {
        key: anchored(value, base) if is_path[key] and isinstance(value, str) else value for key, value in row.items()
    }


def _listed(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of points: CSV with a header, or a YAML list."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise refused(problem, str(path)) from error
    rows = _table(text, path) if path.suffix.lower() == ".csv" else _yaml(text, str(path))
    if not rows or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        problem = "holds no points: a list is wanted, as `- {train.seed: 1, train.learning_rate: 3e-4}`"
        raise refused(problem, str(path))
    return [_placed(row, path.absolute().parent) for row in rows]


def _table(text: str, path: Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV file; an empty cell leaves the setting as it is."""
    every = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    rows = []
    try:
        for number, row in enumerate(every, 2):
            where = f"{path}:{number}"
            if None in row or None in row.values():
                raise refused("a row has more or fewer cells than the header", where)
            rows.append({key.strip(): _yaml(value, where) for key, value in row.items() if value.strip()})
    except csv.Error as error:
        raise refused(f"no valid CSV: {error}", str(path)) from error
    return rows


def _yaml(text: str, where: str) -> Any:
    """Return the value of a text in YAML."""
    document = Document(where).read(text, ("points",))
    if document.problems:
        raise refused(document.problems[0].text, where)
    return document.entries[("points",)].value


# Name and check points


def points_in(config: Config) -> tuple[Point, ...]:
    """Return the points of a sweep; raise ConfigError for invalid points and for equal trainings."""
    rows = config.train.sweep.points
    if not rows:
        return ()
    refuse_script(config)
    refuse_unswept(key for row in rows for key in row)
    base = bare(config)
    short = short_names({key for row in rows for key in row})
    names = [named(row, short, value_as_written) for row in rows]
    times, points = Counter(names), dict[str, Point]()
    for row, usual in zip(rows, names, strict=True):
        name = usual if times[usual] == 1 else named(row, short, json.dumps)  # two files of the same name
        point = Point(name, dict(row), config_at(base, row, name))
        same = points.setdefault(_decided(point.config), point)
        if same is not point:
            longer = " (under a constant schedule more epochs are a longer one)" if "train.epochs" in row else ""
            raise refused(f"{same.name} and {name} are one training{longer}: remove one of the two", SWEEP)
    return tuple(points.values())


def bare(config: Config) -> dict[str, Any]:
    """Return a configuration as JSON data, without its sweep except for the share of a GPU."""
    plain: dict[str, Any] = json.loads(dump_resolved(config))
    plain["train"]["sweep"] = {"per_gpu": config.train.sweep.per_gpu}
    return plain


def refuse_script(config: Config) -> None:
    """Raise if a script is trained: it has no settings to sweep."""
    if config.train.command is not None or config.train.task is None:
        raise refused("train.command is a script, which is trained as it is: a sweep needs a train.task", SWEEP)


def named(row: Mapping[str, Any], short: Mapping[str, str], written: Callable[[Any], str]) -> str:
    """Return the name of a point, such as seed=3 learning_rate=1e-4."""
    return " ".join(f"{short[key]}={written(value)}" for key, value in row.items()) or "as it is"


def _decided(config: Config) -> str:
    """Return the settings that identify a training, as text; without epochs if more of them only extend it."""
    train = config.train
    is_longer = train.schedule.kind == "constant" and not train.curriculum
    return train.model_dump_json(exclude={"epochs"} if is_longer else None)


def refuse_unswept(keys: Iterable[str]) -> None:
    """Raise for a key that is no setting, or that does not make another training."""
    for key in dict.fromkeys(keys):
        path = tuple(key.split("."))
        section, name = path[0], path[1] if len(path) > 1 else ""
        if not (path in FIELDS or any(path[: len(known)] == known for known in FIELDS if known[-1] == "options")):
            detail: Any = {"type": "extra_forbidden"}
            raise refused(f"{key}: {explain(path, detail)}", SWEEP)
        if section not in ("train", "cluster", "cache"):
            what = f"{key} changes the training data, which earlier stages make: start a separate run"
            raise refused(what, SWEEP, Command.submit("train").with_settings((key, "…")))
        if section != "train" or name not in SWEPT:
            means = "means another model: start a separate run" if path == ("train", "task") else ""
            raise refused(f"{key} {means or 'does not change the trained model'}", SWEEP)


def config_at(base: Mapping[str, Any], settings: Mapping[str, Any], name: str) -> Config:
    """Return the configuration with a point's settings in it."""
    try:
        return Config.model_validate_json(json.dumps(with_settings(base, settings)), strict=True)
    except ValidationError as error:
        raise refused("; ".join(map(_problem, error.errors(include_url=False))), f"{SWEEP} {name}") from error


def _problem(detail: ErrorDetails) -> str:
    """Describe the mistakes in a point's settings."""
    names = tuple(part for part in detail["loc"] if isinstance(part, str))
    key = (*names, detail["ctx"]["key"]) if detail["type"] == CONFLICT else names
    return f"{'.'.join(key)}: {explain(key, detail)}"


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Return the shortest unique end of each key."""
    known = [key.split(".") for key in keys]
    ends = {".".join(parts): [parts[-length:] for length in range(1, len(parts) + 1)] for parts in known}
    counts = Counter(".".join(end) for every in ends.values() for end in every)
    return {key: next(name for end in every if counts[name := ".".join(end)] == 1) for key, every in ends.items()}


def value_as_written(value: Any) -> str:
    """Format a value as people write it: 1e-4 for 0.0001."""
    if isinstance(value, float):
        power = re.sub(r"e([+-])0*", lambda sign: "e" + sign[1].replace("+", ""), f"{value:.15e}")
        mantissa, _, exponent = power.partition("e")
        short = f"{mantissa.rstrip('0').rstrip('.')}e{exponent or 0}"
        return min(repr(value).removesuffix(".0"), short, key=len) if float(short) == value else repr(value)
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return ",".join(map(value_as_written, value))
    return str(value).rpartition("/")[2]


def named_points(name: str, names: Sequence[str]) -> list[int]:
    """Return the numbers of the point of that name, or of all points with its settings; * matches any end."""
    words = name.replace(",", " ").split()
    found = [
        number
        for number, known in enumerate(names)
        if known == name or (words and all(fnmatch.filter(known.split(), word) for word in words))
    ]
    if not found:
        nearest = sorted(names, key=lambda known: SequenceMatcher(None, name, known).ratio(), reverse=True)
        raise _unnamed(f"no point is called {name!r}", nearest)
    return [list(names).index(name)] if name in names else found


def named_point(name: str, names: Sequence[str]) -> int:
    """Return the number of the point of that name, or of the only point with its settings."""
    found = named_points(name, names)
    if len(found) > 1:
        raise _unnamed(f"{len(found)} points have {name!r}", [names[number] for number in found])
    return found[0]


def _unnamed(what: str, names: Sequence[str]) -> ConfigError:
    listed = "; ".join(names[:LISTED]) or "none"
    return ConfigError(f"{what} (there are: {listed})", where="--point", remedy="name one, with all its settings")


def refused(what: str, where: str, remedy: Command | str = EXAMPLE) -> ConfigError:
    """Return the error about invalid points."""
    return ConfigError(what, where=where, remedy=remedy)
