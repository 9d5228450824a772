"""Stage train: from a plan, graphs and embeddings to checkpoints, metrics and a trained model."""

from __future__ import annotations

import random
import secrets
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from pipeline.config.schema_train import TrainSection
from pipeline.device.accelerator import is_card
from pipeline.device.batch_transfer import CopyAhead
from pipeline.device.kinds import CPU
from pipeline.keys import content_digest
from pipeline.memory.runtime.meters import HostMeter, Maintenance, MaintenanceSettings, meter_of
from pipeline.memory.runtime.recovery import Governor
from pipeline.protocol import Weights
from pipeline.records import FROM_STEP, Reason, TaskContext
from pipeline.training.checkpoints.checkpoint import CheckpointFolder, latest_checkpoint
from pipeline.training.checkpoints.keeper import Keeper, model_key
from pipeline.training.checkpoints.trained_weights import load_pretrained
from pipeline.training.evaluating.evaluator import Evaluator
from pipeline.training.items.item_source import DamagedItems, ItemSource
from pipeline.training.items.item_table import ItemTable
from pipeline.training.items.loader import PROCESSES, THREADS, Loader, WorkedOn
from pipeline.training.items.residue_embeddings import Embeddings
from pipeline.training.loop.observer import TrainingObserver
from pipeline.training.loop.phase import Phase
from pipeline.training.loop.trainer import Trainer
from pipeline.training.prepared import COST, LIKENESS, ModelFolder, PhasePlan, Prepared, sampler_settings, shrunk_budget
from pipeline.training.ranks import Ranks
from pipeline.training.ranks.rank_pace import RankPace
from pipeline.training.sampling import Sampler
from pipeline.training.step.contrastive import ExactContrastiveStep
from pipeline.training.step.exact_step import ExactStep
from pipeline.training.step.fsdp import ExactShardedStep
from pipeline.training.step.step import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import nn

    from pipeline.protocol import Task
    from pipeline.training.checkpoints.model_claim import ModelClaim
    from pipeline.training.loop.metrics_log import MedianStop

    Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Items:
    """Items that a loader reads, with their cost under a plan."""

    table: ItemTable
    cost_N: Integers
    likeness_N: Integers  # orders an epoch; the same under every plan

    def without(self, ids: Collection[str]) -> Items:
        """Return the items but those with these ids."""
        others_N = np.flatnonzero([self.table.ids[number] not in ids for number in range(len(self.table))])
        return Items(self.table.take(others_N), self.cost_N[others_N], self.likeness_N[others_N])


@dataclass(frozen=True, eq=False)
class Job:
    """Everything that a training needs."""

    train: TrainSection
    prepared: Prepared
    folder: ModelFolder
    make_step: Callable[[Callable[[nn.Module], None]], Step]
    source: Callable[[ItemTable], ItemSource]
    embeddings: Callable[[], Embeddings | None]
    phases: Sequence[tuple[PhasePlan, Items]]
    validation: Items | None
    ranks: Ranks
    context: TaskContext
    say: Callable[[str], None]
    task: Task
    stage_tasks: Mapping[str, Task] = field(default_factory=dict)  # of phases with other options, by name
    remember: Callable[[int, float], None] = lambda _bytes, _s: None  # records a card's memory and a step's time
    leave_out: frozenset[str] = frozenset()
    damaged: DamagedItems | None = None  # handles records that cannot be read; None: they are errors
    settings: Mapping[str, Any] = field(default_factory=dict)  # the frozen configuration, for trackers
    claim: ModelClaim | None = None  # on the model's folder; rank 0 only
    prune: MedianStop | None = None  # which may end it early, among the others of its sweep

    def loader(
        self,
        items: Items,
        phase: PhasePlan,
        *,
        device: str,
        shuffle: bool,
        batch: int,
        threads: int | None = None,
    ) -> Loader:
        """Return a loader of items for a device, cut into micro-batches as planned."""
        settings = sampler_settings(
            batch,
            max(self.budget_of(phase.budget_bytes), int(items.cost_N.max(initial=1))),
            padding=phase.padding if self.train.batching == "padded" else None,
            seed=self.train.seed,
            micro_batch=1 if self.context.careful else pinned(self.train.micro_batch),
            shuffle=shuffle,
        )
        data = content_digest(np.ascontiguousarray(items.table.key_N16).data).hex()
        sizes = {COST: items.cost_N, LIKENESS: items.likeness_N}
        draws = items.table.draws if shuffle else None
        sampler = Sampler(sizes, settings, rank=self.ranks.rank, ranks=self.ranks.world, data=data, draws=draws)
        task = self.task_of(phase)
        weighs = shuffle and isinstance(task, Weights)  # an evaluation needs no weights
        return Loader(
            self.source(items.table),
            self.embeddings(),
            sampler,
            slots=self.train.slots + (phase.kept if shuffle else 0),
            threads=threads or self.train.threads,
            readers=PROCESSES if shuffle and not threads and self.train.readers == PROCESSES else THREADS,
            pin=device != CPU if self.train.pin == "auto" else self.train.pin,
            seed=self.train.seed,
            crop=self.prepared.crop or None,
            measure=self.task.cost,
            collate=task.collate,
            working=self.worked_on.reading,
            may_collate=self._may_collate,
            weigh=cast("Weights", task).weights if weighs else None,
            mending=self.damaged,
        )

    def _may_collate(self, ids: Sequence[str]) -> bool:
        """Tell whether items may be collated ahead: not if some are left out, or if nothing may run in parallel."""
        return not self.context.careful and self.leave_out.isdisjoint(ids)

    @property
    def trained_without(self) -> frozenset[str]:
        """The items that the training leaves out."""
        tables = [items.table for _, items in self.phases] if self.leave_out else []
        ids = (table.ids[number] for table in tables for number in range(len(table)))
        return self.leave_out.intersection(ids)

    @cached_property
    def worked_on(self) -> WorkedOn:
        return WorkedOn(self.context.on)

    def task_of(self, phase: PhasePlan) -> Task:
        return self.stage_tasks.get(phase.name, self.task)

    def budget_of(self, budget: int) -> int:
        """Return a budget, reduced for each time that the GPU ran out of memory."""
        return shrunk_budget(budget, self.context.shrink)


def pinned(value: Any) -> Any:
    """Return a configured value; None for `auto`."""
    return None if value == "auto" else value


def train(job: Job, before: int = 0) -> Generator[Reason | None, None, None]:
    """Train to the end, or until a signal; the first rank yields once for every step after the first `before`."""
    trainer = trainer_of(job)
    try:
        for done in trainer.run():
            if job.claim is not None and job.claim.is_lost:
                job.claim.check()
            job.context.report.moved = done > job.context.report.figures.setdefault(FROM_STEP, done)
            for _ in range(before if job.ranks.rank == 0 else done, done):
                yield None
            before = max(before, done)
    finally:
        close(trainer)
    if job.damaged is not None:
        job.damaged.newly_skipped()  # of the last validation
    job.context.report.ended_by = trainer.ended_by


def close(trainer: Trainer) -> None:
    """Close everything that is open, even where some of it fails."""
    with ExitStack() as stack:
        for loader in trainer.loaders:
            stack.callback(loader.end)
        stack.callback(trainer.observer.close)
        stack.callback(trainer.stepper.upkeep.end)
        stack.callback(trainer.keeper.close)


def seed_all(seed: int) -> None:
    """Seed the random numbers of torch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002 - users' code may draw from it


def trainer_of(job: Job) -> Trainer:
    """Put a training together."""
    train, ranks = job.train, job.ranks
    step = fresh_step(job)
    if train.compile:
        step.model.compile(mode=train.compile_mode)
    phases, checkpoints = _phases(job, step), _checkpoints(job, step)
    # after the card ran out of memory, no batch is copied ahead
    if is_card(step.device) and not (step.is_spread or job.context.shrink):
        step.ahead = CopyAhead(step.device)
    watch = _watch(job, step, checkpoints)
    stepper = _stepper(job, step, phases[0], watch)
    watch.budget = lambda: stepper.governor.budget
    evaluation = _evaluation(job, step, watch)
    host = HostMeter(limit_bytes=job.context.mem_bytes or None)
    behind = train.checkpoints.asynchronous
    warn = partial(job.context.report.warnings.__setitem__, "checkpoints")
    keeper = Keeper(checkpoints, ranks, fresh=StepReset(job), say=job.say, warn=warn, behind=behind, host=host)
    stepper.upkeep.begin()
    hosts = [reply["host"] for reply in ranks.exchange({"host": job.context.place.host})]
    return Trainer(
        train,
        step,
        stepper,
        phases,
        ranks,
        keeper,
        watch,
        validation=evaluation,
        host=host,
        ending=job.context.ending,
        governor_of=lambda phase: _governor(job, step, phase, stepper.ladder),
        leave_out=job.trained_without,
        damaged=job.damaged,
        prune=job.prune,
        pace=RankPace(hosts) if ranks.rank == 0 else None,
    )


def _phases(job: Job, step: Step) -> list[Phase]:
    """Return the phases of a training with their loaders."""
    phases, first = list[Phase](), 0
    for phase, items in job.phases:
        loader = job.loader(items, phase, device=step.device, shuffle=True, batch=job.train.effective_batch)
        phases.append(Phase(phase, loader, items.cost_N, first, job.task_of(phase)))
        first += phase.epochs
    return phases


def _governor(job: Job, step: Step, phase: Phase, ladder: Sequence[str]) -> Governor:
    """Return the governor of a phase's memory budget, as planned."""
    return Governor(
        planned=job.budget_of(phase.plan.budget_bytes),
        base_bytes=phase.plan.base_bytes,
        limit_bytes=job.prepared.limit_bytes - phase.plan.ahead_bytes if step.device != CPU else None,
        largest=int(phase.cost_N.max()),
        margin=job.prepared.margin,
        padded=job.train.batching == "padded",
        ladder=ladder,
    )


def _checkpoints(job: Job, step: Step) -> CheckpointFolder:
    """Return the checkpoint folder of the training, cleared of what dead starts have left."""
    checkpoints = CheckpointFolder(
        job.folder.checkpoints,
        last=job.train.checkpoints.last,
        best=job.train.checkpoints.best,
        identity={"model": model_key(step.model), "recipe": job.prepared.name},
        say=job.say,
        check=job.claim.check if job.claim is not None else lambda: None,
        token=job.ranks.exchange({"token": secrets.token_hex(4)})[0]["token"],
    )
    if job.ranks.rank == 0:
        checkpoints.sweep()
    job.ranks.exchange({})  # no rank writes before that
    return checkpoints


def _watch(job: Job, step: Step, checkpoints: CheckpointFolder) -> TrainingObserver:
    return TrainingObserver(
        job.train,
        job.prepared,
        job.folder,
        step,
        job.ranks,
        replace(job.context, on=job.worked_on.begin),
        job.say,
        meter=meter_of(step.device),
        checkpoint=lambda: _reference(checkpoints),
        config=job.settings,
        remember=job.remember,
    )


def _stepper(job: Job, step: Step, phase: Phase, watch: TrainingObserver) -> ExactStep:
    """Return what makes each step together with all ranks."""
    kind = ExactContrastiveStep if step.contrasts else ExactShardedStep if step.is_spread else ExactStep
    train = job.train
    habits = MaintenanceSettings(train.memory_fraction, train.empty_cache_every, train.collect_every, train.synchronise)
    upkeep = Maintenance(habits, step.device)
    return kind(
        step,
        job.ranks,
        phase.cost_N,
        upkeep,
        too_large=train.too_large,
        meter=watch.meter if step.device != CPU else None,
        begin=watch.begin,
        failed=watch.oom,
    )


def _evaluation(job: Job, step: Step, watch: TrainingObserver) -> Evaluator | None:
    """Return the evaluator that runs between epochs; None without validation items."""
    items = job.validation.without(job.leave_out) if job.validation is not None and job.leave_out else job.validation
    if items is None or not len(items.table):
        return None
    phase, batch = job.phases[-1][0], max(job.train.effective_batch, job.ranks.world)
    return Evaluator(
        step,
        job.loader(items, phase, device=step.device, shuffle=False, batch=batch),
        job.ranks,
        job.folder.outputs,
        cost_N=items.cost_N,
        too_large=job.train.too_large,
        begin=watch.begin,
        ending=job.context.ending,
    )


def _reference(checkpoints: CheckpointFolder) -> dict[str, str] | None:
    """Return the newest checkpoint, from which a step can be reached again."""
    newest = latest_checkpoint(checkpoints.folder)
    return {"path": str(newest.path), "digest": newest.sealed.digest} if newest else None


def fresh_step(job: Job) -> Step:
    """Return a step with a training's initial parameters, the same on every rank."""
    seed_all(job.train.seed)
    step = job.make_step(lambda model: begin_with(job, model))
    seed_all(job.train.seed + 1 + job.ranks.rank)
    return step


def begin_with(job: Job, model: nn.Module) -> None:
    """Load pretrained weights into a model, where any are configured."""
    if job.train.pretrained is None:
        return
    report = load_pretrained(model, job.train.pretrained, partial=job.train.pretrained_partial, train=job.train)
    if job.ranks.rank == 0:
        form = f", as {report.form} names them" if report.form else ""
        job.say(f"{report.loaded:,} tensors of {job.train.pretrained}{form}")
        for line in report.lines():
            job.say(f"  {line}")


class StepReset:
    """Resets a step to the beginning of its training; the first call finds it there already."""

    def __init__(self, job: Job) -> None:
        self._job, self._is_fresh = job, True

    def __call__(self, step: Step) -> None:
        """Give it back its initial parameters."""
        if self._is_fresh:
            self._is_fresh = False
            return
        step.optimizer.state.clear()  # frees memory for the new one
        other = fresh_step(self._job)
        with torch.no_grad():
            step.model.load_state_dict(other.model.state_dict())
            for own, average in zip(step.averages, other.averages, strict=True):
                own.copy_(average)
        step.scaler.load_state_dict(other.scaler.state_dict())
