"""Stages evaluate and predict: apply a trained model to a split, for its loss and metrics or for predictions.

An evaluation is one task whose ranks share the items; it is never split, and finished items are kept.
"""

from __future__ import annotations

import json
import shutil
from abc import abstractmethod
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.codec import plain, read_plain, write_plain
from pipeline.command_line import Command, quoted
from pipeline.dataset.loading import made_table, rows_of, source_of
from pipeline.dataset.reader_items import is_reader, reader_of, unmade
from pipeline.dataset.worklist import Shard, StageSurvey, frozen_items, read_shards
from pipeline.device.host import keep_freed_memory
from pipeline.errors import ConfigError, DataError, JobFailed, PipelineError
from pipeline.journal.attempts import left_out_items
from pipeline.journal.run_folder import writing_run
from pipeline.keys import content_digest
from pipeline.planning.prepare import code_of, digest_of_files, folder_of, known_plan, pathless, prepare
from pipeline.planning.rank_setup import device_here, join_ranks, log_line, staged
from pipeline.planning.trained_model import DECIDED, TrainedModel, named_model, names_model
from pipeline.planning.training_work import Work, sizes_of
from pipeline.project.project import once
from pipeline.project.run_code import blamed, load_task
from pipeline.project.user_code import TaskCode
from pipeline.protocol import PICTURES, Publishes
from pipeline.records import Rejection
from pipeline.stage_names import StageName
from pipeline.stages.stage import Judged, Stage
from pipeline.stages.train import RECORDS, UNPLANNED_BYTES, before_training, refuse_unfit_weights, training_recipe
from pipeline.training.checkpoints.checkpoint import Application, ChosenCheckpoint, choose_checkpoint, weights_file
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
from pipeline.training.items.item_table import ItemTable, table_digest
from pipeline.training.prepared import ModelFolder, Prepared, RowShare, cut_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from numpy.typing import NDArray

    from pipeline.config.schema import Config
    from pipeline.config.schema_cluster import TrainResources
    from pipeline.config.schema_train import EvaluateSection, PredictSection
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.records import TaskContext
    from pipeline.stages.stage import Outcomes
    from pipeline.training.evaluating.evaluator import ApplyJob
    from pipeline.training.ranks import Ranks

    Integers = NDArray[np.int64]
WRITTEN_BYTES = 2 * (64 << 20)  # of outputs in memory, before they are written
UNLIMITED = 1 << 62
OF_DIGITS = 8  # of the digest in the name of a folder of predictions
LINES_SHOWN, LETTERS_SHOWN = 4, 160  # of predictions
ALL = "predictions.csv"


@dataclass(slots=True)
class ModelUse(Judged):
    """The result of applying a model."""

    split: str = ""  # empty: all items
    checkpoint: str = ""
    step: int = 0
    note: str = ""
    model: str = ""  # its folder
    nothing: str = ""  # why there were no items
    each: int = 1  # predictions of an item

    def take(self, applied: Application, made: Figures | Predictions | None) -> None:
        """Fill in what both stages report; `made` is the file of results, None without results."""
        self.split, self.model, self.each = applied.split or "", applied.model, applied.each
        if not applied.items:
            self.nothing = f"no item is in split {applied.split!r}"
        elif made is None:
            whose = f"split {applied.split!r}" if applied.split else "every split"
            self.undone, self.first_undone = applied.items, f"those of {whose}"
        else:
            self.items, self.checkpoint, self.step, self.note = applied.items, made.checkpoint, made.step, made.note
            self.rejected, self.examples = dict(made.rejected), dict(made.examples)


@dataclass(frozen=True)
class ModelInUse:
    """The model that a stage applies, with the options and resources of that stage."""

    stage: StageName
    project: Project

    @property
    def section(self) -> EvaluateSection | PredictSection:
        """Which checkpoint and split."""
        return getattr(self.project.config.train, self.stage)  # type: ignore[no-any-return]

    @property
    def resources(self) -> TrainResources:
        return getattr(self.project.config.cluster, self.stage)  # type: ignore[no-any-return]

    @cached_property
    def model(self) -> TrainedModel | None:
        """The named model; None if the configuration means the one that it trains."""
        return named_model(self.project.config.train.models, self.section.checkpoint)

    @cached_property
    def view(self) -> Project:
        """The project with this stage's options and resources in place of training's."""
        config = self.project.config
        options = {**config.train.options, **self.section.options}
        cluster = config.cluster.model_copy(update={"train": self.resources})
        update = {"cluster": cluster, "train": config.train.model_copy(update={"options": options})}
        return replace(self.project, config=config.model_copy(update=update), made_once={})

    @property
    def code(self) -> TaskCode:
        """Facts about the code of the task, with the stage's options."""
        return code_of(self.view)

    def prepared(self, find: Callable[[Project], Prepared | None]) -> Prepared | None:
        """Return the model's plan for the configured data set; `find` finds the plan of the configured training."""
        if self.model is None:
            return find(self.project)
        table = made_table(self.project)
        return self.model.on(table) if table is not None else None

    def folder(self, prepared: Prepared) -> ModelFolder:
        return self.model.folder if self.model else folder_of(self.project, prepared)

    def choose(self, prepared: Prepared, without: Collection[str] = ()) -> ChosenCheckpoint | None:
        """Return the checkpoint to use, or None."""
        wanted = self.model.checkpoint if self.model else self.section.checkpoint
        return choose_checkpoint(self.folder(prepared).checkpoints, wanted, without)

    def items(self, prepared: Prepared, *, may_miss: bool = False) -> ItemTable:
        """Return the items of the split; an unknown split raises, or is empty if it `may_miss`."""
        whole = ItemTable.read(self.project.cache.kind("sets"), bytes.fromhex(prepared.table))
        split = self.section.split
        if split is None or split in whole.splits:
            chosen = whole if split is None else whole.of_split(split)
            return chosen.sampled(self.code.samples)
        if may_miss:
            return whole.take(np.zeros(0, np.int64))
        key = f"train.{self.stage}.split"
        what = f"no item is in split {split!r}; {whole.named_splits()}"
        raise DataError(what, where=key, remedy=whole.other_splits(key))

    def costs(self, prepared: Prepared, table: ItemTable, *, limited: bool = True) -> Integers:
        """Return the planned bytes of each item, as in training but not cropped."""
        phase = prepared.phases[-1]
        sizes = sizes_of(Work.of(self.view.config, beside=self.project.beside).task, table.sizes)
        return (phase if limited else replace(phase, budget_bytes=UNLIMITED)).cost(sizes)

    def made_of(self, table: ItemTable) -> str:
        """Return the digest of the items, and of the code, options and files that decide the outputs."""
        files = [digest_of_files(path) for path in self.code.reads]
        own = self.section.options
        parts = [self.code.outputs_digest, json.dumps(pathless(own), sort_keys=True) if own else "", *files]
        of_items = table_digest(table)
        return content_digest("-".join([of_items, *filter(None, parts)]).encode()).hex() if any(parts) else of_items

    def shards(self, applied: Application, left: int) -> tuple[Shard, ...]:
        """Return the rows of each of several tasks, or the row count of a single one."""
        tasks, step = self.resources.parallel, self.code.samples or 1
        if not left or tasks == 1 or left == 1:
            return (Shard(0, left, 1),) if left else ()
        return tuple(Shard(*rows, 1) for rows in cut_rows(applied.done_N, applied.items, step, tasks))


class ApplyStage(Stage):
    """What the stages that apply a model share: the choice of model and items, and the job of a rank."""

    needs = (*RECORDS, StageName.TRAIN)
    of_sequences = False
    together = True
    counts_items = False
    with_loss = False

    @abstractmethod
    def parts(self, project: Project, applied: Application) -> Path:
        """Return the folder of unfinished outputs."""

    @abstractmethod
    def read(self, project: Project, applied: Application) -> Figures | Predictions | None:
        """Return the results for exactly this checkpoint and these items, or None."""

    @abstractmethod
    def apply(self, job: ApplyJob) -> Outcomes:
        """Apply the model, as one rank."""

    def is_done(self, project: Project, applied: Application) -> bool:
        return self.read(project, applied) is not None

    def use(self, project: Project) -> ModelInUse:
        """Return the model in use."""
        return _in_use(project, self.name)

    def needed(self, config: Config) -> tuple[StageName, ...]:
        """Return the stages before it; a named model needs no training."""
        before = before_training(config) if self.name != StageName.PREDICT else RECORDS
        is_named = names_model(getattr(config.train, self.name).checkpoint)
        return before if is_named else (*before, StageName.TRAIN)

    def inspect(self, project: Project) -> None:
        """Raise if no model can be applied."""
        config = project.config
        if config.data.source == "fasta":
            what = "sequences have no graphs to apply a model to"
            raise ConfigError(what, where="data.source is fasta", remedy=Command.submit("embed"))
        if config.train.command is not None:
            what = f"train.command trains your own script, but stage {self.name} needs a task"
            raise ConfigError(what, where="train.task", remedy="let the script do it, or set train.task")
        use = self.use(project)
        if use.model is not None:
            use.model.refuse_other_settings(use.project)
        code_of(use.project)
        for path in () if config.train.predict.for_training else use.code.reads:  # they are made first
            if not path.exists():
                where = f"train.{self.name}.options: {path}"
                raise ConfigError("file or folder not found", where=where, remedy=f"ls -ld {quoted(path.parent)}")
        if (file := weights_file(use.section.checkpoint)) is not None:
            train = use.view.config.train
            task = load_task(train.task, train.options, beside=project.beside)
            from pipeline.training.checkpoints.trained_weights import PARTIAL, WHERE  # it imports torch

            try:
                refuse_unfit_weights(task, train, file)
            except PipelineError as error:  # unlike pretrained weights, they must fit the model completely
                error.where = error.where.replace(f"{WHERE}: ", f"train.{self.name}.checkpoint: ", 1)
                error.next = str(error.next).removesuffix(PARTIAL)
                raise

    def plan(self, project: Project) -> None:
        self.use(project).prepared(prepare)

    def survey(self, project: Project, folder: RunFolder | None, at_once: int) -> StageSurvey:  # noqa: ARG002 - one task
        """Choose the checkpoint; count all items and the finished ones."""
        counts = dict.fromkeys(("items", "refused", "unusable", "cached", "missing", "waiting"), 0)
        use = self.use(project)
        prepared = use.prepared(prepare)
        chosen = use.choose(prepared) if prepared else None
        if prepared is None or chosen is None:
            if folder is None:
                return StageSurvey({**counts, "unplanned": 1}, (Shard(0, 1, 1),))
            what, where = "no model has been trained with this configuration", project.config.data.path
            if prepared is None:  # no graphs yet
                what = unmade(project.config)
            else:
                where = use.folder(prepared).checkpoints
            raise DataError(what, where=str(where), remedy=_training(folder))
        table = use.items(prepared, may_miss=folder is None or folder.command().stage == "all")
        items, left, data = len(table), 0, str(project.config.data.path)
        model, each = str(use.folder(prepared).path), use.code.samples or 1
        made = use.made_of(table)
        applied = Application(prepared, chosen, use.section.split, made, items, data, model=model, each=each)
        if items and not self.is_done(use.project, applied):
            applied = replace(applied, done=_done(self.parts(use.project, applied), applied))
            left = max(1, items - len(applied.done_N))
        if folder is not None:
            self._write(folder, applied)
        counts |= {"items": items, "cached": items - left, "missing": left}
        return StageSurvey(counts, use.shards(applied, left), cost=float(left))

    def _write(self, folder: RunFolder, applied: Application) -> None:
        with writing_run(folder.path):
            write_plain(folder.plan(self.name), applied)

    def _share(self, use: ModelInUse, folder: RunFolder, task: int) -> RowShare | None:
        """Return the rows of a task; None if it has all."""
        shards = read_shards(folder, self.name)
        if len(shards) == 1 or use.resources.parallel == 1:
            return None
        return RowShare(shards[task].start, shards[task].end, task, len(shards), folder.unique)

    def mem_bytes(self, project: Project) -> int:
        """Return the memory of a node: as in training, plus outputs; without a GPU also the device memory."""
        use = self.use(project)
        prepared = use.prepared(known_plan)
        if prepared is None:
            return use.resources.ranks_per_node * UNPLANNED_BYTES
        planned_for = use.model.config if use.model and use.model.config else use.project.config
        train = planned_for.cluster.train
        each = -(-prepared.mem_bytes // train.ranks_per_node) + WRITTEN_BYTES
        if not use.resources.gpus:
            asked = {"costs": plain(prepared), "split": use.section.split}
            largest = use.code.remembered(project.config, asked, partial(_largest, use, prepared))
            each += max(0, largest - prepared.phases[-1].budget_bytes)
            each += max(phase.live_bytes for phase in prepared.phases) if train.gpus else 0
        return use.resources.ranks_per_node * each

    def gpu_bytes(self, project: Project) -> int:
        use = self.use(project)
        prepared = use.prepared(known_plan) if use.resources.gpus else None
        return prepared.reserved_bytes if prepared else 0

    def recipe(self, project: Project) -> Mapping[str, Any]:
        return training_recipe(project)

    def work(self, project: Project, folder: RunFolder, task: int, context: TaskContext) -> Outcomes:
        """Apply the model, as one of its ranks."""
        use = self.use(project)
        applied, share = read_plain(folder.plan(self.name), Application), self._share(use, folder, task)
        if share is not None and self.is_done(use.project, applied):  # a previous start finished it
            return
        with closing(join_ranks(use.view, folder, applied.prepared, context)) as ranks:
            view = staged(use.view, lambda: [use.items(applied.prepared)], ranks, context, log_line)
            work = Work.of(view.config, beside=project.beside)
            with blamed(work.task):
                job = self._job(use, view, work, folder, applied, context, ranks, share)
                keep_freed_memory(0 if use.resources.gpus else applied.prepared.heap_bytes)
                yield from self.apply(job)

    def check(self, project: Project, folder: RunFolder, judged: ModelUse) -> list[str]:  # noqa: ARG002
        """Return remarks."""
        nothing = f"{judged.nothing}: nothing to do" if judged.nothing else ""
        return [remark for remark in (nothing, judged.note) if remark]

    def _job(
        self,
        use: ModelInUse,
        view: Project,
        work: Work,
        folder: RunFolder,
        applied: Application,
        context: TaskContext,
        ranks: Ranks,
        share: RowShare | None,
    ) -> ApplyJob:
        """Return the job of a rank; `view` is the project to read from."""
        from pipeline.memory.footprint import MemoryChoice
        from pipeline.training.evaluating.evaluator import ApplyJob

        device, table = device_here(use.resources.gpus), use.items(applied.prepared)
        choice = MemoryChoice(precision=applied.prepared.precision, shards=1)

        def select(without: Collection[str]) -> ChosenCheckpoint:
            """Return the chosen checkpoint or, without the damaged ones, the next best, and record it for `judge`."""
            if not without:
                return applied.chosen
            chosen = use.choose(applied.prepared, without)
            if chosen is None:
                where = str(applied.chosen.path.parent)
                remedy = _training(folder) if use.model is None else "use another model or checkpoint"
                raise JobFailed("none of its checkpoints can be read", where=where, remedy=remedy)
            self._write(folder, replace(applied, chosen=chosen, done=[]))
            return chosen

        def publish(where: Path, outputs: Mapping[str, Any]) -> Iterable[Path]:
            items = (entry for entry in frozen_items(view, folder) if not isinstance(entry, Rejection))
            reading = reader_of(view) if is_reader(view.config) else view.recipe
            return work.task.publish(where, outputs, items, reading)  # type: ignore[attr-defined,no-any-return]

        return ApplyJob(
            train=view.config.train,
            applied=applied,
            table=table,
            cost_N=use.costs(applied.prepared, table),
            make_step=lambda: work.step(choice, device=device, scaled=True),
            source=partial(source_of, view),
            embeddings=partial(rows_of, view),
            choose=select,
            parts=lambda chosen: self.parts(use.project, replace(applied, chosen=chosen)),
            ranks=ranks,
            context=context,
            say=log_line if ranks.rank == 0 else lambda _: None,
            left_out=left_out_items(folder, self.name),
            with_loss=self.with_loss,
            publish=publish if isinstance(work.task, Publishes) else None,
            share=share,
        )


@once
def _in_use(project: Project, stage: StageName) -> ModelInUse:
    """Return the model that a stage applies; a model that predicts inputs of a training has its own task."""
    train = project.config.train
    if stage != StageName.PREDICT or not train.predict.for_training:
        return ModelInUse(stage, project)
    model = named_model(train.models, train.predict.checkpoint)
    if model is None or model.config is None:
        what = "predictions for training need an earlier model, but none is set"
        raise ConfigError(
            what, where="train.predict.checkpoint", remedy=Command.of("model list", then="   (then --set that key)")
        )
    theirs = {name: getattr(model.config.train, name) for name in DECIDED} | {"pretrained": None}
    config = project.config.model_copy(update={"train": train.model_copy(update=theirs)})
    return ModelInUse(stage, replace(project, config=config, made_once={}))


def _training(folder: RunFolder) -> str:
    """Return the typed command with the stage train."""
    return str(folder.command().with_stage("train"))


def _largest(use: ModelInUse, prepared: Prepared) -> int:
    """Return the planned bytes of the largest item."""
    table = use.items(prepared, may_miss=True)
    return int(use.costs(prepared, table, limited=False).max(initial=0)) if len(table) else 0


def _done(folder: Path, applied: Application) -> list[tuple[int, int]]:
    """Return the ranges of items that earlier attempts have finished."""
    from pipeline.training.evaluating.evaluator import outputs_name, spans
    from pipeline.training.evaluating.outputs import done_numbers

    return [(first, stop) for first, stop in spans(done_numbers(folder, outputs_name(applied.chosen, applied.made)))]


@dataclass(slots=True)
class Evaluated(ModelUse):
    """Loss and metrics of a model on a split."""

    figures: dict[str, float | None] = field(default_factory=dict)  # loss and metrics
    file: str = ""


class EvaluateStage(ApplyStage):
    """Applies a checkpoint to a split for its loss and metrics."""

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
        """Tell whether the results are there; if so, remove leftovers of killed tasks."""
        if self.read(project, applied) is None:
            return False
        shutil.rmtree(self.parts(project, applied), ignore_errors=True)
        return True

    def apply(self, job: ApplyJob) -> Outcomes:
        return evaluate(job)

    def judge(self, project: Project, folder: RunFolder, patience_s: float) -> Evaluated:  # noqa: ARG002
        """Return loss and metrics from the file for this checkpoint and these items."""
        applied, judged = read_plain(folder.plan(self.name), Application), Evaluated()
        made = self.read(project, applied) if applied.items else None
        judged.take(applied, made)
        if made is not None:
            judged.figures, judged.file = dict(made.figures), str(self._path(applied))
        return judged

    def check(self, project: Project, folder: RunFolder, judged: Evaluated) -> list[str]:  # type: ignore[override]
        """Return remarks, also on metrics that are not finite."""
        lost = [name for name, value in judged.figures.items() if value is None]
        return super().check(project, folder, judged) + ([f"not finite: {', '.join(lost)}"] if lost else [])


@dataclass(slots=True)
class Predicted(ModelUse):
    """The predictions of a model for a split."""

    folder: str = ""
    files: dict[str, int] = field(default_factory=dict)  # their bytes
    lines: list[str] = field(default_factory=list)  # the first
    pictures: list[dict[str, Any]] = field(default_factory=list)  # drawn by the task, for the HTML report


class PredictStage(ApplyStage):
    """Applies a checkpoint to items for their predictions."""

    name = StageName.PREDICT

    def wanted(self, config: Config) -> bool:
        return config.train.predict.for_training  # without this setting a user names the data to predict

    def inspect(self, project: Project) -> None:
        """Raise if nothing can be predicted, also for a task without outputs()."""
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
        """Return the folder of predictions: one for each checkpoint and data set."""
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
        """Return the predictions that the manifest of their folder lists."""
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
