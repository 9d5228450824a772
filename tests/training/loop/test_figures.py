"""What training measured is in the files once, whatever was killed and resumed."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from pipeline.training.loop.metrics_log import (
    EPOCHS,
    FIGURES,
    Epoch,
    FailsafeTracker,
    MetricRange,
    MetricsLog,
    open_trackers,
    read_epochs,
    read_figures,
    run_id,
)

GIB = 1 << 30
EPOCH = Epoch(
    epoch=3,
    step=40,
    steps=10,
    loss={"contacts": 0.41234},
    learning_rate=1e-4,
    batch=MetricRange(24, 24, 24),
    items=240,
    items_per_s=12.13,
    wait_share=0.004,
    allocated_bytes=int(3.1 * GIB),
    reserved_bytes=int(3.4 * GIB),
    peak_bytes=int(3.9 * GIB),
    ooms=0,
    micro_batches=31,
    rejected=0,
    cropped=0,
    wall_s=19.8,
    validation={"auroc": 0.8123},
)


def test_an_epoch_is_one_line_for_people():
    assert EPOCH.words() == (
        "epoch 3  loss 0.412  val auroc 0.812  "
        "allocated 3.1 GiB / reserved 3.4 GiB / peak 3.9 GiB  batch 24 exactly  "
        "12.1 items/s  wait 0.4%"
    )


def test_the_line_says_what_went_wrong_and_how_the_batch_varied():
    worse = replace(
        EPOCH,
        loss={"contacts": math.nan, "distance": 1.5},
        batch=MetricRange.of([24, 24, 12]),
        allocated_bytes=31 << 20,
        reserved_bytes=0,
        peak_bytes=42 << 20,
        ooms=2,
        rejected=1,
        cropped=1003,
        more={"left_out_steps": 2.0},
    )
    assert worse.words() == (
        "epoch 3  contacts not finite  distance 1.5  val auroc 0.812  "
        "allocated 31.0 MiB / reserved 0 B / peak 42.0 MiB  "
        "batch 12 to 24, 20 on average  12.1 items/s  wait 0.4%  2 out of memory  1 rejected  1,003 cropped  "
        "2 steps left out"
    )


def test_an_epoch_is_read_as_it_was_written(tmp_path):
    with MetricsLog(tmp_path) as figures:
        figures.epoch(EPOCH)
        figures.epoch(replace(EPOCH, epoch=4, step=50, loss={"contacts": math.inf}))
    first, second = read_epochs(tmp_path)
    assert first == EPOCH
    assert second.loss == {"contacts": None}  # JSON has no word for it
    lines = (tmp_path / EPOCHS).read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["epoch"] for line in lines] == [3, 4]


def test_an_epoch_of_a_later_version_can_be_read(tmp_path):
    (tmp_path / EPOCHS).write_text(json.dumps(EPOCH.to_json() | {"brightness": 3}) + "\n")
    assert read_epochs(tmp_path) == [EPOCH]


def test_nothing_was_measured_where_there_is_no_file(tmp_path):
    assert read_epochs(tmp_path) == []
    assert read_figures(tmp_path / "not there") == []


@pytest.mark.parametrize("resumed", range(0, 55, 5))
def test_a_step_never_appears_twice_after_resuming(tmp_path, resumed):
    with MetricsLog(tmp_path) as figures:
        for step in range(10, 51, 10):
            figures.log(step, {"loss": step})
            figures.epoch(replace(EPOCH, epoch=step // 10, step=step))
    with MetricsLog(tmp_path, step=resumed) as figures:
        for step in range(10, 61, 10):
            if step > resumed:
                figures.log(step, {"loss": step + 0.5})
                figures.epoch(replace(EPOCH, epoch=step // 10, step=step, items=1))
    lines = read_figures(tmp_path)
    assert [line["step"] for line in lines] == list(range(10, 61, 10))
    assert [line["loss"] % 1 > 0 for line in lines] == [step > resumed for step in range(10, 61, 10)]
    epochs = read_epochs(tmp_path)
    assert [(one.step, one.items == 1) for one in epochs] == [(step, step > resumed) for step in range(10, 61, 10)]


def test_a_torn_line_is_none_at_whatever_byte_it_was_torn(tmp_path):
    with MetricsLog(tmp_path) as figures:
        for step in (1, 2):
            figures.log(step, {"loss": 0.25})
    path = tmp_path / FIGURES
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole)):
        path.write_bytes(whole[:end])
        assert [line["step"] for line in read_figures(tmp_path)] == [1]
        with MetricsLog(tmp_path, step=9) as figures:
            figures.log(3, {})
        assert [line["step"] for line in read_figures(tmp_path)] == [1, 3]


KILLED = """
import os, signal, sys
from pathlib import Path
from pipeline.training.loop.metrics_log import MetricsLog
figures = MetricsLog(Path(sys.argv[1]))
for step in range(1, 1000):
    figures.log(step, {"loss": 1 / step})
    if step == 321:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_noted_before_a_kill_is_there(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == -9
    assert [line["step"] for line in read_figures(tmp_path)] == list(range(1, 322))


FULL = """
import resource, sys
from pathlib import Path
from pipeline.training.loop.metrics_log import MetricsLog
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
with MetricsLog(Path(sys.argv[1])) as figures:
    for step in range(1, 9):
        figures.log(step, {"loss": 0.123456789})
"""


def test_a_full_disk_costs_lines_and_not_the_training(tmp_path):
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.count("a line of figures is lost") == 8 - 3
    assert (tmp_path / FIGURES).read_bytes().endswith(b"}\n")
    assert [line["step"] for line in read_figures(tmp_path)] == [1, 2, 3]


def points(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
def test_tensorboard_shows_each_step_once_after_resuming(tmp_path):
    with MetricsLog(tmp_path, trackers=open_trackers(["tensorboard"], tmp_path)) as figures:
        for step in (10, 20, 30, 40):
            figures.log(step, {"loss": 1.0, "broken": None})
    with MetricsLog(tmp_path, step=20, trackers=open_trackers(["tensorboard"], tmp_path, step=20)) as figures:
        figures.log(30, {"loss": 0.5})
        figures.epoch(EPOCH)
    seen = points(tmp_path)
    assert seen["loss"] == [(10, 1.0), (20, 1.0), (30, 0.5)]
    assert seen["loss/contacts"] == [(40, pytest.approx(0.41234))]
    assert seen["epoch/peak_bytes"] == [(40, pytest.approx(3.9 * GIB))]
    assert seen["epoch/batch_mean"] == [(40, 24.0)]
    assert "broken" not in seen


OFFLINE = """
import sys
from pathlib import Path
from pipeline.training.loop.metrics_log import open_trackers
folder = Path(sys.argv[1])
for step in (1, 2):
    (tracker,) = open_trackers(["wandb"], folder, name="mine", config={"rate": 0.5})
    tracker.scalars(step, {"loss": 1 / step})
    tracker.close()
"""


def test_wandb_keeps_its_runs_in_the_folder_where_there_is_no_account(tmp_path):
    """In a process of its own: W&B leaves a service behind."""
    home = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", OFFLINE, str(tmp_path)]
    done = subprocess.run(command, env=home, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    runs = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    name = run_id(tmp_path, "wandb")
    assert [run.name for run in runs] == [f"run-{name}.wandb"] * 2  # resumed: another file of the same run
    assert [b"loss" in run.read_bytes() for run in runs] == [True, True]


class Failing:
    def __init__(self):
        self.asked = 0

    def scalars(self, step, figures):
        self.asked += 1
        raise ConnectionError("the service is away")

    def close(self):
        raise AssertionError("it was left alone")


def test_a_tracker_that_fails_is_one_warning_and_nothing_more(tmp_path, caplog):
    failing = Failing()
    tracker = FailsafeTracker("wandb", lambda: failing)
    with MetricsLog(tmp_path, trackers=[tracker]) as figures:
        for step in range(5):
            figures.log(step, {"loss": 1.0})
    assert failing.asked == 1
    assert [record.getMessage() for record in caplog.records] == [
        "wandb gets no more figures: ConnectionError: the service is away"
    ]
    assert len(read_figures(tmp_path)) == 5


def test_a_tracker_that_is_not_installed_says_how_it_would_be(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING):
        (tracker,) = open_trackers(["wandb"], tmp_path)
        tracker.scalars(1, {"loss": 1.0})
    assert len(caplog.records) == 1
    assert "pip install 'protein-training-pipeline[wandb]'" in caplog.text


def test_a_run_keeps_its_id(tmp_path):
    assert run_id(tmp_path, "wandb") == run_id(tmp_path, "wandb")
    (tmp_path / "other").mkdir()
    assert run_id(tmp_path / "other", "wandb") != run_id(tmp_path, "wandb")
