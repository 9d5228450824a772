"""What training measured is in the files once, whatever was killed and resumed."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
from contextlib import closing
from dataclasses import replace

import pytest

from pipeline.training.loop.metrics_log import (
    EPOCHS,
    FIGURES,
    Epoch,
    MetricRange,
    MetricsLog,
    open_trackers,
    read_epochs,
    read_figures,
)
from tests.training.checkpoints.saved import forked, on_full_disk

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


def test_an_epoch_is_read_as_it_was_written(tmp_path):
    with closing(MetricsLog(tmp_path)) as figures:
        figures.epoch(EPOCH)
        figures.epoch(replace(EPOCH, epoch=4, step=50, loss={"contacts": math.inf}))
    first, second = read_epochs(tmp_path)
    assert first == EPOCH
    assert second.loss == {"contacts": None}  # JSON has no word for it
    lines = (tmp_path / EPOCHS).read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["epoch"] for line in lines] == [3, 4]


@pytest.mark.parametrize("resumed", [0, 5, 30, 50])
def test_a_step_never_appears_twice_after_resuming(tmp_path, resumed):
    with closing(MetricsLog(tmp_path)) as figures:
        for step in range(10, 51, 10):
            figures.log(step, {"loss": step})
            figures.epoch(replace(EPOCH, epoch=step // 10, step=step))
    with closing(MetricsLog(tmp_path, step=resumed)) as figures:
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
    with closing(MetricsLog(tmp_path)) as figures:
        for step in (1, 2):
            figures.log(step, {"loss": 0.25})
    path = tmp_path / FIGURES
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole)):
        path.write_bytes(whole[:end])
        assert [line["step"] for line in read_figures(tmp_path)] == [1]
        with closing(MetricsLog(tmp_path, step=9)) as figures:
            figures.log(3, {})
        assert [line["step"] for line in read_figures(tmp_path)] == [1, 3]


def test_what_was_noted_before_a_kill_is_there(tmp_path):
    def work():
        figures = MetricsLog(tmp_path)
        for step in range(1, 1000):
            figures.log(step, {"loss": 1 / step})
            if step == 321:
                os.kill(os.getpid(), signal.SIGKILL)

    assert os.waitpid(forked(work), 0)[1] == signal.SIGKILL
    assert [line["step"] for line in read_figures(tmp_path)] == list(range(1, 322))


def test_a_full_disk_costs_lines_and_not_the_training(tmp_path):
    def work():
        with closing(MetricsLog(tmp_path)) as figures:
            for step in range(1, 9):
                figures.log(step, {"loss": 0.123456789})

    on_full_disk(100, work)
    assert (tmp_path / FIGURES).read_bytes().endswith(b"}\n")
    assert [line["step"] for line in read_figures(tmp_path)] == [1, 2, 3]


def points(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
def test_tensorboard_shows_each_step_once_after_resuming(tmp_path):
    with closing(MetricsLog(tmp_path, trackers=open_trackers(["tensorboard"], tmp_path))) as figures:
        for step in (10, 20, 30, 40):
            figures.log(step, {"loss": 1.0, "broken": None})
    with closing(MetricsLog(tmp_path, step=20, trackers=open_trackers(["tensorboard"], tmp_path, step=20))) as figures:
        figures.log(30, {"loss": 0.5})
        figures.epoch(EPOCH)
    seen = points(tmp_path)
    assert seen["loss"] == [(10, 1.0), (20, 1.0), (30, 0.5)]
    assert seen["loss/contacts"] == [(40, pytest.approx(0.41234))]
    assert seen["epoch/peak_bytes"] == [(40, pytest.approx(3.9 * GIB))]
    assert seen["epoch/batch_mean"] == [(40, 24.0)]
    assert "broken" not in seen


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
    with closing(MetricsLog(tmp_path, trackers={"wandb": failing})) as figures:
        for step in range(5):
            figures.log(step, {"loss": 1.0})
    assert failing.asked == 1
    (record,) = caplog.records
    assert "the service is away" in record.getMessage()
    assert len(read_figures(tmp_path)) == 5


def test_a_tracker_that_is_not_installed_says_how_it_would_be(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING):
        assert open_trackers(["wandb"], tmp_path) == {}
    assert len(caplog.records) == 1
    assert "[wandb]" in caplog.text
