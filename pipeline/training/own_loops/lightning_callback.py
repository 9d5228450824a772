"""The governor under PyTorch Lightning (extra `lightning`): memory records, and steps that survive an out-of-memory.

    Trainer(callbacks=[GovernorCallback(splits=True)]).fit(model, loader)

splits a loader's batches where needed, on one device or many (strategy `ddp`), with the gradients of the whole batch:
`training_step` returns the mean loss of the items that it is given, and is called with parts of a batch. Of a batch,
every tensor has one row for each item. A module that optimizes manually says itself what a part is:

    class Model(lightning.pytorch.LightningModule):
        automatic_optimization = False

        def training_step(self, items, index):
            self.log("loss", self.governed.step(items, self.loss_of))

Otherwise the callback only watches: an OOM ends the training then, with a record of it. Lightning brings what a loader
yields to the device: all items of a step, before they are split.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.device.accelerator import is_out_of_memory
from pipeline.errors import ConfigError, PipelineError
from pipeline.memory.runtime.meters import HostMeter, Maintenance, MaintenanceSettings, meter_of
from pipeline.training.own_loops.governed import Governed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning.pytorch import LightningModule, Trainer

    from pipeline.memory.runtime.meters import Meter

GROWING = 3  # epochs in a row
GROWTH_BYTES = 1 << 20  # by which memory grows at least in each of them
TAKEN_OVER = "optimized_in_parts"  # set on a module whose batches are split: it optimized automatically before
REMEDY = "split batches with GovernorCallback(splits=True), or lower the batch size"
_log = logging.getLogger(__name__)


class GovernorCallback(Callback):
    """Records memory, does the upkeep of `MaintenanceSettings`, and makes the steps: sets `governed` on the module."""

    def __init__(
        self,
        *,
        splits: bool = False,
        habits: MaintenanceSettings | None = None,
        on_record: Callable[[Mapping[str, Any]], None] = lambda record: None,  # noqa: ARG005
        **options: Any,
    ) -> None:
        """Take whether to split batches of a module that optimizes automatically, and options of `Governed`.

        `on_record` is called with each record: epoch, event, growth, failure.
        """
        super().__init__()
        self._splits = splits
        self.records: list[Mapping[str, Any]] = []
        self._habits, self._on_record, self._options = habits or MaintenanceSettings(), on_record, options
        self._upkeep: Maintenance | None = None
        self._meter: Meter | None = None
        self._governed: Governed | None = None
        self._learned: Mapping[str, Any] | None = None
        self._used: list[int] = []  # bytes, at the end of each epoch

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take over the optimization, after Lightning has looked at the settings for an automatic one."""
        is_automatic = pl_module.automatic_optimization or getattr(pl_module, TAKEN_OVER, False)
        self._splits = self._splits and is_automatic
        if not self._splits or stage != "fit":
            return
        times = trainer.accumulate_grad_batches
        if times != 1:
            remedy = f"use batches {times} times as large with accumulate_grad_batches=1"
            raise _refused("splitting batches and accumulating gradients cannot be combined", remedy)
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm not in (None, "norm"):
            problem = f"gradients are clipped by {trainer.gradient_clip_algorithm}"
            raise _refused(problem, "clip by norm, or use manual optimization")
        self._options.setdefault("clip", trainer.gradient_clip_val or None)
        pl_module.automatic_optimization = True  # schedules are read as of such a module: `monitor` counts only there
        setattr(pl_module, TAKEN_OVER, True)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's
        """Have Lightning leave the steps to the module, once it has read the schedules."""
        if self._splits:
            pl_module.automatic_optimization = False  # and stays so: by it Lightning knows where it counts steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring; give the module a `governed`, and its batches in parts."""
        device = str(pl_module.device)
        self._meter, self._upkeep = meter_of(device), Maintenance(self._habits, device)
        self._meter.reset_peak()
        self._upkeep.begin()
        if pl_module.automatic_optimization:
            return
        optimizer: Any = pl_module.optimizers()  # it stands in for one, and counts steps
        if isinstance(optimizer, list):
            raise _refused(f"{len(optimizer)} optimizers", "create a Governed for each")
        model = trainer.strategy.model or pl_module  # DistributedDataParallel, where there are ranks
        self._governed = governed = Governed(model, optimizer, backward=pl_module.manual_backward, **self._options)
        governed.on_event = lambda event: self._report("event", asdict(event))
        if self._learned is not None:
            governed.load_state_dict(self._learned)
        pl_module.governed = governed  # type: ignore[assignment]  # a plain attribute, no module
        if self._splits:
            pl_module.training_step = _InParts(pl_module.training_step, governed)  # type: ignore[method-assign]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *where: Any) -> None:
        """Do the upkeep, and what Lightning does to learning rates where it optimizes."""
        assert self._upkeep is not None
        self._upkeep.after_micro_batch()
        self._upkeep.after_step()
        self._schedule(trainer, pl_module, "step", int(where[-1]) + 1)

    def _schedule(self, trainer: Trainer, module: LightningModule, interval: str, done: int) -> None:
        """Let the schedulers of an interval set the learning rates."""
        for config in trainer.lr_scheduler_configs if self._splits else ():
            if config.interval != interval or done % config.frequency:
                continue
            value = trainer.callback_metrics.get(str(config.monitor)) if config.reduce_on_plateau else None
            if value is not None or not config.reduce_on_plateau:
                module.lr_scheduler_step(config.scheduler, value)
            elif config.strict:
                problem = f"ReduceLROnPlateau monitors {config.monitor}, which was not logged"
                raise _refused(problem, f"log it; available: {', '.join(trainer.callback_metrics) or 'none'}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record allocated, reserved and peak memory; warn if it keeps growing."""
        epoch = trainer.current_epoch
        self._schedule(trainer, pl_module, "epoch", epoch + 1)
        assert self._meter is not None
        memory = self._meter.read()
        figures = {name: value for name, value in asdict(memory).items() if value is not None}
        self._report("epoch", {"epoch": epoch, **figures, "host": asdict(HostMeter().read())})
        pl_module.log_dict({f"memory/{name}": float(value) for name, value in figures.items()})
        self._used.append(memory.reserved_bytes if memory.allocated_bytes is None else memory.allocated_bytes)
        last = self._used[-GROWING - 1 :]
        if len(last) > GROWING and all(now - then >= GROWTH_BYTES for then, now in itertools.pairwise(last)):
            grown_bytes = last[-1] - last[0]
            self._report("growth", {"epoch": epoch, "epochs": GROWING, "bytes": grown_bytes})
            _log.warning("memory grew in each of %d epochs, by %s bytes in all", GROWING, f"{grown_bytes:,}")
        self._meter.reset_peak()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Record a failure for lack of memory, with what to do next."""
        self._end()  # Lightning calls no teardown() of callbacks after an error
        if isinstance(exception, PipelineError):
            error, remedy = exception.what, exception.remedy
        elif is_out_of_memory(exception):
            error, remedy = str(exception).partition("\n")[0], REMEDY
        else:
            return
        memory = {} if self._meter is None else asdict(self._meter.read())
        at = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        self._report("failure", {**at, "error": error, "remedy": remedy, **memory})
        _log.error("step %d: %s\n  next: %s", trainer.global_step, error, remedy)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002 - Lightning's
        """Give the module back its own training step."""
        self._end()
        if isinstance(vars(pl_module).get("training_step"), _InParts):
            del pl_module.training_step

    def _end(self) -> None:
        if self._upkeep is not None:
            self._upkeep.end()
            self._upkeep = None

    def state_dict(self) -> dict[str, Any]:
        return {} if self._governed is None else self._governed.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._learned = state_dict or None

    def _report(self, kind: str, facts: Mapping[str, Any]) -> None:
        record = {"kind": kind, **facts}
        self.records.append(record)
        self._on_record(record)


class _InParts:
    """The training step of a module that is given batches whole and returns means, made of parts of a batch."""

    def __init__(self, training_step: Callable[..., Any], governed: Governed) -> None:
        self._training_step, self._governed = training_step, governed

    def __call__(self, batch: Any, *where: Any) -> torch.Tensor:
        def loss_of(rows: list[int]) -> tuple[torch.Tensor, int]:
            returned = self._training_step(part_of(batch, rows[0], rows[-1] + 1, count), *where)
            loss = returned["loss"] if isinstance(returned, dict) else returned
            if loss is None:
                problem = "training_step returned None: part of a batch cannot be skipped"
                raise _refused(problem, "return a loss times 0, or use manual optimization")
            return loss * len(rows), len(rows)

        tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim())
        count = next(map(len, tensors), 0)
        if not count:
            raise _cannot_split(batch, count)
        return self._governed.step(range(count), loss_of)


def part_of(batch: Any, start: int, stop: int, count: int) -> Any:
    """Return some items of a batch of `count`: those rows of its tensors, and of its lists of as many."""

    def are_items(value: Any) -> bool:  # texts, say
        is_list = isinstance(value, tuple | list) and len(value) == count
        return is_list and not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(list(value)))

    def part(value: Any) -> Any:
        if are_items(value) or (isinstance(value, torch.Tensor) and value.dim() and len(value) == count):
            return value[start:stop]
        if isinstance(value, str | int | float | bool | None) or (isinstance(value, torch.Tensor) and not value.dim()):
            return value
        raise _cannot_split(value, count)

    return tree_map(part, batch, is_leaf=are_items)


def _cannot_split(value: Any, count: int) -> ConfigError:
    problem = f"cannot split a {type(value).__name__} of a batch of {count} items"
    return _refused(problem, "use manual optimization: self.governed.step(items, self.loss_of)")


def _refused(problem: str, remedy: str) -> ConfigError:
    return ConfigError(problem, where="GovernorCallback", remedy=remedy)
