"""Lightning's own Trainer, on the CPU, with the callback."""

from __future__ import annotations

import difflib
import gc
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.memory.runtime.meters import Habits
from pipeline.training.own_loops.governed import Governed
from tests.docs.blocks import Page
from tests.testkit.limited import device as limited
from tests.testkit.limited.device import LimitedDevice

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Lightning's own imports
    pytest.importorskip("lightning.pytorch", reason="the extra `lightning` is not installed")
    from lightning.pytorch import LightningModule, Trainer

    from pipeline.training.own_loops.lightning_callback import GROWTH_BYTES, GovernorCallback

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.filterwarnings("ignore"),  # Lightning warns of loaders without workers, and of much else
]
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


def fit(module: Regression, callback: GovernorCallback, folder: Path, epochs: int = 1, **more: object) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=[callback],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(ROWS, batch_size=64, collate_fn=list), **more)
    return trainer


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


def means(module: Means, callback: GovernorCallback, folder: Path, **options: object) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        callbacks=[callback],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **{"gradient_clip_val": 0.05, **options},
    )
    items = [{"rows": row, "rest": (row.sum(), f"item {place}")} for place, row in enumerate(ROWS)]
    trainer.fit(module, torch.utils.data.DataLoader(items, batch_size=60))
    return trainer


def weights(module: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in module.parameters()])


def limit_for(count: int) -> int:
    """Return a limit under which so many items run at once, beside gradients, and 64 do not."""
    module, items = Regression(manual=True), ROWS[:count]
    with LimitedDevice() as device:
        for _ in range(2):
            module.loss_of(items)[0].backward()
    return device.peak_bytes + 16 * 1024  # Lightning's own numbers


def test_a_step_that_does_not_fit_is_split_and_trains_as_without_a_limit(tmp_path: Path) -> None:
    limited.need()
    free, squeezed, callback = Regression(manual=False), Regression(manual=True), GovernorCallback()
    fit(free, GovernorCallback(), tmp_path, 2)
    with LimitedDevice(limit_for(16)) as device:
        trainer = fit(squeezed, callback, tmp_path, 2)
    assert device.refused > 0
    assert trainer.global_step == 4
    assert torch.allclose(weights(free), weights(squeezed), atol=1e-5)
    events = [record for record in callback.records if record["kind"] == "event"]
    assert {event["what"] for event in events} == {"out of memory", "budget"}
    assert isinstance(squeezed.governed, Governed)


def test_with_automatic_optimization_an_oom_is_recorded_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limited.need()
    callback = GovernorCallback(habits=Habits(collect_every=5))
    with LimitedDevice(limit_for(16)), pytest.raises(torch.OutOfMemoryError), caplog.at_level(logging.ERROR):
        fit(Regression(manual=False), callback, tmp_path)
    failure = callback.records[-1]
    assert (failure["kind"], failure["epoch"], failure["step"]) == ("failure", 0, 0)
    assert "GovernorCallback(splits=True)" in failure["remedy"]
    assert failure["reserved_bytes"] > 0
    assert "next: split batches" in caplog.text
    assert gc.isenabled()


def test_another_error_is_none_of_its_business(tmp_path: Path) -> None:
    class Wrong(Regression):
        def training_step(self, items: list[Tensor], index: int) -> Tensor | None:
            raise RuntimeError("shapes differ")

    callback = GovernorCallback()
    with pytest.raises(RuntimeError, match="shapes differ"):
        fit(Wrong(manual=False), callback, tmp_path)
    assert callback.records == []


def test_every_epoch_has_its_figures_and_they_are_logged(tmp_path: Path) -> None:
    heard: list[object] = []
    callback = GovernorCallback(heard=heard.append)
    trainer = fit(Regression(manual=False), callback, tmp_path, 3)
    assert [record["epoch"] for record in callback.records if record["kind"] == "epoch"] == [0, 1, 2]
    assert heard == callback.records
    figures = callback.records[-1]
    assert figures["peak_reserved_bytes"] >= figures["reserved_bytes"] > 0
    assert figures["host"]["used_bytes"] > 0
    assert trainer.callback_metrics["memory/peak_reserved_bytes"] > 0


@pytest.mark.parametrize("leaks_bytes", [0, 40 * GROWTH_BYTES])  # more than malloc keeps of what tests before took
def test_memory_that_grows_in_every_epoch_is_told(tmp_path: Path, leaks_bytes: int) -> None:
    module, callback = Regression(manual=False), GovernorCallback()
    module.leaks_bytes = leaks_bytes
    fit(module, callback, tmp_path, 6)
    grown = [record for record in callback.records if record["kind"] == "growth"]
    assert bool(grown) is bool(leaks_bytes)
    if grown:
        assert grown[-1]["bytes"] == pytest.approx(2 * 3 * leaks_bytes, rel=0.3)


def test_habits_are_kept_during_training_and_not_after(tmp_path: Path) -> None:
    seen = []

    class Looking(Regression):
        def training_step(self, items: list[Tensor], index: int) -> Tensor | None:
            seen.append(gc.isenabled())
            return super().training_step(items, index)

    fit(Looking(manual=False), GovernorCallback(habits=Habits(collect_every=10)), tmp_path)
    assert seen == [False, False]
    assert gc.isenabled()


def test_the_learned_budget_is_part_of_lightnings_checkpoint(tmp_path: Path) -> None:
    limited.need()
    limit_bytes, callback, path = limit_for(16), GovernorCallback(), tmp_path / "last.ckpt"
    first, second, resumed = Regression(manual=True), Regression(manual=True), GovernorCallback()
    with LimitedDevice(limit_bytes):
        trainer = fit(first, callback, tmp_path, 2)
    trainer.save_checkpoint(path)
    with LimitedDevice(limit_bytes) as device:
        fit(second, resumed, tmp_path, 3, ckpt_path=path, weights_only=True)
    assert resumed.state_dict()["steps"] == 6
    assert device.refused == 0
    assert [record for record in resumed.records if record["kind"] == "event"] == []


def test_two_optimizers_are_refused_with_what_to_do(tmp_path: Path) -> None:
    class Two(Regression):
        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(layer.parameters(), 0.01) for layer in (self.layers[0], self.layers[2])]

    with pytest.raises(ConfigError, match="2 optimizers"):
        fit(Two(manual=True), GovernorCallback(), tmp_path)


def test_a_module_that_is_not_changed_is_given_parts_and_trains_as_with_whole_batches(tmp_path: Path) -> None:
    limited.need()
    whole, parts = Means(), Means()
    by_lightning = means(whole, GovernorCallback(), tmp_path)
    with LimitedDevice(limit_for(16) + 32 * 1024) as device:  # the whole batch is there, too
        governed = means(parts, GovernorCallback(splits=True), tmp_path)
    assert device.refused > 0
    assert whole.given == [60, 60, 8] * 2
    assert sum(parts.given[-6:]) < sum(whole.given)
    assert max(parts.given[6:]) < 60
    torch.testing.assert_close(weights(parts), weights(whole), rtol=0, atol=1e-5)
    assert governed.global_step == by_lightning.global_step == 6
    rates = [trainer.optimizers[0].param_groups[0]["lr"] for trainer in (governed, by_lightning)]
    assert rates == [0.025, 0.025]
    assert "training_step" not in vars(parts), "it is as it was"
    parts.given.clear()
    governed = means(parts, GovernorCallback(splits=True, budget=30), tmp_path, gradient_clip_val=None)
    assert parts.given == [30, 30, 30, 30, 8] * 2, "a second fit goes in parts, too"
    assert governed.global_step == 6


class Plateau(Means):
    """Learns slower once a figure stays as it is."""

    figure = "still"

    def on_train_batch_start(self, *_: object) -> None:
        self.log("still", 1.0)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": self.figure}}


def test_a_rate_that_waits_for_a_plateau_is_set_as_by_lightning(tmp_path: Path) -> None:
    trainers = [means(Plateau(), GovernorCallback(splits=splits), tmp_path) for splits in (False, True)]
    assert [trainer.optimizers[0].param_groups[0]["lr"] for trainer in trainers] == [pytest.approx(0.01)] * 2


def test_a_plateau_of_a_figure_that_nobody_logs_is_an_error(tmp_path: Path) -> None:
    module = Plateau()
    module.figure = "stil"
    with pytest.raises(ConfigError, match="waits for stil, which was not logged"):
        means(module, GovernorCallback(splits=True), tmp_path)


def test_a_step_without_a_loss_is_refused_with_what_to_do(tmp_path: Path) -> None:
    class Silent(Means):
        def training_step(self, batch: dict[str, object], index: int) -> None:
            return None

    with pytest.raises(ConfigError, match="training_step returned None"):
        means(Silent(), GovernorCallback(splits=True), tmp_path)


def test_what_cannot_be_split_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which are split, and accumulate 1"):
        means(Means(), GovernorCallback(splits=True), tmp_path, accumulate_grad_batches=2)
    with pytest.raises(ConfigError, match="clip by norm"):
        means(Means(), GovernorCallback(splits=True), tmp_path, gradient_clip_algorithm="value")


BEFORE = Page(Path(__file__).resolve().parents[3] / "docs/own_script.md").files()["fit.py"]
AFTER = BEFORE.replace("import torch\n", "import torch\nfrom pipeline.api import GovernorCallback\n", 1).replace(
    "    max_epochs=2,\n", "    max_epochs=2,\n    callbacks=[GovernorCallback(splits=True)],\n"
)
SMALL = """\
import os
import torch

forward = torch.nn.Linear.forward


def limited(self, batch):
    if len(batch) > 4 and os.environ.get("LOCAL_RANK") == "1":
        open("refused", "a").close()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has 24 GiB")
    return forward(self, batch)


torch.nn.Linear.forward = limited
"""


@pytest.mark.nightly
def test_a_script_on_two_devices_outlives_an_oom_on_one_with_two_lines_changed(tmp_path: Path) -> None:
    changed = [line for line in difflib.ndiff(BEFORE.splitlines(), AFTER.splitlines()) if line[0] in "+-"]
    assert 0 < len(changed) <= 5
    for name, text in (("before", BEFORE), ("after", SMALL + AFTER)):
        folder = tmp_path / name
        folder.mkdir()
        spread = text.replace('accelerator="cpu",', 'accelerator="cpu",\n    devices=2,\n    strategy="ddp",')
        (folder / "fit.py").write_text(spread)
        done = subprocess.run(
            [sys.executable, "fit.py", "--out", ".", "--accumulate", "1"],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "after/refused").exists()
    found, expected = (torch.load(tmp_path / name / "weights.pt") for name in ("after", "before"))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10)
