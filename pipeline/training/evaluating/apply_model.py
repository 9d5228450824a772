"""Applies a trained model to the items of a split, as one rank of several; evaluating and predicting share this.

Items that earlier starts have done are not done again. Every rank yields once for each of its items.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.device.accelerator import Card, computing, is_card
from pipeline.records import Reason, Rejection
from pipeline.training.checkpoints.trained_weights import WeightsReading, load_checkpoint
from pipeline.training.evaluating.evaluator import Evaluator
from pipeline.training.evaluating.outputs import done_numbers
from pipeline.training.items.loader import Loader, WorkedOn
from pipeline.training.prepared import COST, LIKENESS, sampler_settings, shrunk_budget
from pipeline.training.sampling import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from pipeline.config.schema_train import TrainSection
    from pipeline.records import TaskContext
    from pipeline.training.checkpoints.checkpoint import ChosenCheckpoint
    from pipeline.training.items.item_source import ItemSource
    from pipeline.training.items.item_table import ItemTable
    from pipeline.training.items.residue_embeddings import Embeddings
    from pipeline.training.prepared import Prepared, RowShare
    from pipeline.training.ranks import Ranks
    from pipeline.training.step.step import Step

    Integers = NDArray[np.int64]

STEP_ITEMS = 64  # of a rank, which the sampler cuts into micro-batches together


@dataclass(frozen=True, eq=False)
class ApplyJob:
    """A model, the items to apply it to, and how."""

    train: TrainSection
    prepared: Prepared
    table: ItemTable
    cost_N: Integers  # bytes, as planned
    made: str  # the digest of the table
    data: str  # the path of the data set
    make_step: Callable[[], Step]
    source: Callable[[ItemTable], ItemSource]
    embeddings: Callable[[], Embeddings | None]
    choose: Callable[[Collection[str]], ChosenCheckpoint]  # a checkpoint, except those given: they proved unusable
    parts: Callable[[ChosenCheckpoint], Path]  # the folder of the outputs so far
    known_N: Integers  # items that were done before the run
    ranks: Ranks
    tell: TaskContext
    say: Callable[[str], None]
    left_out: Mapping[str, tuple[Reason, str]] = field(default_factory=dict)
    with_loss: bool = True
    publish: Callable[[Path, Mapping[str, Any]], Iterable[Path]] | None = None  # writes a task's own files of outputs
    share: RowShare | None = None  # of the rows, where other tasks have the rest

    @cached_property
    def worked_on(self) -> WorkedOn:
        return WorkedOn(self.tell.on)


@dataclass(frozen=True, slots=True)
class ApplyResult:
    """The results of applying a model, on this rank."""

    evaluation: Evaluator
    chosen: ChosenCheckpoint
    parts: Path
    of: str  # the name of the checkpoint and the items, by `outputs_name`
    rejected: Mapping[str, int]  # over all ranks: reason → items
    examples: Mapping[str, str]  # reason → an item and the details


def outputs_name(chosen: ChosenCheckpoint, made: str) -> str:
    """Return the name under which outputs are kept: of the checkpoint and the items."""
    return f"{chosen.digest}-{made}"


def apply_model(job: ApplyJob) -> Generator[Reason | None, None, ApplyResult | None]:
    """Run a model over all items that are left, yielding for each why it was left out; return None after a signal."""
    ranks, train = job.ranks, job.train
    torch.manual_seed(train.seed)
    step = job.make_step()
    if train.memory_fraction is not None:
        computing(step.device).limit_fraction(train.memory_fraction)
    with ranks.patient("loading the model"):
        chosen = load_checkpoint(step, ranks, job.choose, job.say, WeightsReading.of(train))
    job.say(f"checkpoint {chosen.path}, step {chosen.step:,}" + (f" ({chosen.note})" if chosen.note else ""))
    if train.compile:
        step.model.compile(mode=train.compile_mode)
    folder, of = job.parts(chosen), outputs_name(chosen, job.made)
    done_N = _done(job, folder, of)
    rest_N = np.setdiff1d(np.arange(len(job.table)), done_N)
    if job.share is not None:
        rest_N, done_N = job.share.of(rest_N), job.share.of(done_N)
    is_kept_N = np.array([job.table.ids[number] not in job.left_out for number in rest_N], np.bool_)
    kept_N = rest_N[is_kept_N]
    rejected, examples = Counter[str](), dict[str, str]()

    def refuse(rejection: Rejection) -> None:
        rejected[rejection.reason] += 1
        examples.setdefault(rejection.reason, f"{rejection.id}: {rejection.detail}")
        job.tell.refuse(rejection.id, rejection.reason, rejection.detail)

    if ranks.rank == 0:
        yield from [None] * len(np.setdiff1d(done_N, job.known_N))  # by earlier attempts of this run
        for id_ in (job.table.ids[number] for number in rest_N[~is_kept_N]):  # they killed their task before
            refuse(Rejection(id_, *job.left_out[id_]))
            yield job.left_out[id_][0]
    evaluation = Evaluator(
        step,
        _loader(job, kept_N, step) if len(kept_N) else None,
        ranks,
        folder,
        cost_N=job.cost_N[kept_N],
        of=of,
        numbers=kept_N,
        first_writer=job.share.task * ranks.world if job.share else 0,
        with_loss=job.with_loss,
        too_large=train.too_large,
        flush_s=60 * train.checkpoints.minutes,
        begin=lambda piece: job.worked_on.begin(piece.ids),
        reject=refuse,
        ending=job.tell.ending,
    )
    with ranks.patient("compiling") if train.compile else nullcontext():
        for left_out in evaluation.run():
            job.tell.report.moved = job.tell.report.moved or left_out is None
            yield left_out
    if is_card(step.device):
        job.tell.report.figures["device_peak_bytes"] = float(Card(step.device).memory("reserved", "peak"))
    own = {"ended_by": evaluation.ended_by, "rejected": rejected, "examples": examples}
    reports = ranks.exchange(own)
    job.tell.report.ended_by = max(rank["ended_by"] for rank in reports)
    if job.tell.report.ended_by:
        return None
    in_all = sum((Counter(rank["rejected"]) for rank in reports), Counter[str]())
    first_examples = {reason: text for rank in reversed(reports) for reason, text in rank["examples"].items()}
    return ApplyResult(evaluation, chosen, folder, of, dict(sorted(in_all.items())), first_examples)


def _done(job: ApplyJob, folder: Path, of: str) -> Integers:
    """Return the items that are done, as rank 0 sees them before anybody writes."""
    mine = done_numbers(folder, of) if job.ranks.rank == 0 else np.zeros(0, np.int64)
    done = job.ranks.exchange({"done": spans(mine)})[0]["done"]
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(first, stop) for first, stop in done)])


def spans(numbers: Integers) -> list[list[int]]:
    """Return ascending numbers as ranges [first, stop]."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return [[int(run[0]), int(run[-1]) + 1] for run in runs if len(run)]


def _loader(job: ApplyJob, numbers_K: Integers, step: Step) -> Loader:
    """Return a loader of some items, in micro-batches as planned."""
    train, table = job.train, job.table.take(numbers_K)
    phase = job.prepared.phases[-1]
    budget = shrunk_budget(phase.budget_bytes, job.tell.shrink)
    settings = sampler_settings(
        STEP_ITEMS * job.ranks.world,
        budget,
        padding=phase.padding if train.batching == "padded" else None,
        micro_batch=1 if job.tell.careful else None if train.micro_batch == "auto" else train.micro_batch,
        shuffle=False,
    )
    cost_K = np.minimum(job.cost_N[numbers_K], budget)
    sampler = Sampler({COST: cost_K, LIKENESS: cost_K}, settings, rank=job.ranks.rank, ranks=job.ranks.world)
    return Loader(
        job.source(table),
        job.embeddings(),
        sampler,
        slots=train.slots,
        threads=train.threads,
        pin=is_card(step.device) if train.pin == "auto" else train.pin,
        seed=train.seed,
        collate=step.task.collate,
        working=job.worked_on.reading,
        may_collate=lambda _: not job.tell.careful,
    )
