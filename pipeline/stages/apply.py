"""What the stages evaluate and predict share: they apply a trained model to a split.

A split is one task and never halved: its ranks share the items, and finished items are kept.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.command_line import Command, quoted
from pipeline.dataset.loading import made_table, rows_of, source_of
from pipeline.dataset.reader_items import is_reader, reader_of, unmade
from pipeline.dataset.worklist import Shard, StageSurvey, frozen_items, read_shards
from pipeline.errors import ConfigError, DataError, JobFailed, PipelineError
from pipeline.files import write_whole
from pipeline.journal.attempts import left_out_items
from pipeline.journal.run_folder import writing_run
from pipeline.keys import content_digest
from pipeline.planning.prepare import code_of, digest_of_files, folder_of, pathless, prepare
from pipeline.planning.rank_setup import device_here, join_ranks, log_line, staged
from pipeline.planning.trained_model import TrainedModel, named_model, names_model
from pipeline.planning.training_work import Work, sizes_of
from pipeline.project.run_code import blamed, load_task
from pipeline.project.user_code import TaskCode, task_code
from pipeline.protocol import Publishes
from pipeline.records import Rejection
from pipeline.stage_names import StageName
from pipeline.stages.stage import Judged, Stage
from pipeline.stages.train import UNPLANNED_BYTES, TrainStage, refuse_unfit_weights
from pipeline.training.items.item_table import ItemTable
from pipeline.training.prepared import ModelFolder, Prepared, RowShare, cut_rows

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from numpy.typing import NDArray

    from pipeline.config.schema import Config
    from pipeline.config.schema_cluster import TrainResources
    from pipeline.config.schema_train import EvaluateSection, PredictSection
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.records import TaskContext
    from pipeline.stages.stage import Outcomes
    from pipeline.training.checkpoints.checkpoint import ChosenCheckpoint
    from pipeline.training.evaluating.evaluator import ApplyJob
    from pipeline.training.evaluating.results import Figures, Predictions
    from pipeline.training.ranks import Ranks

    Integers = NDArray[np.int64]

WRITTEN_BYTES = 2 * (64 << 20)  # of outputs, before they go to a file
UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Application:
    """A checkpoint and the items to apply it to, as decided when the stage began."""

    prepared: Prepared
    chosen: ChosenCheckpoint
    split: str | None
    made: str  # the digest of the items, and of the user's code that tells of them
    items: int
    done: list[list[int]]  # items that were done before, as [first, stop]
    model: str = ""  # the model's folder
    each: int = 1  # rows of an item, such as poses

    @classmethod
    def read(cls, path: Path) -> Application:
        """Read the plan that a survey wrote."""
        from pipeline.training.checkpoints.checkpoint import ChosenCheckpoint

        data = json.loads(path.read_text())
        prepared, chosen = Prepared.from_json(data["prepared"]), ChosenCheckpoint.from_json(data["chosen"])
        return cls(**{**data, "prepared": prepared, "chosen": chosen})

    def write(self, path: Path) -> None:
        """Write it, so that readers see the old or the new one."""
        plain = {**asdict(self), "prepared": self.prepared.to_json(), "chosen": self.chosen.to_json()}
        with writing_run(path):
            write_whole(path, json.dumps(plain))

    @property
    def folder(self) -> ModelFolder:
        return ModelFolder(Path(self.model))

    @property
    def done_N(self) -> Integers:
        return np.concatenate([np.zeros(0, np.int64), *(np.arange(first, stop) for first, stop in self.done)])


@dataclass(slots=True)
class ModelUse(Judged):
    """The result of applying a model."""

    split: str = ""  # empty: all items
    checkpoint: str = ""
    step: int = 0
    note: str = ""
    model: str = ""  # its folder
    nothing: str = ""  # why there was nothing to do
    each: int = 1  # predictions of an item

    def take(self, applied: Application, made: Figures | Predictions | None) -> None:
        """Fill in what both stages report; `made` is their results, None where there are none."""
        self.split, self.model, self.each = applied.split or "", applied.model, applied.each
        if not applied.items:
            self.nothing = f"no item is in split {applied.split!r}"
        elif made is None:
            whose = f"split {applied.split!r}" if applied.split else "every split"
            self.undone, self.first_undone = applied.items, f"those of {whose}"
        else:
            self.items, self.checkpoint, self.step, self.note = applied.items, made.checkpoint, made.step, made.note
            self.rejected, self.examples = dict(made.rejected), dict(made.examples)


class ApplyStage(Stage):
    """What the stages that apply a model share: the choice of model and items, and the job of a rank."""

    needs = (*TrainStage.needs, StageName.TRAIN)
    of_sequences = False
    together = True
    counts_items = False  # rejected items are known only at the end
    with_loss = False

    @abstractmethod
    def parts(self, project: Project, applied: Application) -> Path:
        """Return the folder of unfinished outputs."""

    @abstractmethod
    def read(self, project: Project, applied: Application) -> Figures | Predictions | None:
        """Return the results of exactly this application; None where there are none."""

    @abstractmethod
    def apply(self, project: Project, applied: Application, job: ApplyJob) -> Outcomes:
        """Apply the model, as one rank."""

    def is_done(self, project: Project, applied: Application) -> bool:
        return self.read(project, applied) is not None

    def settings(self, project: Project) -> EvaluateSection | PredictSection:
        """Return the section of the stage: which checkpoint and split."""
        return self._section(project.config)

    def _section(self, config: Config) -> EvaluateSection | PredictSection:
        section: EvaluateSection | PredictSection = getattr(config.train, self.name)
        return section

    def own_resources(self, project: Project) -> TrainResources:
        """Return the resources of this stage, which differ from those of training."""
        resources: TrainResources = getattr(project.config.cluster, self.name)
        return resources

    def needed(self, config: Config) -> tuple[StageName, ...]:
        """Return the stages before it: a model that is named was trained already."""
        before = TrainStage().needed(config) if self.name != StageName.PREDICT else TrainStage.needs
        return before if names_model(self._section(config).checkpoint) else (*before, StageName.TRAIN)

    def inspect(self, project: Project) -> None:
        """Raise where no model can be applied."""
        config = project.config
        if config.data.source == "fasta":
            what = "sequences have no graphs to apply a model to"
            raise ConfigError(what, where="data.source is fasta", remedy=Command.submit("embed"))
        if config.train.command is not None:
            what = f"train.command trains your own script, but stage {self.name} needs a task"
            raise ConfigError(what, where="train.task", remedy="let the script do it, or set train.task")
        if (model := self._model(project)) is not None:
            model.refuse_other_settings(project)
        code_of(project)
        self._refuse_unfit(project)

    def _refuse_unfit(self, project: Project) -> None:
        """Raise where files that the task reads are not there, or weights that are named are not of its model."""
        from pipeline.training.checkpoints.checkpoint import weights_file

        are_made_first = project.config.train.predict.for_training
        for path in () if are_made_first else self._code(project).reads:
            if not path.exists():
                where = f"train.{self.name}.options: {path}"
                raise ConfigError("file or folder not found", where=where, remedy=f"ls -ld {quoted(path.parent)}")
        if (file := weights_file(self.settings(project).checkpoint)) is not None:
            train, options = project.config.train, self._options(project.config)
            task = load_task(train.task, options, beside=project.beside)
            from pipeline.training.checkpoints.trained_weights import PARTIAL, WHERE  # which waits for torch

            try:
                refuse_unfit_weights(task, train, file)
            except PipelineError as error:  # they are not those that a training begins with, and must fit as a whole
                error.where = error.where.replace(f"{WHERE}: ", f"train.{self.name}.checkpoint: ", 1)
                error.next = str(error.next).removesuffix(PARTIAL)
                raise

    def _model(self, project: Project) -> TrainedModel | None:
        """Return the model that the configuration names; None where it means the one that it trains."""
        wanted = self.settings(project).checkpoint
        return project.once(f"model {wanted}", lambda: named_model(project.config.train.models, wanted))

    def _prepared(self, project: Project) -> Prepared | None:
        """Return the plan of the model for the configured data set; None while its graphs are not there."""
        model = self._model(project)
        if model is None:
            return prepare(project)
        table = made_table(project)
        return model.on(table) if table is not None else None

    def survey(self, project: Project, folder: RunFolder | None, at_once: int) -> StageSurvey:  # noqa: ARG002 - one task
        """Choose the checkpoint, and count the items and how many of them are done."""
        counts = dict.fromkeys(("items", "refused", "unusable", "cached", "missing", "waiting"), 0)
        prepared = self._prepared(project)
        chosen = self._choose(project, prepared) if prepared else None
        if prepared is None or chosen is None:
            if folder is None:
                return StageSurvey({**counts, "unplanned": 1}, (Shard(0, 1, 1),))
            what, where = "no model has been trained with this configuration", project.config.data.path
            if prepared is None:  # the graphs are not there yet
                what = unmade(project.config)
            else:
                where = self._folder_of(project, prepared).checkpoints
            raise DataError(what, where=str(where), remedy=self._training(folder))
        is_for_all = folder is None or folder.command().stage == "all"
        table = self._items(project, prepared, may_miss=is_for_all)
        items, left = len(table), 0
        made = self._made_of(project, table)
        applied = Application(prepared, chosen, self.settings(project).split, made, items, [])
        model, each = str(self._folder_of(project, prepared).path), self._code(project).samples or 1
        applied = replace(applied, model=model, each=each)
        if items and not self.is_done(project, applied):
            applied = replace(applied, done=_done(self.parts(project, applied), applied))
            left = max(1, items - len(applied.done_N))
        if folder is not None:
            applied.write(folder.plan(self.name))
        counts |= {"items": items, "cached": items - left, "missing": left}
        return StageSurvey(counts, self._shards(project, applied, left), cost=float(left))

    def _shards(self, project: Project, applied: Application, left: int) -> tuple[Shard, ...]:
        """Return the rows of each task where there are several, else how many rows there are to do."""
        tasks, step = self.own_resources(project).parallel, self._code(project).samples or 1
        if not left or tasks == 1 or left == 1:
            return (Shard(0, left, 1),) if left else ()
        return tuple(Shard(*rows, 1) for rows in cut_rows(applied.done_N, applied.items, step, tasks))

    def _share(self, project: Project, folder: RunFolder, task: int) -> RowShare | None:
        """Return the rows of a task; None where it has all."""
        shards = read_shards(folder, self.name)
        if len(shards) == 1 or self.own_resources(project).parallel == 1:
            return None
        return RowShare(shards[task].start, shards[task].end, task, len(shards), folder.unique)

    def mem_bytes(self, project: Project) -> int:
        """Return the memory of a node: as in training, with outputs, and without a GPU also what one would hold."""
        prepared, own, model = self._prepared(project), self.own_resources(project), self._model(project)
        if prepared is None:
            return own.ranks_per_node * UNPLANNED_BYTES
        train = (model.config if model and model.config else project.config).cluster.train  # as it was planned for
        each = -(-prepared.mem_bytes // train.ranks_per_node) + WRITTEN_BYTES
        if not own.gpus:
            asked = {"costs": prepared.to_json(), "split": self.settings(project).split}
            find = partial(self._largest, project, prepared)
            largest = code_of(project).remembered(project.config.cluster.runs, asked, find)
            each += max(0, largest - prepared.phases[-1].budget_bytes)
            each += max(phase.live_bytes for phase in prepared.phases) if train.gpus else 0
        return own.ranks_per_node * each

    def _largest(self, project: Project, prepared: Prepared) -> int:
        """Return the planned bytes of the largest item."""
        table = self._items(project, prepared, may_miss=True)
        return int(_costs(project, prepared, table, limited=False).max(initial=0)) if len(table) else 0

    def gpu_bytes(self, project: Project) -> int:
        prepared = self._prepared(project) if self.own_resources(project).gpus else None
        return max(phase.reserved_bytes for phase in prepared.phases) if prepared else 0

    def recipe(self, project: Project) -> Mapping[str, Any]:
        return TrainStage().recipe(project)

    def work(self, project: Project, folder: RunFolder, task: int, tell: TaskContext) -> Outcomes:
        """Apply the model, as one of its ranks."""
        applied, share = Application.read(folder.plan(self.name)), self._share(project, folder, task)
        if share is not None and self.is_done(project, applied):  # this task ended after it had told the others
            return
        project = self._with_own_resources(project)
        with closing(join_ranks(project, folder, applied.prepared, tell)) as ranks:
            project = staged(project, lambda: [self._items(project, applied.prepared)], ranks, tell, log_line)
            job = replace(self._job(project, folder, applied, tell, ranks), share=share)
            with blamed(Work.of(project.config, beside=project.beside).task):
                yield from self.apply(project, applied, job)

    def check(self, project: Project, folder: RunFolder, judged: ModelUse) -> list[str]:  # noqa: ARG002
        """Return remarks."""
        nothing = f"{judged.nothing}: nothing to do" if judged.nothing else ""
        return [remark for remark in (nothing, judged.note) if remark]

    def _training(self, folder: RunFolder) -> str:
        """Return the typed command with the stage train, which makes the model that this stage needs."""
        return str(folder.command().with_stage("train"))

    def _choose(self, project: Project, prepared: Prepared, without: Collection[str] = ()) -> ChosenCheckpoint | None:
        """Return the checkpoint to use of the configured training; None where there is none."""
        from pipeline.training.checkpoints.checkpoint import choose_checkpoint

        model = self._model(project)
        wanted = model.checkpoint if model else self.settings(project).checkpoint
        return choose_checkpoint(self._folder_of(project, prepared).checkpoints, wanted, without)

    def _folder_of(self, project: Project, prepared: Prepared) -> ModelFolder:
        model = self._model(project)
        return model.folder if model else folder_of(project, prepared)

    def _items(self, project: Project, prepared: Prepared, *, may_miss: bool = False) -> ItemTable:
        """Return the items of the split; an unknown split raises, or has no items where it `may_miss`."""
        whole = ItemTable.read(project.cache.kind("sets"), bytes.fromhex(prepared.table))
        split = self.settings(project).split
        if split is None or split in whole.splits:
            chosen = whole if split is None else whole.of_split(split)
            return chosen.sampled(self._code(project).samples)
        if may_miss:
            return whole.take(np.zeros(0, np.int64))
        key = f"train.{self.name}.split"
        what = f"no item is in split {split!r}; {whole.named_splits()}"
        raise DataError(what, where=key, remedy=whole.other_splits(key))

    def _with_own_resources(self, project: Project) -> Project:
        """Return the project with this stage's resources in place of training's, which say on what device it is."""
        cluster = project.config.cluster.model_copy(update={"train": self.own_resources(project)})
        train = project.config.train.model_copy(update={"options": self._options(project.config)})
        return replace(project, config=project.config.model_copy(update={"cluster": cluster, "train": train}))

    def _options(self, config: Config) -> dict[str, Any]:
        """Return the options of the task where this stage applies its model."""
        return {**config.train.options, **self._section(config).options}

    def _code(self, project: Project) -> TaskCode:
        """Return what is known of the task with those options."""
        train = project.config.train.model_copy(update={"options": self._options(project.config)})
        config = project.config.model_copy(update={"train": train})
        return project.once(f"task of {self.name}", lambda: task_code(config, project.beside))

    def _made_of(self, project: Project, table: ItemTable) -> str:
        """Return the digest of the items, and of what else decides what is told of them: code, options and files."""
        from pipeline.training.items.item_table import table_digest

        of_items, code, own = table_digest(table), self._code(project), self._section(project.config).options
        files = [digest_of_files(path) for path in code.reads]
        told = [code.tells, json.dumps(pathless(own), sort_keys=True) if own else "", *files]
        return content_digest("-".join([of_items, *filter(None, told)]).encode()).hex() if any(told) else of_items

    def _job(
        self, project: Project, folder: RunFolder, applied: Application, tell: TaskContext, ranks: Ranks
    ) -> ApplyJob:
        """Return everything that a rank is given."""
        from pipeline.memory.footprint import MemoryChoice
        from pipeline.training.evaluating.evaluator import ApplyJob

        prepared = applied.prepared
        work = Work.of(project.config, beside=project.beside)
        device = device_here(self.own_resources(project).gpus)
        table = self._items(project, prepared)
        choice = MemoryChoice(precision=prepared.precision, shards=1)

        def select(without: Collection[str]) -> ChosenCheckpoint:
            """Return the chosen checkpoint, or the next best without these, which is then recorded for `judge`."""
            if not without:
                return applied.chosen
            chosen = self._choose(project, prepared, without)
            if chosen is None:
                where = str(applied.chosen.path.parent)
                anew = self._training(folder) if self._model(project) is None else "use another model or checkpoint"
                raise JobFailed("none of its checkpoints can be read", where=where, remedy=anew)
            replace(applied, chosen=chosen, done=[]).write(folder.plan(self.name))
            return chosen

        def publish(where: Path, outputs: Mapping[str, Any]) -> Iterable[Path]:
            items = (entry for entry in frozen_items(project, folder) if not isinstance(entry, Rejection))
            reading = reader_of(project) if is_reader(project.config) else project.recipe
            return work.task.publish(where, outputs, items, reading)  # type: ignore[attr-defined,no-any-return]

        return ApplyJob(
            train=project.config.train,
            prepared=prepared,
            table=table,
            cost_N=_costs(project, prepared, table),
            made=applied.made,
            make_step=lambda: work.step(choice, device=device, scaled=True),
            source=lambda items: source_of(project, items),
            embeddings=lambda: rows_of(project),
            choose=select,
            parts=lambda chosen: self.parts(project, replace(applied, chosen=chosen)),
            known_N=applied.done_N,
            ranks=ranks,
            tell=tell,
            say=log_line if ranks.rank == 0 else lambda _: None,
            left_out=left_out_items(folder, self.name),
            with_loss=self.with_loss,
            data=str(project.config.data.path),
            publish=publish if isinstance(work.task, Publishes) else None,
        )


def _done(folder: Path, applied: Application) -> list[list[int]]:
    """Return the ranges of items that an interrupted run has finished."""
    from pipeline.training.evaluating.evaluator import outputs_name, spans
    from pipeline.training.evaluating.outputs import done_numbers

    return spans(done_numbers(folder, outputs_name(applied.chosen, applied.made)))


def _costs(project: Project, prepared: Prepared, table: ItemTable, *, limited: bool = True) -> Integers:
    """Return the planned bytes of each item, as in training but not cropped."""
    phase = prepared.phases[-1]
    sizes = sizes_of(Work.of(project.config, beside=project.beside).task, table.sizes)
    return (phase if limited else replace(phase, budget_bytes=UNLIMITED)).cost(sizes)
