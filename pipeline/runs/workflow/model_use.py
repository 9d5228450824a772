"""What the stages that use a trained model share in a run: which model, which items, what is done, a rank's job.

A split is one task of one or more ranks, and never halved: its ranks share it out, and what is done is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.errors import ConfigError, DataError, JobFailed
from pipeline.journal.attempts import left_out_items
from pipeline.journal.run_folder import writing_run
from pipeline.project.run_code import load_task
from pipeline.runs.dataset.loading import rows_of, source_of
from pipeline.runs.dataset.outcome import Judged
from pipeline.runs.dataset.reader_items import unmade
from pipeline.runs.dataset.worklist import Found, Shard
from pipeline.runs.model.prepare import folder_of, prepare
from pipeline.runs.model.training_work import Work, sizes_of
from pipeline.runs.workflow.train_stage import UNPLANNED_BYTES, said
from pipeline.training.items.item_table import ItemTable
from pipeline.training.prepared import ModelFolder, Prepared

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from numpy.typing import NDArray

    from pipeline.config.schema_cluster import TrainResources
    from pipeline.config.schema_train import EvaluateSection, PredictSection
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.records import Tell
    from pipeline.training.checkpoints.checkpoint_choice import ChosenCheckpoint
    from pipeline.training.evaluating.apply_model import ApplyJob
    from pipeline.training.ranks.rank_protocol import Ranks

    Integers = NDArray[np.int64]

WRITTEN_BYTES = 2 * (64 << 20)  # of outputs, before they go to a file
UNLIMITED = 1 << 62
FOR_ALL = "--stage all"


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a model is to be applied to, as it was found when the stage began."""

    prepared: Prepared
    chosen: ChosenCheckpoint
    split: str | None
    made: str  # the digest of the items
    items: int
    done: list[list[int]]  # items that were done before, as [first, stop]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {**asdict(self), "prepared": self.prepared.to_json(), "chosen": self.chosen.to_json()}

    @classmethod
    def read(cls, path: Path) -> Ahead:
        """Read what a survey wrote."""
        from pipeline.training.checkpoints.checkpoint_choice import ChosenCheckpoint

        data = json.loads(path.read_text())
        return cls(
            **{
                **data,
                "prepared": Prepared.from_json(data["prepared"]),
                "chosen": ChosenCheckpoint.from_json(data["chosen"]),
            }
        )

    def write(self, path: Path) -> None:
        """Write it down; who reads meanwhile sees the old or the new one."""
        partial = path.with_suffix(".partial")
        with writing_run(path):
            partial.write_text(json.dumps(self.to_json()))
            partial.replace(path)

    @property
    def done_N(self) -> Integers:
        """Return the items that were done before."""
        return np.concatenate([np.zeros(0, np.int64), *(np.arange(first, stop) for first, stop in self.done)])


IsDone: TypeAlias = "Callable[[Project, Ahead], bool]"
Parts: TypeAlias = "Callable[[Project, Ahead], Path]"


def settings(project: Project, name: str) -> EvaluateSection | PredictSection:
    """Return which model and which items a stage is about."""
    found: EvaluateSection | PredictSection = getattr(project.config.train, name)
    return found


def resources(project: Project, name: str) -> TrainResources:
    """Return what the ranks of a stage have."""
    found: TrainResources = getattr(project.config.cluster, name)
    return found


def inspect(project: Project, name: str) -> Any:
    """Refuse what no model can be applied to; return the task."""
    config = project.config
    if config.data.source == "fasta":
        what = "sequences alone have no graphs to apply a model to"
        raise ConfigError(what, where="data.source is fasta", remedy="pipeline submit --stage embed")
    if config.train.command is not None:
        what = f"a script of your own is trained (train.command): stage {name} needs a task"
        raise ConfigError(what, where="train.task", remedy="let the script do it, or name a task")
    return load_task(config.train.task, config.train.options, beside=project.beside)


def survey(project: Project, folder: RunFolder | None, name: str, is_done: IsDone, parts: Parts) -> Found:
    """See which model there is, how many items it is for, and how many of them are done."""
    counts = {"items": 0, "refused": 0, "unusable": 0, "cached": 0, "missing": 0, "waiting": 0}
    prepared = prepare(project)
    unplanned = Found({**counts, "unplanned": 1}, (Shard(0, 1, 1),))
    if prepared is None:  # the graphs are not there yet
        if folder is None:
            return unplanned
        what = unmade(project.config)
        raise DataError(what, where=str(project.config.data.path), remedy=_training(folder, name))
    chosen = choose(project, prepared, name)
    if chosen is None:
        if folder is None:
            return unplanned
        where = str(folder_of(project, prepared).checkpoints)
        what = "no model was trained with this configuration"
        raise DataError(what, where=where, remedy=_training(folder, name))
    table = items_of(project, prepared, name, may_miss=folder is None or is_for_all(folder))
    ahead = _ahead(prepared, chosen, settings(project, name).split, table)
    items = len(table)
    if items and not is_done(project, ahead):
        ahead = replace(ahead, done=_done(parts(project, ahead), ahead))
        left = max(1, items - len(ahead.done_N))
    else:
        left = 0
    if folder is not None:
        ahead.write(folder.plan(name))
    counts |= {"items": items, "cached": items - left, "missing": left}
    return Found(counts, (Shard(0, left, 1),) if left else (), cost=float(left))


def _training(folder: RunFolder, name: str) -> str:
    """Return the command that trains what a stage is to use: the one that was typed, of another stage."""
    return folder.again.read_text().replace(f"--stage {name}", "--stage train")


def is_for_all(folder: RunFolder) -> bool:
    """Tell whether a run was asked for all that there is to do, and not for this stage."""
    return FOR_ALL in folder.again.read_text()


def _ahead(prepared: Prepared, chosen: ChosenCheckpoint, split: str | None, table: ItemTable) -> Ahead:
    from pipeline.training.evaluating.apply_model import table_digest

    return Ahead(prepared, chosen, split, table_digest(table), len(table), [])


def choose(project: Project, prepared: Prepared, name: str, without: Collection[str] = ()) -> ChosenCheckpoint | None:
    """Return the checkpoint that a stage is to use, of the training that this configuration asks for."""
    from pipeline.training.checkpoints.checkpoint_choice import choose_checkpoint as of_folder

    return of_folder(folder_of(project, prepared).checkpoints, settings(project, name).checkpoint, without)


def items_of(project: Project, prepared: Prepared, name: str, *, may_miss: bool = False) -> ItemTable:
    """Return the items of a stage's split; where it `may_miss`, none."""
    whole = ItemTable.read(project.cache.kind("sets"), bytes.fromhex(prepared.table))
    split = settings(project, name).split
    if split is None or split in whole.splits:
        return whole if split is None else whole.of_split(split)
    if may_miss:
        return whole.take(np.zeros(0, np.int64))
    named = [one for one in whole.splits if one]
    there = f"there are: {', '.join(named)}" if named else "this data set has no splits"
    key = f"train.{name}.split"
    remedy = " or ".join(f"--set {key}={one}" for one in (*named, "null")) + "   (null: every item)"
    raise DataError(f"no item is in split {split!r}; {there}", where=key, remedy=remedy)


def _done(folder: Path, ahead: Ahead) -> list[list[int]]:
    """Return what a run that was ended has left, if anything."""
    from pipeline.training.evaluating.apply_model import outputs_name, spans
    from pipeline.training.evaluating.outputs import OutputWriter

    if not folder.is_dir():
        return []
    return spans(OutputWriter(folder, 0, of=outputs_name(ahead.chosen, ahead.made)).done_numbers().tolist())


def costs(project: Project, prepared: Prepared, table: ItemTable, *, limited: bool = True) -> Integers:
    """Return what items take, as planned: as if they were trained on, and not cropped."""
    stretch = prepared.stretches[-1]
    sizes = sizes_of(Work.of(project.config, beside=project.beside).task, table.sizes)
    return (stretch if limited else replace(stretch, budget_bytes=UNLIMITED)).cost(sizes)


def mem_bytes(project: Project, name: str) -> int:
    """Return the memory of a node's processes: that of training, outputs, and what no card of this stage takes."""
    prepared, own, train = prepare(project), resources(project, name), project.config.cluster.train
    if prepared is None:
        return own.ranks_per_node * UNPLANNED_BYTES
    each = -(-prepared.mem_bytes // train.ranks_per_node) + WRITTEN_BYTES
    if not own.gpus:
        table = items_of(project, prepared, name, may_miss=True)
        largest = int(costs(project, prepared, table, limited=False).max(initial=0)) if len(table) else 0
        each += max(0, largest - prepared.stretches[-1].budget_bytes)
        each += max(stretch.live_bytes for stretch in prepared.stretches) if train.gpus else 0
    return own.ranks_per_node * each


def gpu_bytes(project: Project, name: str) -> int:
    """Return the memory that a card must have at least: that of training."""
    prepared = prepare(project) if resources(project, name).gpus else None
    return max(stretch.reserved_bytes for stretch in prepared.stretches) if prepared else 0


def lent(project: Project, name: str) -> Project:
    """Return the project with a stage's resources in the place of training's, for what asks on which device it is."""
    cluster = project.config.cluster.model_copy(update={"train": resources(project, name)})
    return replace(project, config=project.config.model_copy(update={"cluster": cluster}))


def job_of(
    project: Project, folder: RunFolder, name: str, tell: Tell, ranks: Ranks, parts: Parts, *, with_loss: bool
) -> ApplyJob:
    """Return everything that a rank is given."""
    from pipeline.memory.footprint import MemoryChoice
    from pipeline.training.evaluating.apply_model import ApplyJob

    ahead = Ahead.read(folder.plan(name))
    prepared = ahead.prepared
    work = Work.of(project.config, beside=project.beside)
    device = "cuda" if resources(project, name).gpus else "cpu"
    table = items_of(project, prepared, name)
    choice: MemoryChoice = MemoryChoice(precision=prepared.precision, shards=1)

    def select(without: Collection[str]) -> ChosenCheckpoint:
        """Return the checkpoint that was found, or the next one; the judge is to know which."""
        if not without:
            return ahead.chosen
        chosen = choose(project, prepared, name, without)
        if chosen is None:
            where = str(ahead.chosen.path.parent)
            raise JobFailed("no checkpoint of it can be read", where=where, remedy=_training(folder, name))
        replace(ahead, chosen=chosen, done=[]).write(folder.plan(name))
        return chosen

    return ApplyJob(
        train=project.config.train,
        prepared=prepared,
        table=table,
        cost_N=costs(project, prepared, table),
        made=ahead.made,
        make_step=lambda: work.step(choice, device=device, scaled=True),
        source=lambda one: source_of(project, one),
        embeddings=lambda: rows_of(project),
        choose=select,
        parts=lambda chosen: parts(project, replace(ahead, chosen=chosen)),
        known_N=ahead.done_N,
        ranks=ranks,
        tell=tell,
        say=said if ranks.rank == 0 else lambda _: None,
        left_out=left_out_items(folder, name),
        with_loss=with_loss,
    )


@dataclass(slots=True)
class Applied(Judged):
    """What came of the application of a model."""

    split: str = ""  # empty: all items
    checkpoint: str = ""
    step: int = 0
    note: str = ""
    model: str = ""  # its folder
    nothing: str = ""  # why there was nothing to do


def judged(kind: type[Any], project: Project, ahead: Ahead, made: Any) -> Any:
    """Return a judgement with what both stages say; `made` is what was read of the results."""
    found = kind(split=ahead.split or "", model=str(folder_of(project, ahead.prepared).path))
    if not ahead.items:
        found.nothing = f"no item is in split {ahead.split!r}"
    elif made is None:
        found.undone, found.first_undone = ahead.items, f"those of {_named(ahead.split)}"
    else:
        found.items, found.checkpoint, found.step, found.note = ahead.items, made.checkpoint, made.step, made.note
        found.rejected, found.examples = dict(made.rejected), dict(made.examples)
    return found


def _named(split: str | None) -> str:
    return f"split {split!r}" if split else "every split"


def remarks(found: Applied) -> list[str]:
    """Return what deserves a word."""
    return [one for one in (f"{found.nothing}: nothing to do" if found.nothing else "", found.note) if one]


def made_folder(project: Project, ahead: Ahead) -> ModelFolder:
    """Return the folder of the model."""
    return folder_of(project, ahead.prepared)
