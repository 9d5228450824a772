"""The governor under PyTorch Lightning (extra `lightning`): figures, habits, and steps that outlive an out-of-memory.

    class Model(lightning.pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False  # else Lightning runs backward where nobody can catch it

        def training_step(self, items, index):
            self.log("loss", self.governed.step(items, self.loss_of))

    Trainer(callbacks=[GovernorCallback()]).fit(model, DataLoader(data, batch_size=64, collate_fn=list))

With automatic optimization the callback only watches: an OOM ends the training then, with a record of it. Lightning
brings what a loader yields to the device: all items of a step, before they are split.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from pipeline.device.out_of_memory import is_out_of_memory
from pipeline.errors import ConfigError, PipelineError
from pipeline.memory.runtime.governed import Governed
from pipeline.memory.runtime.meters import Habits, HostMeter, Upkeep, meter_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning.pytorch import LightningModule, Trainer

    from pipeline.memory.runtime.meters import Meter

GROWING = 3  # epochs in a row
GROWTH_BYTES = 1 << 20  # by which memory grows at least in each of them
REMEDY = "split steps with GovernorCallback and automatic_optimization = False, or lower the batch size"
_log = logging.getLogger(__name__)


class GovernorCallback(Callback):
    """Records memory, does the upkeep of `Habits`, and sets `governed` on modules that optimize manually."""

    def __init__(
        self,
        *,
        habits: Habits | None = None,
        heard: Callable[[Mapping[str, Any]], None] = lambda record: None,  # noqa: ARG005
        **options: Any,
    ) -> None:
        """Take habits, what to call with each record (epoch, event, growth, failure), and options of `Governed`."""
        super().__init__()
        self.records: list[Mapping[str, Any]] = []
        self._habits, self._heard, self._options = habits or Habits(), heard, options
        self._upkeep: Upkeep | None = None
        self._meter: Meter | None = None
        self._governed: Governed | None = None
        self._learned: Mapping[str, Any] | None = None
        self._used: list[int] = []  # bytes, at the end of each epoch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring; where the module optimizes manually, give it a `governed`."""
        device = str(pl_module.device)
        self._meter, self._upkeep = meter_of(device), Upkeep(self._habits, device)
        self._meter.reset_peak()
        self._upkeep.begin()
        if not pl_module.automatic_optimization:
            self._governed = self._govern(trainer, pl_module)
            pl_module.governed = self._governed  # type: ignore[assignment]  # a plain attribute, no module

    def _govern(self, trainer: Trainer, module: LightningModule) -> Governed:
        optimizer = module.optimizers()
        if isinstance(optimizer, list):
            problem = f"{len(optimizer)} optimizers"
            raise ConfigError(problem, where="GovernorCallback", remedy="a Governed of your own each")
        if trainer.world_size > 1:
            problem = "Lightning adds up gradients in every backward: an OOM on one rank would leave the others waiting"
            raise ConfigError(problem, where="GovernorCallback", remedy="one device, or pipeline submit --stage train")
        governed = Governed(
            module,
            optimizer,  # type: ignore[arg-type]  # it stands in for one, and counts steps
            backward=module.manual_backward,
            **self._options,
        )
        governed.heard = lambda event: self._tell({"kind": "event", **asdict(event)})
        if self._learned is not None:
            governed.load_state_dict(self._learned)
        return governed

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        assert self._upkeep is not None
        self._upkeep.after_micro_batch()
        self._upkeep.after_step()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record allocated, reserved and peak memory; warn if it keeps growing."""
        assert self._meter is not None
        memory, host = self._meter.read(), HostMeter().read()
        figures = {name: value for name, value in asdict(memory).items() if value is not None}
        self._tell({"kind": "epoch", "epoch": trainer.current_epoch, **figures, "host": asdict(host)})
        pl_module.log_dict({f"memory/{name}": float(value) for name, value in figures.items()})
        self._used.append(memory.reserved_bytes if memory.allocated_bytes is None else memory.allocated_bytes)
        self._look_for_growth(trainer.current_epoch)
        self._meter.reset_peak()

    def _look_for_growth(self, epoch: int) -> None:
        last = self._used[-GROWING - 1 :]
        if len(last) > GROWING and all(now - then >= GROWTH_BYTES for then, now in itertools.pairwise(last)):
            grown_bytes = last[-1] - last[0]
            self._tell({"kind": "growth", "epoch": epoch, "epochs": GROWING, "bytes": grown_bytes})
            _log.warning("memory grew in each of %d epochs, by %s bytes in all", GROWING, f"{grown_bytes:,}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Record a failure for lack of memory, with what to do next."""
        self._end()  # Lightning calls no teardown() of callbacks after an error
        if not (is_out_of_memory(exception) or isinstance(exception, PipelineError)):
            return
        error, remedy = str(exception).partition("\n")[0], REMEDY
        if isinstance(exception, PipelineError):
            error, remedy = exception.what, exception.remedy
        figures = {} if self._meter is None else asdict(self._meter.read())
        at = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        self._tell({"kind": "failure", **at, "error": error, "remedy": remedy, **figures})
        _log.error("step %d: %s\n  next: %s", trainer.global_step, error, remedy)

    def teardown(self, *_: Any, **__: Any) -> None:
        self._end()

    def _end(self) -> None:
        if self._upkeep is not None:
            self._upkeep.end()
            self._upkeep = None

    def state_dict(self) -> dict[str, Any]:
        return {} if self._governed is None else self._governed.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._learned = state_dict or None

    def _tell(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)
        self._heard(record)
