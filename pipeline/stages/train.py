"""Stage train: finds the progress of a training, plans the rest, trains, and reports the result."""

from __future__ import annotations

import json
import math
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.codec import write_plain
from pipeline.command_line import Command
from pipeline.config.masking import without_secrets_in
from pipeline.dataset.early_items import refuse_other_width, refuse_sequences, refuse_unknown_splits
from pipeline.dataset.loading import rows_of, source_of
from pipeline.dataset.reader_items import refuse_crop, unmade
from pipeline.dataset.worklist import Shard, StageSurvey, read_shard
from pipeline.device.host import keep_freed_memory, trim_heap
from pipeline.device.kinds import CPU
from pipeline.errors import ConfigError
from pipeline.journal.attempts import left_out_items
from pipeline.journal.run_folder import writing_run
from pipeline.journal.run_status import State
from pipeline.planning.prepare import (
    FLAG,
    code_of,
    folder_of,
    has_input,
    known_plan,
    phase_items,
    tables_of,
    trained_table,
    validation_items,
    with_task,
)
from pipeline.planning.rank_setup import device_here, join_ranks, log_line, staged
from pipeline.planning.search import refuse_unsearchable
from pipeline.planning.training_work import Work, configs_of_stages
from pipeline.planning.trainings import (
    PER_GPU,
    Training,
    in_parts,
    known_plans,
    plan_trainings,
    read_trainings,
    sharing_of,
    view_of,
    views_of,
    write_trainings,
)
from pipeline.project.run_code import blamed, load_task
from pipeline.report.run_text import OUT_OF_MEMORY
from pipeline.stage_names import StageName
from pipeline.stages.graph import remake_graph
from pipeline.stages.stage import Stage
from pipeline.stages.trained import (
    SweepResult,
    Trained,
    damaged_items,
    progress_of,
    prunes,
    steps_left,
    swept_so_far,
    trained_so_far,
    unvalidated,
)
from pipeline.training.loop.metrics_log import MedianStop, Pruned
from pipeline.training.prepared import ModelFolder, Prepared
from pipeline.units import first_few

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
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
    from pipeline.training.checkpoints.model_claim import ModelClaim
    from pipeline.training.loop.train import Job
    from pipeline.training.ranks import Ranks
    from pipeline.training.step.step import Step

RECORDS = (StageName.SCAN, StageName.EMBED, StageName.GRAPH)  # stages that make the input of a training
NOTHING = dict.fromkeys(("items", "refused", "unusable", "cached", "missing", "waiting"), 0)
UNPLANNED_BYTES = 2 << 30  # of a process, without a plan
CALLED = {"code": "the task's code", "table": "the data set", "embeddings": "the encoder", "crop": "the crop"}


class TrainStage(Stage):
    """Trains a model from graphs and embeddings; a sweep trains one for each point, each by a task of its own."""

    name = StageName.TRAIN
    needs = RECORDS
    of_sequences = False
    together = True
    counts_items = False
    may_be_empty = True  # e.g. all points of a sweep were cancelled before a step
    unit = "step"

    def wanted(self, config: Config) -> bool:
        return with_task(config)

    def needed(self, config: Config) -> tuple[StageName, ...]:
        return before_training(config)

    def at(self, project: Project, name: str) -> Project:
        """Return the project of a point."""
        return views_of(project)[name] if name else project

    def are_apart(self, config: Config) -> bool:
        return config.train.sweep.is_used

    def parallel(self, config: Config) -> int:
        return config.train.sweep.parallel if self.are_apart(config) else super().parallel(config)

    def sharing(self, project: Project) -> int:
        return sharing_of(project)

    def inspect(self, project: Project) -> None:
        """Raise if nothing can be trained: there are no structures, or the task cannot be loaded."""
        train, world = project.config.train, project.config.cluster.train.world
        if train.sweep.share > 1 and world > 1:
            what = f"{train.sweep.share} trainings cannot share a GPU: each has {world} processes, one a GPU"
            raise ConfigError(what, where=PER_GPU, remedy=Command.submit("train").with_settings((PER_GPU, "1")))
        if (prunes(project) or train.sweep.is_search) and train.validation.split is None:
            what = "a search and pruning need validations, but train.validation.split is null"
            raise ConfigError(what, where="train.sweep", remedy="set a split, or omit --prune")
        if train.sweep.is_search:
            refuse_unsearchable(project.config)
        refuse_sequences(project.config)
        refuse_unknown_splits(project)
        for view in views_of(project).values():
            refuse_crop(view.config)
            code_of(view)
            if known_plan(view) is None:  # a known plan was made with this task, these embeddings and these weights
                task = load_task(view.config.train.task, view.config.train.options, beside=project.beside)
                refuse_misfits(view, task)

    def plan(self, project: Project) -> None:
        plan_trainings(project)

    def survey(self, project: Project, folder: RunFolder | None, at_once: int) -> StageSurvey:  # noqa: ARG002
        """Find the progress of each training, and plan the rest."""
        if folder is not None and project.config.train.sweep.is_search:
            return self._search(project, folder)
        trainings = plan_trainings(project)
        if trainings is None:
            return unprepared(project, folder, len(views_of(project)))
        shares = [share_of(project, training) for training in trainings if training.prepared]
        if folder is not None:
            write_trainings(folder, in_parts(project, trainings))
        cached, missing = (sum(getattr(share, name) for share in shares) for name in ("start", "items"))
        counts = {"items": cached + missing, "cached": cached, "missing": missing}
        counts |= {"refused": len(trainings) - len(shares)}
        shards = tuple(replace(share, items=1) for share in shares if share.items)  # it cannot be split
        return StageSurvey(NOTHING | counts, shards, cost=float(missing))

    def _search(self, project: Project, folder: RunFolder) -> StageSurvey:
        """Begin a search; its first trial becomes its first task."""
        if not has_input(project):
            return unprepared(project, folder)
        write_trainings(folder, ())
        train = project.config.train
        about = {"monitor": train.validation.monitor, "lower": train.validation.lower_is_better}
        return StageSurvey(NOTHING, (), search={"trials": train.sweep.trials, **about})

    def mem_bytes(self, project: Project) -> int:
        """Return the most memory of a node over all trainings, or a default without plans."""
        unplanned = project.config.cluster.train.ranks_per_node * UNPLANNED_BYTES
        return max((prepared.mem_bytes for prepared in known_plans(project)), default=unplanned)

    def gpu_bytes(self, project: Project) -> int:
        """Return the least memory of a GPU; all trainings use the same kind of GPU."""
        sharing = self.sharing(project)
        each = (plan.taken_bytes if sharing > 1 else plan.reserved_bytes for plan in known_plans(project))
        return sharing * max(each, default=0)

    def recipe(self, project: Project) -> Mapping[str, Any]:
        return training_recipe(project)

    def work(self, project: Project, folder: RunFolder, task: int, context: TaskContext) -> Outcomes:
        """Train, as one of the ranks."""
        shard, trainings = read_shard(folder, self.name, task), read_trainings(folder)
        view = next(view_of(project, training) for training in trainings if training.name == shard.of)
        plans = {training.name: training.prepared for training in trainings if training.prepared}
        own = plans.pop(shard.of)
        prune = None
        if prunes(project):
            rivals = [folder_of(view, rival) for rival in plans.values()]
            settings, grace = view.config.train.validation, project.config.train.sweep.grace
            made = folder_of(view, own)
            prune = MedianStop(made, rivals, settings.monitor, lower=settings.lower_is_better, grace=grace)
        yield from train_there(view, folder, own, context, shard.start, prune, sharing=trainings[0].sharing)

    def judge(self, project: Project, folder: RunFolder, patience_s: float) -> Trained:  # noqa: ARG002
        """Return the result of each training by its newest intact checkpoint, verified byte by byte."""
        if self.are_apart(project.config):
            judged: Trained = swept_so_far(project, folder)
        else:
            (training,) = read_trainings(folder)
            assert training.prepared is not None
            judged = trained_so_far(project, training.prepared)
        judged.left_out(damaged_items(folder))
        return judged

    def check(self, project: Project, folder: RunFolder, judged: Trained) -> list[str]:  # noqa: ARG002
        """Return warnings: missing training or validation, skipped items, recovered out-of-memory steps."""
        rows = judged.points if isinstance(judged, SweepResult) else []
        left = [row for row in rows if row["state"] in (State.CANCELLED, State.INFEASIBLE, State.FAILED)]
        skipped = f"{judged.skipped:,} items are too large for any plan and were skipped (train.oversize: skip)"
        ooms = f"{OUT_OF_MEMORY} {judged.ooms:,} times; no step was lost   (pipeline replay {folder.name} shows where)"
        whose = "1 item was skipped: its" if judged.damaged == 1 else f"{judged.damaged:,} items were skipped: their"
        remedy = "pipeline cache repair --yes; move the model away to train again on all items"
        damaged = f"{whose} records in the cache are damaged ({first_few(judged.damaged_items)})   ({remedy})"
        counted = ((judged.skipped, skipped), (judged.ooms, ooms), (judged.damaged, damaged))
        untrained = [f"{row['name']} was not trained: {row['why']}" for row in left]
        return [*untrained, *judged.remarks, *(text for count, text in counted if count)]


def before_training(config: Config) -> tuple[StageName, ...]:
    """Return the stages before a training; `predict` among them if a model predicts its input."""
    return (*RECORDS, StageName.PREDICT) if config.train.predict.for_training else RECORDS


def training_recipe(project: Project) -> Mapping[str, Any]:
    """Return the choices under which measurements of a model's jobs are kept."""
    train = project.config.train
    return {"task": train.task, "options": dict(train.options), "batch": train.effective_batch}


def share_of(project: Project, training: Training) -> Shard:
    """Return the steps of a training from the first undone one; its items are the steps left, none if it is over."""
    assert training.prepared is not None
    view = view_of(project, training)
    made = folder_of(view, training.prepared)
    progress = progress_of(made)
    is_pruned = prunes(project) and Pruned.read(made, progress.epoch) is not None
    left = 0 if is_pruned else steps_left(view, training.prepared, progress)
    return Shard(progress.done, progress.done + left, left, of=training.name)


def unprepared(project: Project, folder: RunFolder | None, tasks: int = 1) -> StageSurvey:
    """Return the survey of a training whose input is not there yet; raise in a run, where it must be."""
    if folder is not None:
        what = f"{unmade(project.config)}: nothing to train on"
        raise ConfigError(what, where=str(project.config.cluster.runs), remedy="omit --only")
    return StageSurvey({**NOTHING, "unplanned": 1}, tuple(Shard(0, 1, 1) for _ in range(tasks)))


def train_there(
    project: Project,
    folder: RunFolder,
    prepared: Prepared,
    context: TaskContext,
    before: int,
    prune: MedianStop | None = None,
    *,
    sharing: int = 1,
) -> Outcomes:
    """Train as one of the ranks, after the steps done `before`; `prune` may end the training early."""
    from pipeline.training.loop.train import train

    ranks = join_ranks(project, folder, prepared, context)
    try:
        with ranks.patient("claiming the model's folder"):
            claim = _claimed(folder_of(project, prepared), folder) if ranks.rank == 0 else None
        mend = partial(remake_graph, project, folder)
        with nullcontext() if claim is None else closing(claim):
            project = staged(project, partial(tables_of, project, prepared), ranks, context, log_line)
            job = replace(job_of(project, folder, prepared, context, ranks, mend), prune=prune, claim=claim)
            job = job if sharing == 1 else in_its_part(job, device_here(project.config.cluster.train.gpus))
            trim_heap()  # of what read the items
            keep_freed_memory(prepared.heap_bytes)
            with blamed(Work.of(project.config, beside=project.beside).task):
                yield from train(job, before)
    except BaseException as error:
        why = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else ""
        ranks.close(why)  # all ranks get it
        raise
    ranks.close()


def _claimed(made: ModelFolder, folder: RunFolder) -> ModelClaim:
    from pipeline.training.checkpoints.model_claim import ModelClaim

    with writing_run(made.path, "train.models"):
        return ModelClaim(made.writers, folder.path)


def in_its_part(job: Job, device: str) -> Job:
    """Return the job of a training that shares its GPU: torch limits it to its part of the memory.

    Its measurements of the GPU include its neighbours, so no later plan uses them.
    """
    from pipeline.device.accelerator import Card

    if device == CPU:
        return job
    fraction = min(1.0, job.prepared.held_bytes / Card(device).total_bytes)
    train = job.train.model_copy(update={"memory_fraction": fraction})
    return replace(job, train=train, remember=lambda _peak_bytes, _step_s: None)


def job_of(
    project: Project,
    folder: RunFolder,
    prepared: Prepared,
    context: TaskContext,
    ranks: Ranks,
    rebuild: Callable[[str, bytes], bool] | None = None,
    *,
    device: str | None = None,
) -> Any:
    """Return the job of a rank. Default: on the device of its process.

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
    validation = validation_items(project, prepared)  # first: its memory is freed before the others are read
    table = trained_table(project, prepared)
    made = folder_of(project, prepared)
    if ranks.rank == 0:
        with writing_run(made.path, "train.models"):
            made.path.mkdir(parents=True, exist_ok=True)
            write_plain(made.prepared, prepared)
            made.settings.write_text(json.dumps(without_secrets_in(config.model_dump(mode="json")), indent=1))
    ranks.exchange({})
    device = device or device_here(config.cluster.train.gpus)
    damaged = None
    if rebuild is not None:
        spare, root = math.floor(config.data.max_rejected_fraction * table.distinct), str(project.cache.root)
        damaged = DamagedItems(rebuild, table.distinct, spare, root, refuse=context.refuse, say=log_line)
    return Job(
        train=config.train,
        prepared=prepared,
        folder=made,
        make_step=lambda begin: _step(work, choice, ranks, device, begin, is_spread=prepared.sharded),
        source=lambda items: source_of(project, items, damaged),
        embeddings=lambda: rows_of(project),
        phases=[(phase, phase_items(table, phase)) for phase in prepared.phases],
        validation=validation,
        ranks=ranks,
        context=context,
        say=log_line if ranks.rank == 0 else lambda _: None,
        remember=lambda peak_bytes, step_s: remember_peak(config, folder, work, prepared, choice, peak_bytes, step_s),
        task=work.task,
        stage_tasks={name: Work.of(one, beside=project.beside).task for name, one in configs_of_stages(config).items()},
        leave_out=frozenset(left_out_items(folder, StageName.TRAIN)),
        damaged=damaged,
        settings=without_secrets_in(config.model_dump(mode="json")),
    )


def novelty(project: Project) -> list[str]:
    """Return remarks on a new training: its differences from the most similar earlier one, and missing settings."""
    prepared = known_plan(project)
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


def refuse_misfits(project: Project, task: Task) -> None:
    """Raise if the width of the embeddings or the pretrained weights do not fit the task."""
    refuse_other_width(project, task)
    if project.config.train.pretrained is not None:
        refuse_unfit_weights(task, project.config.train)


def refuse_unfit_weights(task: Task, train: TrainSection, path: Path | None = None) -> None:
    """Raise if the configured weights, or those of a file to be applied, do not fit the task's model.

    The model is built without memory if possible.
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
    """Return the step to train, sharded over ranks if `is_spread`; `begin` loads its initial weights."""
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
    from pipeline.planning.probe import model_name, peaks_of, torch_of

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
        predicted_bytes=prepared.reserved_bytes,
        measured_bytes=peak_bytes,
        died=False,
        outside_bytes=total_bytes - free_bytes - card.memory("reserved"),
        predicted_s=prepared.step_s,
        step_s=step_s,
        at=time.time(),
    )
    peaks_of(config).record(folder.name, [peak])
