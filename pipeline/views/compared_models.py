"""Compares trainings (`pipeline compare`): those of runs, all points of a sweep, and models by name.

It shows different settings, best metrics and means over seeds, as data, text and charts.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from pipeline.codec import read_plain
from pipeline.command_line import Command
from pipeline.config.load import read_resolved
from pipeline.config.schema_train import ValidationSection
from pipeline.errors import ConfigError, PipelineError
from pipeline.journal.run_status import State
from pipeline.planning.trainings import read_trainings
from pipeline.report.charts import COLOURS, SMALL, Chart, Line, Size, figure, line_chart, whole_axis
from pipeline.report.tables import plural, table_of
from pipeline.stages.trained import progress_of
from pipeline.training.loop.metrics_log import Pruned, read_epochs
from pipeline.training.prepared import ModelFolder, Prepared
from pipeline.views.why import flat

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.report.tables import Column
    from pipeline.training.loop.metrics_log import Epoch

SEED = "seed"
UNKNOWN = "-"
SHOWN_MOST = 28  # characters of a setting's value in a table
TRAIN = "train"
LOSS = "loss"
SHORT = 8  # digits of a digest
CURVES, LINES, NAMED = 8, 60, 8  # charts of a comparison; models in a chart; models in its legend
STYLES = ("", "dashed", "thin")
LARGE = (Size(920, 360, "wide"), Size(*SMALL[:2], "narrow"))


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """One training: its settings and its results."""

    name: str  # of its folder
    folder: str
    state: str  # done, pruned, not done
    settings: Mapping[str, Any]  # all settings of its recipe, by dotted names
    epochs: int
    steps: int
    hours: float
    planned_bytes: int  # of a rank's device; 0: unknown
    peak_bytes: int
    curves: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)  # metric → (epoch, value)
    point: str = ""  # its point in the sweep, by which it was named
    why: str = ""  # it was pruned
    names: Mapping[str, str] = field(default_factory=dict)  # digest → name of its table and its weights
    best_epoch: int | None = None  # by the compared metric
    best: float | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Trainings that differ only in their seed."""

    settings: Mapping[str, Any]  # those that differ between groups
    models: Sequence[str]
    known: int  # models with a metric
    mean: float | None
    deviation: float | None  # None: of fewer than two
    hours: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compared models, the best first."""

    metric: str
    lower: bool
    models: Sequence[ComparedModel]
    differing: Sequence[str]  # settings
    groups: Sequence[Group]

    def cell(self, value: Any) -> str:
        """Format a setting for a table: a digest becomes the name of its file."""
        known = {digest: name for model in self.models for digest, name in model.names.items()}
        return brief(known.get(value, value) if isinstance(value, str) else value)

    def called(self, model: ComparedModel) -> str:
        """Return the settings that distinguish a model from the others."""
        differing = ", ".join(f"{name}={self.cell(value)}" for name, value in self.settings_of(model).items())
        return model.point or differing or model.name

    def settings_of(self, model: ComparedModel) -> dict[str, Any]:
        """Return the settings of a model that differ between models."""
        return {name: model.settings.get(name) for name in self.differing}

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        rows = [asdict(model) | {"differing": self.settings_of(model)} for model in self.models]
        for row in rows:
            del row["settings"]
        groups = [asdict(group) for group in self.groups]
        plain = {"metric": self.metric, "lower_is_better": self.lower, "differing": list(self.differing)}
        return plain | {"models": rows, "groups": groups}


def compared(models: Sequence[ComparedModel], metric: str, *, lower: bool) -> Comparison:
    """Compare models by the best value of a validation metric."""
    best_of, sign = min if lower else max, 1 if lower else -1
    judged = []
    for model in models:
        if curve := model.curves.get(metric):
            epoch, value = best_of(curve, key=itemgetter(1))
            model = replace(model, best_epoch=epoch, best=value)
        judged.append(model)
    judged.sort(key=lambda model: (math.inf if model.best is None else sign * model.best, model.name))
    differing = _differing([model.settings for model in judged])
    return Comparison(metric, lower, judged, differing, _groups(judged, differing))


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings that differ between models, in the order of their first appearance."""
    names = dict.fromkeys(name for known in settings for name in known)
    return [name for name in names if len({json.dumps(known.get(name), sort_keys=True) for known in settings}) > 1]


def _groups(models: Sequence[ComparedModel], differing: Sequence[str]) -> list[Group]:
    """Group models that differ only in their seed."""
    others = [name for name in differing if name != SEED]
    together: dict[str, list[ComparedModel]] = {}
    for model in models:
        key = json.dumps([model.settings.get(name) for name in others], sort_keys=True)
        together.setdefault(key, []).append(model)
    return [_group(others, members) for members in together.values()]


def _group(others: Sequence[str], members: Sequence[ComparedModel]) -> Group:
    values = [model.best for model in members if model.best is not None]
    return Group(
        settings={name: members[0].settings.get(name) for name in others},
        models=[model.name for model in members],
        known=len(values),
        mean=fmean(values) if values else None,
        deviation=stdev(values) if len(values) > 1 else None,
        hours=sum(model.hours for model in members),
        peak_bytes=max(model.peak_bytes for model in members),
    )


def brief(value: Any) -> str:
    """Return a setting's value as a cell of a table."""
    text = f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= SHOWN_MOST else f"{text[: SHOWN_MOST - 1]}…"


def spread(group: Group) -> tuple[str, float] | None:
    """Return mean ± standard deviation, and the mean."""
    if group.mean is None:
        return None
    return f"{group.mean:.4g}" + ("" if group.deviation is None else f" ± {group.deviation:.2g}"), group.mean


def model_columns(shown: Comparison) -> list[Column]:
    """Return the columns of a table of the models: their settings that differ, and their results."""
    settings: list[Column] = [(name, partial(_setting, shown, name)) for name in shown.differing]
    return [
        ("MODEL", "name", "code"), *settings, (f"best {shown.metric}", "best", "figure"),
        ("EPOCH", "best_epoch", "count"), ("TRAINED", "epochs", "count"), ("HOURS", "hours", "hours"),
        ("PLANNED", lambda model: model.planned_bytes or None, "bytes"),
        ("PEAK", lambda model: model.peak_bytes or None, "bytes"), ("STATE", "state"),
    ]  # fmt: skip


def seed_columns(shown: Comparison) -> list[Column]:
    """Return the columns of a table of means over seeds; none where no models differ only in their seed."""
    if len(shown.groups) == len(shown.models):
        return []
    others: list[Column] = [(name, partial(_setting, shown, name)) for name in shown.differing if name != SEED]
    mean: Column = (f"mean ± sd of best {shown.metric}", spread, "worded")
    return [*others, ("SEEDS", "known", "count"), mean, ("HOURS", "hours", "hours")]


def _setting(shown: Comparison, name: str, row: ComparedModel | Group) -> str:
    return shown.cell(row.settings.get(name))


def comparison_lines(shown: Comparison) -> list[RenderableType]:
    """Name the best model; then show all of them, and means over several seeds."""
    first = shown.models[0]
    answer = f"No model has a validation {shown.metric} yet; without splits, none will"
    if first.best is not None:
        answer = f"✓ Best {shown.metric}: {first.best:.4g} at epoch {first.best_epoch}, {shown.called(first)}"
    better = "lower" if shown.lower else "higher"
    lines: list[RenderableType] = [f"{answer} ({plural(len(shown.models), 'model')}, {better} is better)", ""]
    lines.append(table_of(model_columns(shown), shown.models, unknown=UNKNOWN))
    if columns := seed_columns(shown):
        lines += ["", table_of(columns, shown.groups, unknown=UNKNOWN)]
    return lines


def curve_charts(shown: Comparison) -> Iterator[Chart]:
    """Yield a chart of each metric, the compared one first, with a line for each model."""
    names = dict.fromkeys((shown.metric, *(name for model in shown.models for name in model.curves)))
    for name in list(names)[:CURVES]:
        is_first, lines = name == shown.metric, []
        for number, model in enumerate(model for model in shown.models[:LINES] if model.curves.get(name)):
            points, called = list(model.curves[name]), shown.called(model)
            hints = [f"{called}: epoch {epoch}: {figure(value)}" for epoch, value in points]
            style = STYLES[min(number // COLOURS, len(STYLES) - 1)]
            lines.append(Line(called if number < NAMED and is_first else "", points, number, style, hints))
        if lines:
            epochs = [epoch for line in lines for epoch, _ in line.points]
            x = whole_axis(min(epochs), max(epochs), "epoch")
            yield line_chart(name, x, lines, sizes=LARGE if is_first else (SMALL,))


def compared_data(shown: Comparison) -> dict[str, Any]:
    """Return the data of a comparison for the template of its page."""
    data = {"compared": shown, "curves": list(curve_charts(shown))}
    return data | {"model_columns": model_columns(shown), "seed_columns": seed_columns(shown)}


def models_of_run(folder: RunFolder) -> list[ComparedModel]:
    """Return the trainings of a run that have begun."""
    try:
        trainings = read_trainings(folder)
    except (OSError, ValueError):  # it trains nothing, or its plan is of another version
        return []
    models = read_resolved(folder.config).train.models
    found = []
    for training in trainings:
        with suppress(ConfigError):  # it has not begun
            if training.prepared:
                found.append(read_model(models / training.prepared.name, training.name))
    return found


def read_model(path: Path, point: str = "") -> ComparedModel:
    """Return a training by its folder; raise ConfigError if it is not a model's folder."""
    made = ModelFolder(path)
    try:
        prepared = read_plain(made.prepared, Prepared)
    except (OSError, ValueError) as error:
        what = f"not a model's folder ({type(error).__name__}: {error})"
        raise ConfigError(
            what, where=str(path), remedy=Command.of("model list", then="   (or the name of a run)")
        ) from error
    epochs = read_epochs(path)
    trained = epochs[-1].epoch if epochs else 0
    pruned = Pruned.read(made, trained)
    config = _config_of(made)
    is_over = trained >= prepared.epochs or progress_of(made).is_stale(_validation(config))
    return ComparedModel(
        name=path.name,
        folder=str(path),
        state=State.DONE if is_over else State.PRUNED if pruned else State.UNDONE,
        settings=dict(flat({**prepared.recipe, "epochs": prepared.epochs})),  # a recipe may lack it
        epochs=trained,
        steps=epochs[-1].step if epochs else 0,
        hours=sum(epoch.wall_s for epoch in epochs) / 3600,
        planned_bytes=max((epoch.planned_bytes for epoch in epochs), default=0),
        peak_bytes=max((epoch.peak_bytes for epoch in epochs), default=0),
        curves=_curves_of(epochs),
        point=point,
        why=pruned.why if pruned and not is_over else "",
        names=_names(prepared, config) if config else {},
    )


def _config_of(made: ModelFolder) -> Config | None:
    """Return the configuration that a model was trained with; None if missing or of another version."""
    with suppress(PipelineError):
        return read_resolved(made.settings)
    return None


def _validation(config: Config | None) -> ValidationSection:
    return config.train.validation if config else ValidationSection()


def _names(prepared: Prepared, config: Config) -> dict[str, str]:
    """Return digest → file name of a training's table and weights, with a short digest in the name."""
    weights = prepared.recipe.get("embeddings", {}).get("weights", "")
    named = {prepared.table: config.data.path, weights: config.of_encoder(config.encoders_read[0]).embed.weights}
    return {digest: f"{path.name} {digest[:SHORT]}" for digest, path in named.items() if digest}


def _curves_of(epochs: Iterable[Epoch]) -> dict[str, list[tuple[int, float]]]:
    """Return the validation metrics and the training losses by epoch."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for epoch in epochs:
        trained = {f"training {name}": value for name, value in epoch.loss.items()}
        for name, value in {**epoch.validation, **trained}.items():
            if value is not None:
                curves.setdefault(name, []).append((epoch.epoch, value))
    return curves


def comparison(models: Sequence[ComparedModel], metric: str | None = None) -> Comparison:
    """Compare trainings by a metric. Default: the one by which they were monitored."""
    if not models:
        raise ConfigError("no training to compare", where="pipeline compare", remedy=Command.of("model list"))
    of_all = [_validation(_config_of(ModelFolder(Path(model.folder)))) for model in models]
    monitors = dict.fromkeys(settings.monitor for settings in of_all)
    known = sorted({name for model in models for name in model.curves})
    if metric is None and len(monitors) > 1:
        what = f"the trainings were monitored by different metrics: {', '.join(monitors)}"
        raise ConfigError(what, where="pipeline compare", remedy=f"--metric {known[0] if known else LOSS}")
    name = metric or next(iter(monitors))
    if metric is not None and metric not in known:
        what = f"no training has metric {metric!r}; known metrics: {', '.join(known) or 'none yet'}"
        raise ConfigError(what, where="--metric", remedy="name one of these")
    settings = next((known for known in of_all if known.monitor == name), ValidationSection(monitor=name))
    return compared(models, name, lower=name.startswith("training ") or settings.lower_is_better)
