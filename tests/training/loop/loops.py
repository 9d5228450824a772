"""Whole trainings, as small as can be: made graphs in memory, a tiny model, everything else as it really is."""

from __future__ import annotations

import gc
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.config.schema_train import TrainSection
from pipeline.graphs.item_graph import encode_graph
from pipeline.keys import recipe_key
from pipeline.records import TaskContext
from pipeline.training.items.item_source import ItemArrays
from pipeline.training.items.item_table import ItemTable, TableBuilder
from pipeline.training.loop.train import Items, Job, close, trainer_of
from pipeline.training.loop.trainer import Trainer
from pipeline.training.prepared import ModelFolder, PhasePlan, Prepared, likeness
from pipeline.training.ranks import Ranks
from pipeline.training.sampling import MicroBatch
from pipeline.training.step.optimizers import StepSettings
from pipeline.training.step.step import Step
from tests.training.items.content import graph_of

TRAIN = {
    "effective_batch": 6,
    "epochs": 2,
    "learning_rate": 0.05,
    "weight_decay": 0.0,
    "optimizer": "sgd",
    "clip": None,
    "validation": {"split": None},
    "checkpoints": {"minutes": 1000.0, "asynchronous": False},
    "log_every": 1,
}


@dataclass(frozen=True)
class Plot:
    """What a training is; all of it can be sent to another process."""

    train: Mapping[str, Any] = field(default_factory=dict)
    items: int = 14
    budget: int = 70  # nodes of a micro-batch
    terms: str = "one"  # several, weighted: the same with weights(); uneven: others on every rank
    dropout: float = 0.0
    nan: Mapping[int, int] = field(default_factory=dict)  # an item, and the epoch from which on it is not a number
    momentum: float = 0.0
    crop: Mapping[str, int] = field(default_factory=dict)
    phases: Sequence[tuple[int, int, int]] = ()  # epochs, most nodes, budget
    first_terms: str = ""  # those of the first of several phases, where they are others
    validated: int = 0  # items
    outgrown: bool = False  # gradients overflow, the loss does not
    leave_out: tuple[str, ...] = ()

    def config(self) -> TrainSection:
        """Return what a configuration would say."""
        given = {name: value for name, value in self.train.items() if name != "nested"}
        for name in ("validation", "checkpoints"):
            if name in given:
                given[name] = {**TRAIN[name], **given[name]}  # type: ignore[dict-item]
        return TrainSection.model_validate({**TRAIN, **given})


class Network(nn.Module):
    """Blocks that repeat, a part that nothing uses, and one number in half of the memory of a statistic."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(12, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout)) for _ in range(3))
        self.last = nn.Linear(8, 1)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))  # micro-batches, so not what exactness is of

    def forward(self, x_ND: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x_ND)  # nodes, however they are cut
        hidden_ND = self.first(x_ND).tanh()
        for block in self.blocks:
            hidden_ND = hidden_ND + block(hidden_ND)
        value_N: Tensor = self.last(hidden_ND).squeeze(-1)
        return value_N


class Tiny:
    """A number for each residue of the receptor; its loss has one term or two."""

    def __init__(self, plot: Plot, rank: int = 0) -> None:
        self.plot, self.rank = plot, rank
        self.double = plot.config().precision == "fp32"

    def model(self) -> nn.Module:
        network = Network(self.plot.dropout)
        return network.double() if self.double else network

    def cost(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"nodes": item["nodes"]}

    def collate(self, items: Sequence[Any], rng: np.random.Generator) -> dict[str, Any]:
        dtype = torch.float64 if self.double else torch.float32
        x, y = [], []
        for item in items:
            side = item.sides["receptor"]
            noise = float(item.rng.normal())  # of the item in this epoch, whatever it comes together with
            x.append(side.nodes["pos"].reshape(-1, 12).to(dtype) + 0.01 * noise)
            y.append(side.nodes["type"].to(dtype) / 21)
            if int(item.id[4:]) in self.plot.nan and item.rng.integers(1) == 0:
                y[-1] = y[-1] * math.nan
            if self.plot.outgrown and int(item.id[4:]) == 3:
                y[-1] = y[-1] * 1e200
        sizes = torch.tensor([len(one) for one in y])
        ids = tuple(item.id for item in items)
        return {"x": torch.cat(x), "y": torch.cat(y), "sizes": sizes, "ids": ids}

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, float]]:
        value_N, y_N = model(batch["x"]), batch["y"].to(batch["x"].dtype)
        square_N = (value_N - y_N).square()
        if self.plot.outgrown:
            square_N = torch.where(y_N > 1e10, (value_N * y_N * (y_N * 1e-100)).abs(), square_N)
        terms = {"squares": (square_N.sum(), float(len(y_N)))}
        if self.plot.terms == "one":
            return terms
        if self.plot.terms == "uneven":
            return {f"of{self.rank}": terms["squares"]}
        means = torch.stack([one.mean().square() for one in value_N.split(batch["sizes"].tolist())])
        return {**terms, "means": (means.sum(), float(len(means)))}


class Weighted(Tiny):
    """Tells the weights of its terms beforehand."""

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        return {"squares": float(len(batch["y"])), "means": float(len(batch["sizes"]))}


class Judged(Tiny):
    """Has a metric."""

    def outputs(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {"value": list(model(batch["x"]).split(batch["sizes"].tolist()))}

    def metrics(self, outputs: Mapping[str, Any]) -> dict[str, float]:
        return {"mean": float(np.mean([float(np.mean(np.asarray(one))) for one in outputs["value"]]))}


def task_of(plot: Plot, rank: int = 0) -> Tiny:
    """Return the task of a plot."""
    return Weighted(plot, rank) if plot.terms == "weighted" else Tiny(plot, rank)


@cache
def drawn(number: int) -> tuple[Any, Any, dict[str, int]]:
    """Return a made graph, encoded, and its sizes."""
    graph = graph_of(number)
    return (*encode_graph(graph), graph.sizes())


@dataclass(frozen=True)
class Memory:
    """Graphs that are in memory."""

    table: ItemTable

    def read(self, numbers: Sequence[int]) -> Iterator[ItemArrays]:
        """Yield the graph of each item."""
        for number in numbers:
            name = self.table.ids[number]
            arrays, meta, _ = drawn(int(name[4:]))
            yield ItemArrays(number, name, arrays, meta)


@cache
def table_of(items: int) -> ItemTable:
    """Return a table of so many made graphs."""
    builder = TableBuilder()
    for number in range(items):
        builder.add(f"item{number}", recipe_key("test", {"number": number}), "train", drawn(number)[2])
    return builder.table()


def phases_of(plot: Plot) -> list[tuple[PhasePlan, Items]]:
    """Return the phases of a plot with their items: of a cost of one a node."""
    table, train = table_of(plot.items), plot.config()
    made = []
    for number, (epochs, most, budget) in enumerate(plot.phases or [(train.epochs, 1 << 30, plot.budget)], 1):
        phase = PhasePlan(f"stage {number}", epochs, budget, 0, budget, budget, {"nodes": 1.0}, {"nodes": most})
        sizes = {"nodes": table.sizes["nodes"]}
        keep_N = np.flatnonzero(phase.keeps(sizes))
        kept = {"nodes": sizes["nodes"][keep_N]}
        made.append((phase, Items(table.take(keep_N), phase.cost(kept), likeness(kept))))
    return made


def prepared_of(phases: Sequence[PhasePlan], **more: Any) -> Prepared:
    """Return what a plan says of a training."""
    off: dict[str, Any] = {"checkpointing": 0, "offload": False, "sharded": False, "precision": "fp32"}
    host: dict[str, Any] = {"cpus": 1, "ranks": 1, "mem_bytes": 1 << 30, "mem_why": "", "allocator": "", "step_s": 0.1}
    given = {"limit_bytes": 1 << 30, "margin": 0.05, **off, **host, **more}
    return Prepared(name="made", recipe={}, table="", phases=tuple(phases), **given)


@dataclass
class Run:
    """A training, and what became of it."""

    plot: Plot
    folder: Path
    ranks: Ranks = field(default_factory=Ranks)
    make: Callable[[Any, StepSettings], Step] = Step
    ending: Callable[[], int] = lambda: 0
    task: Any = None
    limit_bytes: int = 1 << 30
    mem_bytes: int = 0  # of the host
    phases: list[tuple[PhasePlan, Items]] | None = None

    def __post_init__(self) -> None:
        if self.ranks.world > 1:  # a process of its own: every replay collects garbage, which torch itself is not
            gc.freeze()
        self.said: list[str] = []
        self.context = TaskContext(refuse=lambda *_: None, ending=lambda: self.ending(), mem_bytes=self.mem_bytes)
        self.made = self.job()
        self.trainer: Trainer = trainer_of(self.made)

    @property
    def settings(self) -> StepSettings:
        """Return what a step computes."""
        train = self.plot.config()
        names = ("optimizer", "learning_rate", "weight_decay", "clip", "ema", "frozen", "precision")
        given = {name: getattr(train, name) for name in names}
        return StepSettings(**given, momentum=self.plot.momentum, way="loop" if train.way == "auto" else train.way)

    def job(self) -> Job:
        """Return what the stage is given."""
        train, plot = self.plot.config(), self.plot
        task = self.task or task_of(plot, self.ranks.rank)
        phases = self.phases or phases_of(plot)
        first = {"stage 1": task_of(replace(plot, terms=plot.first_terms))} if plot.first_terms else {}
        limits = {"limit_bytes": self.limit_bytes, "precision": train.precision, "crop": dict(plot.crop)}
        prepared = prepared_of([phase for phase, _ in phases], ranks=self.ranks.world, **limits)
        path = self.folder / "model"
        path.mkdir(parents=True, exist_ok=True)
        validation = None
        if plot.validated:
            table = table_of(plot.items + plot.validated).take(np.arange(plot.items, plot.items + plot.validated))
            sizes = {"nodes": table.sizes["nodes"]}
            validation = Items(table, phases[-1][0].cost(sizes), likeness(sizes))
        return Job(
            train=train,
            prepared=prepared,
            folder=ModelFolder(path),
            make_step=lambda begin: self.make(task, self.settings),
            source=Memory,
            embeddings=lambda: None,
            phases=phases,
            validation=validation,
            ranks=self.ranks,
            context=self.context,
            say=self.said.append,
            task=task,
            stage_tasks=first,
            leave_out=frozenset(plot.leave_out),
        )

    def to_end(self, *, stop: int | None = None, each: Callable[[int], None] = lambda _: None) -> Run:
        """Train to the end, or to where so many steps are done: then it is left as if it had been killed."""
        try:
            for done in self.trainer.run():
                each(done)
                if done == stop:
                    break
        finally:
            close(self.trainer)
        return self

    def state(self) -> dict[str, list[float]]:
        """Return everything that stands between two steps, exactly."""
        return state_of(self.trainer.step)


def state_of(step: Step) -> dict[str, list[float]]:
    """Return parameters, buffers, averages and the optimizer's state as numbers; of a sharded model, all ranks ask."""
    found: dict[str, Tensor] = dict(step.model.state_dict())
    found |= {f"ema.{place}": one for place, one in enumerate(step.averages)}
    for place, parameter in enumerate(step.trained):
        state = step.optimizer.state.get(parameter, {})
        found |= {f"optimizer.{place}.{what}": value for what, value in state.items() if isinstance(value, Tensor)}
    return {name: whole(one).double().flatten().tolist() for name, one in found.items()}


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor of which this rank may have a shard."""
    one: Any = tensor.detach()
    full: Tensor = one.full_tensor() if hasattr(one, "full_tensor") else one
    return full


def warm(run: Run) -> None:
    """Let the rings have their memory before a device counts."""
    for phase in run.trainer.phases:
        for _ in phase.loader:
            pass


def furthest(one: Mapping[str, Sequence[float]], other: Mapping[str, Sequence[float]]) -> float:
    """Return the largest difference of two states."""
    assert one.keys() == other.keys()
    return max(float(np.abs(np.subtract(one[name], other[name])).max(initial=0.0)) for name in one)


def signals_after(steps: int) -> Callable[[], int]:
    """Return what tells to end once it has been asked so often, at each step."""
    asked = iter(range(steps - 1))
    return lambda: 0 if next(asked, None) is not None else signal.SIGTERM


class Refuse:
    """Refuses one block of those that its own thread asks for: what others read ahead comes at any time."""

    def __init__(self) -> None:
        self.at: int | None = None
        self.count = 0
        self._thread = threading.get_ident()

    def __call__(self, block: int, signed_bytes: int) -> bool:
        if signed_bytes <= 0 or threading.get_ident() != self._thread:
            return True
        self.count += 1
        return self.count != self.at


class Aimed(Step):
    """Notes which items each update is of, micro-batch by micro-batch; some of these may be refused a block."""

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        self.refuse: Refuse | None = None
        self.at: Mapping[int, int] = {}  # a call, and which of its blocks is refused
        self.blocks: list[int] = []  # of each call
        self.tried: list[tuple[str, ...]] = []  # the items of each call
        self.cuts: list[list[tuple[str, ...]]] = []
        self._pending: list[tuple[str, ...]] = []

    def accumulate(self, batch: Any, weights: Any = None) -> None:
        """Add the gradients of a micro-batch, or fail midway."""
        self.tried.append(batch["ids"])
        if self.refuse is not None:
            self.refuse.at, self.refuse.count = self.at.get(len(self.blocks)), 0
        try:
            super().accumulate(batch, weights)
        finally:
            if self.refuse is not None:
                self.refuse.at = None
                self.blocks.append(self.refuse.count)
        self._pending.append(batch["ids"])

    def release(self) -> None:
        """Drop what is known of the step."""
        super().release()
        self._pending = []

    def apply(self, norm: Tensor | None = None) -> None:
        """Note what the update is of."""
        self.cuts.append(self._pending)
        super().apply(norm)


def big_batch(plot: Plot, numbers: Sequence[int], epoch: int = 0) -> dict[str, list[float]]:
    """Return the gradients of some items as one batch, by plain autograd."""
    torch.manual_seed(plot.config().seed)
    task = task_of(plot)
    model = task.model()
    terms = task.loss(model, batch_of(plot, task, numbers, epoch))
    sum((total / weight for total, weight in terms.values()), torch.zeros(())).backward()
    return {name: one.grad.flatten().tolist() for name, one in model.named_parameters() if one.grad is not None}


def batch_of(plot: Plot, task: Any, numbers: Sequence[int], epoch: int) -> Any:
    """Return some items as a task's batch."""
    from pipeline.training.items.loader import Loader
    from pipeline.training.sampling import Sampler
    from pipeline.training.sampling import SamplerSettings as Sampling

    table = table_of(plot.items)
    sampler = Sampler({"nodes": table.sizes["nodes"]}, Sampling(batch=1))
    loader = Loader(Memory(table), None, sampler, slots=2, threads=1, pin=False, seed=plot.config().seed)
    batch = loader.fetch(list(numbers), MicroBatch(epoch, 0, 0, 1, np.array(numbers, np.int64)))
    return task.collate(batch.value.items, batch.value.rng)
