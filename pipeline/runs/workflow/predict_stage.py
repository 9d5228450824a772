"""Stage predict in a run: which predictions are there already; one rank's work; what came of it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from pipeline.errors import ConfigError
from pipeline.project.run_code import blamed
from pipeline.runs.model.node_staging import staged
from pipeline.runs.model.training_work import Work
from pipeline.runs.workflow import model_use
from pipeline.runs.workflow.model_use import Ahead, Applied
from pipeline.runs.workflow.train_stage import said, together

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.records import Reason, Tell
    from pipeline.runs.dataset.worklist import Found
    from pipeline.stages.predict import Predictions

NAME = "predict"
LINES_SHOWN = 4
LETTERS_SHOWN = 160


def inspect(project: Project) -> None:
    """Refuse what cannot be predicted: a task that says nothing of its items, too."""
    task = model_use.inspect(project, NAME)
    if not callable(getattr(task, "outputs", None)):
        remedy = "give it outputs(self, model, batch) -> {name: an entry for each item}   (pipeline/protocol.py)"
        raise ConfigError("the task has no outputs(): there is nothing to predict", where="train.task", remedy=remedy)


def survey(project: Project, folder: RunFolder | None, _at_once: int) -> Found:
    """See whether the predictions are there."""
    return model_use.survey(project, folder, NAME, lambda project, ahead: _read(project, ahead) is not None, _parts)


def _folder(project: Project, ahead: Ahead) -> Path:
    """Return where the predictions of a model on a split are."""
    return project.config.train.predict.folder / f"{_model(ahead)}-{ahead.split or 'all'}"


def _model(ahead: Ahead) -> str:
    return ahead.chosen.model or ahead.prepared.name


def _parts(project: Project, ahead: Ahead) -> Path:
    from pipeline.stages.predict import parts_of

    return parts_of(_folder(project, ahead), ahead.chosen, ahead.made)


def _read(project: Project, ahead: Ahead) -> Predictions | None:
    from pipeline.stages.predict import read

    return read(_folder(project, ahead), ahead.chosen, ahead.made, project.config.cache.verify_bytes)


def work(
    project: Project, folder: RunFolder, _task: int, tell: Tell, _part: tuple[int, int] = (0, 1)
) -> Generator[Reason | None, None, None]:
    """Predict, as one rank of those that there are."""
    from pipeline.stages.predict import predict

    ahead, project = Ahead.read(folder.plan(NAME)), model_use.lent(project, NAME)
    with closing(together(project, folder, ahead.prepared, tell)) as ranks:
        project = staged(project, [model_use.items_of(project, ahead.prepared, NAME)], ranks, tell, said)
        job = model_use.job_of(project, folder, NAME, tell, ranks, _parts, with_loss=False)
        with blamed(Work.of(project.config, beside=project.beside).task):
            yield from predict(job, _folder(project, ahead), _model(ahead), ahead.split)


@dataclass(slots=True)
class Predicted(Applied):
    """What a model has said of a split."""

    folder: str = ""
    files: dict[str, int] = field(default_factory=dict)  # their bytes
    lines: list[str] = field(default_factory=list)  # the first


def judge(project: Project, folder: RunFolder, _patience_s: float) -> Predicted:
    """Say what was predicted, by what is said in the folder, and the bytes of its files."""
    ahead = Ahead.read(folder.plan(NAME))
    made = _read(project, ahead) if ahead.items else None
    found: Predicted = model_use.judged(Predicted, project, ahead, made)
    if made is not None:
        path = _folder(project, ahead)
        found.folder = str(path)
        found.files = {name: size for name, (size, _) in made.files.items()}
        found.lines = _first_lines(path / "predictions.csv")
    return found


def _first_lines(path: Path) -> list[str]:
    with path.open(encoding="utf-8", newline="") as file:
        return [line.rstrip("\r\n")[:LETTERS_SHOWN] for line in islice(file, LINES_SHOWN)]


def check(_project: Project, _folder: RunFolder, predicted: Predicted) -> list[str]:
    """Return what deserves a word."""
    return model_use.remarks(predicted)
