"""Lightning's own Trainer, on the CPU, with the callback."""

from __future__ import annotations

import difflib
import gc
import importlib
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import ConfigError
from pipeline.memory.runtime.meters import MaintenanceSettings
from pipeline.training.own_loops.governed import Governed
from tests.docs.blocks import Page
from tests.testkit.limited import device as limited
from tests.testkit.limited.device import LimitedDevice

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.filterwarnings("ignore"),  # Lightning warns of loaders without workers, and of much else
]


@pytest.fixture(scope="module")
def kit() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning's own imports
        pytest.importorskip("lightning.pytorch", reason="the extra `lightning` is not installed")
        return importlib.import_module("tests.training.own_loops.lightning_kit")


def test_a_step_that_does_not_fit_is_split_and_trains_as_without_a_limit(kit: Any, tmp_path: Path) -> None:
    limited.need()
    free, squeezed, callback = kit.Regression(manual=False), kit.Regression(manual=True), kit.GovernorCallback()
    kit.fit(free, kit.GovernorCallback(), tmp_path, 2)
    with LimitedDevice(kit.limit_for(16)) as device:
        trainer = kit.fit(squeezed, callback, tmp_path, 2)
    assert device.refused > 0
    assert trainer.global_step == 4
    assert torch.allclose(kit.weights(free), kit.weights(squeezed), atol=1e-5)
    events = [record for record in callback.records if record["kind"] == "event"]
    assert {event["what"] for event in events} == {"out of memory", "budget"}
    assert isinstance(squeezed.governed, Governed)


def test_with_automatic_optimization_an_oom_is_recorded_with_what_to_do(
    kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limited.need()
    callback = kit.GovernorCallback(habits=MaintenanceSettings(collect_every=5))
    with LimitedDevice(kit.limit_for(16)), pytest.raises(torch.OutOfMemoryError), caplog.at_level(logging.ERROR):
        kit.fit(kit.Regression(manual=False), callback, tmp_path)
    failure = callback.records[-1]
    assert (failure["kind"], failure["epoch"], failure["step"]) == ("failure", 0, 0)
    assert "GovernorCallback(splits=True)" in failure["remedy"]
    assert failure["reserved_bytes"] > 0
    assert gc.isenabled()


def test_every_epoch_has_its_figures_and_they_are_logged(kit: Any, tmp_path: Path) -> None:
    reported: list[object] = []
    callback = kit.GovernorCallback(on_record=reported.append)
    trainer = kit.fit(kit.Regression(manual=False), callback, tmp_path, 3)
    assert [record["epoch"] for record in callback.records if record["kind"] == "epoch"] == [0, 1, 2]
    assert reported == callback.records
    figures = callback.records[-1]
    assert figures["peak_reserved_bytes"] >= figures["reserved_bytes"] > 0
    assert figures["host"]["used_bytes"] > 0
    assert trainer.callback_metrics["memory/peak_reserved_bytes"] > 0


@pytest.mark.parametrize("leaks", [False, True])
def test_memory_that_grows_in_every_epoch_is_told(kit: Any, tmp_path: Path, leaks: bool) -> None:
    module, callback = kit.Regression(manual=False), kit.GovernorCallback()
    module.leaks_bytes = leaks_bytes = leaks * 40 * kit.GROWTH_BYTES  # more than malloc keeps of what tests before took
    kit.fit(module, callback, tmp_path, 6)
    grown = [record for record in callback.records if record["kind"] == "growth"]
    assert bool(grown) is leaks
    if grown:
        assert grown[-1]["bytes"] == pytest.approx(2 * 3 * leaks_bytes, rel=0.3)


def test_the_learned_budget_is_part_of_lightnings_checkpoint(kit: Any, tmp_path: Path) -> None:
    limited.need()
    limit_bytes, callback, path = kit.limit_for(16), kit.GovernorCallback(), tmp_path / "last.ckpt"
    first, second, resumed = kit.Regression(manual=True), kit.Regression(manual=True), kit.GovernorCallback()
    with LimitedDevice(limit_bytes):
        trainer = kit.fit(first, callback, tmp_path, 2)
    trainer.save_checkpoint(path)
    with LimitedDevice(limit_bytes) as device:
        kit.fit(second, resumed, tmp_path, 3, ckpt_path=path, weights_only=True)
    assert resumed.state_dict()["steps"] == 6
    assert device.refused == 0
    assert [record for record in resumed.records if record["kind"] == "event"] == []


def test_a_module_that_is_not_changed_is_given_parts_and_trains_as_with_whole_batches(kit: Any, tmp_path: Path) -> None:
    limited.need()
    whole, parts = kit.Means(), kit.Means()
    by_lightning = kit.means(whole, kit.GovernorCallback(), tmp_path)
    with LimitedDevice(kit.limit_for(16) + 32 * 1024) as device:  # the whole batch is there, too
        governed = kit.means(parts, kit.GovernorCallback(splits=True), tmp_path)
    assert device.refused > 0
    assert whole.given == [60, 60, 8] * 2
    assert sum(parts.given[-6:]) < sum(whole.given)
    assert max(parts.given[6:]) < 60
    torch.testing.assert_close(kit.weights(parts), kit.weights(whole), rtol=0, atol=1e-5)
    assert governed.global_step == by_lightning.global_step == 6
    rates = [trainer.optimizers[0].param_groups[0]["lr"] for trainer in (governed, by_lightning)]
    assert rates == [0.025, 0.025]
    assert "training_step" not in vars(parts), "it is as it was"
    parts.given.clear()
    governed = kit.means(parts, kit.GovernorCallback(splits=True, budget=30), tmp_path, gradient_clip_val=None)
    assert parts.given == [30, 30, 30, 30, 8] * 2, "a second fit goes in parts, too"
    assert governed.global_step == 6


def test_a_rate_that_waits_for_a_plateau_is_set_as_by_lightning(kit: Any, tmp_path: Path) -> None:
    trainers = [kit.means(kit.Plateau(), kit.GovernorCallback(splits=splits), tmp_path) for splits in (False, True)]
    assert [trainer.optimizers[0].param_groups[0]["lr"] for trainer in trainers] == [pytest.approx(0.01)] * 2


@pytest.mark.parametrize(
    ("kind", "problem", "options"),
    [
        ("Two", "2 optimizers", {"gradient_clip_val": None}),
        ("Unlogged", "stil", {}),
        ("Silent", "training_step returned None", {}),
        ("Means", "accumulate_grad_batches=1", {"accumulate_grad_batches": 2}),
        ("Means", "clip by norm", {"gradient_clip_algorithm": "value"}),
    ],
)
def test_what_cannot_be_split_is_refused_with_what_to_do(
    kit: Any, tmp_path: Path, kind: str, problem: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=problem):
        kit.means(getattr(kit, kind)(), kit.GovernorCallback(splits=True), tmp_path, **options)


BEFORE = Page(Path(__file__).resolve().parents[3] / "docs/how-to/own_script.md").files()["fit.py"]
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
