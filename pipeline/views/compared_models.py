"""Read the trainings to compare: those of runs, with all points of a sweep, and models by name."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.command_line import Command
from pipeline.config.load import read_resolved
from pipeline.config.schema_train import ValidationSection
from pipeline.errors import ConfigError, PipelineError
from pipeline.report.compared import ComparedModel, compared
from pipeline.stages.sweep import DONE, PRUNED, UNDONE, told_plans
from pipeline.stages.train import progress_of
from pipeline.training.loop.metrics_log import Pruned, read_epochs
from pipeline.training.prepared import ModelFolder, Prepared

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.report.compared import Comparison
    from pipeline.training.loop.metrics_log import Epoch

TRAIN = "train"
LOSS = "loss"
SHORT = 8  # digits of a digest


def models_of_run(folder: RunFolder) -> list[ComparedModel]:
    """Return the trainings of a run that have begun; none where it trains nothing."""
    try:
        told = json.loads(folder.plan(TRAIN).read_text())
    except (OSError, ValueError):
        return []
    models = read_resolved(folder.config).train.models
    with suppress(TypeError, KeyError):  # a plan of another version
        if "points" not in told:
            return list(_begun(models / Prepared.from_json(told).name))
        plans = [plan for plan in told_plans(folder) if plan.prepared is not None]
        return [
            model for plan in plans if plan.prepared for model in _begun(models / plan.prepared.name, point=plan.name)
        ]
    return []


def _begun(path: Path, point: str = "") -> Iterator[ComparedModel]:
    with suppress(ConfigError):
        yield read_model(path, point)


def read_model(path: Path, point: str = "") -> ComparedModel:
    """Return a training by its folder; raise ConfigError if it is not a model's folder."""
    made = ModelFolder(path)
    try:
        prepared = Prepared.read(made.prepared)
    except (OSError, ValueError, TypeError, KeyError) as error:
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
        state=DONE if is_over else PRUNED if pruned else UNDONE,
        settings=dict(_flat({**prepared.recipe, "epochs": prepared.epochs})),  # a recipe may leave that open
        epochs=trained,
        steps=epochs[-1].step if epochs else 0,
        hours=sum(epoch.wall_s for epoch in epochs) / 3600,
        planned_bytes=max((epoch.planned_bytes for epoch in epochs), default=0),
        peak_bytes=max((epoch.peak_bytes for epoch in epochs), default=0),
        curves=_curves(epochs),
        point=point,
        why=pruned.why if pruned and not is_over else "",
        names=_names(prepared, config) if config else {},
    )


def _config_of(made: ModelFolder) -> Config | None:
    """Return the configuration that a model was trained with; None where it is missing or of another version."""
    with suppress(PipelineError):
        return read_resolved(made.settings)
    return None


def _validation(config: Config | None) -> ValidationSection:
    return config.train.validation if config else ValidationSection()


def _names(prepared: Prepared, config: Config) -> dict[str, str]:
    """Return the file names of a training's table and weights by their digests, which the names repeat in short."""
    weights = prepared.recipe.get("embeddings", {}).get("weights", "")
    named = {prepared.table: config.data.path, weights: config.embed.weights}
    return {digest: f"{path.name} {digest[:SHORT]}" for digest, path in named.items() if digest}


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings with the names of the sections that they are in."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _curves(epochs: Iterable[Epoch]) -> dict[str, list[tuple[int, float]]]:
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
    is_loss = name.startswith("training ")
    return compared(models, name, lower=is_loss or settings.lower_is_better)
