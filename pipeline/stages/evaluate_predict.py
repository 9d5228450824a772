"""Stages evaluate and predict: loss and metrics of a trained model on a split; what it says of each item, in tables."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from pipeline.codec import read_plain
from pipeline.errors import ConfigError
from pipeline.keys import content_digest
from pipeline.project.run_code import load_task
from pipeline.protocol import PICTURES
from pipeline.stage_names import StageName
from pipeline.stages.apply import ApplyStage, ModelUse
from pipeline.training.checkpoints.checkpoint import Application
from pipeline.training.evaluating.results import (
    Figures,
    Predictions,
    evaluate,
    evaluation_parts,
    evaluation_path,
    predict,
    prediction_parts,
    read_evaluation,
    read_predictions,
)

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.stages.stage import Outcomes
    from pipeline.training.evaluating.evaluator import ApplyJob


@dataclass(slots=True)
class Evaluated(ModelUse):
    """Loss and metrics of a model on a split."""

    figures: dict[str, float | None] = field(default_factory=dict)  # loss and metrics
    file: str = ""


class EvaluateStage(ApplyStage):
    """A checkpoint and a split in, its loss and metrics out."""

    name = StageName.EVALUATE
    may_be_empty = True
    with_loss = True

    def wanted(self, config: Config) -> bool:
        return config.train.task is not None

    def _path(self, applied: Application) -> Path:
        return evaluation_path(applied.folder.evaluations, applied.split, applied.chosen, applied.made)

    def parts(self, project: Project, applied: Application) -> Path:  # noqa: ARG002
        return evaluation_parts(self._path(applied))

    def read(self, project: Project, applied: Application) -> Figures | None:  # noqa: ARG002
        return read_evaluation(self._path(applied), applied.chosen, applied.made)

    def is_done(self, project: Project, applied: Application) -> bool:
        """Tell whether the figures are there; if so, remove what a kill has left beside them."""
        if self.read(project, applied) is None:
            return False
        shutil.rmtree(self.parts(project, applied), ignore_errors=True)
        return True

    def apply(self, job: ApplyJob) -> Outcomes:
        return evaluate(job)

    def judge(self, project: Project, folder: RunFolder, patience_s: float) -> Evaluated:  # noqa: ARG002
        """Return loss and metrics, by the file about this checkpoint on these items."""
        applied, judged = read_plain(folder.plan(self.name), Application), Evaluated()
        made = self.read(project, applied) if applied.items else None
        judged.take(applied, made)
        if made is not None:
            judged.figures, judged.file = dict(made.figures), str(self._path(applied))
        return judged

    def check(self, project: Project, folder: RunFolder, judged: Evaluated) -> list[str]:  # type: ignore[override]
        """Return remarks, also about figures that are not finite."""
        lost = [name for name, value in judged.figures.items() if value is None]
        return super().check(project, folder, judged) + ([f"not finite: {', '.join(lost)}"] if lost else [])


OF_DIGITS = 8  # of a digest of checkpoint and items, in the name of a folder of predictions
LINES_SHOWN, LETTERS_SHOWN = 4, 160  # of predictions
ALL = "predictions.csv"


@dataclass(slots=True)
class Predicted(ModelUse):
    """The predictions of a model for a split."""

    folder: str = ""
    files: dict[str, int] = field(default_factory=dict)  # their bytes
    lines: list[str] = field(default_factory=list)  # the first
    pictures: list[dict[str, Any]] = field(default_factory=list)  # that the task draws of them, for the run's page


class PredictStage(ApplyStage):
    """A checkpoint and items in, predictions for each item out."""

    name = StageName.PREDICT

    def wanted(self, config: Config) -> bool:
        return config.train.predict.for_training  # else people say what they want predictions of

    def inspect(self, project: Project) -> None:
        """Raise where nothing can be predicted, also for a task without outputs()."""
        super().inspect(project)
        train = self.use(project).project.config.train
        if not callable(getattr(load_task(train.task, train.options, beside=project.beside), "outputs", None)):
            what = "the task has no outputs(), so it cannot predict"
            remedy = "define outputs(self, model, batch) -> {name: an entry for each item}   (pipeline/protocol.py)"
            raise ConfigError(what, where="train.task", remedy=remedy)
        if project.config.train.predict.parquet:
            from pipeline.training.evaluating.embedding_files import import_arrow

            import_arrow()

    def _folder(self, project: Project, applied: Application) -> Path:
        """Return the folder of a checkpoint's predictions for a data set, which no other ones share."""
        if project.config.train.predict.for_training:
            return project.config.train.predict.folder
        model, data = applied.chosen.model or applied.prepared.name, project.config.data.path.name.partition(".")[0]
        of = content_digest(f"{applied.chosen.digest}-{applied.made}".encode()).hex()[:OF_DIGITS]
        return project.config.train.predict.folder / "-".join((model, data, applied.split or "all", of))

    def parts(self, project: Project, applied: Application) -> Path:
        return prediction_parts(self._folder(project, applied), applied.chosen, applied.made)

    def read(self, project: Project, applied: Application) -> Predictions | None:
        verify_bytes = project.config.cache.verify_bytes
        return read_predictions(self._folder(project, applied), applied.chosen, applied.made, verify_bytes)

    def apply(self, job: ApplyJob) -> Outcomes:
        return predict(job)

    def judge(self, project: Project, folder: RunFolder, patience_s: float) -> Predicted:  # noqa: ARG002
        """Return the predictions, by the folder's own record of its files and their sizes."""
        applied, judged = read_plain(folder.plan(self.name), Application), Predicted()
        made = self.read(project, applied) if applied.items else None
        judged.take(applied, made)
        if made is not None:
            path = self._folder(project, applied)
            judged.folder = str(path)
            judged.files = {name: size for name, (size, _) in made.files.items() if "/" not in name}
            if PICTURES in made.files:
                judged.pictures = json.loads((path / PICTURES).read_text())
            own = (name for name in judged.files if name.endswith(".csv") and name != ALL)
            with (path / next(own, ALL)).open(encoding="utf-8", newline="") as file:
                judged.lines = [line.rstrip("\r\n")[:LETTERS_SHOWN] for line in islice(file, LINES_SHOWN)]
        return judged
