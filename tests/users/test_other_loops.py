"""The loader in loops of others: scripts for Lightning and Accelerate, of one process and of two, whole and resumed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.docs.conftest import Demo
from tests.docs.conftest import demo as demo

pytestmark = pytest.mark.timeout(400)
LIMIT_S = 180.0
HEAD = """\
import json, os, sys
from pathlib import Path

import torch

from pipeline.api import SamplerSettings, open_loader

out, stop, resume = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "resume"
torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 1, dtype=torch.float64)

    def forward(self, batch):  # the sum over this rank's items, of which all ranks have SIX
        rows = batch["receptor.embedding"].double()
        sums = rows.new_zeros(len(batch), 32).index_add(0, batch.owner("receptor.node"), rows)
        return self.layer(sums / 1000).square().sum()


def seen(batch, rank):
    with (out / f"rank{rank}.jsonl").open("a") as file:
        print(json.dumps([batch.origin.epoch, batch.origin.step, batch.ids]), file=file)


loader = open_loader(None, SamplerSettings(batch=6, brick=2, padding=None, drop_last=True))
"""
LIGHTNING = """
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


class Fit(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def training_step(self, batch, index):
        seen(batch, self.global_rank)
        return self.model(batch) / (6 / self.trainer.world_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


module, ranks = Fit(), int(sys.argv[4])
keeper = ModelCheckpoint(out, filename="state", every_n_train_steps=stop if stop > 0 else 10_000)
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
spread = {"accelerator": "cpu", "devices": ranks, "strategy": "ddp" if ranks > 1 else "auto"}
trainer = Trainer(max_epochs=3, max_steps=stop, callbacks=[keeper], **spread, **quiet)
trainer.fit(module, loader, ckpt_path=str(out / "state.ckpt") if resume else None)
if trainer.global_rank == 0:
    torch.save(module.model.state_dict(), out / "weights.pt")
"""
ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = Model()
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
accelerator.register_for_checkpointing(loader)
if resume:
    accelerator.load_state(out / "state")
steps = 0
for epoch in range(loader.state_dict()["epoch"], 3):
    loader.set_epoch(epoch)
    for batch in loader:
        batch = batch.to(accelerator.device)
        seen(batch, accelerator.process_index)
        accelerator.backward(model(batch) / (6 / accelerator.num_processes))
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps == stop:
            accelerator.save_state(out / "state")
            sys.exit()
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), out / "weights.pt")
accelerator.end_training()  # all ranks wait for each other, and leave the process group
"""
SCRIPTS = {"lightning": HEAD + LIGHTNING, "accelerate": HEAD + ACCELERATE}


@pytest.fixture(scope="module")
def project(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the demo with graphs and embeddings of its own; scripts only read them."""
    folder = tmp_path_factory.mktemp("loops") / "project"
    shutil.copytree(demo.pristine, folder)
    words = ["submit", "--stage", "graph", "--executor", "local", "--follow"]
    submit = [Path(sys.executable).with_name("pipeline"), *words]
    subprocess.run(submit, cwd=folder, check=True, capture_output=True, timeout=LIMIT_S)
    return folder


@pytest.fixture(params=SCRIPTS)
def script(request: pytest.FixtureRequest, project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a script of a loop in the project, which is the current folder."""
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    monkeypatch.chdir(project)
    path = project / f"{request.param}_loop.py"
    path.write_text(SCRIPTS[request.param])
    return path


def run(script: Path, out: Path, *, ranks: int = 1, stop: int = -1, resume: bool = False) -> None:
    out.mkdir(exist_ok=True)
    words = [sys.executable]
    if ranks > 1 and script.name.startswith("accelerate"):  # Lightning starts its ranks itself
        words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    given = [str(script), str(out), str(stop), "resume" if resume else "new", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*words, *given], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def steps(out: Path) -> list[tuple[int, int, frozenset[str]]]:
    """Return epoch, step and items of all ranks, in the order in which they were trained on."""
    by_rank = [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(out.glob("rank*.jsonl"))]
    found = []
    for parts in zip(*by_rank, strict=True):
        (place,) = {(epoch, step) for epoch, step, _ in parts}
        ids = [id_ for *_, mine in parts for id_ in mine]
        assert len(ids) == len(set(ids)) == 6, "ranks share items"
        found.append((*place, frozenset(ids)))
    return found


def weights(out: Path) -> np.ndarray[Any, Any]:
    import torch

    tensors = torch.load(out / "weights.pt", weights_only=True)
    return np.concatenate([tensor.numpy().ravel() for tensor in tensors.values()])


@pytest.mark.nightly
def test_a_script_that_stops_within_an_epoch_goes_on_with_the_next_step(script: Path, tmp_path: Path) -> None:
    run(script, tmp_path / "whole")
    whole = steps(tmp_path / "whole")
    an_epoch = len({step for _, step, _ in whole})
    assert len(whole) == 3 * an_epoch
    assert len({ids for _, _, ids in whole[:an_epoch] + whole[an_epoch : 2 * an_epoch]}) > an_epoch, "epochs are alike"

    stop = an_epoch + 2  # within the second epoch
    run(script, tmp_path / "parts", stop=stop)
    assert steps(tmp_path / "parts") == whole[:stop]
    run(script, tmp_path / "parts", resume=True)
    assert steps(tmp_path / "parts") == whole
    np.testing.assert_array_equal(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


@pytest.mark.nightly
def test_ranks_that_others_start_share_the_steps_of_one_process(script: Path, tmp_path: Path) -> None:
    for ranks in (1, 2):
        run(script, tmp_path / str(ranks), ranks=ranks)
    assert len(list((tmp_path / "2").glob("rank*.jsonl"))) == 2
    assert steps(tmp_path / "2") == steps(tmp_path / "1")
    np.testing.assert_allclose(weights(tmp_path / "2"), weights(tmp_path / "1"), rtol=1e-10)
