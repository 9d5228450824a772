"""A task as it is trained, for the planner: a step to trace, sizes of items, micro-batches.

Planning needs neither the GPUs nor the data set on this machine, only the task.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.device.kinds import CARD, CPU
from pipeline.errors import ConfigError
from pipeline.keys import recipe_key
from pipeline.memory.estimating.oracle import BestOracle, Formula
from pipeline.memory.footprint import EVERY_BLOCK, MemoryChoice, Unmeasurable
from pipeline.memory.history import fingerprint
from pipeline.memory.planning.memory_plan import CardSpec, DataSizes, Micros, Oversize, PlanRequest
from pipeline.project.run_code import load_task, package_digest, source_digest, user_code_failed
from pipeline.protocol import ITEMS, Contrastive, Example
from pipeline.training.items.item_table import PAGE
from pipeline.training.prepared import COST, LIKENESS, LOOSER, PADDING, likeness, sampler_settings
from pipeline.training.sampling import Sampler, narrow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import nn

    from pipeline.config.schema import Config
    from pipeline.config.schema_train import TrainSection
    from pipeline.memory.footprint import Sizes, StandingFootprint
    from pipeline.memory.planning.memory_plan import Cutter
    from pipeline.memory.tracing.recorder import Recorder
    from pipeline.memory.tracing.tracer import Target
    from pipeline.protocol import Task
    from pipeline.training.ranks import Ranks
    from pipeline.training.step.optimizers import StepSettings
    from pipeline.training.step.step import Step

    Integers = NDArray[np.int64]

TRACES = ".traces"  # in the folder of runs: the memory traces of models
ITEMS_CUT = 1 << 16  # planned exactly of an epoch; the planner bounds the others


@dataclass(frozen=True)
class Work:
    """A task as it is trained; a `MemoryChoice` holds what a plan may decide."""

    task: Task
    settings: StepSettings
    device: str = CARD  # cpu: for a machine without cards

    @classmethod
    def of(cls, config: Config, *, beside: Path | None = None, on_gpu: bool = False) -> Work:
        """Return the work of a configuration, with the options of the last phase of a curriculum.

        `on_gpu`: plan for a GPU although the configuration names none.
        """
        task = load_task(config.train.task, config.train.options, beside=beside)
        device = CARD if config.cluster.train.gpus or on_gpu else CPU
        return cls(task, step_settings(config.train, device, task), device)

    def step(self, choice: MemoryChoice, *, device: str = CPU, **given: Any) -> Step:
        """Build a training step under a choice."""
        from pipeline.training.step.contrastive import make_step

        return make_step(self.task, self.under(choice), device=device, **given)

    def begun(self, choice: MemoryChoice, *, device: str, begin: Callable[[nn.Module], None]) -> Step:
        """Build a step on one device, after `begin` has loaded initial weights into its model."""
        return self.step(choice, device=device, scaled=True, model=self._model_from(begin))

    def _model_from(self, begin: Callable[[nn.Module], None]) -> nn.Module:
        model = self.task.model()
        if hasattr(model, "parameters"):
            begin(model)
        return model

    def spread(self, choice: MemoryChoice, ranks: Ranks, *, device: str, begin: Callable[[nn.Module], None]) -> Step:
        """Build a step whose model is sharded over ranks."""
        from pipeline.training.step.fsdp import ShardedStep

        self._refuse_sharding()
        make = partial(self._model_from, begin)
        return ShardedStep(self.task, self.under(choice), ranks, device=device, scaled=True, make=make)

    @property
    def is_contrastive(self) -> bool:
        return isinstance(self.task, Contrastive)

    def request(self, train: TrainSection, ranks: int, ratios: Sequence[float] = ()) -> PlanRequest:
        """Return the planner's request for this task; a contrastive one is never sharded."""
        if train.sharding is True and ranks > 1:
            self._refuse_sharding()
        wanted = EVERY_BLOCK if train.checkpointing is True else train.checkpointing
        return PlanRequest(
            batch=train.effective_batch,
            ranks=ranks,
            epochs=train.epochs,
            precisions=("fp32", "bf16", "fp16") if train.precision == "auto" else (train.precision,),
            blocks=self.blocks,
            checkpointing=None if wanted == "auto" else min(wanted, self.blocks),
            offload=None if train.offload == "auto" else train.offload,
            shards=1 if self.is_contrastive or train.sharding is False else ranks if train.sharding is True else None,
            micro_batch=None if train.micro_batch == "auto" else train.micro_batch,
            oversize=Oversize(train.oversize),
            ratios=tuple(ratios),
            compiled=train.compile,
        )

    @cached_property
    def blocks(self) -> int:
        """Return how many blocks the model repeats."""
        from pipeline.training.step.checkpointing import repeated

        return len(repeated(self.model()))

    def _refuse_sharding(self) -> None:
        if self.is_contrastive:
            what = (
                "a loss over all items of a step takes two passes, which a model that is spread over ranks cannot make"
            )
            raise ConfigError(what, where="train.sharding", remedy="--set train.sharding=false")

    def under(self, choice: MemoryChoice) -> StepSettings:
        """Return the settings of a step under a choice."""
        return replace(
            self.settings,
            precision=choice.precision,
            checkpointing=choice.checkpointing,
            offload=choice.offload,
        )

    def build(self, choice: MemoryChoice, watch: Recorder, model: nn.Module | None) -> Step:
        """Build a step to trace: always on the CPU; of a sharded model that of one rank."""
        if choice.shards == 1:
            return self.step(choice, watch=watch, model=model)
        from pipeline.training.step.fsdp import ShardedStep, imagined

        make = None if model is None else (lambda: model)
        with imagined(choice.shards) as ranks:
            return ShardedStep(self.task, self.under(choice), ranks, watch=watch, make=make)

    def example(self, sizes: Sizes) -> Any:
        """Make a batch of given sizes."""
        assert isinstance(self.task, Example)
        return self.task.example(sizes)

    def oracle(
        self, least: Sizes, target: Target, *, padded: bool, kept: Path | None = None, own: OwnItems | None = None
    ) -> BestOracle:
        """Return the memory oracle of the model: traced, else measured on small steps, else by a formula.

        `kept` is the folder of earlier traces of this model with these options; `own` are items of the data set, for
        small steps of a task without `example`.
        """
        from pipeline.memory.estimating.small_steps import SmallSteps
        from pipeline.memory.estimating.traced import Confirmation, TracedOracle, compared
        from pipeline.memory.tracing import tracer

        @cache
        def tracing(target: Target) -> tracer.Tracer:
            return tracer.Tracer(self.build, self.model, self.example, least, target)

        def confirmation(standing: StandingFootprint) -> Confirmation:
            real = partial(tracer.TraceSession, partial(self.build, MemoryChoice()), self.example, least)
            on_card = target is not tracer.CPU
            return compared(standing, partial(tracing, tracer.CPU), real, least, on_card=on_card)

        def formula() -> Formula:
            states = {"adamw": 2, "adam": 2, "sgd": 1}[self.settings.optimizer]
            return Formula(self.model(), states=states, averages=int(self.settings.ema is not None), padded=padded)

        if not isinstance(self.task, Example):
            sources = [partial(SmallSteps, self.build, own, least, near=own.near)] if own else []
            missing = "the task has no example(sizes): with one, every allocation would be traced"
            return BestOracle([*sources, formula], [missing])
        traced = partial(TracedOracle, partial(tracing, target), confirmation if kept is not None else None, kept)
        return BestOracle([traced, partial(SmallSteps, self.build, self.example, least), formula])

    def model(self) -> nn.Module:
        """Build the model alone, on a device without memory where that works."""
        import torch

        from pipeline.device.accelerator import located
        from pipeline.memory.tracing.tracer import calls_to_card
        from pipeline.training.step.step import checked_model

        with calls_to_card() if self.device != CPU and located(self.device) is None else nullcontext():
            try:
                with torch.device("meta"):
                    model = self.task.model()
            except Exception:  # noqa: BLE001 - whatever a model does with values that are not there
                model = self.task.model()
        return checked_model(model)


@dataclass(frozen=True)
class OwnItems:
    """Batches of the data set's items, with which the planner measures a task without `example`."""

    open: Callable[[], Callable[[Sequence[int]], Any]]  # returns what makes a batch of items by their numbers
    sizes: Mapping[str, Integers]
    padded: bool
    chosen: dict[tuple[int, ...], Integers] = field(default_factory=dict)  # items, by the sizes of their batch

    def near(self, wanted: Sizes) -> dict[str, int]:
        """Return the sizes of the largest batch with that many items within these sizes, else of the smallest."""
        share_N = np.sum([values_N / max(wanted[name], 1) for name, values_N in self.sizes.items()], axis=0)
        order_N = np.argsort(share_N, kind="stable")
        count = min(max(wanted[ITEMS], 1), len(order_N))
        sums = np.concatenate(([0.0], np.cumsum(share_N[order_N])))
        taken = share_N[order_N][count - 1 :] if self.padded else sums[count:] - sums[:-count]
        first = max(0, int(np.searchsorted(taken, len(self.sizes), side="right")) - 1)
        chosen = order_N[first : first + count]
        size_of = np.max if self.padded else np.sum
        sizes = {ITEMS: count, **{name: int(size_of(values_N[chosen])) for name, values_N in self.sizes.items()}}
        self.chosen.setdefault(tuple(sizes.values()), chosen)
        return {name: sizes[name] for name in wanted}

    def __call__(self, sizes: Sizes) -> Any:
        """Make the batch of sizes that `near` has returned."""
        try:
            return self._fetch(self.chosen[sizes[ITEMS], *(sizes[name] for name in self.sizes)].tolist())
        except Exception as error:
            raise Unmeasurable(f"no batch of its own items can be made: {type(error).__name__}: {error}") from error

    @cached_property
    def _fetch(self) -> Callable[[Sequence[int]], Any]:
        return self.open()


def configs_of_stages(config: Config) -> dict[str, Config]:
    """Return a configuration for each phase with other options, as if it had all epochs."""
    return {
        name: config.model_copy(
            update={"train": config.train.model_copy(update={"options": config.train.options | stage.options})}
        )
        for name, stage in config.train.stages.items()
        if stage.options
    }


def example_bytes(task: Example, sizes: Sizes) -> list[int]:
    """Return the bytes of each tensor of a batch of given sizes; empty if making it needs values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from pipeline.device.batch_transfer import map_tensors

    found: list[int] = []
    with suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
        map_tensors(lambda tensor: found.append(tensor.nbytes), task.example(sizes), own=lambda value: value)
    return found


def step_settings(train: TrainSection, device: str, task: Task | None = None) -> StepSettings:
    """Return the step settings of a configuration; those of a contrastive task hold how many items it compares."""
    from pipeline.training.step.optimizers import StepSettings

    way = train.way if train.way != "auto" else "foreach" if device != CPU else "loop"
    return StepSettings(
        optimizer=train.optimizer,
        learning_rate=train.learning_rate,
        weight_decay=train.weight_decay,
        way=way,
        clip=train.clip,
        ema=train.ema,
        frozen=train.frozen,
        batch=train.effective_batch if isinstance(task, Contrastive) else None,
    )


def target_of(capability: tuple[int, int] | None) -> Target:
    """Return the device that a trace imitates: a GPU of a compute capability, or this CPU."""
    from pipeline.memory.tracing import tracer

    return tracer.CPU if capability is None else tracer.card_target(capability)


def traces_folder(config: Config, work: Work, least: Sizes, capability: tuple[int, int] | None) -> Path:
    """Return the folder of the traces of a model, named by the digest of everything that they depend on."""
    import torch

    asked = {
        "model": fingerprint(work.model(), work.settings),
        "task": config.train.task,
        "options": config.train.model_dump(mode="json")["options"],
        "code": [source_digest(work.task), package_digest()],
        "packages": sorted(path.name for place in sys.path for path in Path(place).glob("*.dist-info")),
        "least": dict(least),
        "capability": capability,
        "threads": None if capability else torch.get_num_threads(),  # some kernels of a CPU take memory for each
    }
    return config.cluster.runs / TRACES / recipe_key("traces", asked).hex()


def sizes_of(task: Task, item_sizes: Mapping[str, Integers]) -> dict[str, Integers]:
    """Return the sizes of every item that drive memory, as the task's `cost` names them; refuse what cannot be."""
    items, sizes = len(next(iter(item_sizes.values()), ())), costs_of(task, item_sizes)
    if not sizes:
        raise ConfigError("cost() names no size", where="train.task", remedy="return at least one, such as nodes")
    if ITEMS in sizes:
        raise ConfigError(f"cost() names a size {ITEMS!r}, which counts a batch's items", where="train.task")
    for name, values_N in sizes.items():
        if items and values_N.min() < 0:
            what = f"cost() says {int(values_N.min())} {name} of item {int(values_N.argmin()):,}"
            raise ConfigError(what, where="train.task", remedy="a size is a whole number from 0")
    if items and not any(values_N.any() for values_N in sizes.values()):
        raise ConfigError("cost() is 0 for every item", where="train.task", remedy="return sizes that drive memory")
    return sizes


def costs_of(task: Task, item_sizes: Mapping[str, Integers]) -> dict[str, Integers]:
    """Return what the task's `cost` says of items, asked page by page."""
    items = len(next(iter(item_sizes.values()), ()))
    try:
        pages = [
            _costs(task, {name: size_N[at : at + PAGE] for name, size_N in item_sizes.items()})
            for at in range(0, max(1, items), PAGE)
        ]
        return {name: np.concatenate([page.pop(name) for page in pages]) for name in list(pages[0])}
    except Exception as error:
        blame = user_code_failed(
            f"cost() of all items at once, whose sizes are arrays ({', '.join(item_sizes)}),", error
        )
        blame.next = "write cost() with numpy: item['nodes'] * 2, np.maximum(item['edges'], 10), np.where(...)"
        raise blame from error


def _costs(task: Task, item_sizes: Mapping[str, Integers]) -> dict[str, Integers]:
    """Return what the task's `cost` says of some items."""
    costs: Any = task.cost({name: np.asarray(size_N, np.int64) for name, size_N in item_sizes.items()})
    if not isinstance(costs, Mapping):
        raise TypeError(f"it must return {{name: size}}, got {type(costs).__name__}")
    for name, values in costs.items():
        if not np.isfinite(values).all():
            raise ValueError(f"{name} is not finite")
    items = len(next(iter(item_sizes.values()), ()))
    return {name: narrow(np.broadcast_to(np.asarray(values, np.int64), items)) for name, values in costs.items()}


def data_of(
    sizes: Mapping[str, Integers], request: PlanRequest, *, padded: bool, seed: int = 0, ids: Any = None
) -> DataSizes:
    """Return the planner's view of items, with all the ways in which training could cut them."""
    cut = partial(cutter, request.batch, seed=seed, micro_batch=request.micro_batch)
    padding = PADDING if padded else None
    looser = LOOSER if padded and request.micro_batch is None else ()
    return DataSizes(sizes, cut(padding=padding), padded, ids, padding, {most: cut(padding=most) for most in looser})


def cutter(batch: int, *, padding: float | None, seed: int = 0, micro_batch: int | None = None) -> Cutter:
    """Return a function that cuts an epoch into micro-batches as training will."""
    padded = padding is not None

    def cut(data: DataSizes, cost_N: Integers, budget_bytes: int, ranks: int) -> Micros:
        sizes = data.sizes
        settings = sampler_settings(batch, budget_bytes, padding=padding, seed=seed, micro_batch=micro_batch)
        sampler = Sampler({COST: cost_N, LIKENESS: likeness(sizes)}, settings, ranks=ranks, draws=data.draws)
        rows, steps, owners = [], [], []
        names = tuple(sizes)
        sizes_NS = np.stack([sizes[name] for name in names], axis=1)
        for step in range(min(sampler.steps, -(-ITEMS_CUT // batch))):
            for rank, parts in enumerate(sampler.shares(0, step)):
                for part in parts:
                    taken_KS = sizes_NS[part]
                    rows.append((len(part), *(taken_KS.max(axis=0) if padded else taken_KS.sum(axis=0)).tolist()))
                    steps.append(step)
                    owners.append(rank)
        epochs = (steps[-1] + 1) / sampler.steps
        return Micros((ITEMS, *names), np.array(rows, np.int64), np.array(steps), np.array(owners), epochs)

    return cut


def host_card(memory_bytes: int) -> CardSpec:
    """Return a machine's own memory as a card without a caching allocator."""
    rates = {"fp32": 5e10, "bf16": 5e10}  # a core or two; only ratios matter
    return CardSpec(CPU, memory_bytes, memory_bytes, rates, 1e10, launch_s=6e-5, caching=False)  # [ratio measured]


def least_of(sizes: Mapping[str, Integers]) -> dict[str, int]:
    """Return the sizes of a batch of one item: the smallest of each size, at least 1."""
    return {ITEMS: 1, **{name: max(1, int(values_N.min())) for name, values_N in sizes.items()}}
