"""Modules and loops of Lightning, which takes seconds to import: a test has them from its fixture `kit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pipeline.training.own_loops.lightning_callback import GROWTH_BYTES as GROWTH_BYTES
from pipeline.training.own_loops.lightning_callback import GovernorCallback
from tests.testkit.limited.device import LimitedDevice

WIDTH = 64


class Regression(LightningModule):
    def __init__(self, *, manual: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = not manual
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, 1))
        self.leaked: list[Tensor] = []
        self.leaks_bytes = 0

    def loss_of(self, items: list[Tensor]) -> tuple[Tensor, int]:
        rows = torch.stack(items)
        return self.layers(rows).square().sum(), len(rows)

    def training_step(self, items: list[Tensor], index: int) -> Tensor | None:
        self.leaked.append(torch.ones(self.leaks_bytes // 4))
        if self.automatic_optimization:
            total, weight = self.loss_of(items)
            return total / weight
        loss = self.governed.step(items, self.loss_of)
        self.log("loss", loss)
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


ROWS = list(torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(1)))


def train(
    module: LightningModule, callback: GovernorCallback, folder: Path, loader: DataLoader, **options: Any
) -> Trainer:
    fit = {name: options.pop(name) for name in ("ckpt_path", "weights_only") if name in options}
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    options = {"accelerator": "cpu", "devices": 1, **quiet, **options}
    trainer = Trainer(callbacks=[callback], default_root_dir=folder, **options)
    trainer.fit(module, loader, **fit)
    return trainer


def fit(module: Regression, callback: GovernorCallback, folder: Path, epochs: int = 1, **more: Any) -> Trainer:
    loader = DataLoader(ROWS, batch_size=64, collate_fn=list)
    return train(module, callback, folder, loader, max_epochs=epochs, **more)


class Means(LightningModule):
    """A module as most are: batches of tensors, mean losses, clipping and a schedule left to Lightning."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, 1))
        self.given: list[int] = []

    def training_step(self, batch: dict[str, object], index: int) -> dict[str, Tensor]:
        rows, (target, *names) = batch["rows"], batch["rest"]
        self.given.append(len(rows))
        assert all(len(name) == len(rows) for name in names)
        loss = (self.layers(rows).squeeze(1) - target).square().mean()
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def means(module: Means, callback: GovernorCallback, folder: Path, **options: Any) -> Trainer:
    items = [{"rows": row, "rest": (row.sum(), f"item {place}")} for place, row in enumerate(ROWS)]
    loader = DataLoader(items, batch_size=60)
    return train(module, callback, folder, loader, max_epochs=2, **{"gradient_clip_val": 0.05, **options})


def weights(module: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in module.parameters()])


def limit_for(count: int) -> int:
    """Return a limit under which so many items run at once next to gradients, and 64 do not."""
    module, items = Regression(manual=True), ROWS[:count]
    with LimitedDevice() as device:
        for _ in range(2):
            module.loss_of(items)[0].backward()
    return device.peak_bytes + 16 * 1024  # Lightning's own numbers


class Plateau(Means):
    """Learns slower once a figure stays as it is."""

    figure = "still"

    def on_train_batch_start(self, *_: object) -> None:
        self.log("still", 1.0)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": self.figure}}


class Unlogged(Plateau):
    """Monitors a metric that is never logged."""

    figure = "stil"


class Silent(Means):
    """Returns no loss."""

    def training_step(self, batch: dict[str, object], index: int) -> None:  # type: ignore[override]
        return None


class Two(Means):
    """Has two optimizers, as only a module that optimizes manually may."""

    automatic_optimization = False

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:  # type: ignore[override]
        return [torch.optim.SGD(layer.parameters(), 0.01) for layer in (self.layers[0], self.layers[2])]
