"""TensorBoard and W&B carry the same figures as the files do, also of a training that was taken up again."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.training.loop.metrics_log import Epoch, last_step, read_epochs, read_figures, run_id, wandb_history

ROOT = Path(__file__).parents[3]
KEY = "0123456789abcdef0123456789abcdef01234567"
Curves = dict[str, list[tuple[int, float]]]
# Stopped in the second epoch, and taken up at the end of the first; in a process: W&B leaves a service behind.
TRAINED = """
import sys
from pathlib import Path
from tests.training.loop.loops import Judged, Plot, Run
train = {"trackers": ("tensorboard", "wandb"), "epochs": 3}
plot = Plot(train, terms="weighted", validated=4)
for stop in (5, None):
    Run(plot, Path(sys.argv[1]), task=Judged(plot)).to_end(stop=stop)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tracked")
    place = {"HOME": str(folder), "PATH": "/usr/bin:/bin", "WANDB_MODE": "offline", "WANDB_API_KEY": KEY}
    command = [sys.executable, "-c", TRAINED, str(folder)]
    done = subprocess.run(command, env=place, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert KEY not in done.stdout
    return folder / "model"


def of_files(model: Path) -> Curves:
    curves: Curves = {}
    for line in read_figures(model):
        for name, value in line.items():
            if name != "step":
                curves.setdefault(name, []).append((line["step"], value))
    for epoch in read_epochs(model):
        for name, value in epoch.scalars().items():
            curves.setdefault(name, []).append((epoch.step, value))
    return curves


def of_tensorboard(model: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(model / "tensorboard")).Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


def of_wandb(model: Path) -> Curves:
    curves: Curves = {}
    for path in sorted(model.glob("wandb/*run-*/run-*.wandb")):
        for step, figures in wandb_history(path):
            for name, value in figures.items():
                curves.setdefault(name, []).append((step, value))
    return curves


def as_single(curves: Curves) -> Curves:
    """Return curves as TensorBoard keeps them."""
    return {name: [(step, float(np.float32(value))) for step, value in points] for name, points in curves.items()}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
def test_both_trackers_show_every_figure_of_every_step_once_and_as_the_files_have_it(model: Path) -> None:
    files = of_files(model)
    timed = {"epoch/wall_s", "epoch/items_per_s", "epoch/wait_share"} | {one for one in files if one.endswith("_bytes")}
    timed |= {one for one in files if one.startswith("seconds/")}
    assert as_single(files) == of_tensorboard(model)
    kept = of_wandb(model)
    assert kept.keys() == files.keys()
    for name, points in files.items():  # what was kept before the stop is kept: what a clock says of it is another
        assert [step for step, _ in kept[name]] == [step for step, _ in points]
        if name not in timed:
            assert kept[name] == points, name


@pytest.mark.nightly
def test_the_figures_are_those_of_the_loss_the_pace_the_memory_and_its_end(model: Path) -> None:
    names = of_files(model).keys()
    assert {"loss.squares", "loss.means", "learning_rate", "gradient_norm", "items", "reserved_bytes"} <= names
    assert {"loss/squares", "loss/means", "validation/mean", "validation/loss"} <= names
    memory = {"allocated_bytes", "reserved_bytes", "peak_bytes", "planned_bytes", "ooms", "micro_batches"}
    pace = {"learning_rate", "items", "items_per_s", "wait_share", "wall_s", "rejected", "cropped"}
    assert {f"epoch/{name}" for name in memory | pace} <= names


@pytest.mark.nightly
def test_a_training_taken_up_again_goes_on_in_the_same_run(model: Path) -> None:
    name = run_id(model, "wandb")
    files = sorted(model.glob("wandb/*run-*/run-*.wandb"))
    assert [path.name for path in files] == [f"run-{name}.wandb"] * 2
    steps = [[step for step, _ in wandb_history(path)] for path in files]
    assert steps == [[1, 2, 3, 4, 5], [6, 7, 8, 9]]
    assert last_step(model, name) == 9
    assert last_step(model, "another") == 0


@pytest.mark.nightly
def test_the_key_of_an_account_is_in_no_file(model: Path) -> None:
    files = [path for path in model.parent.rglob("*") if path.is_file()]
    assert any("wandb" in path.parts for path in files)
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


@pytest.mark.nightly
def test_nothing_after_a_torn_record_is_believed(model: Path, tmp_path: Path) -> None:
    whole = sorted(model.glob("wandb/*run-*/run-*.wandb"))[0]
    data, steps = whole.read_bytes(), list(wandb_history(whole))
    torn = tmp_path / "run-torn.wandb"
    for end in range(0, len(data), 97):
        torn.write_bytes(data[:end])
        assert list(wandb_history(torn)) == steps[: len(list(wandb_history(torn)))]
    at = data.index(b"loss.squares")
    torn.write_bytes(data[:at] + b"?" + data[at + 1 :])
    assert list(wandb_history(torn)) == []


@pytest.mark.nightly
def test_what_was_planned_and_every_rung_is_among_the_figures_of_an_epoch() -> None:
    line = {"epoch": 1, "step": 4, "steps": 4, "loss": {"a": math.inf}, "learning_rate": 0.1, "items": 8, "ooms": 2}
    line |= {"items_per_s": 3.0, "wait_share": 0.1, "allocated_bytes": 1, "reserved_bytes": 2, "peak_bytes": 3}
    line |= {
        "micro_batches": 9,
        "rejected": 0,
        "cropped": 0,
        "wall_s": 1.0,
        "batch": {"least": 1, "mean": 2, "most": 3},
    }
    scalars = Epoch.from_json(line | {"remedied": {"offload": 5}, "planned_bytes": 7}).scalars()
    assert (scalars["epoch/by_offload"], scalars["epoch/planned_bytes"], scalars["epoch/ooms"]) == (5.0, 7.0, 2.0)
