"""Stage train in a run: what is trained already, what a plan makes of the rest; one task's work; what came of it."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.config.masking import without_secrets_in
from pipeline.errors import ConfigError, PipelineError
from pipeline.journal.attempts import left_out_items
from pipeline.journal.run_folder import writing_run
from pipeline.project.run_code import blamed
from pipeline.runs.dataset.loading import rows_of, source_of
from pipeline.runs.dataset.outcome import Judged
from pipeline.runs.dataset.reader_items import refuse_crop, unmade
from pipeline.runs.dataset.worklist import Found, Shard, read_shard
from pipeline.runs.model.node_staging import staged
from pipeline.runs.model.prepare import (
    folder_of,
    items_of,
    prepare,
    steps_of,
    stretch_items,
    tables_of,
    task_sizes,
    trained_table,
    validation_items,
)
from pipeline.runs.model.training_work import Work
from pipeline.training.prepared import ModelFolder, Prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from torch import nn

    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.memory.footprint import MemoryChoice
    from pipeline.project.project import Project
    from pipeline.records import Reason, Tell
    from pipeline.training.checkpoints.checkpoint_reader import Manifest
    from pipeline.training.ranks.rank_protocol import Ranks
    from pipeline.training.step.step import Step

NAME = "train"
UNPLANNED_BYTES = 2 << 30  # what a process is thought to take until its plan is made
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
CALLED = {"code": "the task's code", "table": "the data set", "embeddings": "the encoder", "crop": "what is cropped"}


def inspect(project: Project) -> None:
    """Refuse what cannot be trained: no task, or one that does not even load."""
    from pipeline.project.run_code import load_task

    config = project.config
    if config.data.source == "fasta":
        what = "sequences alone have no graphs to train on"
        raise ConfigError(what, where="data.source is fasta", remedy="pipeline submit --stage embed")
    refuse_crop(config)
    load_task(config.train.task, config.train.options, beside=project.beside)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a training is, by its newest checkpoint."""

    done: int = 0  # steps
    epoch: int = 0
    stale: int = 0

    @classmethod
    def of(cls, folder: ModelFolder) -> Progress:
        """Look at the newest checkpoint."""
        told = latest(folder)
        return cls.told(told.data) if told else cls()

    @classmethod
    def told(cls, data: Mapping[str, Any]) -> Progress:
        """Read it from the data of a checkpoint."""
        return cls(**{name: data["place"][name] for name in ("done", "epoch", "stale")})

    def is_over(self, project: Project, prepared: Prepared) -> bool:
        """Say whether nothing is left to be trained."""
        patience = project.config.train.validation.patience
        return self.epoch >= prepared.epochs or (patience is not None and self.stale >= patience)


def latest(folder: ModelFolder) -> Manifest | None:
    """Return what the newest checkpoint of a training tells of itself."""
    from pipeline.training.checkpoints.checkpoint_folder import CheckpointFolder

    return CheckpointFolder(folder.checkpoints, last=1, best=0, identity={}, tell=lambda _: None).latest()


def survey(project: Project, folder: RunFolder | None, _at_once: int) -> Found:
    """See how far the training is that is asked for, and plan the rest."""
    counts = {"items": 0, "refused": 0, "unusable": 0, "cached": 0, "missing": 0, "waiting": 0}
    prepared = prepare(project)
    if prepared is None and folder is not None:
        what = f"{unmade(project.config)}: there is nothing to train on"
        raise ConfigError(what, where=str(project.config.cluster.runs), remedy="leave out --only")
    if prepared is None:  # they come first
        return Found({**counts, "unplanned": 1}, (Shard(0, 1, 1),))
    steps = steps_of(project, prepared)
    progress = Progress.of(folder_of(project, prepared))
    left = 0 if progress.is_over(project, prepared) else max(1, steps - progress.done)
    counts |= {"items": progress.done + left, "cached": progress.done, "missing": left}
    if folder is not None:
        with writing_run(folder.plan(NAME)):
            folder.plan(NAME).write_text(json.dumps(prepared.to_json()))
    shards = (Shard(progress.done, progress.done + left, 1),) if left else ()  # one thing, which cannot be halved
    return Found(counts, shards, bytes=0, cost=float(left))


def mem_bytes(project: Project) -> int:
    """Return the memory of a node's processes: as planned, once there is a plan."""
    prepared = prepare(project)
    resources = project.config.cluster.train
    return prepared.mem_bytes if prepared else resources.ranks_per_node * UNPLANNED_BYTES


def gpu_bytes(project: Project) -> int:
    """Return the memory that a card must have at least: that for which the plan was made."""
    prepared = prepare(project)
    return max(stretch.reserved_bytes for stretch in prepared.stretches) if prepared else 0


def recipe(project: Project) -> Mapping[str, Any]:
    """Return under what measurements of such jobs are remembered."""
    train = project.config.train
    return {"task": train.task, "options": dict(train.options), "batch": train.effective_batch}


def work(
    project: Project, folder: RunFolder, task: int, tell: Tell, _part: tuple[int, int] = (0, 1)
) -> Generator[Reason | None, None, None]:
    """Train, as one rank of those that there are."""
    from pipeline.stages.train import train

    prepared = Prepared.from_json(json.loads(folder.plan(NAME).read_text()))
    ranks = together(project, folder, prepared, tell)
    try:
        project = staged(project, tables_of(project, prepared), ranks, tell, said)
        job = job_of(project, folder, prepared, tell, ranks)
        with blamed(Work.of(project.config, beside=project.beside).task):
            yield from train(job, read_shard(folder, NAME, task).start)
    except BaseException as error:
        why = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else ""
        ranks.close(why)  # which the others hear
        raise
    ranks.close()


def together(project: Project, folder: RunFolder, prepared: Prepared, tell: Tell) -> Ranks:
    """Return this process among its ranks, on the device that it has."""
    from pipeline.training.ranks.process_group import join_process_group
    from pipeline.training.ranks.rendezvous import RankPlace
    from pipeline.training.ranks.watchdog import HangLimits

    place = tell.place or RankPlace(0, 1)
    device = device_for(project, place.local_rank, prepared)
    hang_s = float(project.config.train.hang)
    folder.meetings.mkdir(exist_ok=True)
    patience = HangLimits(hang_s=hang_s, slow_s=max(2 * hang_s, 3600.0))
    return join_process_group(place, folder.meetings, device=device, patience=patience, tell=said)


def device_for(project: Project, local_rank: int, prepared: Prepared) -> str:
    """Return the device of a rank, made the current one: before torch looks at any, its allocator is told how to go."""
    if not project.config.cluster.train.gpus:
        return "cpu"
    if prepared.allocator:
        os.environ.setdefault(ALLOCATOR, prepared.allocator)
    import torch

    torch.cuda.set_device(local_rank % max(1, torch.cuda.device_count()))
    return "cuda"


def job_of(project: Project, folder: RunFolder, prepared: Prepared, tell: Tell, ranks: Ranks) -> Any:
    """Return everything that training is given."""
    from pipeline.memory.footprint import MemoryChoice
    from pipeline.stages.train import Job

    config = project.config
    work = Work.of(config, beside=project.beside)
    choice: MemoryChoice = MemoryChoice(
        precision=prepared.precision, checkpointing=prepared.checkpointing, offload=prepared.offload, shards=1
    )
    table = trained_table(project, prepared)
    sizes = task_sizes(project, prepared, table)
    made = folder_of(project, prepared)
    if ranks.rank == 0:
        with writing_run(made.path):
            made.path.mkdir(parents=True, exist_ok=True)
            made.prepared.write_text(json.dumps(prepared.to_json()))
    ranks.exchange({})
    device = "cuda" if config.cluster.train.gpus else "cpu"
    return Job(
        train=config.train,
        prepared=prepared,
        folder=made,
        make_step=lambda begin: _step(work, choice, ranks, device, begin, is_spread=prepared.sharded),
        source=lambda one: source_of(project, one),
        embeddings=lambda: rows_of(project),
        stretches=[(one, stretch_items(table, sizes, one)) for one in prepared.stretches],
        validation=validation_items(project, prepared),
        ranks=ranks,
        tell=tell,
        say=said if ranks.rank == 0 else lambda _: None,
        remember=lambda peak_bytes, step_s: remember(config, folder, work, prepared, choice, peak_bytes, step_s),
        measure=work.task.cost,
        leave_out=frozenset(left_out_items(folder, NAME)),
        settings=without_secrets_in(config.model_dump(mode="json")),
    )


def novelty(project: Project) -> list[str]:
    """Say why a training begins anew although one of the same task is there: what differs."""
    prepared = prepare(project)
    if prepared is None or folder_of(project, prepared).path.exists():
        return []
    kind = prepared.name.rpartition("-")[0]
    known = sorted(project.config.train.models.glob(f"{kind}-*/prepared.json"), key=lambda path: path.stat().st_mtime)
    if not known:
        return []
    before = json.loads(known[-1].read_text()).get("recipe", {})
    names = [name for name in {**before, **prepared.recipe} if before.get(name) != prepared.recipe.get(name)]
    changed = ", ".join(CALLED.get(name, f"train.{name}") for name in names)
    return [f"a new training: {changed} changed since {known[-1].parent.name}, which stays as it is"]


def misfits(project: Project) -> list[str]:
    """Return what a configuration names that is not there: splits, weights to begin with."""
    from pipeline.runs.dataset.loading import made_table

    train, found = project.config.train, list[str]()
    key = made_table(project)
    splits = items_of(project, key, None).splits if key else ()
    if any(splits) and train.split is not None and train.split not in splits:
        found.append(f"train.split is {train.split!r}; there are {', '.join(repr(one) for one in splits if one)}")
    if train.pretrained is not None:
        from pipeline.project.run_code import load_task
        from pipeline.training.checkpoints.pretrained import load_pretrained

        try:
            task = load_task(train.task or "", train.options, beside=project.beside)
            load_pretrained(task.model(), train.pretrained, partial=train.pretrained_partial)
        except PipelineError as error:
            found.append(f"train.pretrained: {error.what}")
    return found


def _step(
    work: Work, choice: MemoryChoice, ranks: Ranks, device: str, begin: Callable[[nn.Module], None], *, is_spread: bool
) -> Step:
    """Return the step that is trained; `begin` gives its model the weights to begin with."""
    if is_spread and ranks.world > 1:
        return work.spread(choice, ranks, device=device, begin=begin)
    return work.begun(choice, device=device, begin=begin)


def remember(
    config: Config,
    folder: RunFolder,
    work: Work,
    prepared: Prepared,
    choice: MemoryChoice,
    peak_bytes: int,
    step_s: float,
) -> None:
    """Remember what a card really held in an epoch, for the next plan of such a model."""
    import torch

    from pipeline.memory.hardware.gpus import known_name
    from pipeline.memory.history.step_history import Peak, torch_version
    from pipeline.runs.model.probe import model_name
    from pipeline.runs.model.probe_job import peaks_of

    gpu = known_name(torch.cuda.get_device_name())
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    peak = Peak(
        model=model_name(work, choice),
        card=gpu,
        gpu=gpu,
        torch=torch_version(),
        driver="",
        allocator=prepared.allocator,
        sizes="an epoch",
        predicted_bytes=max(stretch.reserved_bytes for stretch in prepared.stretches),
        measured_bytes=peak_bytes,
        died=False,
        outside_bytes=total_bytes - free_bytes - torch.cuda.memory_reserved(),
        predicted_s=prepared.step_s,
        step_s=step_s,
        at=time.time(),
    )
    peaks_of(config).record(folder.name, f"{socket.gethostname()}-{os.getpid()}", [peak])


def said(line: str) -> None:
    """Write a line to the log of the task."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - a task's stderr is its log


@dataclass(slots=True)
class Trained(Judged):
    """What came of a training."""

    folder: str = ""
    epochs: int = 0
    steps: int = 0
    last: dict[str, Any] = field(default_factory=dict)  # figures of the last epoch
    best: dict[str, Any] = field(default_factory=dict)  # and of the best
    monitor: str = ""
    ooms: int = 0
    skipped: int = 0
    cropped: int = 0
    remedied: dict[str, int] = field(default_factory=dict)  # items on each rung of the ladder, over all epochs


def judge(project: Project, folder: RunFolder, _patience_s: float) -> Trained:
    """Say what has been trained, by the newest checkpoint that is whole, every byte of which is read."""
    from pipeline.training.checkpoints.checkpoint_folder import CheckpointFolder
    from pipeline.training.loop.metrics_log import read_epochs

    prepared = Prepared.from_json(json.loads(folder.plan(NAME).read_text()))
    made, settings = folder_of(project, prepared), project.config.train.validation
    identity = latest(made)
    checkpoints = CheckpointFolder(
        made.checkpoints, last=1, best=0, identity=identity.identity if identity else {}, tell=said
    )
    found = checkpoints.newest()
    judged = Trained(folder=str(made.path), monitor=settings.monitor)
    progress = Progress.told(found.data) if found else Progress()
    judged.items = judged.steps = progress.done
    judged.epochs = progress.epoch
    if not progress.is_over(project, prepared):
        judged.undone = max(1, steps_of(project, prepared) - progress.done)
        judged.first_undone = f"step {progress.done + 1}"
    epochs = read_epochs(made.path) if made.path.exists() else []
    if epochs:
        judged.last = epochs[-1].to_json()
        judged.ooms, judged.cropped = sum(one.ooms for one in epochs), max(one.cropped for one in epochs)
        for rung in sorted({rung for one in epochs for rung in one.remedied}):
            judged.remedied[rung] = sum(one.remedied.get(rung, 0) for one in epochs)
        judged.skipped = len(prepared.skipped)
        judged.best = best_of([one.to_json() for one in epochs], settings.monitor, lower=settings.lower_is_better)
    return judged


def best_of(epochs: list[dict[str, Any]], monitor: str, *, lower: bool) -> dict[str, Any]:
    """Return the epoch whose watched figure is the best; nothing where none has it."""
    known = [one for one in epochs if one["validation"].get(monitor) is not None]
    choose: Callable[..., dict[str, Any]] = min if lower else max
    return choose(known, key=lambda one: one["validation"][monitor]) if known else {}


def check(_project: Project, _folder: RunFolder, trained: Trained) -> list[str]:
    """Return what deserves a word."""
    said = []
    if trained.skipped:
        said.append(f"{trained.skipped:,} items are too large for any plan and were left out (train.oversize: skip)")
    if trained.ooms:
        said.append(f"memory ended {trained.ooms:,} times; no step was lost   (pipeline replay RUN --step N)")
    return said
