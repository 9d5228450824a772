"""The HTML report of a run: gather its facts, render them, and write the file where it is asked for.

The report only shows what the ledger and the models' folders say. A part that cannot be read becomes a note in it.
"""

from __future__ import annotations

import re
import sys
import time
from functools import reduce
from itertools import chain
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.command_line import quoted
from pipeline.config.load import read_resolved
from pipeline.config.masking import without_secrets_in
from pipeline.config.schema import LEAVES, value_at
from pipeline.errors import ConfigError, PipelineError
from pipeline.files import what_is_no_file, write_whole
from pipeline.journal.budget import Budget, Spending
from pipeline.journal.run_view import RunView, view
from pipeline.report.html.run_facts import PageFacts, RecordedStep, TrainingFacts
from pipeline.training.loop.metrics_log import STEP, read_epochs, read_figures
from pipeline.training.prepared import ModelFolder, Prepared
from pipeline.views.compared_models import comparison, models_of_run
from pipeline.views.page_facts import rejection_facts, stage_facts, time_facts, trouble_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import StageStatus
    from pipeline.report.compared import Comparison
    from pipeline.report.html.run_facts import Curve

_T = TypeVar("_T")


class Page:
    """The HTML report of one run, made from its ledger's events."""

    def __init__(self, folder: RunFolder, config: Config) -> None:
        self.folder, self.config = folder, config
        self._spending = Spending(folder.path.parent, Budget.of(config.cluster.budget))

    def facts(self, run: RunView) -> PageFacts:
        """Return everything that the report shows."""
        from pipeline.views.efficiency import stage_uses

        now, notes, status = time.time(), list[str](), run.status

        def or_note(name: str, facts: Callable[[], _T]) -> _T | None:
            try:
                return facts()
            except (PipelineError, OSError, ValueError, KeyError, TypeError) as error:
                notes.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                return None

        return PageFacts(
            run=run,
            folder=self.folder.path,
            made_at=now,
            again=or_note("command", lambda: self.folder.again.read_text().strip()) or "",
            stages=[stage_facts(run, stage) for stage in status.in_order()],
            time=time_facts(status, now),
            troubles=trouble_facts(status),
            rejections=or_note("rejections", lambda: rejection_facts(self.folder, status)),
            training=or_note("training", lambda: training_facts(self.folder, self.config, status.stages.get(TRAIN))),
            compared=or_note("points", self._compared),
            uses=or_note("efficiency", lambda: stage_uses(self.folder, status)) or [],
            account=or_note("budget", self._spending.account),
            settings=changed_settings(self.config),
            notes=notes,
        )

    def _compared(self) -> Comparison | None:
        if not (self.config.train.sweep.points and (models := models_of_run(self.folder))):
            return None
        return comparison(models)

    def html(self, run: RunView) -> str:
        """Return the report as text."""
        from pipeline.report.html.html_page import page

        return page(self.facts(run))


def of_run(folder: RunFolder) -> Page:
    """Return the report of a run, with the configuration under which it began."""
    return Page(folder, read_resolved(folder.config))


def changed_settings(config: Config) -> dict[str, str]:
    """Return the settings that differ from their defaults, secrets masked."""
    plain = config.model_dump(mode="json")
    changed = {".".join(key): key for key, info in LEAVES.items() if value_at(config, key) != info.default}
    return {name: f"{without_secrets_in(reduce(getitem, key, plain), name)}" for name, key in changed.items()}


def page_now(folder: RunFolder) -> tuple[Page, RunView]:
    """Return the report of a run, and the state of the run."""
    return of_run(folder), view(folder, deep=True)


def write_page(path: Path, text: str) -> None:
    """Write a report, readable as the umask says; the folder of a private run keeps its report private."""
    write_whole(path, text.encode(errors="backslashreplace"))


def write_page_where_asked(path: Path, text: str) -> None:
    """Write a report to a path that the user named."""
    try:
        if other := what_is_no_file(path):
            raise OSError(f"is {other}, expected a file")
        write_page(path, text)
    except OSError as error:
        what, there = f"cannot write the HTML report: {error.strerror or error}", path.parent.exists()
        remedy = "name a file that you may write to" if there else f"mkdir -p {quoted(path.parent)}"
        raise ConfigError(what, where=str(path), remedy=remedy) from error


TRAIN = "train"
POINTS = 500  # of a curve
SERIES = 16  # curves of a kind: terms of a loss, metrics
EPOCH_ROWS = 100
BUNDLES = 50
# As `training/forensics/step_bundle.py` names them, which needs torch: a supervisor has no room for that.
_BUNDLE = re.compile(r"step-(?P<step>\d{8,})-(?P<kind>[a-z]+)-rank-(?P<rank>\d+)(?:-\d+)?")


def training_facts(folder: RunFolder, config: Config, stage: StageStatus | None) -> TrainingFacts | None:
    """Return what is known of the training of a run; None where it has no plan that this version can read."""
    prepared = Prepared.read_if_known(folder.plan(TRAIN))
    if prepared is None:
        return None
    made = ModelFolder(config.train.models / prepared.name)
    every, settings = read_epochs(made.path), config.train.validation
    census = stage.census or {} if stage else {}
    last = min(prepared.epochs, census.get("epochs", prepared.epochs))  # a later run may have trained on
    epochs = [epoch for epoch in every if epoch.epoch <= last]
    steps = epochs[-1].step if epochs and len(epochs) < len(every) else sys.maxsize
    names = sorted(path.name for path in made.bundles.iterdir()) if made.bundles.is_dir() else []
    bundles = [match for match in map(_BUNDLE.fullmatch, names) if match and int(match["step"]) <= steps]
    return TrainingFacts(
        prepared=prepared,
        folder=made.path,
        monitor=settings.monitor,
        on_gpu=bool(stage and any(job.gpus for job in stage.jobs.values())) or bool(config.cluster.train.gpus),
        epochs=thinned(epochs, POINTS),
        newest=epochs[-EPOCH_ROWS:],
        known_epochs=len(epochs),
        losses=_names(epoch.loss for epoch in epochs)[:SERIES],
        metrics=_names(epoch.validation for epoch in epochs),
        curves=_curves([figures for figures in read_figures(made.path) if figures[STEP] <= steps]),
        bundles=[RecordedStep(int(match["step"]), match["kind"], int(match["rank"])) for match in bundles[-BUNDLES:]],
        more_bundles=max(0, len(bundles) - BUNDLES),
    )


def _names(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names that occur in records, in order of first appearance."""
    return list(dict.fromkeys(chain.from_iterable(records)))


def _curves(figures: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return each figure that was recorded every few steps as a curve."""
    names = [name for name in _names(figures) if name != STEP][: 2 * SERIES]
    curves = {
        name: [(record[STEP], record[name]) for record in figures if record.get(name) is not None] for name in names
    }
    return {name: thinned(curve, POINTS) for name, curve in curves.items() if curve}


def thinned(values: Sequence[_T], most: int) -> list[_T]:
    """Return `most` evenly spaced values at most, with the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[place * (len(values) - 1) // (most - 1)] for place in range(most)]
