"""Compared trainings: settings that differ, the best metrics, means over seeds, as data and as text."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from pipeline.report.tables import plural, text_table
from pipeline.units import short_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

SEED = "seed"
UNKNOWN = "-"
LEAST_HOURS = 0.01
SHOWN_MOST = 28  # characters of a setting's value in a table


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """One training: its settings and its results."""

    name: str  # of its folder
    folder: str
    state: str  # done, pruned, not done
    settings: Mapping[str, Any]  # everything that decides its outcome, by flat names
    epochs: int
    steps: int
    hours: float
    planned_bytes: int  # of a rank's device; 0: unknown
    peak_bytes: int
    curves: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)  # metric → (epoch, value)
    point: str = ""  # of the sweep that it was named by
    why: str = ""  # it was pruned
    names: Mapping[str, str] = field(default_factory=dict)  # of what is known by digest: its table and its weights


@dataclass(frozen=True, slots=True)
class Group:
    """Trainings that differ in nothing but their seed."""

    settings: Mapping[str, Any]  # those that differ between groups
    models: Sequence[str]
    known: int  # of them, with a metric
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
    best: Mapping[str, tuple[int, float]]  # folder of a model → its best epoch and value
    differing: Sequence[str]  # settings
    groups: Sequence[Group]

    def cell(self, value: Any) -> str:
        """Return a setting's value for a table: a digest by the name of its file."""
        known = {digest: name for model in self.models for digest, name in model.names.items()}
        return brief(known.get(value, value) if isinstance(value, str) else value)

    def called(self, model: ComparedModel) -> str:
        """Return the settings that distinguish a model from the others."""
        differing = ", ".join(f"{name}={self.cell(model.settings.get(name))}" for name in self.differing)
        return model.point or differing or model.name

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        rows = []
        for model in self.models:
            epoch, value = self.best.get(model.folder, (None, None))
            differing = {name: model.settings.get(name) for name in self.differing}
            plain = {name: part for name, part in asdict(model).items() if name != "settings"}
            rows.append(plain | {"best_epoch": epoch, "best": value, "differing": differing})
        return {
            "metric": self.metric,
            "lower_is_better": self.lower,
            "differing": list(self.differing),
            "models": rows,
            "groups": [asdict(group) for group in self.groups],
        }


def compared(models: Sequence[ComparedModel], metric: str, *, lower: bool) -> Comparison:
    """Compare models by the best value of a validation metric."""
    best = {model.folder: found for model in models if (found := _best(model.curves.get(metric, ()), lower=lower))}
    differing = _differing([model.settings for model in models])
    worst = float("inf")

    def place(model: ComparedModel) -> tuple[float, str]:
        found = best.get(model.folder)
        return (worst if found is None else found[1] if lower else -found[1], model.name)

    ordered = sorted(models, key=place)
    return Comparison(metric, lower, ordered, best, differing, _groups(ordered, best, differing))


def _best(curve: Sequence[tuple[int, float]], *, lower: bool) -> tuple[int, float] | None:
    """Return the epoch and the value of the best point of a curve; None where it has none."""
    if not curve:
        return None
    return min(curve, key=lambda point: point[1]) if lower else max(curve, key=lambda point: point[1])


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings that are not the same everywhere, in the order of their first appearance."""
    names = dict.fromkeys(name for known in settings for name in known)
    return [name for name in names if len({json.dumps(known.get(name), sort_keys=True) for known in settings}) > 1]


def _groups(
    models: Sequence[ComparedModel], best: Mapping[str, tuple[int, float]], differing: Sequence[str]
) -> list[Group]:
    """Group models that differ only in their seed."""
    others = [name for name in differing if name != SEED]
    together: dict[str, list[ComparedModel]] = {}
    for model in models:
        key = json.dumps([model.settings.get(name) for name in others], sort_keys=True)
        together.setdefault(key, []).append(model)
    groups = []
    for members in together.values():
        values = [best[model.folder][1] for model in members if model.folder in best]
        groups.append(
            Group(
                settings={name: members[0].settings.get(name) for name in others},
                models=[model.name for model in members],
                known=len(values),
                mean=fmean(values) if values else None,
                deviation=stdev(values) if len(values) > 1 else None,
                hours=sum(model.hours for model in members),
                peak_bytes=max(model.peak_bytes for model in members),
            )
        )
    return groups


def brief(value: Any) -> str:
    """Return a setting's value as a cell of a table."""
    text = f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= SHOWN_MOST else f"{text[: SHOWN_MOST - 1]}…"


def hours(count: float) -> str:
    """Return hours for people."""
    return f"{count:,.2f}" if count >= LEAST_HOURS else f"<{LEAST_HOURS}"


def spread(group: Group) -> str:
    """Return mean ± standard deviation."""
    if group.mean is None:
        return UNKNOWN
    deviation = "" if group.deviation is None else f" ± {group.deviation:.2g}"
    return f"{group.mean:.4g}{deviation}"


def comparison_lines(shown: Comparison) -> list[RenderableType]:
    """Name the best model; then show all of them, and means over several seeds."""
    names, better = list(shown.differing), "lower" if shown.lower else "higher"
    best = f"best {shown.metric}"
    columns = ("MODEL", *names, best, "EPOCH", "TRAINED", "HOURS", "PLANNED", "PEAK", "STATE")
    rows = [_row(model, shown) for model in shown.models]
    first = shown.models[0]
    epoch, value = shown.best.get(first.folder, (0, None))
    answer = f"No model has a validation {shown.metric} yet"
    if value is not None:
        answer = f"✓ Best {shown.metric}: {value:.4g} at epoch {epoch}, {shown.called(first)}"
    lines: list[RenderableType] = [f"{answer} ({plural(len(rows), 'model')}, {better} is better)", ""]
    lines.append(text_table(columns, rows, right=(best, *columns[-6:-1])))
    if len(shown.groups) < len(shown.models):
        others = [name for name in names if name != SEED]
        cells = [
            (
                *(shown.cell(group.settings[name]) for name in others),
                f"{group.known}",
                spread(group),
                hours(group.hours),
            )
            for group in shown.groups
        ]
        columns = (*others, "SEEDS", f"mean ± sd of {best}", "HOURS")
        lines += ["", text_table(columns, cells, right=columns[-3:])]
    return lines


def _row(model: ComparedModel, shown: Comparison) -> tuple[str, ...]:
    epoch, value = shown.best.get(model.folder, (None, None))
    return (
        model.name,
        *(shown.cell(model.settings.get(name)) for name in shown.differing),
        UNKNOWN if value is None else f"{value:.4g}",
        UNKNOWN if epoch is None else f"{epoch:,}",
        f"{model.epochs:,}",
        hours(model.hours),
        short_bytes(model.planned_bytes) if model.planned_bytes else UNKNOWN,
        short_bytes(model.peak_bytes) if model.peak_bytes else UNKNOWN,
        model.state,
    )
