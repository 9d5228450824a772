"""Stage evaluate in a run: which figures are known already; one rank's work; what came of it."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.project.run_code import blamed
from pipeline.runs.model.node_staging import staged
from pipeline.runs.model.training_work import Work
from pipeline.runs.workflow import model_use
from pipeline.runs.workflow.model_use import Ahead, Applied, made_folder
from pipeline.runs.workflow.train_stage import said, together

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.records import Reason, Tell
    from pipeline.runs.dataset.worklist import Found
    from pipeline.stages.evaluate import Figures

NAME = "evaluate"


def inspect(project: Project) -> None:
    """Refuse what cannot be evaluated."""
    model_use.inspect(project, NAME)


def wanted(config: Config) -> bool:
    """Tell whether `all` means it."""
    return config.train.task is not None


def survey(project: Project, folder: RunFolder | None, _at_once: int) -> Found:
    """See whether the figures of the split are known."""
    return model_use.survey(project, folder, NAME, _is_done, _parts)


def _path(project: Project, ahead: Ahead) -> Path:
    from pipeline.stages.evaluate import path_of

    return path_of(made_folder(project, ahead).evaluations, ahead.split, ahead.chosen, ahead.made)


def _parts(project: Project, ahead: Ahead) -> Path:
    from pipeline.stages.evaluate import parts_of

    return parts_of(_path(project, ahead))


def _read(project: Project, ahead: Ahead) -> Figures | None:
    from pipeline.stages.evaluate import read

    return read(_path(project, ahead), ahead.chosen, ahead.made)


def _is_done(project: Project, ahead: Ahead) -> bool:
    """Say whether the figures are there; what a kill has left beside them goes."""
    if _read(project, ahead) is None:
        return False
    shutil.rmtree(_parts(project, ahead), ignore_errors=True)
    return True


def work(
    project: Project, folder: RunFolder, _task: int, tell: Tell, _part: tuple[int, int] = (0, 1)
) -> Generator[Reason | None, None, None]:
    """Evaluate, as one rank of those that there are."""
    from pipeline.stages.evaluate import evaluate

    ahead, project = Ahead.read(folder.plan(NAME)), model_use.lent(project, NAME)
    with closing(together(project, folder, ahead.prepared, tell)) as ranks:
        project = staged(project, [model_use.items_of(project, ahead.prepared, NAME)], ranks, tell, said)
        job = model_use.job_of(project, folder, NAME, tell, ranks, _parts, with_loss=True)
        with blamed(Work.of(project.config, beside=project.beside).task):
            yield from evaluate(job, made_folder(project, ahead).evaluations, ahead.split)


@dataclass(slots=True)
class Evaluated(Applied):
    """What a model comes to on a split."""

    figures: dict[str, float | None] = field(default_factory=dict)  # loss and metrics
    file: str = ""


def judge(project: Project, folder: RunFolder, _patience_s: float) -> Evaluated:
    """Say what the model comes to, by the file that tells of this checkpoint on these items."""
    ahead = Ahead.read(folder.plan(NAME))
    made = _read(project, ahead) if ahead.items else None
    found: Evaluated = model_use.judged(Evaluated, project, ahead, made)
    if made is not None:
        found.figures, found.file = dict(made.figures), str(_path(project, ahead))
    return found


def check(_project: Project, _folder: RunFolder, evaluated: Evaluated) -> list[str]:
    """Return what deserves a word."""
    lost = [name for name, value in evaluated.figures.items() if value is None]
    return model_use.remarks(evaluated) + ([f"not finite: {', '.join(lost)}"] if lost else [])
