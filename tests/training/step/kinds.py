"""Train a task with any kind of stepper, and let memory end at a chosen site.

The contract (test_contract.py) looks at trained weights, checkpoints and reports alone. A new core of the step changes
`training` here, and nothing else.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pipeline.device.accelerator import RngState
from pipeline.training.loop.metrics_log import read_epochs
from pipeline.training.ranks import Ranks
from pipeline.training.step.contrastive import make_step
from pipeline.training.step.fsdp import ShardedStep
from pipeline.training.step.optimizers import StepSettings
from pipeline.training.step.step import Step
from tests.testkit.limited.device import LimitedDevice
from tests.training.loop.loops import Plot, Run, Tiny, batch_of, warm
from tests.training.step import towers

# Ranks are forked from a process that has imported all this: what FSDP needs takes seconds.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["tests.training.ranks.crews", "tests.training.step.kinds", "torch._dynamo"]
)

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB"
TRAINED = 14  # items; those after them are validated on
RNG_BYTES = {state.nbytes for state in RngState.capture().tensors().values()}  # such blocks are in the host's memory
SCALAR_BYTES = 64  # a smaller block is a number, which takes no memory on a GPU
SITES = ("collate", "forward", "backward", "optimizer", "validation")
GRADIENT = {"epochs": 1, "learning_rate": 1.0, "optimizer": "sgd"}  # in one such step parameters lose their gradient


@dataclass(frozen=True)
class Kind:
    """A way to make steps."""

    world: int = 1
    contrasts: bool = False
    is_sharded: bool = False

    @property
    def sites(self) -> tuple[str, ...]:
        """The places at which memory may end."""
        return SITES + (("embed", "contrast") if self.contrasts else ())


KINDS = {
    "local": Kind(),
    "ranks": Kind(2),
    "contrastive": Kind(contrasts=True),
    "contrastive ranks": Kind(2, contrasts=True),
    "sharded": Kind(2, is_sharded=True),
}


class Net(nn.Module):
    """Repeated blocks, one of them tied to what follows, a head that few items use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(3))
        self.tied = nn.Linear(7, 6, bias=False)
        self.tied.weight = self.blocks[1][2].weight  # type: ignore[index]
        self.last, self.rare, self.unused = nn.Linear(6, 1), nn.Linear(6, 1), nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, x_ND: Tensor, *, both: bool) -> tuple[Tensor, Tensor | None]:
        x_ND = self.first(x_ND) * self.get_buffer("scale").mean()
        for block in self.blocks:
            x_ND = x_ND + block(x_ND)
        x_ND = self.tied(nn.functional.pad(x_ND, (0, 1)))
        return self.last(x_ND).squeeze(-1), self.rare(x_ND).squeeze(-1) if both else None


class Heads(Tiny):
    """A term of all residues; of several, the second is of every fifth item alone."""

    def model(self) -> nn.Module:
        return Net().double() if self.double else Net()

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, float]]:
        known = [int(name[4:]) % 5 == 0 for name in batch["ids"]]
        several = self.plot.terms != "one"
        value_N, rare_N = model(batch["x"], both=several and any(known))
        terms = {"squares": ((value_N - batch["y"]).square().sum(), float(len(value_N)))}
        if several:
            rare = value_N.sum() * 0.0
            if rare_N is not None:
                parts = rare_N.split(batch["sizes"].tolist())
                rare = sum((part.mean() for part, kept in zip(parts, known, strict=True) if kept), rare)
            terms["rare"] = (rare, float(sum(known)))
        return terms


class Weighted(Heads):
    """Gives the weights of its terms before the loss."""

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        rare = sum(int(name[4:]) % 5 == 0 for name in batch["ids"])
        return {"squares": float(len(batch["y"])), "rare": float(rare)}


def task_of(kind: Kind, plot: Plot) -> Any:
    """Return the task that this kind trains."""
    if kind.contrasts:
        return replace(towers.of(plot), terms=1 if plot.terms == "one" else 2)
    return Weighted(plot) if plot.terms == "weighted" else Heads(plot)


def training(name: str, plot: Plot, folder: Path, ranks: Ranks | None = None, task: Any = None, **more: Any) -> Run:
    """Return a training by steps of a kind."""
    kind, ranks = KINDS[name], ranks or Ranks()

    def make(task: Any, settings: StepSettings) -> Step:
        if kind.is_sharded and ranks.world > 1:
            return ShardedStep(task, settings, ranks)
        return make_step(task, replace(settings, batch=plot.config().effective_batch))

    return Run(plot, folder, ranks=ranks, task=task or task_of(kind, plot), make=make, **more)


class Trouble:
    """Memory that ends once, at a site of a training after its first step; as `through` of a device: at a block.

    `site` is `block` for the n-th block that is allocated in a step, from its first forward to the optimizer's end.
    """

    def __init__(self, site: str = "", block: int = 0) -> None:
        self.site, self.block = site, block
        self.is_armed = self.has_struck = self.counts = self.has_gradients = False
        self.blocks = 0
        self._thread = threading.get_ident()

    def arm(self, done: int) -> None:
        """Let it strike from the second step on: not in the rehearsal."""
        self.is_armed = self.is_armed or done > 0

    def within(self, task: Any) -> Any:
        """Return the task with this in its methods."""
        for name in ("collate", "loss", "embed", "contrast"):
            if hasattr(task, name):
                object.__setattr__(task, name, partial(getattr(self, name), getattr(task, name)))
        return task

    def collate(self, collate: Callable[..., Any], items: Sequence[Any], rng: Any) -> Any:
        is_trained = all(int(item.id[4:]) < TRAINED for item in items)
        if self._strikes("collate" if is_trained else "", len(items)):
            raise MemoryError
        return collate(items, rng)

    def loss(self, loss: Callable[..., Any], model: nn.Module, batch: Any) -> Any:
        with self._forward(model, len(batch["ids"])):
            return loss(model, batch)

    def embed(self, embed: Callable[..., Any], model: nn.Module, batch: Any) -> Any:
        if model.training and not torch.is_grad_enabled() and self._strikes("embed", len(batch["ids"])):
            raise torch.OutOfMemoryError(FULL)
        with self._forward(model, len(batch["ids"])):
            return embed(model, batch)

    def contrast(self, contrast: Callable[..., Any], model: nn.Module, embedded: Any) -> Any:
        if model.training and self._strikes("contrast"):
            raise torch.OutOfMemoryError(FULL)
        return contrast(model, embedded)

    @contextmanager
    def _forward(self, model: nn.Module, items: int) -> Iterator[None]:
        self.counts = self.counts or (self.site == "block" and self.is_armed and model.training)
        self.has_gradients = is_last = model.training and torch.is_grad_enabled()
        if self._strikes("forward" if is_last else "" if model.training else "validation", items):
            raise torch.OutOfMemoryError(FULL)
        if not (is_last and self._strikes("backward", items)):
            yield
            return
        middle = [module for module in model.modules() if isinstance(module, nn.Tanh)][1]
        hook = middle.register_forward_hook(lambda _, __, output: output.register_hook(_refuse) and None)
        try:
            yield
        finally:
            hook.remove()

    def _strikes(self, site: str, items: int = 2) -> bool:
        strikes = site == self.site != "" and self.is_armed and not self.has_struck and items > 1
        self.has_struck = self.has_struck or strikes
        return strikes

    def before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Leave some parameters changed and others not; what only makes the optimizer's state has no gradients."""
        had_gradients, self.has_gradients = self.has_gradients, False
        if had_gradients and self._strikes("optimizer"):
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].add_(1000.0)
            raise torch.OutOfMemoryError(FULL)

    def after_update(self, *_: Any) -> None:
        if self.counts:
            self.counts, self.site = False, ""

    def __call__(self, block: int, signed_bytes: int) -> bool:
        is_on_gpu = signed_bytes > SCALAR_BYTES and signed_bytes not in RNG_BYTES
        if not is_on_gpu or not self.counts or threading.get_ident() != self._thread:
            return True
        self.blocks += 1
        self.has_struck = self.has_struck or self.blocks == self.block
        return self.blocks != self.block

    def spare(self, ranks: Any) -> None:
        """Count nothing that ranks exchange: with a GPU it is in the host's memory, or NCCL's own."""
        for name in ("exchange", "add_up", "collective"):
            if hasattr(ranks, name):
                setattr(ranks, name, partial(self._uncounted, getattr(type(ranks), name).__get__(ranks)))

    def _uncounted(self, call: Callable[..., Any], *words: Any, **named: Any) -> Any:
        counts, self.counts = self.counts, False
        try:
            return call(*words, **named)
        finally:
            self.counts = counts


class Always(Trouble):
    """Memory that ends at a site whatever is done about it."""

    def _strikes(self, site: str, items: int = 2) -> bool:
        return self.is_armed and site == self.site != ""


def _refuse(_: Tensor) -> None:
    raise torch.OutOfMemoryError(FULL)


def outcome(
    name: str, plot: Plot, folder: Path, ranks: Ranks | None = None, trouble: Trouble | None = None, task: Any = None
) -> dict[str, Any]:
    """Train to the end, through some trouble; return what JSON can say of it."""
    trouble, ranks = trouble or Trouble(), ranks or Ranks()
    run = training(name, plot, folder, ranks, trouble.within(task or task_of(KINDS[name], plot)))
    at_block = trouble.site == "block"
    if at_block:
        trouble.spare(ranks)
        warm(run)
    before = weights_of(run)
    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(trouble.before_update).remove)
        stack.callback(register_optimizer_step_post_hook(trouble.after_update).remove)
        if at_block:
            stack.enter_context(LimitedDevice(through=trouble))
        run.to_end(each=trouble.arm)
    epochs = read_epochs(run.made.folder.path) if ranks.rank == 0 else []
    state = weights_of(run)
    return {
        "state": state,
        "lost": {name: [a - b for a, b in zip(before[name], state[name], strict=True)] for name in before},
        "done": run.trainer.done,
        "said": run.said,
        "has_struck": trouble.has_struck,
        "blocks": trouble.blocks,
        "ooms": sum(epoch.ooms for epoch in epochs),
        "skipped": sum(epoch.skipped_items for epoch in epochs),
        "left_out": sum(epoch.left_out_steps for epoch in epochs),
        "validation": [epoch.validation for epoch in epochs],
    }


def weights_of(run: Run) -> dict[str, list[float]]:
    """Return the state without what each rank counts for itself."""
    return {name: one for name, one in run.state().items() if name != "seen"}


def true_gradient(name: str, plot: Plot) -> dict[str, list[float]]:
    """Return the gradient of all items as one batch, by plain autograd."""
    torch.manual_seed(plot.config().seed)
    task = task_of(KINDS[name], plot)
    model = task.model()
    terms = task.loss(model, batch_of(plot, task, range(plot.items), 0))
    sum((total / weight for total, weight in terms.values() if weight), torch.zeros(())).backward()
    return {name: one.grad.flatten().tolist() for name, one in model.named_parameters() if one.grad is not None}
