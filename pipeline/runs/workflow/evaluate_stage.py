"""Stage evaluate: loss and metrics of a trained model on a split."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.runs.workflow.apply_stage import Application, ApplyStage, ModelUse
from pipeline.stage_names import StageName

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.runs.workflow.stage import Outcomes
    from pipeline.stages.apply import Figures
    from pipeline.training.evaluating.apply_model import ApplyJob


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
        from pipeline.stages.apply import evaluation_path

        return evaluation_path(applied.folder.evaluations, applied.split, applied.chosen, applied.made)

    def parts(self, project: Project, applied: Application) -> Path:  # noqa: ARG002
        from pipeline.stages.apply import evaluation_parts

        return evaluation_parts(self._path(applied))

    def read(self, project: Project, applied: Application) -> Figures | None:  # noqa: ARG002
        from pipeline.stages.apply import read_evaluation

        return read_evaluation(self._path(applied), applied.chosen, applied.made)

    def is_done(self, project: Project, applied: Application) -> bool:
        """Tell whether the figures are there; if so, remove what a kill has left beside them."""
        if self.read(project, applied) is None:
            return False
        shutil.rmtree(self.parts(project, applied), ignore_errors=True)
        return True

    def apply(self, project: Project, applied: Application, job: ApplyJob) -> Outcomes:  # noqa: ARG002
        from pipeline.stages.apply import evaluate

        return evaluate(job, applied.folder.evaluations, applied.split)

    def judge(self, project: Project, folder: RunFolder, patience_s: float) -> Evaluated:  # noqa: ARG002
        """Return loss and metrics, by the file about this checkpoint on these items."""
        applied, judged = Application.read(folder.plan(self.name)), Evaluated()
        made = self.read(project, applied) if applied.items else None
        judged.take(applied, made)
        if made is not None:
            judged.figures, judged.file = dict(made.figures), str(self._path(applied))
        return judged

    def check(self, project: Project, folder: RunFolder, judged: Evaluated) -> list[str]:  # type: ignore[override]
        """Return remarks, also about figures that are not finite."""
        lost = [name for name, value in judged.figures.items() if value is None]
        return super().check(project, folder, judged) + ([f"not finite: {', '.join(lost)}"] if lost else [])
