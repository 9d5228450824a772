"""What `pipeline plan train` shows: the plan, tables to decide by, the job, and the linter's findings."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from pipeline.command_line import Command
from pipeline.dataset.early_items import (
    SIZES,
    naming_sizes,
    refuse_other_width,
    refuse_sequences,
    refuse_unknown_splits,
    scanned_table,
    typed_table,
)
from pipeline.dataset.loading import batches_of, made_table, table_of
from pipeline.dataset.reader_items import refuse_crop
from pipeline.device.kinds import CPU
from pipeline.errors import ConfigError
from pipeline.memory.footprint import Category
from pipeline.memory.hardware.caching_allocator import DEFAULT, EXPANDABLE
from pipeline.memory.hardware.gpus import device
from pipeline.memory.hardware.host_memory import TrainingJob, kept_bytes, staged_bytes, train_need
from pipeline.memory.history import Suggestion
from pipeline.memory.outlook import EVERY, PLANNING, RunFacts, TrainOutlook, lint
from pipeline.memory.planning.budget_search import ChoiceMemory
from pipeline.memory.planning.memory_plan import DataSizes, Offer
from pipeline.memory.planning.planner import CurriculumStage, compare_offers, plan_stages
from pipeline.memory.planning.step_estimates import SETTINGS, ahead_bytes, compare_configurations, reserve
from pipeline.planning.offers import NAME, Question, card_of, is_known, offers_of, waits
from pipeline.planning.probe import measured_pace, measured_ratios, probe
from pipeline.planning.sampled_items import with_draws
from pipeline.planning.training_work import (
    OwnItems,
    Work,
    configs_of_stages,
    data_of,
    example_bytes,
    least_of,
    sizes_of,
    target_of,
    traces_folder,
)
from pipeline.project.project import asked_bytes, cluster_name, profiles_of
from pipeline.project.run_code import blamed
from pipeline.protocol import ITEMS, Example, Weights
from pipeline.training.prepared import in_bounds
from pipeline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.config.schema import Config
    from pipeline.memory.estimating.oracle import BestOracle
    from pipeline.memory.footprint import StandingFootprint
    from pipeline.memory.hardware.host_memory import HostNeed
    from pipeline.memory.outlook import Probed
    from pipeline.memory.planning.memory_plan import CardSpec, Configuration, MemoryPlan, PlannedOffer, PlanRequest
    from pipeline.memory.planning.step_estimates import Reserve
    from pipeline.training.items.item_table import ItemTable

    Integers = NDArray[np.int64]

COMPARED = ("24GiB", "a100-40gb", "a100-80gb-sxm", "h200-141gb-sxm")  # GPUs of 24, 40, 80 and 141 GB
TYPICAL = 95  # percentile of each size that the table of configurations uses
KEPT_BYTES = 2 << 30  # of kept batches; above this, reading them again is cheaper than memory


def plan_training(question: Question, *, probing: bool = False) -> TrainOutlook:
    """Plan training; with a probe, run the worst bucket on every card first."""
    begun_s = time.monotonic()
    work = Work.of(question.config, beside=question.beside, on_gpu=bool(question.gpus))
    with blamed(work.task):
        outlook = _outlook(question, work, probing=probing)
    question.say(f"planned in {format_seconds(time.monotonic() - begun_s)}")
    return outlook


def _outlook(question: Question, work: Work, *, probing: bool) -> TrainOutlook:
    case = _case(question, work)
    question.say(PLANNING)
    config, offer, oracle = question.config, case.offers[0], case.oracle
    plans = case.plans()
    probed: tuple[Probed, ...] = ()
    if probing:
        worst = max(plans.values(), key=lambda plan: plan.live.value)
        probed = probe(
            config, work, worst, oracle, offer.cards, question.executor, question.say, beside=question.beside
        )
        plans = case.plans()
    ahead = {name: _ahead_bytes(config, *case.made_by(name), stage_plan) for name, stage_plan in plans.items()}
    plans = {name: _noted(stage_plan, ahead[name]) for name, stage_plan in plans.items()}
    plan = plans[EVERY]
    standing = oracle.standing(replace(plan.choice, shards=1))  # the host builds the whole model
    kept = {name: _kept(work, stage_plan) for name, stage_plan in plans.items()}
    host = _host(question, plan, standing, offer, case.table, kept=max(kept.values()))
    mem = _mem(config, host)
    return TrainOutlook(
        task=str(config.train.task),
        items=case.table.in_epoch,
        sizes_from=case.sizes_from,
        offer=offer,
        plans=plans,
        kept=kept,
        ahead_bytes=ahead,
        parameters=standing.parameters,
        trained=standing.trained,
        standing=standing.parts,
        evaluation_bytes=_evaluation_bytes(oracle, plan, question.say) if question.by_plan else None,
        configurations=case.configurations(plan) if question.detailed else (),
        item=case.typical,
        alternatives=case.side_by_side(),
        waits_s=dict(waits(question, case.offers, mem.mem_bytes)) if len(case.offers) > 1 else {},
        host=host,
        mem=mem,
        cpus=config.cluster.train.cpus_on_node,
        gpus=offer.ranks // config.cluster.train.nodes if work.device != CPU else 0,
        nodes=config.cluster.train.nodes,
        time_s=int(config.cluster.train.time),
        findings=lint(_facts(config, work, plan)),
        probed=probed,
        ignores_sizes=_ignores_sizes(oracle, plan, least_of(case.sizes)),
        pace=measured_pace(config, work, plan.choice, [card.name for card in offer.cards]),
    )


def _evaluation_bytes(oracle: BestOracle, plan: MemoryPlan, say: Callable[[str], object]) -> int | None:
    """Return the live bytes while the largest micro-batch is evaluated between two steps; None: unknown."""
    worst, choice = plan.worst, plan.choice
    footprint = oracle.evaluation(choice, worst.sizes)
    if oracle.no_evaluation:
        say(f"evaluating cannot be planned, and may fail when it runs: {oracle.no_evaluation}")
    return oracle.standing(choice).bytes + footprint.again.peak_bytes if footprint else None


def _ignores_sizes(oracle: BestOracle, plan: MemoryPlan, least: Mapping[str, int]) -> bool:
    """Tell whether the worst micro-batch takes no more memory than the smallest, at twice its sizes."""
    worst = plan.worst.sizes
    if any(worst[name] < 2 * size for name, size in least.items()):
        return False
    choice = plan.choice
    return oracle.micro(choice, worst).again.peak_bytes <= oracle.micro(choice, least).again.peak_bytes


@dataclass(frozen=True)
class _PlanningCase:
    """The inputs of plans, and the plans."""

    config: Config
    work: Work
    table: ItemTable
    sizes: Mapping[str, Integers]
    sizes_from: str
    offers: Sequence[Offer]
    oracle: BestOracle
    stages: Mapping[str, tuple[Work, BestOracle]]  # phases of the curriculum with other options

    def made_by(self, stage: str) -> tuple[Work, BestOracle]:
        """Return the work of a stage of the curriculum, and its oracle."""
        return self.stages.get(stage, (self.work, self.oracle))

    @property
    def padded(self) -> bool:
        return self.config.train.batching == "padded"

    @cached_property
    def request(self) -> PlanRequest:
        """Return the request to the planner, with the precision that an `auto` stands for.

        The precision is part of the recipe and must not depend on micro-batches. So it is chosen as if their size were
        left to the planner.
        """
        request = self.work.request(self.config.train, self.offers[0].ranks)
        if len(request.precisions) == 1 or request.micro_batch is None:
            return request
        free = self._planned(replace(request, micro_batch=None))
        return replace(request, precisions=(free[EVERY].choice.precision,))

    @property
    def data(self) -> DataSizes:
        return self._data(self.request)

    def _data(self, request: PlanRequest) -> DataSizes:
        data = data_of(self.sizes, request, padded=self.padded, seed=self.config.train.seed, ids=self.table.ids)
        return replace(data, draws=self.table.draws)

    @property
    def reserve(self) -> Reserve:
        """Return the function that says how much an allocator reserves, under the allowed settings."""
        allowed = {"auto": SETTINGS, "default": [DEFAULT], "expandable": [EXPANDABLE]}
        return partial(reserve, allowed=allowed[self.config.train.allocator])

    @property
    def typical(self) -> dict[str, int]:
        """Return the sizes that 95% of the items do not exceed."""
        return {name: int(np.percentile(values_N, TYPICAL)) for name, values_N in self.sizes.items()}

    def compared(self) -> list[CardSpec]:
        """Return GPUs of common sizes, to compare with; none for a CPU."""
        if self.work.device == CPU:
            return []
        return [card_of(device(name), self.offers[0].ranks, self.config.train) for name in COMPARED]

    def plans(self) -> dict[str, MemoryPlan]:
        """Plan every stage of the curriculum, corrected by earlier measurements of this model on these cards."""
        plans = self._planned(self.request)
        names = [card.name for card in self.offers[0].cards]
        choice = plans[EVERY].choice
        ratios = measured_ratios(self.config, self.work, choice, names)
        return self._planned(replace(self.request, ratios=ratios, measured=choice)) if ratios else plans

    def _planned(self, request: PlanRequest) -> dict[str, MemoryPlan]:
        stages, cards = list(_stages(self.config, self._data(request))), self.offers[0].cards
        stages = [replace(stage, oracle=self.made_by(stage.name)[1]) for stage in stages]
        return plan_stages(self.oracle, stages, request, cards, reserve=self.reserve, others=self.compared())

    def configurations(self, plan: MemoryPlan) -> list[Configuration]:
        """Return the memory of a rank's share, run whole, halved, … and item by item."""
        share = ceil(min(self.config.train.effective_batch, len(self.table)) / self.offers[0].ranks)
        counts = [1, 2]
        while counts[-1] < share:
            counts.append(2 * counts[-1])
        items = sorted({ceil(share / count) for count in counts}, reverse=True)
        shares = [(count, ceil(share / count)) for count in items]
        cards = self.compared() or self.offers[0].cards
        memory = ChoiceMemory(self.oracle, plan.choice, (ITEMS, *self.typical))
        ratios = measured_ratios(self.config, self.work, plan.choice, plan.cards)
        request, as_planned = replace(self.request, ratios=ratios), partial(reserve, allowed=[plan.allocator.settings])
        return compare_configurations(
            memory, shares, cards, self.typical, request, padded=self.padded, reserve=as_planned
        )

    def side_by_side(self) -> list[PlannedOffer]:
        """Return the cost of each of several offers."""
        if len(self.offers) < 2:
            return []
        return compare_offers(self.oracle, self.data, self.request, self.offers, reserve=self.reserve)


def _case(question: Question, work: Work) -> _PlanningCase:
    """Gather the items, the offers and the memory oracle; the weakest GPU decides which attention is traced."""
    config = question.config
    if question.sizes:  # typed sizes have no phases
        config = config.model_copy(update={"train": config.train.model_copy(update={"curriculum": ()})})
    refuse_sequences(config)
    refuse_crop(config)
    if not question.sizes:
        with naming_sizes(config) if question.by_plan else nullcontext():
            refuse_unknown_splits(question.project)
        refuse_other_width(question.project, work.task)
    table, sizes_from = _items(question)
    sizes = _sizes(question, work, table, early=bool(sizes_from))
    offers = offers_of(question, on_cpu=work.device == CPU)
    cards = [device(card.name) for offer in offers for card in offer.cards if is_known(card)]
    capability = min((card.capability for card in cards), default=(8, 0)) if work.device != CPU else None
    padded = config.train.batching == "padded"
    least = least_of(sizes)
    kept = traces_folder(config, work, least, capability)
    own = None
    if not (isinstance(work.task, Example) or question.sizes or sizes_from):
        own = OwnItems(partial(batches_of, question.project, table, work.task.collate), sizes, padded)
    oracle = work.oracle(least, target_of(capability), padded=padded, kept=kept, own=own)
    stages = {}
    for name, one in configs_of_stages(config).items():
        staged = Work.of(one, beside=question.beside, on_gpu=bool(question.gpus))
        _refuse_another_model(name, work, staged, table, sizes)
        kept = traces_folder(one, staged, least, capability)
        stages[name] = staged, staged.oracle(least, target_of(capability), padded=padded, kept=kept, own=own)
    return _PlanningCase(config, work, table, sizes, sizes_from, offers, oracle, stages)


def _refuse_another_model(
    stage: str, work: Work, staged: Work, table: ItemTable, sizes: Mapping[str, Integers]
) -> None:
    """Raise if the options of a phase change the model or the items, which all phases share."""
    shapes, others = (
        {name: tuple(part.shape) for name, part in one.model().state_dict().items()} for one in (work, staged)
    )
    changed = sorted(name for name in {**shapes, **others} if shapes.get(name) != others.get(name))
    what = f"its options change the model: {', '.join(changed[:3])}" if changed else ""
    for name, size_N in sizes_of(staged.task, table.sizes).items():
        if name not in sizes or (size_N > sizes[name]).any():
            what = what or f"its options make items larger, in {name}, than train.options does"
    if what:
        remedy = "keep the options of losses, weights and noise there, and those of the model in train.options"
        raise ConfigError(what, where=f"train.curriculum, {stage}", remedy=remedy)


def _items(question: Question) -> tuple[ItemTable, str]:
    """Return the items of the training; without graphs also the source of their sizes."""
    project, train = question.project, question.config.train
    if question.sizes:
        return typed_table(question.sizes, train.effective_batch)
    is_early = question.by_plan and made_table(project) is None
    table, sizes_from = scanned_table(project) if is_early else (table_of(project), "")
    if train.split is not None and any(table.splits):  # without splits all items are for training
        table = table.of_split(train.split, "train.split")
    return with_draws(table, train.sampling), sizes_from


def _sizes(question: Question, work: Work, table: ItemTable, *, early: bool) -> dict[str, Integers]:
    """Return the sizes of the items that drive memory; raise for a size that only graphs have, without graphs."""
    try:
        return sizes_of(work.task, table.sizes)
    except ConfigError as error:
        if not early or not isinstance(error.__cause__, KeyError):
            raise
        name = error.__cause__.args[0]
        if question.sizes:
            typed = "".join(f"{size}={count}," for size, count in question.sizes.items())
            what = f"the task's cost() asks for {name}, which --sizes does not tell"
            raise ConfigError(what, where="--sizes", remedy=f"--sizes {typed}{name}=…") from error
        what = f"the task's cost() asks for {name}, which the scan does not tell"
        graphs = Command.submit("graph", then=f", or plan for sizes that you name: {SIZES},{name}=…")
        raise ConfigError(what, where="train.task", remedy=graphs) from error


def _stages(config: Config, data: DataSizes) -> Iterator[CurriculumStage]:
    """Yield the phases of the curriculum; the last has all items."""
    left = config.train.epochs
    for name, stage in config.train.stages.items():
        where = f"train.curriculum, {name}"
        unknown = [size for size in {**stage.largest, **stage.smallest} if size not in data.sizes]
        if unknown:
            what = f"no size is called {unknown[0]!r}; the task's cost() names {', '.join(data.sizes)}"
            raise ConfigError(what, where=where, remedy="name one of these")
        keep_N = in_bounds(data.sizes, stage.largest, stage.smallest)
        if not keep_N.any():
            bounds = [f"at most {most:,} {size}" for size, most in stage.largest.items()]
            bounds += [f"at least {least:,} {size}" for size, least in stage.smallest.items()]
            raise ConfigError(f"no item has {' and '.join(bounds)}", where=where, remedy="widen its bounds")
        left -= stage.epochs
        yield CurriculumStage(name, data.only(keep_N), stage.epochs)
    yield CurriculumStage(EVERY, data, left)


def _kept(work: Work, plan: MemoryPlan) -> int:
    """Return how many micro-batches a rank keeps in memory for the second pass of a step."""
    goes_twice = isinstance(work.task, Weights) or work.is_contrastive  # it needs all weights or all rows first
    return min(plan.cuts.steps_most, KEPT_BYTES // _batch_bytes(plan)) if goes_twice else 0


def _batch_bytes(plan: MemoryPlan) -> int:
    return max(1, sum(part.bytes for part in plan.parts if part.category is Category.INPUTS))


def _ahead_bytes(config: Config, work: Work, oracle: BestOracle, plan: MemoryPlan) -> int:
    """Return the device memory of the micro-batch that is copied ahead; 0 if there is no room for one."""
    is_possible = work.device != CPU and config.train.pin is not False and plan.choice.shards == 1
    if not is_possible or not isinstance(work.task, Example):
        return 0
    worst, choice = plan.worst, plan.choice
    inputs = max((example_bytes(work.task, bucket.sizes) for bucket in plan.buckets), key=sum)
    standing, micro = oracle.standing(choice), oracle.micro(choice, worst.sizes)
    held_bytes = ahead_bytes(standing, micro, inputs, plan.allocator.settings)
    return held_bytes if plan.total.value + held_bytes <= plan.limit_bytes else 0


def _noted(plan: MemoryPlan, held_bytes: int) -> MemoryPlan:
    """Add a note on the micro-batch that is copied ahead."""
    note = f"the next micro-batch is copied ahead: {format_bytes(held_bytes)}"
    return replace(plan, notes=(*plan.notes, note)) if held_bytes else plan


def _host(
    question: Question, plan: MemoryPlan, standing: StandingFootprint, offer: Offer, table: ItemTable, *, kept: int
) -> HostNeed:
    """Return the host memory that a node's processes take."""
    config = question.config
    gpu = offer.cards[0].caching
    parameters = sum(part.bytes for part in standing.parts if part.category in (Category.PARAMETERS, Category.BUFFERS))
    run = TrainingJob(
        ranks=ceil(offer.ranks / config.cluster.train.nodes),
        gpu=gpu,
        several=offer.ranks > 1,
        model_bytes=parameters,
        step_bytes=0 if gpu else int(plan.live.value),
        kept_bytes=0 if gpu else kept_bytes(int(plan.live.value), plan.limit_bytes - int(plan.total.value)),
        resumed_bytes=standing.bytes,
        staged_bytes=staged_bytes(standing.blocks, pinned=gpu),
        batch_bytes=_batch_bytes(plan),
        slots=config.train.slots + kept,
        threads=config.train.threads,
        forks=config.train.readers == "processes",
        offloaded_bytes=plan.host_bytes,
        items=len(table),
        sizes=len(table.sizes),
        compile_workers=config.cluster.train.cpus if config.train.compile else 0,
    )
    return train_need(run, question.baseline)


def _mem(config: Config, host: HostNeed) -> Suggestion:
    """Return a job's memory: the configured, else the planned, corrected by measurements of such jobs."""
    pinned = asked_bytes(config.cluster.train, 0)
    if pinned:
        planned = format_bytes(host.total_bytes)
        fits = "enough" if pinned >= host.total_bytes else f"less than the {planned} that are planned"
        return Suggestion(pinned, f"pinned by cluster.train: {fits}", 0)
    task, where = str(config.train.task), cluster_name(config)
    return profiles_of(config).suggest(NAME, task, where, planned_bytes=host.total_bytes)


def _facts(config: Config, work: Work, plan: MemoryPlan) -> RunFacts:
    """Return the facts that the linter judges."""
    train = config.train
    model = work.model()
    return RunFacts(
        environment=dict(os.environ),
        empty_cache_every=train.empty_cache_every,
        accumulation=plan.cuts.steps_most,
        module_types=frozenset(type(module).__name__ for module in model.modules()),
        in_batch_contrastive=bool(getattr(work.task, "in_batch", False)) and not work.is_contrastive,
    )
