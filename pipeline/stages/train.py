"""Stage train: finds how far the training is, plans the rest, trains, and reports the result."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.config.masking import without_secrets_in
from pipeline.dataset.early_items import refuse_other_width, refuse_sequences, refuse_unknown_splits
from pipeline.dataset.loading import rows_of, source_of
from pipeline.dataset.reader_items import refuse_crop, unmade
from pipeline.dataset.worklist import Shard, StageSurvey, read_shard
from pipeline.errors import ConfigError
from pipeline.journal.attempts import left_out_items
from pipeline.journal.ledger import LedgerReader
from pipeline.journal.run_folder import writing_run
from pipeline.planning.accepted_code import FLAG
from pipeline.planning.prepare import (
    code_of,
    folder_of,
    items_of,
    phase_items,
    prepare,
    steps_of,
    tables_of,
    task_sizes,
    trained_table,
    validation_items,
    with_task,
)
from pipeline.planning.rank_setup import device_here, join_ranks, log_line, staged
from pipeline.planning.training_work import Work, configs_of_stages
from pipeline.project.run_code import blamed
from pipeline.records import EventKind, Reason
from pipeline.report.run_summary import OUT_OF_MEMORY
from pipeline.stage_names import StageName
from pipeline.stages.graph import remake_graph
from pipeline.stages.stage import Judged, Stage
from pipeline.training.prepared import ModelFolder, Prepared
from pipeline.training.state import TRAINING, TrainingState
from pipeline.units import first_few

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from torch import nn

    from pipeline.config.schema import Config
    from pipeline.config.schema_train import TrainSection
    from pipeline.journal.run_folder import RunFolder
    from pipeline.memory.footprint import MemoryChoice
    from pipeline.project.project import Project
    from pipeline.protocol import Task
    from pipeline.records import TaskContext
    from pipeline.stages.stage import Outcomes
    from pipeline.training.checkpoints.checkpoint import Checkpoint
    from pipeline.training.checkpoints.model_claim import ModelClaim
    from pipeline.training.loop.metrics_log import MedianStop
    from pipeline.training.ranks import Ranks
    from pipeline.training.step.step import Step

NOTHING = dict.fromkeys(("items", "refused", "unusable", "cached", "missing", "waiting"), 0)
COURSE = 8  # figures that show how a training went
UNPLANNED_BYTES = 2 << 30  # of a process, until there is a plan
CALLED = {"code": "the task's code", "table": "the data set", "embeddings": "the encoder", "crop": "the crop"}


class TrainStage(Stage):
    """A task, graphs and embeddings in, a trained model out."""

    name = StageName.TRAIN
    needs = (StageName.SCAN, StageName.EMBED, StageName.GRAPH)
    of_sequences = False
    together = True
    counts_items = False
    unit = "step"

    def wanted(self, config: Config) -> bool:
        return with_task(config)

    def needed(self, config: Config) -> tuple[StageName, ...]:
        """Return the stages before it: also that which predicts what is trained on."""
        return (*self.needs, StageName.PREDICT) if config.train.predict.for_training else self.needs

    def inspect(self, project: Project) -> None:
        """Raise where nothing can be trained: there are no structures, or the task cannot be loaded."""
        from pipeline.project.run_code import load_task

        config = project.config
        refuse_sequences(config)
        refuse_crop(config)
        code_of(project)
        if not self.is_sweep:  # whose points share a table
            refuse_unknown_splits(project)
        refuse_misfits(project, load_task(config.train.task, config.train.options, beside=project.beside))

    def survey(self, project: Project, folder: RunFolder | None, at_once: int) -> StageSurvey:  # noqa: ARG002 - one task
        """Find how far the training is, and plan the rest."""
        prepared = prepare(project)
        if prepared is None:
            return unprepared(project, folder)
        progress = progress_of(folder_of(project, prepared))
        left = (
            0
            if progress.is_over(prepared.epochs, project.config.train.validation)
            else max(1, steps_of(project, prepared) - progress.done)
        )
        counts = NOTHING | {"items": progress.done + left, "cached": progress.done, "missing": left}
        if folder is not None:
            with writing_run(folder.plan(self.name)):
                folder.plan(self.name).write_text(json.dumps(prepared.to_json()))
        shards = (Shard(progress.done, progress.done + left, 1),) if left else ()  # one thing, which cannot be halved
        return StageSurvey(counts, shards, bytes=0, cost=float(left))

    def mem_bytes(self, project: Project) -> int:
        """Return the memory of a node: as planned, or a default until there is a plan."""
        prepared = prepare(project)
        return prepared.mem_bytes if prepared else project.config.cluster.train.ranks_per_node * UNPLANNED_BYTES

    def gpu_bytes(self, project: Project) -> int:
        """Return the memory that a GPU must have at least, by the plan."""
        prepared = prepare(project)
        return max(phase.reserved_bytes for phase in prepared.phases) if prepared else 0

    def recipe(self, project: Project) -> Mapping[str, Any]:
        """Return the choices under which measurements of its jobs are kept."""
        train = project.config.train
        return {"task": train.task, "options": dict(train.options), "batch": train.effective_batch}

    def work(self, project: Project, folder: RunFolder, task: int, tell: TaskContext) -> Outcomes:
        """Train, as one of the ranks."""
        prepared = Prepared.read(folder.plan(self.name))
        yield from train_there(project, folder, prepared, tell, read_shard(folder, self.name, task).start)

    def judge(self, project: Project, folder: RunFolder, patience_s: float) -> Trained:  # noqa: ARG002
        """Return the result of the training, by its newest intact checkpoint, every byte of which is read."""
        judged = trained_so_far(project, Prepared.read(folder.plan(self.name)))
        judged.left_out(damaged_items(folder))
        return judged

    def check(self, project: Project, folder: RunFolder, judged: Trained) -> list[str]:  # noqa: ARG002
        """Return warnings about what was not validated, skipped items and recoveries from running out of memory."""
        skipped = f"{judged.skipped:,} items are too large for any plan and were skipped (train.oversize: skip)"
        ooms = f"{OUT_OF_MEMORY} {judged.ooms:,} times; no step was lost   (pipeline replay {folder.name} shows where)"
        whose = "1 item was skipped: its" if judged.damaged == 1 else f"{judged.damaged:,} items were skipped: their"
        remedy = "pipeline cache repair --yes; move the model away to train again on all items"
        damaged = f"{whose} records in the cache are damaged ({first_few(judged.damaged_items)})   ({remedy})"
        counted = ((judged.skipped, skipped), (judged.ooms, ooms), (judged.damaged, damaged))
        return [*judged.remarks, *(text for count, text in counted if count)]


def unprepared(project: Project, folder: RunFolder | None, tasks: int = 1) -> StageSurvey:
    """Return what is known while what is trained on is not there; raise in a run, where it should be."""
    if folder is not None:
        what = f"{unmade(project.config)}: nothing to train on"
        raise ConfigError(what, where=str(project.config.cluster.runs), remedy="omit --only")
    return StageSurvey({**NOTHING, "unplanned": 1}, tuple(Shard(0, 1, 1) for _ in range(tasks)))


def train_there(
    project: Project,
    folder: RunFolder,
    prepared: Prepared,
    tell: TaskContext,
    before: int,
    prune: MedianStop | None = None,
) -> Outcomes:
    """Train as one of the ranks, after the first steps that were done `before`; `prune` may end it early."""
    from pipeline.training.loop.train import train

    ranks = join_ranks(project, folder, prepared, tell)
    try:
        with ranks.patient("claiming the model's folder"):
            claim = _claimed(folder_of(project, prepared), folder) if ranks.rank == 0 else None
        mend = partial(remake_graph, project, folder)
        with nullcontext() if claim is None else closing(claim):
            project = staged(project, partial(tables_of, project, prepared), ranks, tell, log_line)
            job = replace(job_of(project, folder, prepared, tell, ranks, mend), prune=prune, claim=claim)
            with blamed(Work.of(project.config, beside=project.beside).task):
                yield from train(job, before)
    except BaseException as error:
        why = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else ""
        ranks.close(why)  # sent to the other ranks
        raise
    ranks.close()


def _claimed(made: ModelFolder, folder: RunFolder) -> ModelClaim:
    from pipeline.training.checkpoints.model_claim import ModelClaim

    with writing_run(made.path, "train.models"):
        return ModelClaim(made.writers, folder.path)


def trained_so_far(project: Project, prepared: Prepared) -> Trained:
    """Return the result of a training, by its newest intact checkpoint, every byte of which is read."""
    from pipeline.training.checkpoints.checkpoint import CheckpointFolder
    from pipeline.training.loop.metrics_log import read_epochs

    made, settings = folder_of(project, prepared), project.config.train.validation
    newest = latest(made)
    identity = newest.sealed.identity if newest else {}
    checkpoint = CheckpointFolder(made.checkpoints, last=1, best=0, identity=identity, tell=log_line).newest()
    judged = Trained(folder=str(made.path), monitor=settings.monitor)
    progress = TrainingState.from_json(checkpoint.data[TRAINING]) if checkpoint else TrainingState()
    judged.left_out(sorted(progress.damaged))
    if progress.killed:
        remedy = "move the model away to train again on all items"
        killed = first_few(sorted(progress.killed))
        judged.remarks.append(f"trained without {killed}, on which its process died   ({remedy})")
    judged.items = judged.steps = progress.done
    judged.epochs = progress.epoch
    if left := steps_left(project, prepared, progress):
        judged.undone = left
        judged.first_undone = f"step {progress.done + 1}"
    epochs = read_epochs(made.path) if made.path.exists() else []
    if epochs:
        figures = [epoch.to_json() for epoch in epochs]
        judged.course = course_of(figures, settings.monitor)
        judged.last, judged.best = figures[-1], best_of(figures, settings.monitor, lower=settings.lower_is_better)
        judged.remarks += unmonitored(figures, settings.monitor)
        judged.ooms, judged.cropped = sum(epoch.ooms for epoch in epochs), max(epoch.cropped for epoch in epochs)
        remedied = Counter[str]()
        for epoch in epochs:
            remedied.update(epoch.remedied)
        judged.remedied = dict(sorted(remedied.items()))
        judged.skipped = len(prepared.skipped)
        if left_out := sum(epoch.left_out_steps for epoch in epochs):
            made_steps = sum(epoch.steps for epoch in epochs)
            what = f"{left_out:,} of {left_out + made_steps:,} steps were not finite and were skipped"
            judged.remarks.append(f"{what} (train.nan: {project.config.train.nan})")
    judged.remarks += unvalidated(project, prepared)
    return judged


def progress_of(folder: ModelFolder) -> TrainingState:
    """Return how far a training has come, by its newest checkpoint."""
    newest = latest(folder)
    return TrainingState.from_json(newest.data[TRAINING]) if newest else TrainingState()


def steps_left(project: Project, prepared: Prepared, progress: TrainingState) -> int:
    """Return how many steps a training still needs; at least one unless it is over."""
    is_over = progress.is_over(prepared.epochs, project.config.train.validation)
    return 0 if is_over else max(1, steps_of(project, prepared) - progress.done)


def latest(folder: ModelFolder) -> Checkpoint | None:
    """Return the newest checkpoint by its manifest; None where there is none."""
    from pipeline.training.checkpoints.checkpoint import latest_checkpoint

    return latest_checkpoint(folder.checkpoints)


def job_of(
    project: Project,
    folder: RunFolder,
    prepared: Prepared,
    tell: TaskContext,
    ranks: Ranks,
    make_anew: Callable[[str, bytes], bool] | None = None,
    *,
    device: str | None = None,
) -> Any:
    """Return the job of a rank, on the device that its process was given, or another.

    Without `make_anew`, for graphs, damage is an error.
    """
    from pipeline.memory.footprint import MemoryChoice
    from pipeline.training.items.item_source import DamagedItems
    from pipeline.training.loop.train import Job

    config = project.config
    work = Work.of(config, beside=project.beside)
    choice: MemoryChoice = MemoryChoice(
        precision=prepared.precision, checkpointing=prepared.checkpointing, offload=prepared.offload, shards=1
    )
    validation = validation_items(project, prepared)  # what is read for them is gone when the others are read
    table = trained_table(project, prepared)
    sizes = task_sizes(project, prepared, table)
    made = folder_of(project, prepared)
    if ranks.rank == 0:
        with writing_run(made.path, "train.models"):
            made.path.mkdir(parents=True, exist_ok=True)
            made.prepared.write_text(json.dumps(prepared.to_json()))
            made.settings.write_text(json.dumps(without_secrets_in(config.model_dump(mode="json")), indent=1))
    ranks.exchange({})
    device = device or device_here(config.cluster.train.gpus)
    damaged = None
    if make_anew is not None:
        spare, root = math.floor(config.data.max_rejected_fraction * len(table)), str(project.cache.root)
        damaged = DamagedItems(make_anew, len(table), spare, root, refuse=tell.refuse, say=log_line)
    return Job(
        train=config.train,
        prepared=prepared,
        folder=made,
        make_step=lambda begin: _step(work, choice, ranks, device, begin, is_spread=prepared.sharded),
        source=lambda items: source_of(project, items, damaged),
        embeddings=lambda: rows_of(project),
        phases=[(phase, phase_items(table, sizes, phase)) for phase in prepared.phases],
        validation=validation,
        ranks=ranks,
        tell=tell,
        say=log_line if ranks.rank == 0 else lambda _: None,
        remember=lambda peak_bytes, step_s: remember_peak(config, folder, work, prepared, choice, peak_bytes, step_s),
        task=work.task,
        stage_tasks={name: Work.of(one, beside=project.beside).task for name, one in configs_of_stages(config).items()},
        leave_out=frozenset(left_out_items(folder, StageName.TRAIN)),
        damaged=damaged,
        settings=without_secrets_in(config.model_dump(mode="json")),
    )


def damaged_items(folder: RunFolder) -> list[str]:
    """Return the items that a training left out when it found their records damaged."""
    told = (event.data for event in LedgerReader(folder, whole=False).fresh() if event.kind is EventKind.REFUSED)
    return sorted({data["key"] for data in told if data["reason"] == Reason.DAMAGED.value})


def novelty(project: Project) -> list[str]:
    """Return remarks on a training that begins: how it differs from an earlier one of its task, and what it lacks."""
    prepared = prepare(project)
    if prepared is None or folder_of(project, prepared).path.exists():
        return []
    kind = prepared.name.rpartition("-")[0]
    known = sorted(project.config.train.models.glob(f"{kind}-*/prepared.json"), key=lambda path: path.stat().st_mtime)
    if not known:
        return unvalidated(project, prepared)
    before = json.loads(known[-1].read_text()).get("recipe", {})
    names = [name for name in {**before, **prepared.recipe} if before.get(name) != prepared.recipe.get(name)]
    changed = ", ".join(CALLED.get(name, f"train.{name}") for name in names)
    way_back = f"   (to continue it: {FLAG})" if names == ["code"] else ""
    new = f"a new training: {changed} changed since {known[-1].parent.name}, which is kept{way_back}"
    return [new, *unvalidated(project, prepared)]


def unvalidated(project: Project, prepared: Prepared) -> list[str]:
    """Return a remark where no item is in the split that is to validate, though there are splits."""
    table, wanted = items_of(project, prepared.table, None), project.config.train.validation.split
    if wanted is None or wanted in table.splits or not any(table.splits):
        return []
    return [f"no validation: no item is in split {wanted!r} (train.validation.split); {table.named_splits()}"]


def refuse_misfits(project: Project, task: Task) -> None:
    """Raise where the width of embeddings, or pretrained weights, do not go with the task."""
    refuse_other_width(project, task)
    if project.config.train.pretrained is not None:
        refuse_unfit_weights(task, project.config.train)


def refuse_unfit_weights(task: Task, train: TrainSection, path: Path | None = None) -> None:
    """Raise where the configured weights, or a file's to be applied whole, are not of the task's model.

    That is made without memory if it can be.
    """
    import torch

    from pipeline.training.checkpoints.trained_weights import fitting_weights

    try:
        with torch.device("meta"):
            model = task.model()
    except Exception:  # noqa: BLE001 - one that needs numbers while it is made
        model = task.model()
    partial = train.pretrained_partial and path is None
    if (file := path or train.pretrained) is not None:
        fitting_weights(model, file, partial=partial, train=train)


def _step(
    work: Work, choice: MemoryChoice, ranks: Ranks, device: str, begin: Callable[[nn.Module], None], *, is_spread: bool
) -> Step:
    """Return the step to train, sharded over ranks where `is_spread`; `begin` loads its initial weights."""
    if is_spread and ranks.world > 1:
        return work.spread(choice, ranks, device=device, begin=begin)
    return work.begun(choice, device=device, begin=begin)


def remember_peak(
    config: Config,
    folder: RunFolder,
    work: Work,
    prepared: Prepared,
    choice: MemoryChoice,
    peak_bytes: int,
    step_s: float,
) -> None:
    """Record the peak memory of an epoch on a GPU, for later plans of the model."""
    from pipeline.device.accelerator import Card
    from pipeline.memory.hardware.gpus import known_name
    from pipeline.memory.history import Peak
    from pipeline.planning.probe import model_name
    from pipeline.planning.probe_job import record_peak, torch_of

    card = Card(device_here(1))
    gpu = known_name(card.name)
    free_bytes, total_bytes = card.free_and_total_bytes()
    peak = Peak(
        model=model_name(work, choice),
        card=gpu,
        gpu=gpu,
        torch=torch_of(config),
        driver="",
        allocator=prepared.allocator,
        sizes="an epoch",
        predicted_bytes=max(phase.reserved_bytes for phase in prepared.phases),
        measured_bytes=peak_bytes,
        died=False,
        outside_bytes=total_bytes - free_bytes - card.memory("reserved"),
        predicted_s=prepared.step_s,
        step_s=step_s,
        at=time.time(),
    )
    record_peak(config, folder.name, peak)


@dataclass(slots=True)
class Trained(Judged):
    """The result of a training."""

    folder: str = ""
    epochs: int = 0
    steps: int = 0
    last: dict[str, Any] = field(default_factory=dict)  # figures of the last epoch
    best: dict[str, Any] = field(default_factory=dict)  # of the best epoch
    course: list[float] = field(default_factory=list)  # the monitored figure, from the first epoch to the last
    monitor: str = ""
    ooms: int = 0
    skipped: int = 0
    damaged: int = 0  # items that were left out, now or in the runs before, as their records were damaged
    damaged_items: list[str] = field(default_factory=list)  # these
    cropped: int = 0
    remarks: list[str] = field(default_factory=list)  # on its validations, and on what it was trained without
    remedied: dict[str, int] = field(default_factory=dict)  # items for which each remedy was used, over all epochs

    def left_out(self, items: Iterable[str]) -> None:
        """Count items whose records were damaged, each once."""
        self.damaged_items = sorted({*self.damaged_items, *items})
        self.damaged = len(self.damaged_items)


def course_of(epochs: list[dict[str, Any]], monitor: str) -> list[float]:
    """Return the figures by `monitor` of the first epoch, the last and a few between."""
    known = [value for epoch in epochs if (value := epoch["validation"].get(monitor)) is not None]
    places = sorted({round(place * (len(known) - 1) / (COURSE - 1)) for place in range(COURSE)}) if known else []
    return [known[place] for place in places]


def unmonitored(epochs: list[dict[str, Any]], monitor: str) -> list[str]:
    """Return a remark where validations have figures, and none that is to tell the best one."""
    known = dict.fromkeys(name for epoch in epochs for name in epoch["validation"])
    if not known or monitor in known:
        return []
    return [f"the validation has no metric {monitor!r} (train.validation.monitor); available: {', '.join(known)}"]


def best_of(epochs: list[dict[str, Any]], monitor: str, *, lower: bool) -> dict[str, Any]:
    """Return the figures of the best epoch by `monitor`; empty where no epoch has that."""
    known = [epoch for epoch in epochs if epoch["validation"].get(monitor) is not None]
    choose: Callable[..., dict[str, Any]] = min if lower else max
    return choose(known, key=lambda epoch: epoch["validation"][monitor]) if known else {}
