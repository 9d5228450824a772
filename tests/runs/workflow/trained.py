"""A small project with a trained model, made once for all tests that use one; its task dies and stops when told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors import safe_open

from pipeline.encoder.checkpoints.synth import write_random_checkpoint
from pipeline.structures.synthetic import complex_pdb
from tests.testkit.command import Command
from tests.testkit.project import settle

RESIDUES = 20
SPLITS = ("train", "train", "val", "val", "test", "test", "test", "test", "test")
SMALL = """\
data: {source: manifest, path: data/manifest.csv}
embed: {weights: weights/esm2_tiny.pt}
graph: {neighbours: 8}
cluster: {executor: local, slots: {cpus: 2}}
train:
  options: {embedding_dim: 16, width: 8, layers: 1, pair_width: 4}
  effective_batch: 2
"""  # a project of `write_project`; what else section `train` is to say follows
CONFIG = f"""{SMALL}
  task: "trained_task:Own"
  micro_batch: 1
  epochs: 1
  checkpoints: {{minutes: 0.00001}}
"""
TASK = '''\
"""The reference task, which writes down what it is asked, and ends its process where a file says so."""

import os
import signal
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from pipeline.tasks.interface import Interface

ids = {}  # by the sum of all numbers of a batch: they are collated ahead


def total(batch):
    return sum(leaf.double().sum().item() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


class Own(Interface):
    def collate(self, items, rng):
        batch = super().collate(items, rng)
        ids[total(batch)] = [item.id for item in items]
        return batch

    def outputs(self, model, batch):
        said = super().outputs(model, batch)
        folder = Path(os.environ.get("TRAINED_TASK", "/nonexistent"))
        if folder.is_dir():
            with (folder / "asked.txt").open("a") as file:
                file.write("".join(f"{name}\\n" for name in ids[total(batch)]))
            order = folder / "signal.txt"
            if order.exists() and len((folder / "asked.txt").read_text().split()) == 3:
                number = int(order.read_text())
                order.unlink()
                os.kill(os.getpid(), number)
        return said
'''


@dataclass(frozen=True)
class Trained:
    """The project, and what its model comes to on its split `test`."""

    folder: Path
    figures: dict[str, float]
    file: Path  # where these were kept
    content: str  # of the file

    def asked(self) -> list[str]:
        """Return the items that the task was asked about, in order."""
        path = self.folder / "task" / "asked.txt"
        return path.read_text().split() if path.exists() else []

    def tell_to_die(self, signal_number: int) -> None:
        """Let the process that does the third item send itself a signal, once."""
        (self.folder / "task" / "signal.txt").write_text(str(signal_number))


_made: list[Trained] = []


def trained_project(factory: pytest.TempPathFactory, pipeline: Command, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Return the project, without what earlier tests have made of its model; its folder is the current one."""
    if not _made:
        _made.append(_make(factory.mktemp("trained"), pipeline, monkeypatch))
    found = _made[0]
    monkeypatch.chdir(found.folder)
    for made in (found.file.parent, found.folder / "predictions", found.folder / "task"):
        shutil.rmtree(made, ignore_errors=True)
    (found.folder / "task").mkdir()
    monkeypatch.setenv("TRAINED_TASK", str(found.folder / "task"))
    return found


def _make(folder: Path, pipeline: Command, monkeypatch: pytest.MonkeyPatch) -> Trained:
    write_project(folder, CONFIG, {"trained_task.py": TASK}, SPLITS)
    monkeypatch.chdir(folder)
    done = pipeline("submit", "--stage", "all", "--follow")
    assert done.code == 0, done.err
    (file,) = folder.glob("models/*/evaluations/*.json")
    return Trained(folder, json.loads(file.read_text())["evaluation"]["figures"], file, file.read_text())


def write_project(folder: Path, config: str, code: Mapping[str, str], splits: Sequence[str]) -> None:
    """Write a project: a complex for each of some splits, tiny weights of an encoder, the user's code, settings."""
    (folder / "data").mkdir()
    rows = ["id,path,receptor_chains,ligand_chains,split,cluster"]
    for number, split in enumerate(splits):
        (folder / "data" / f"c{number}.pdb").write_bytes(complex_pdb(number, RESIDUES, RESIDUES + number))
        rows.append(f"c{number},c{number}.pdb,A,B,{split},{number}")
    (folder / "data" / "manifest.csv").write_text("\n".join([*rows, ""]))
    settle(folder / "data")
    write_random_checkpoint(folder / "weights" / "esm2_tiny.pt", layers=1, dim=16, heads=2)
    for name, text in code.items():
        (folder / name).write_text(text)
    (folder / "pipeline.yaml").write_text(config)


def weights(model: Path, step: int | None = None) -> dict[str, bytes]:
    """Return the bits of all tensors of a model's newest checkpoint, which is to be of that step."""
    newest = max((model / "checkpoints").glob("step-*"))
    assert step is None or newest.name == f"step-{step:08}"
    with safe_open(newest / "state.safetensors", "np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118 - it is no dict
