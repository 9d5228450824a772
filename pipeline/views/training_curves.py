"""The epochs, curves and recorded steps of a training, of bounded size."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from pipeline.codec import read_if_whole
from pipeline.planning.trainings import Training as Planned
from pipeline.report.html.charts import thinned
from pipeline.training.loop.metrics_log import STEP, read_epochs, read_figures
from pipeline.training.prepared import ModelFolder, Prepared

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import StageStatus
    from pipeline.training.loop.metrics_log import Epoch

TRAIN = "train"
POINTS = 500  # of a curve
EPOCH_ROWS = 100
SERIES = 16  # curves of a kind: terms of a loss, metrics
# As `training/forensics/step_bundle.py` names them, which needs torch: this has to start without it.
_BUNDLE = re.compile(r"step-(\d{8,})-([a-z]+)-rank-(\d+)(?:-\d+)?")


@dataclass(frozen=True, slots=True)
class Training:
    """What is known of the training of a run."""

    prepared: Prepared
    folder: Path
    monitor: str
    on_gpu: bool
    newest: Sequence[Epoch]  # all of them
    curves: Mapping[str, Sequence[tuple[float, float]]]  # of steps
    bundles: Sequence[Mapping[str, Any]]  # recorded steps: `step`, `kind`, `rank`, and how to run one `again`

    @property
    def epochs(self) -> list[Epoch]:
        """The epochs that are drawn."""
        return thinned(self.newest, POINTS)

    @property
    def losses(self) -> list[str]:
        return _names(epoch.loss for epoch in self.epochs)[:SERIES]

    @property
    def metrics(self) -> list[str]:
        return _names(epoch.validation for epoch in self.epochs)

    @property
    def own_metrics(self) -> list[str]:
        """The validation metrics that are not terms of the loss."""
        return [name for name in self.metrics if not name.startswith("loss")]

    @property
    def survived(self) -> list[Epoch]:
        """The last epochs with steps that ran out of memory and went on."""
        return [epoch for epoch in self.newest[-EPOCH_ROWS:] if epoch.ooms or epoch.remedied]

    def predicted_bytes(self, epoch: int) -> int | None:
        """Return the memory that was planned for an epoch: of a GPU, else of a node, if one process has it alone."""
        if not self.on_gpu:
            return self.prepared.mem_bytes if self.prepared.ranks == 1 else None
        return self.prepared.phases[self.prepared.phase_of(epoch - 1)].reserved_bytes


def training_of(folder: RunFolder, config: Config, stage: StageStatus | None) -> Training | None:
    """Return what is known of the training of a run; None where it has no plan that this version can read."""
    trainings = read_if_whole(folder.plan(TRAIN), tuple[Planned, ...]) or ()
    prepared = trainings[0].prepared if len(trainings) == 1 else None
    if prepared is None:
        return None
    made = ModelFolder(config.train.models / prepared.name)
    every, census = read_epochs(made.path), stage.census or {} if stage else {}
    last = min(prepared.epochs, census.get("epochs", prepared.epochs))  # a later run may have trained on
    epochs = [epoch for epoch in every if epoch.epoch <= last]
    steps = epochs[-1].step if epochs and len(epochs) < len(every) else sys.maxsize
    names = sorted(path.name for path in made.bundles.iterdir()) if made.bundles.is_dir() else []
    recorded = [(int(match[1]), match[2], int(match[3])) for match in map(_BUNDLE.fullmatch, names) if match]
    return Training(
        prepared=prepared,
        folder=made.path,
        monitor=config.train.validation.monitor,
        on_gpu=bool(stage and any(job.gpus for job in stage.jobs.values())) or bool(config.cluster.train.gpus),
        newest=epochs,
        curves=_curves([figures for figures in read_figures(made.path) if figures[STEP] <= steps]),
        bundles=[
            {"step": step, "kind": kind, "rank": rank, "again": f"pipeline replay {folder.name} --step {step}"}
            for step, kind, rank in recorded
            if step <= steps
        ],
    )


def _names(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names that occur in records, in order of first appearance."""
    return list(dict.fromkeys(chain.from_iterable(records)))


def _curves(figures: Sequence[Mapping[str, Any]]) -> dict[str, Sequence[tuple[float, float]]]:
    """Return each figure that was recorded every few steps as a curve."""
    names = [name for name in _names(figures) if name != STEP][: 2 * SERIES]
    curves = {
        name: [(record[STEP], record[name]) for record in figures if record.get(name) is not None] for name in names
    }
    return {name: thinned(curve, POINTS) for name, curve in curves.items() if curve}
