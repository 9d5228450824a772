"""`pipeline replay`: a step that went wrong is made again from its bundle, on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import ConfigError
from pipeline.journal.ledger import LedgerReader
from pipeline.journal.run_folder import RunFolder, find_run
from pipeline.memory.runtime.meters import Memory
from pipeline.records import EventKind, TaskContext
from pipeline.replay.replay_result import ReplayResult
from pipeline.replay.replay_step import ReplayCase, find_case, replay_here
from pipeline.stages.train import job_of
from pipeline.training.forensics import step_bundle
from pipeline.training.loop.train import Job, train
from pipeline.training.prepared import ModelFolder
from pipeline.training.ranks import Ranks
from tests.testkit import project as kit
from tests.testkit.command import Command
from tests.testkit.limited import device as limited
from tests.testkit.limited.device import LimitedDevice
from tests.testkit.project import DATA, EMBED, write_complexes, write_config, write_weights

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared

ITEMS = 8
TASK = '''
import os, signal
import torch
from torch import nn

BAD = "c2"
ITEMS = 8
WIDTH = 1024

class Bend(nn.Module):
    def forward(self, x, sign):
        return (x.square() * sign + 1e-3 * sign).log()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.bend, self.drop, self.out = nn.Linear(16, WIDTH), Bend(), nn.Dropout(0.1), nn.Linear(WIDTH, 1)

    def forward(self, x, sign):
        return self.out(self.drop(self.bend(self.enter(x), sign)))

class Task:
    """The loss of one item is no number, and it is the module `bend` that makes it so."""

    def model(self):
        return Net()

    def cost(self, item):
        return {"nodes": item["nodes"]}

    def collate(self, items, rng):
        if any(item.id == os.environ.get("REPLAYLAB_DIES") for item in items):
            os.kill(os.getpid(), signal.SIGKILL)
        if len(items) > int(os.environ.get("REPLAYLAB_FITS", ITEMS)):
            raise MemoryError("no room to collate")
        rows = [torch.cat([side.embedding for side in item.sides.values()]) for item in items]
        signs = [torch.full((len(x), 1), -1.0 if item.id == BAD else 1.0) for item, x in zip(items, rows)]
        return torch.cat(rows), torch.cat(signs)

    def loss(self, model, batch):
        y = model(*batch)
        return {"square": (y.square().sum(), float(len(y)))}

    def example(self, sizes):
        return torch.randn(sizes["nodes"], 16), torch.ones(sizes["nodes"], 1)
'''


@dataclass(frozen=True)
class Lab:
    """A project in which a training has failed."""

    root: Path
    run: RunFolder
    code: int
    said: str

    @property
    def case(self) -> ReplayCase:
        return find_case(self.run, self.bundle.step)

    @property
    def bundle(self) -> step_bundle.Bundle:
        """The bundle that the training has left."""
        (made,) = (self.root / "models").iterdir()
        (path,) = step_bundle.bundles_in(made / "bundles")
        return step_bundle.read_bundle(path)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Train once, to where a loss is no number."""
    root = tmp_path_factory.mktemp("lab")
    write_complexes(root / "data", ITEMS, residues=30)
    task = {"task": "replaylab:Task", "split": None, "effective_batch": 4, "epochs": 2, "validation": {"split": None}}
    write_config(root, **DATA, **EMBED, cluster__executor="local", train=task)
    (root / "replaylab.py").write_text(TASK)
    write_weights(root, layers=1)
    done = kit.Project(root).submits("train")
    yield Lab(root, find_run(root / "runs", None), done.code, done.said)
    sys.modules.pop("replaylab", None)


@pytest.fixture(scope="module")
def found(lab: Lab) -> ReplayResult:
    """Replay what it has left."""
    before = content(lab.case.made.path)
    replayed = replay_here(lab.case, device="cpu")
    assert content(lab.case.made.path) == before, "replaying changes nothing in the folder of the model"
    return replayed


def content(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return what is in a folder, and when that was written."""
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def beside(lab: Lab, tmp_path: Path) -> ModelFolder:
    """A copy of the folder of the model, to be spoiled."""
    shutil.copytree(lab.case.made.path, tmp_path / "model")
    return ModelFolder(tmp_path / "model")


@pytest.mark.nightly
def test_a_run_with_a_loss_that_is_no_number_fails_and_names_item_step_and_command(lab: Lab) -> None:
    assert lab.code == 7, lab.said
    assert "c2" in lab.said
    assert f"pipeline replay --step {lab.bundle.step}" in lab.said


class TestNotFinite:
    @pytest.mark.nightly
    def test_is_reproduced_with_item_term_and_module(self, found: ReplayResult) -> None:
        assert found.is_reproduced
        assert found.is_exact
        (suspect,) = found.suspects
        assert (suspect.ids, suspect.terms, suspect.module, suspect.kind) == (("c2",), ("square",), "bend", "Bend")
        assert not suspect.was_given
        assert not suspect.fields
        assert found.rerun is not None
        assert any(name.startswith("enter") for name in found.rerun.gradients)

    @pytest.mark.nightly
    def test_is_reported_as_json_that_every_reader_takes(self, lab: Lab, pipeline: Command) -> None:
        step = str(lab.bundle.step)
        ended = pipeline("replay", str(lab.run.path), "--step", step, "--rank", "0", "--device", "cpu", "--json")
        found = json.loads(ended.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert found["is_reproduced"]
        assert found["kind"] == "nan"
        assert "nan" in {micro["terms"]["square"][0] for micro in found["micro_batches"]}
        assert sorted(item for micro in found["micro_batches"] for item in micro["items"]) == sorted(
            name for cut in lab.bundle.cuts for name in cut.ids
        )

    @pytest.mark.nightly
    def test_goes_by_the_random_numbers_of_the_bundle_and_needs_its_item(self, lab: Lab, tmp_path: Path) -> None:
        case = replace(lab.case, bundle=without(lab.bundle, "c2"))
        first = replay_here(case, device="cpu")
        torch.rand(7)
        second = replay_here(case, device="cpu")
        assert terms(first) == terms(second)
        assert not first.is_reproduced
        rng = step_bundle.read_rng(case.where)
        other = rng | {"rng.torch": torch.Generator().manual_seed(99).get_state()}
        where = step_bundle.write_bundle(tmp_path, case.bundle, other)
        assert where is not None
        assert terms(replay_here(replace(case, where=where), device="cpu")) != terms(first)


@pytest.mark.nightly
def test_without_the_checkpoint_of_that_step_the_weights_are_others(lab, beside, found):
    earlier = replace(lab.bundle, step=lab.bundle.step - 1)  # all checkpoints are of later steps
    assert replay_here(replace(lab.case, made=beside, bundle=earlier), device="cpu").weights != found.weights
    for path in beside.checkpoints.glob("*/state.safetensors"):
        path.write_bytes(path.read_bytes()[:-8])
    assert not replay_here(replace(lab.case, made=beside), device="cpu").is_exact
    shutil.rmtree(beside.checkpoints)
    assert not replay_here(replace(lab.case, made=beside), device="cpu").is_exact


@pytest.mark.nightly
def test_without_such_a_bundle_those_that_there_are_are_named(lab: Lab, tmp_path: Path, pipeline: Command) -> None:
    for words in (("--step", "77"), ()):
        ended = pipeline("replay", str(lab.run.path), *words)
        assert (ended.code, str(lab.bundle.step) in ended.err) == (2, True)
    with pytest.raises(ConfigError):
        find_case(lab.run, lab.bundle.step, 3)  # of another rank
    shutil.copytree(lab.run.path, tmp_path / lab.run.name)
    other = RunFolder(tmp_path / lab.run.name)
    other.plan("train").unlink()
    with pytest.raises(ConfigError):
        find_case(other, 1)  # nothing was trained


class Counted:
    """Reads a limited device as a card would be read."""

    def __init__(self, device: LimitedDevice) -> None:
        self._device = device

    def read(self) -> Memory:
        live, peak = self._device.live_bytes, self._device.peak_bytes
        return Memory(live, live, peak, peak, 0, self._device.limit_bytes)

    def reset_peak(self) -> None:
        self._device.reset_peak()


@pytest.fixture(scope="module")
def starved(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> ReplayCase:
    """Train where whole micro-batches do not fit; return the case of the first of them."""
    limited.need()
    with pytest.MonkeyPatch.context() as patch:  # else the worst micro-batch, run first, shows what fits
        patch.setattr("pipeline.training.loop.trainer.rehearse", lambda stepper, *rest, **more: stepper.governor.budget)
        with LimitedDevice() as device:
            run_to_end(job(lab, ModelFolder(tmp_path_factory.mktemp("roomy"))))
        made = ModelFolder(tmp_path_factory.mktemp("starved"))
        with LimitedDevice(int(0.75 * device.peak_bytes)):
            run_to_end(job(lab, made))
    where = next(path for path in step_bundle.bundles_in(made.bundles) if "-oom-" in path.name)
    return replace(lab.case, made=made, where=where, bundle=step_bundle.read_bundle(where))


def allowed(case: ReplayCase, limit_bytes: int) -> ReplayCase:
    """Return a case whose run was allowed so much memory."""
    plan = {**case.bundle.plan, "limit_bytes": limit_bytes}
    prepared = replace(case.prepared, limit_bytes=limit_bytes)
    return replace(case, bundle=replace(case.bundle, plan=plan), prepared=prepared)


class TestOutOfMemory:
    @pytest.mark.nightly
    def test_in_collate_is_reproduced(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("REPLAYLAB_FITS", "0")
        bundle = replace(lab.bundle, kind=step_bundle.BundleKind.OOM, failed=0)
        found = replay_here(replace(lab.case, bundle=bundle), device="cpu")
        assert found.is_reproduced, found.verdict
        assert found.to_json()["micro_batches"][0]["error"] == "no room to collate"

    @pytest.mark.nightly
    def test_is_measured_where_there_is_room_and_reproduced_where_there_is_not(self, starved: ReplayCase) -> None:
        with LimitedDevice() as device:
            found = replay_here(allowed(starved, 1 << 20), device="cpu", meter=Counted(device))
        assert not found.is_reproduced
        assert found.rerun is not None
        taken = found.rerun.reserved_bytes
        assert found.traced is not None
        assert abs(found.traced.live_bytes / taken - 1) < 0.1, "the trace says what is measured"
        with LimitedDevice(int(0.8 * taken)) as device:
            found = replay_here(starved, device="cpu", meter=Counted(device))
        assert found.is_reproduced, found.verdict
        (failed,) = [one for one in found.to_json()["micro_batches"] if one["outcome"] == "out of memory"]
        assert starved.bundle.failed is not None
        assert failed["items"] == list(starved.bundle.cuts[starved.bundle.failed].ids)


class TestPoison:
    @pytest.mark.nightly
    @pytest.mark.parametrize(
        "bad", ["c2", "c7"]
    )  # c7 is the largest: it is in the worst micro-batch, which is run first
    def test_what_kills_a_training_in_collate_is_left_out_and_everything_else_is_trained(
        self, lab: Lab, tmp_path: Path, bad: str
    ) -> None:
        """Items are collated ahead of their step, so that at first others were being trained on when it died."""
        settings = ("train.nan=skip", "train.evaluate.split=null", "data.max_rejected_fraction=0.13")
        sets = [word for setting in (f"train.models={tmp_path}", *settings) for word in ("--set", setting)]
        for stage in ("train", "evaluate"):
            done = kit.Project(lab.root).submits(stage, "--only", *sets, REPLAYLAB_DIES=bad)
            assert done.code == 0, done.said
            events = LedgerReader(find_run(lab.run.path.parent, None)).fresh()
            assert [one.data["names"] for one in events if one.kind is EventKind.LEFT_OUT] == [[bad]], stage

    @pytest.mark.nightly
    def test_what_kills_its_process_twice_leaves_a_bundle_at_the_next_start(self, lab: Lab, tmp_path: Path) -> None:
        made = ModelFolder(tmp_path / "model")
        made.path.mkdir()
        assert [die(lab, made, tmp_path), step_bundle.bundles_in(made.bundles)] == [-9, []]
        assert [die(lab, made, tmp_path), step_bundle.bundles_in(made.bundles)] == [-9, []]
        run_to_end(job(lab, made))  # this start finds what the two before have died of
        where = next(path for path in step_bundle.bundles_in(made.bundles) if "-poison-" in path.name)
        bundle = step_bundle.read_bundle(where)
        assert bundle.kind is step_bundle.BundleKind.POISON
        assert "c2" in bundle.cuts[0].ids
        assert bundle.step == lab.bundle.step
        found = replay_here(replace(lab.case, made=made, where=where, bundle=bundle), device="cpu")
        assert not found.is_reproduced, "nothing kills it now"


def without(bundle: step_bundle.Bundle, name: str) -> step_bundle.Bundle:
    """Return a bundle without an item."""
    cuts = []
    for cut in bundle.cuts:
        kept = [(one, number) for one, number in zip(cut.ids, cut.numbers, strict=True) if one != name]
        ids, numbers = zip(*kept, strict=True)
        cuts.append(step_bundle.BundleCut(ids, numbers))
    return replace(bundle, cuts=tuple(cuts), state={})


def terms(found: ReplayResult) -> list[Any]:
    """Return what the losses came to."""
    return [micro["terms"] for micro in found.to_json()["micro_batches"]]


def job(lab: Lab, made: ModelFolder, *, careful: bool = False) -> Job:
    """Return a training like that of the run in another folder, which leaves out what is not finite."""
    case = lab.case
    context = TaskContext(lambda _key, _reason, _detail: None, careful=careful)
    found: Job = job_of(case.project, lab.run, case.prepared, context, Ranks())
    return replace(found, folder=made, train=found.train.model_copy(update={"nan": "skip"}), validation=None)


def run_to_end(work: Job) -> None:
    """Train."""
    for _ in train(work):
        pass


def die(lab: Lab, made: ModelFolder, tmp_path: Path) -> int:
    """Train in a process of its own that the bad item kills; return how it ended."""
    code = (
        "import sys, pathlib\n"
        "sys.path.insert(0, sys.argv[4])\n"
        "from tests.replay import test_replay as t\n"
        "from pipeline.journal.run_folder import RunFolder\n"
        "from pipeline.training.prepared import ModelFolder\n"
        "lab = t.Lab(pathlib.Path(sys.argv[1]), RunFolder(pathlib.Path(sys.argv[2])), 0, '')\n"
        "t.run_to_end(t.job(lab, ModelFolder(pathlib.Path(sys.argv[3])), careful=True))\n"
    )
    root = str(Path(__file__).parents[2])
    words = [sys.executable, "-c", code, str(lab.root), str(lab.run.path), str(made.path), root]
    environment = {**os.environ, "REPLAYLAB_DIES": "c2"}
    return subprocess.run(words, cwd=tmp_path, env=environment, check=False).returncode
