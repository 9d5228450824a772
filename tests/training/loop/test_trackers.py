"""TensorBoard and W&B carry the same figures as the files do, also of a training that was taken up again."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.training.loop.metrics_log import MetricsLog, read_epochs, read_figures, tracked_run
from tests.training.loop.test_figures import points

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[3]
KEY = "0123456789abcdef0123456789abcdef01234567"
Curves = dict[str, list[tuple[int, float]]]
MAGIC = b":W&B"
HEADER_BYTES, BLOCK_BYTES = 7, 1 << 15  # of a file and of a piece alike; a piece never crosses a block's end
WHOLE, LAST = 1, 4  # kinds of pieces: a record, or the end of one
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


def wandb_history(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield each logged step with its metrics by name; stops at the first damaged record."""
    protocol: Any = import_module("wandb.proto.wandb_internal_pb2")
    for data in _records(path.read_bytes()):
        record = protocol.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            named = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            figures = {name: json.loads(value) for name, value in named.items() if not name.startswith("_")}
            yield record.history.step.num, figures


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a W&B file, joined from their chunks."""
    if not data.startswith(MAGIC):
        return
    at, record = HEADER_BYTES, b""
    while at + HEADER_BYTES <= len(data):
        if (left := BLOCK_BYTES - at % BLOCK_BYTES) < HEADER_BYTES:
            at += left
            continue
        digest, size, kind = struct.unpack_from("<IHB", data, at)
        if zlib.crc32(data[at + HEADER_BYTES - 1 : at + HEADER_BYTES + size]) != digest:  # of the kind and what follows
            return
        record += data[at + HEADER_BYTES : at + HEADER_BYTES + size]
        at += HEADER_BYTES + size
        if kind in (WHOLE, LAST):
            yield record
            record = b""


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
def test_both_trackers_show_every_figure_of_every_step_once_and_as_the_files_have_it(model: Path) -> None:
    files = of_files(model)
    timed = {"epoch/wall_s", "epoch/items_per_s", "epoch/wait_share"} | {one for one in files if one.endswith("_bytes")}
    timed |= {one for one in files if one.startswith("seconds/")}
    assert as_single(files) == points(model)
    kept = of_wandb(model)
    assert kept.keys() == files.keys()
    for name, curve in files.items():  # what was kept before the stop is kept: what a clock says of it is another
        assert [step for step, _ in kept[name]] == [step for step, _ in curve]
        if name not in timed:
            assert kept[name] == curve, name


def test_a_resumed_training_continues_the_same_run(model: Path) -> None:
    run, _ = tracked_run(model)
    files = sorted(model.glob("wandb/*run-*/run-*.wandb"))
    assert [path.name for path in files] == [f"run-{run}.wandb"] * 2
    assert [[step for step, _ in wandb_history(path)] for path in files] == [[1, 2, 3, 4, 5], [6, 7, 8, 9]]


def test_a_step_that_was_sent_is_known_though_a_resume_has_cut_off_its_line(tmp_path: Path) -> None:
    run, sent = tracked_run(tmp_path)
    assert sent == 0
    for resumed, last in ((0, 9), (4, 5), (2, 3)):  # each process is killed soon after it has resumed
        with closing(MetricsLog(tmp_path, step=resumed)) as log:
            for step in range(resumed + 1, last + 1):
                log.log(step, {"loss": 1.0})
        assert tracked_run(tmp_path) == (run, 9)


def test_the_key_of_an_account_is_in_no_file(model: Path) -> None:
    files = [path for path in model.parent.rglob("*") if path.is_file()]
    assert any("wandb" in path.parts for path in files)
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
