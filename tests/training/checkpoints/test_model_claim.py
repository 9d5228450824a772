"""One process at a time writes a model's folder, whatever became of the one before it."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from threading import Timer

import pytest

from pipeline.errors import ConfigError
from pipeline.training.checkpoints import model_claim
from pipeline.training.checkpoints.model_claim import ModelClaim
from tests.training.checkpoints.saved import checkpoints, forked, state_at


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in {"BEAT_S": 0.05, "STALE_S": 1.0, "LOOK_EVERY_S": 0.02}.items():
        monkeypatch.setattr(model_claim, name, seconds)


def test_a_second_writer_learns_who_holds_the_folder_and_takes_over_from_a_dead_process(tmp_path):
    ready = tmp_path / "ready"

    def hold():
        ModelClaim(tmp_path / "writers", tmp_path / "runs/first")
        ready.touch()
        time.sleep(600)

    holder = forked(hold)
    while not ready.exists():
        time.sleep(0.01)
    with pytest.raises(ConfigError) as refused:
        ModelClaim(tmp_path / "writers", tmp_path / "runs/second")
    assert all(name in refused.value.what for name in ("runs/first", socket.gethostname(), f"{holder}", "since"))
    assert refused.value.command is not None
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    ModelClaim(tmp_path / "writers", tmp_path / "runs/second").close()
    assert not list((tmp_path / "writers").iterdir())


@pytest.mark.parametrize("skew_s", [-1e6, 1e6])
@pytest.mark.parametrize(
    "content", ["", json.dumps({"run": "/runs/first", "host": "elsewhere", "pid": 1, "born": 0.0})]
)
def test_a_claim_that_nobody_touches_is_taken_over_whatever_the_clocks_say(tmp_path, skew_s, content):
    (tmp_path / "writers").mkdir()
    (tmp_path / "writers/000004").write_text(content)
    (tmp_path / "writers/.nfs0000002").touch()
    os.utime(tmp_path / "writers/000004", (time.time() + skew_s,) * 2)
    claim = ModelClaim(tmp_path / "writers", tmp_path / "runs/second")
    claim.check()
    assert [path.name for path in (tmp_path / "writers").glob("0*")] == ["000005"]
    claim.close()


def test_a_claim_whose_holder_has_not_written_its_name_yet_is_read_again(tmp_path):
    first = tmp_path / "writers" / "000001"
    first.parent.mkdir()
    first.touch()
    Timer(0.2, first.write_text, [json.dumps({"run": "elsewhere/run", "host": "other"})]).start()
    ModelClaim(first.parent, tmp_path / "run").close()  # after an earlier attempt of the same run


def test_a_writer_that_was_replaced_or_whose_folder_is_gone_stops(tmp_path):
    model = tmp_path / "model"
    first = ModelClaim(model / "writers", tmp_path / "run")
    one = checkpoints(model / "checkpoints", last=1, check=first.check)
    one.save(state_at(1), 1)
    second = ModelClaim(model / "writers", tmp_path / "moved/run")  # a later attempt of the same run does not wait
    other = checkpoints(model / "checkpoints", last=2, check=second.check)
    other.save(state_at(2), 2)
    with pytest.raises(ConfigError, match="now writes this model"):
        one.save(state_at(3), 3)
    for step in (5, 6, 7):
        other.save(state_at(step), step)
    names = {path.name for path in (model / "checkpoints").iterdir()}
    assert names == {"step-00000006", "step-00000007"}
    first.close()
    model.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="moved or removed"):
        other.save(state_at(8), 8)
    second.close()
    assert not model.exists()
