"""Runs a model over a split and computes its loss, outputs and metrics, on any number of ranks and with little memory.

A training validates with an `Evaluator`. The stages evaluate and predict run `apply_model`: it loads a checkpoint and
does the items that earlier starts have not done. Every rank yields once for each of its items.

The outputs go to files at once (`outputs`). So does the loss, if it must survive a kill.

A loss that compares items belongs to no piece: the items' embeddings go to the files, and rank 0 computes the loss of
as many at a time as a step has (`Settings.batch`), in the order of their numbers; the last are fewer. So it is the
same however the split is cut, on any ranks.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from pipeline.device.accelerator import Card, RngState, computing, is_card
from pipeline.device.batch_transfer import map_tensors
from pipeline.errors import PlanInfeasible
from pipeline.memory.runtime.recovery import Governor, each_that_fits
from pipeline.records import Reason, Rejection
from pipeline.training.checkpoints.trained_weights import load_checkpoint
from pipeline.training.evaluating.outputs import (
    HIDDEN,
    GatheredOutputs,
    OutputWriter,
    done_numbers,
    numbers_of,
    returned_values,
    summed_by_name,
)
from pipeline.training.items.loader import Loader, WorkedOn
from pipeline.training.prepared import COST, LIKENESS, sampler_settings, shrunk_budget
from pipeline.training.sampling import BatchOrigin, Sampler
from pipeline.training.step.contrastive import embedded
from pipeline.training.step.exact_step import Piece
from pipeline.training.step.step import ON_HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import nn

    from pipeline.config.schema_train import TrainSection
    from pipeline.memory.runtime.recovery import Cut
    from pipeline.protocol import Contrastive
    from pipeline.records import TaskContext
    from pipeline.training.checkpoints.checkpoint import Application, ChosenCheckpoint
    from pipeline.training.evaluating.outputs import Terms
    from pipeline.training.items.batch import TaskBatch
    from pipeline.training.items.item_source import ItemSource
    from pipeline.training.items.item_table import ItemTable
    from pipeline.training.items.residue_embeddings import Embeddings
    from pipeline.training.prepared import RowShare
    from pipeline.training.ranks import Ranks
    from pipeline.training.step.contrastive import ContrastiveStep
    from pipeline.training.step.fsdp import ShardedStep
    from pipeline.training.step.step import Step

    Integers = NDArray[np.int64]

LOSS = "loss"
HOST, ERROR = "cpu", "error"


@dataclass(eq=False)
class Evaluator:
    """Runs a model over the items of a loader; every rank makes the same calls."""

    step: Step
    loader: Loader | None  # None: this rank has no items left
    ranks: Ranks
    folder: Path  # for outputs; all ranks see it
    cost_N: NDArray[Any]  # bytes of each item
    of: str = ""  # names the model and the items; if set, finished work survives a kill
    numbers: NDArray[Any] | None = None  # of the loader's items in the whole table, if it has only some
    first_writer: int = 0  # distinguishes this rank's files from those of other tasks
    with_loss: bool = True
    too_large: str = ERROR  # for an item that does not fit on the device: cpu, skip or error
    flush_s: float = math.inf  # at most this much work is lost by a kill
    begin: Callable[[Piece], None] = lambda _: None
    reject: Callable[[Rejection], None] = lambda _: None
    ending: Callable[[], int] = lambda: 0

    def __post_init__(self) -> None:
        self.ended_by = 0  # the signal that ended it
        self._has_outputs = callable(getattr(self.step.task, "outputs", None))
        self._contrasts = self.with_loss and self.step.contrasts  # the loss compares many items
        self._writer: OutputWriter | None = None
        self._governor = Governor()
        self._terms: list[Terms] = []  # of each piece

    def figures(self) -> dict[str, float] | int:
        """Return the loss and the metrics of the split, or the signal that ended it; the files are removed."""
        self.clear()
        for _ in self.run():
            pass
        ended_by = max(report["ended_by"] for report in self.ranks.exchange({"ended_by": self.ended_by}))
        figures = int(ended_by) or self.results()
        self.clear()
        return figures

    def clear(self) -> None:
        """Remove the files of outputs, once every rank is done with them."""
        self.ranks.exchange({})
        if self.ranks.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.ranks.exchange({})

    def run(self) -> Iterator[Reason | None]:
        """Run over this rank's items; yield for each why it was left out, or None."""
        if self.loader is None:
            return
        if self._has_outputs or self.of or self._contrasts:
            writer = self.first_writer + self.ranks.rank
            self._writer = OutputWriter(self.folder, writer, of=self.of, part_s=self.flush_s)
        leaves = self.too_large == HOST and self.step.device != HOST and not self.step.is_spread
        self._governor = Governor(ladder=(HOST,) if leaves else ())
        self.loader.set_epoch(0)
        try:
            yield from self._run_jointly() if self.step.is_spread else self._run_alone()
        finally:
            if self._writer is not None:
                self._writer.flush()
            self._writer = None

    def _run_alone(self) -> Iterator[Reason | None]:
        """Evaluate this rank's items independently of the other ranks."""
        assert self.loader is not None
        for batch in self.loader.read():
            self.ranks.progress("evaluation")
            yield from map(self._left_out, batch.rejected)
            whole = Piece(batch, 0, len(batch))
            run = partial(self._evaluate, whole)
            for cut, error in each_that_fits(self._governor, self._costs(whole), run, device=self.step.device):
                piece = whole.part(cut)
                yield from [self._leave_out_oversize(piece, error)] if error else [None] * len(piece)
            if signal := self.ending():
                self.ended_by = signal
                return

    def _run_jointly(self) -> Iterator[Reason | None]:
        """Evaluate in step with all ranks, as a model that is sharded over them needs."""
        from pipeline.training.step.fsdp import joint_turns

        loader, rejected, step = self.loader, list[Rejection](), cast("ShardedStep", self.step)
        assert loader is not None

        def pieces() -> Iterator[Piece]:
            for batch in loader.read():
                rejected.extend(batch.rejected)
                yield from self._cuts(Piece(batch, 0, len(batch)))

        def fetch(number: int) -> TaskBatch:
            return loader.fetch((number,), BatchOrigin(0, 0, 0, 1))

        for turn in joint_turns(pieces(), self.ranks, fetch):
            self.ranks.progress("evaluation")
            done, error = step.joint_pass(partial(self._evaluated, turn.piece))
            if not done:  # memory ended on this rank or on another
                turn.instead = [turn.piece] if turn.counts else []
                if error:
                    can_be_cut = self._governor.failed(self._costs(turn.piece))
                    turn.instead = list(self._cuts(turn.piece)) if can_be_cut else []
                    if not can_be_cut:
                        yield self._leave_out_oversize(turn.piece, error, counts=turn.counts)
            elif turn.counts:
                self._keep(turn.piece, *done[0])
                yield from [None] * len(turn.piece)
        yield from map(self._left_out, rejected)

    def _costs(self, piece: Piece) -> list[int]:
        return [int(self.cost_N[number]) for number in piece.numbers]

    def _cuts(self, piece: Piece) -> Iterator[Piece]:
        yield from map(piece.part, self._governor.cuts(self._costs(piece)))

    def _left_out(self, rejection: Rejection) -> Reason:
        self.reject(rejection)
        return rejection.reason

    def _leave_out_oversize(self, piece: Piece, error: str, *, counts: bool = True) -> Reason:
        """Leave out an item that does not fit, if `train.too_large` allows it and the item is this rank's own."""
        name = piece.ids[0]
        if self.too_large == ERROR or not counts:
            problem = f"{name} does not fit in memory, even alone and without gradients: {error}"
            remedy = "use a larger GPU   or   --set train.too_large=skip"
            raise PlanInfeasible(problem, where="evaluation", remedy=remedy)
        return self._left_out(Rejection(name, Reason.DOES_NOT_FIT, f"even alone: {error}"))

    def _evaluate(self, whole: Piece, cut: Cut) -> None:
        """Evaluate a piece, on the CPU if it did not fit on the GPU; a failed piece adds nothing to the results."""
        piece = whole.part(cut)
        self._keep(piece, *self._evaluated(piece, ON_HOST if piece.rung else 0))

    def _evaluated(self, piece: Piece, rung: int = 0) -> tuple[dict[str, Any], Terms]:
        """Return the outputs of a piece, with embeddings for a contrastive loss, and its loss terms."""
        self.begin(piece)
        task, batch = self.step.task, piece.collated()
        terms: dict[str, Any] = {}
        outputs: dict[str, Any] = {}
        is_asked_twice = self._has_outputs and self.with_loss and not self.step.is_spread
        with self.step.remedied(rung), self.step.evaluating():
            batch, model = self.step.moved(batch), self.step.model
            with computed_once(model, self.step.place) if is_asked_twice else nullcontext(), self.step.cast():
                if self.with_loss and not self._contrasts:
                    terms = dict(self.step.terms_of(batch))
                if self._has_outputs:
                    outputs = returned_values("outputs", task.outputs(model, batch))  # type: ignore[attr-defined]
                if self._contrasts:
                    embeddings = embedded(cast("Contrastive", task), model, batch)
                    outputs |= {f"{HIDDEN}{name}": rows for name, rows in embeddings.items()}
        return outputs, {name: (float(total), float(weight)) for name, (total, weight) in terms.items()}

    def _keep(self, piece: Piece, outputs: Mapping[str, Any], terms: Terms) -> None:
        """Add a piece to the results."""
        self._terms.append(terms)
        if self._writer is not None:
            numbers = piece.numbers if self.numbers is None else self.numbers[list(piece.numbers)].tolist()
            self._writer.add(piece.ids, numbers, outputs, terms)

    def results(self) -> dict[str, float]:
        """Return the loss and the task's metrics over all items and ranks, work of earlier starts included.

        The loss is the sum of its terms' means. Rank 0 computes what needs the files.
        """
        task, are_kept = self.step.task, bool(self.of) or self._contrasts
        has_metrics = self._has_outputs and callable(getattr(task, "metrics", None))
        terms, self._terms = self._terms, []
        own: dict[str, Any] = {"terms": {} if are_kept else summed_by_name(terms), "metrics": {}}
        self.ranks.exchange({})  # all have written
        if self.ranks.rank == 0 and (are_kept or has_metrics):
            gathered = GatheredOutputs(self.folder, of=self.of)
            if are_kept:
                own["terms"] = self._kept_terms(gathered)
            if gathered and has_metrics:
                own["metrics"] = numbers_of(task.metrics(gathered))  # type: ignore[attr-defined]
        reports = self.ranks.exchange(own)
        totals = summed_by_name([report["terms"] for report in reports])
        means = {name: total / weight if weight else 0.0 for name, (total, weight) in totals.items()}
        of_terms = {f"{LOSS}.{name}": mean for name, mean in means.items()} if len(means) > 1 else {}
        loss = {LOSS: math.fsum(means.values())} if means else {}
        return {**loss, **of_terms, **reports[0]["metrics"]}

    def _kept_terms(self, gathered: GatheredOutputs) -> Terms:
        """Return the sums and weights of terms that the files hold, or, if contrastive, of the embeddings there."""
        if not self._contrasts:
            return gathered.terms()
        items = min(map(len, gathered.hidden.values()), default=0)
        size = self.step.settings.batch or max(items, 1)
        return summed_by_name([self._contrast(gathered, slice(start, start + size)) for start in range(0, items, size)])

    def _contrast(self, gathered: GatheredOutputs, places: slice) -> Terms:
        """Return the sums and weights of the loss of some items together, on the CPU if the GPU has no room."""
        step = cast("ContrastiveStep", self.step)
        rows = {name: torch.from_numpy(np.stack(column[places])) for name, column in gathered.hidden.items()}
        return step.where_it_fits(lambda: step.evaluate_rows(rows), rows, may_leave=self.too_large == HOST)


@contextmanager
def computed_once(model: nn.Module, device: str) -> Iterator[None]:
    """Let a second call of a model return the first result, where computing it again would give the same.

    A task calls the model for the loss and again for the outputs. The result is reused only without gradients and
    random numbers, in eval mode, and if no tensor that went in or came out has changed since.
    """
    name = "forward" if model._compiled_call_impl is None else "_compiled_call_impl"  # noqa: SLF001 - set by compile()
    own, forward, kind = vars(model).get(name), getattr(model, name), torch.device(device).type
    last: tuple[Any, Any, list[Any]] | None = None  # arguments, result, and the state of both

    def state(given: tuple[Any, ...], result: Any) -> list[Any]:
        is_plain = not torch.is_grad_enabled() and not any(module.training for module in model.modules())
        found = [is_plain, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), *map(id, given)]
        map_tensors(lambda tensor: found.append((id(tensor), tensor._version)), (given, result))  # noqa: SLF001 - the only count of in-place changes
        return found

    def once(*args: Any, **kwargs: Any) -> Any:
        nonlocal last
        given, known, last = (*args, *kwargs, *kwargs.values()), last, None
        if known is not None and state(given, known[1]) == known[2]:
            return known[1]
        before = RngState.capture(device)
        result = forward(*args, **kwargs)
        now = state(given, result)
        if now[0] and RngState.capture(device) == before:
            last = given, result, now
        return result

    setattr(model, name, once)
    try:
        yield
    finally:
        delattr(model, name)
        if own is not None:
            setattr(model, name, own)


# A trained model, applied to the items of a split

STEP_ITEMS = 64  # of a rank, which the sampler cuts into micro-batches together


@dataclass(frozen=True, eq=False)
class ApplyJob:
    """A model, the items to apply it to, and how."""

    train: TrainSection
    applied: Application
    table: ItemTable
    cost_N: Integers  # bytes, as planned
    make_step: Callable[[], Step]
    source: Callable[[ItemTable], ItemSource]
    embeddings: Callable[[], Embeddings | None]
    choose: Callable[[Collection[str]], ChosenCheckpoint]  # a checkpoint, except those given: they proved unusable
    parts: Callable[[ChosenCheckpoint], Path]  # the folder of the outputs so far
    ranks: Ranks
    context: TaskContext
    say: Callable[[str], None]
    left_out: Mapping[str, tuple[Reason, str]] = field(default_factory=dict)
    with_loss: bool = True
    publish: Callable[[Path, Mapping[str, Any]], Iterable[Path]] | None = None  # writes a task's own files of outputs
    share: RowShare | None = None  # of the rows, where other tasks have the rest


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
        chosen = load_checkpoint(step, ranks, job.choose, job.say, train)
    job.say(f"checkpoint {chosen.path}, step {chosen.step:,}" + (f" ({chosen.note})" if chosen.note else ""))
    if train.compile:
        step.model.compile(mode=train.compile_mode)
    folder, of = job.parts(chosen), outputs_name(chosen, job.applied.made)
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
        job.context.refuse(rejection.id, rejection.reason, rejection.detail)

    if ranks.rank == 0:
        yield from [None] * len(np.setdiff1d(done_N, job.applied.done_N))  # by earlier attempts of this run
        for id_ in (job.table.ids[number] for number in rest_N[~is_kept_N]):  # they killed an earlier attempt
            refuse(Rejection(id_, *job.left_out[id_]))
            yield job.left_out[id_][0]
    worked_on = WorkedOn(job.context.on)
    evaluation = Evaluator(
        step,
        _loader(job, kept_N, step, worked_on) if len(kept_N) else None,
        ranks,
        folder,
        cost_N=job.cost_N[kept_N],
        of=of,
        numbers=kept_N,
        first_writer=job.share.task * ranks.world if job.share else 0,
        with_loss=job.with_loss,
        too_large=train.too_large,
        flush_s=60 * train.checkpoints.minutes,
        begin=lambda piece: worked_on.begin(piece.ids),
        reject=refuse,
        ending=job.context.ending,
    )
    with ranks.patient("compiling") if train.compile else nullcontext():
        for left_out in evaluation.run():
            job.context.report.moved = job.context.report.moved or left_out is None
            yield left_out
    if is_card(step.device):
        job.context.report.figures["device_peak_bytes"] = float(Card(step.device).memory("reserved", "peak"))
    reports = ranks.exchange({"ended_by": evaluation.ended_by, "rejected": rejected, "examples": examples})
    job.context.report.ended_by = max(rank["ended_by"] for rank in reports)
    if job.context.report.ended_by:
        return None
    in_all = sum((Counter(rank["rejected"]) for rank in reports), Counter[str]())
    first_examples = {reason: text for rank in reversed(reports) for reason, text in rank["examples"].items()}
    return ApplyResult(evaluation, chosen, folder, of, dict(sorted(in_all.items())), first_examples)


def _done(job: ApplyJob, folder: Path, of: str) -> Integers:
    """Return the items that are done, as rank 0 sees them before any rank writes."""
    mine = done_numbers(folder, of) if job.ranks.rank == 0 else np.zeros(0, np.int64)
    done = job.ranks.exchange({"done": spans(mine)})[0]["done"]
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(first, stop) for first, stop in done)])


def spans(numbers: Integers) -> list[list[int]]:
    """Return ascending numbers as ranges [first, stop]."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return [[int(run[0]), int(run[-1]) + 1] for run in runs if len(run)]


def _loader(job: ApplyJob, numbers_K: Integers, step: Step, worked_on: WorkedOn) -> Loader:
    """Return a loader of some items, in micro-batches as planned."""
    train, table = job.train, job.table.take(numbers_K)
    phase = job.applied.prepared.phases[-1]
    budget = shrunk_budget(phase.budget_bytes, job.context.shrink)
    settings = sampler_settings(
        STEP_ITEMS * job.ranks.world,
        budget,
        padding=phase.padding if train.batching == "padded" else None,
        micro_batch=1 if job.context.careful else None if train.micro_batch == "auto" else train.micro_batch,
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
        working=worked_on.reading,
        may_collate=lambda _: not job.context.careful,
    )
