"""What a run trains: one training, or one for each point of a sweep; each with its plan, or why it has none.

`train.sweep.points` holds the settings in which the trainings of a sweep differ: a grid on the
command line, or a file with a row for each. A point's training is that which a plain run with its settings has: what
was trained before counts, and what a sweep has trained counts for others. Points that fit no machine are reported, and
the others are trained.
"""

from __future__ import annotations

import csv
import fnmatch
import io
import json
import math
import re
import time
from collections import Counter
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from pipeline.codec import read_plain, recall, remember, write_plain
from pipeline.command_line import Command
from pipeline.config.load import dump_resolved, with_settings
from pipeline.config.schema import FIELDS, PATHS, Config
from pipeline.config.schema_parts import CONFLICT
from pipeline.config.site_profiles import anchored
from pipeline.config.yaml_document import Document, explain
from pipeline.dataset.reader_items import is_reader
from pipeline.errors import ConfigError, PlanInfeasible
from pipeline.journal.run_folder import writing_run
from pipeline.planning.prepare import DECISIVE, has_input, is_planned, known_plan, plan_asked, prepare
from pipeline.project.project import Project, once
from pipeline.project.user_code import plans_folder
from pipeline.stage_names import StageName
from pipeline.training.prepared import Prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pydantic_core import ErrorDetails

    from pipeline.journal.run_folder import RunFolder

SWEEP, FILE = "--sweep", "--sweep-file"
MOST, LISTED = 1000, 10  # points of a run, and of an error
SWEPT = {  # of section `train`: what makes another training of it
    *DECISIVE, "schedule", "epochs", "precision", "pretrained", "pretrained_as", "pretrained_map", "pretrained_entry",
} - {"task"}  # fmt: skip
RANGE = re.compile(r"(-?\d+):(-?\d+)(?::([1-9]\d*))?")
PLAIN = re.compile(r"[\w.+\-/~ ]+|\[.*\]|\".*\"|'.*'")  # what may stand in a YAML list as it is
EXAMPLE = Command.of("submit train --sweep train.seed=0:5 --sweep train.learning_rate=1e-4,3e-4")


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """One training of a sweep: what tells it from the others, in words, and its settings."""

    name: str  # seed=3 learning_rate=1e-4
    settings: Mapping[str, Any]
    config: Config  # that a plain submit of it would have


# What is typed


def typed_points(words: Sequence[str], file: Path | None) -> str:
    """Return the points that `--sweep` and `--sweep-file` name, as YAML: the file's, each with each of the grid."""
    rows = [{}] if file is None else _listed(file)
    grid = _grid(words)
    count = len(rows) * math.prod(map(len, grid.values()))
    if count > MOST:
        raise _refused(f"{count:,} points are more than the {MOST:,} of one run: submit parts of it", SWEEP)
    if twice := sorted(grid.keys() & {key for row in rows for key in row}):
        raise _refused(f"{twice[0]} is in {file} and in a {SWEEP}: keep one of the two", FILE)
    cells = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    return f"[{', '.join(_mapping({**row, **cell}) for row in rows for cell in cells)}]"


def _grid(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each key."""
    grid: dict[str, list[str]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.strip()
        if not equals or not key:
            wants = "wants KEY=VALUES, such as train.seed=0:5 or train.learning_rate=1e-4,3e-4"
            raise _refused(wants, f"{SWEEP} {word}")
        if key in grid:
            raise _refused(f"{key} is swept twice: name all its values in one", f"{SWEEP} {word}")
        if not (values := _values(text)):
            raise _refused(f"{key} gets no value from {text!r}", f"{SWEEP} {word}")
        grid[key] = [_placed(key, value, Path.cwd()) for value in values]
    return grid


def _placed(key: str, value: str, base: Path) -> str:
    """Return a value as it is typed, a path as a whole one: relative ones start from where they are written."""
    is_path = tuple(key.split(".")) in PATHS or (key.startswith("train.options.") and value.startswith(("./", "../")))
    return anchored(value, base) if is_path and value not in ("null", "~") else value


def _values(text: str) -> list[str]:
    """Return the values that a text lists: whole numbers as `A:B`, half open, or values between commas."""
    if (numbers := RANGE.fullmatch(text.strip())) is not None:
        first, end, step = (int(number or 1) for number in numbers.groups())
        if len(span := range(first, end, step)) > MOST:
            raise _refused(f"{len(span):,} points are more than the {MOST:,} of one run", f"{SWEEP} {text}")
        return list(map(str, span))
    values, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values] if all(value.strip() for value in values) else []


def _listed(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file of points, keys and values as they are written: CSV with a header, or a YAML list."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise _refused(problem, str(path)) from error
    rows = _table(text, path) if path.suffix.lower() == ".csv" else _list(text, path)
    if not rows:
        raise _refused("holds no point: a row of settings for each is wanted", str(path))
    base = path.absolute().parent
    return [{key: _placed(key, value, base) for key, value in row.items()} for row in rows]


def _table(text: str, path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file; an empty cell leaves the setting as it is."""
    every = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    rows = []
    try:
        for number, row in enumerate(every, 2):
            if None in row or None in row.values():
                raise _refused("a row has more or fewer cells than the header", f"{path}:{number}")
            rows.append({key.strip(): value.strip() for key, value in row.items() if value.strip()})
    except csv.Error as error:
        raise _refused(f"no valid CSV: {error}", str(path)) from error
    return rows


def _list(text: str, path: Path) -> list[dict[str, str]]:
    """Return the rows of a YAML file."""
    document = Document(str(path)).read(text, ("points",))
    if document.problems:
        raise _refused(document.problems[0].text, str(path))
    rows = document.entries[("points",)].value
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        problem = "wants a list of points, as `- {train.seed: 1, train.learning_rate: 3e-4}`"
        raise _refused(problem, str(path))
    return [{key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()} for row in rows]


def _mapping(point: Mapping[str, str]) -> str:
    """Return a point as YAML."""
    pairs = ((key, value if PLAIN.fullmatch(value) else json.dumps(value)) for key, value in point.items())
    return f"{{{', '.join(f'{json.dumps(key)}: {value}' for key, value in pairs)}}}"


# What it means


@once
def points_of(project: Project) -> tuple[Point, ...]:
    """Return the points of a configuration's sweep; none where it has none."""
    return points_in(project.config)


def points_in(config: Config) -> tuple[Point, ...]:
    """Return the points of a sweep; raise ConfigError for those that cannot be, or that are the same training."""
    rows = config.train.sweep.points
    if not rows:
        return ()
    if config.train.command is not None or config.train.task is None:
        raise _refused("train.command is a script, which is trained as it is: a sweep needs a train.task", SWEEP)
    for key in dict.fromkeys(key for row in rows for key in row):
        _refuse_unswept(key)
    base = json.loads(dump_resolved(config))
    base["train"]["sweep"] = {}
    short = _short_names({key for row in rows for key in row})
    known: dict[str, str] = {}
    points = list[Point]()
    names = [_named(row, short, value_as_written) for row in rows]
    times = Counter(names)
    for row, usual in zip(rows, names, strict=True):
        name = usual if times[usual] == 1 else _named(row, short, json.dumps)  # files of one name in two folders
        point = Point(name, dict(row), _config_at(base, row, name))
        same = known.setdefault(_decided(point.config), point.name)
        if len(points) != len(known) - 1:
            twice = (
                f"{point.name} is there twice" if same == point.name else f"{same} and {point.name} are one training"
            )
            longer = " (under a constant schedule more epochs are a longer one)" if "train.epochs" in row else ""
            raise _refused(f"{twice}{longer}: every point is a training of its own", SWEEP)
        points.append(point)
    return tuple(points)


def _named(row: Mapping[str, Any], short: Mapping[str, str], written: Callable[[Any], str]) -> str:
    """Return the name of a point: what is set, in words."""
    return " ".join(f"{short[key]}={written(value)}" for key, value in row.items()) or "as it is"


def _decided(config: Config) -> str:
    """Return what tells a training from others, as text; of one that more epochs only make longer, without these."""
    train = config.train
    is_longer = train.schedule.kind == "constant" and not train.curriculum
    return train.model_dump_json(exclude={"epochs"} if is_longer else None)


def _refuse_unswept(key: str) -> None:
    """Raise where a key is no setting, or one that makes no other training."""
    section, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    path = tuple(key.split("."))
    is_known = path in FIELDS or any(path[: len(known)] == known for known in FIELDS if known[-1] == "options")
    if not is_known:
        detail: Any = {"type": "extra_forbidden"}
        raise _refused(f"{key}: {explain(path, detail)}", SWEEP)
    if section == "train" and name in SWEPT:
        return
    if name == "task":
        raise _refused(f"{key} means another model: start a separate run", SWEEP)
    if section in ("train", "cluster", "cache"):
        raise _refused(f"{key} does not change the trained model", SWEEP)
    what = f"{key} changes the training data, which earlier stages make: start a separate run"
    raise _refused(what, SWEEP, Command.submit("train").with_settings((key, "…")))


def _config_at(base: Mapping[str, Any], settings: Mapping[str, Any], name: str) -> Config:
    """Return the configuration with a point's settings in it."""
    try:
        return Config.model_validate_json(json.dumps(with_settings(base, settings)), strict=True)
    except ValidationError as error:
        problems = "; ".join(map(_problem, error.errors(include_url=False)))
        raise _refused(problems, f"{SWEEP} {name}") from error


def _problem(detail: ErrorDetails) -> str:
    """Return what is wrong with a point's settings, in words."""
    names = tuple(part for part in detail["loc"] if isinstance(part, str))
    key = (*names, detail["ctx"]["key"]) if detail["type"] == CONFLICT else names
    return f"{'.'.join(key)}: {explain(key, detail)}"


def _short_names(keys: Iterable[str]) -> dict[str, str]:
    """Return the end of each key, as long as it has to be to tell it from the others."""
    names = {key: key.split(".") for key in keys}

    def end(key: str, length: int) -> str:
        return ".".join(names[key][-length:])

    return {
        key: next(
            end(key, length)
            for length in range(1, len(parts) + 1)
            if sum(end(other, length) == end(key, length) for other in names) == 1
        )
        for key, parts in names.items()
    }


def value_as_written(value: Any) -> str:
    """Return a value as people write it: 1e-4, and not 0.0001."""
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


@once
def at(project: Project, point: Point) -> Project:
    """Return the project of one point; what does not follow from section `train` is shared."""
    if not is_reader(project.config):
        _ = project.encoding  # read once, for all points
    other = replace(project, config=point.config, made_once={})
    vars(other).update({name: vars(project)[name] for name in ("graphs", "encoding") if name in vars(project)})
    return other


def named_points(name: str, names: Sequence[str], where: str = "--point") -> list[int]:
    """Return the numbers of the point of that name, or of those that have all of its settings; * stands for any end."""
    if name in names:
        return [list(names).index(name)]
    words = name.replace(",", " ").split()
    found = [
        number
        for number, known in enumerate(names)
        if words and all(fnmatch.filter(known.split(), word) for word in words)
    ]
    if not found:
        nearest = sorted(names, key=lambda known: SequenceMatcher(None, name, known).ratio(), reverse=True)
        raise _unnamed(f"no point is called {name!r}", nearest, where)
    return found


def named_point(name: str, names: Sequence[str]) -> int:
    """Return the number of the point of that name, or of the only one that has all of its settings."""
    found = named_points(name, names)
    if len(found) > 1:
        raise _unnamed(f"{len(found)} points have {name!r}", [names[number] for number in found], "--point")
    return found[0]


def _unnamed(what: str, names: Sequence[str], where: str) -> ConfigError:
    listed = "; ".join(names[:LISTED]) or "none"
    return ConfigError(f"{what} (there are: {listed})", where=where, remedy="name one, with all its settings")


def _refused(what: str, where: str, remedy: Command | str = EXAMPLE) -> ConfigError:
    return ConfigError(what, where=where, remedy=remedy)


# Their plans

REFUSAL = "refused plan"  # the name of what is remembered
REFUSED_FOR_S = 3600.0  # after which memory that is free now, or another node, may let it pass


@dataclass(frozen=True, slots=True)
class Training:
    """A training with its plan, or why there is none."""

    name: str  # of its point; empty: the only one of its run
    prepared: Prepared | None
    why: str = ""  # there is no plan, and what helps


@dataclass(frozen=True, slots=True)
class _Refusal:
    why: str
    at: float  # seconds since 1970


def view_of(project: Project, name: str) -> Project:
    """Return the project of a training of that name."""
    point = next((point for point in points_of(project) if point.name == name), None)
    return project if point is None else at(project, point)


def training_names(project: Project) -> list[str]:
    """Return the names of the trainings of a configuration."""
    return [point.name for point in points_of(project)] or [""]


def plan_trainings(project: Project) -> tuple[Training, ...] | None:
    """Plan every training; None while what is trained on is not there. Raise where none has a plan."""
    if not all(has_input(view_of(project, name)) for name in training_names(project)):
        return None
    return _planned(project)


@once
def _planned(project: Project) -> tuple[Training, ...]:
    if not points_of(project):
        return (Training("", prepare(project)),)
    trainings = tuple(_plan_point(view_of(project, name), name) for name in training_names(project))
    known: dict[str, str] = {}
    for training in trainings:
        model = training.prepared.name if training.prepared else training.name
        if known.setdefault(model, training.name) != training.name:  # what differs between them decides nothing
            what = f"{known[model]} and {training.name} are the same training, {model}"
            raise ConfigError(what, where=SWEEP, remedy="remove one of the two")
    if not any(training.prepared for training in trainings):
        what = f"none of {len(trainings)} points fits, such as {trainings[0].name}: {trainings[0].why}"
        raise PlanInfeasible(what, where=SWEEP)
    return trainings


def _plan_point(project: Project, name: str) -> Training:
    """Plan a point; that it fits no machine is remembered for a while, as it takes long to find."""
    if refusal := _known_refusal(project):
        return Training(name, None, refusal.why)
    try:
        return Training(name, prepare(project))
    except PlanInfeasible as error:
        refusal = _Refusal(str(error), time.time())
        remember(plans_folder(project.config), REFUSAL, plan_asked(project), refusal)
        return Training(name, None, refusal.why)


def _known_refusal(project: Project) -> _Refusal | None:
    """Return why there was no plan a while ago, where it is known."""
    refusal = recall(plans_folder(project.config), REFUSAL, plan_asked(project), _Refusal)
    return refusal if refusal and time.time() - refusal.at < REFUSED_FOR_S else None


def known_plans(project: Project) -> list[Prepared]:
    """Return the plans that were made, none while they are not."""
    if (trainings := _planned.known(project)) is not None:
        return [training.prepared for training in trainings if training.prepared]
    return [plan for name in training_names(project) if (plan := known_plan(view_of(project, name))) is not None]


def unplanned(project: Project) -> list[str]:
    """Return the trainings that can be planned, and are not yet."""
    views = {name: view_of(project, name) for name in training_names(project)}
    return [name for name, view in views.items() if not is_planned(view) and not _known_refusal(view)]


def write_trainings(folder: RunFolder, trainings: tuple[Training, ...]) -> None:
    """Write down what a run trains."""
    with writing_run(folder.path):
        write_plain(folder.plan(StageName.TRAIN), trainings)


def read_trainings(folder: RunFolder) -> tuple[Training, ...]:
    """Return what a run trains."""
    return read_plain(folder.plan(StageName.TRAIN), tuple[Training, ...])
