"""Projects with a trained model, made once a session: `trained` and `docking` copy one into the test's folder.

Their tasks write down what they are asked, and end their process where a file says so.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from pipeline.structures.synthetic import complex_pdb
from tests.testkit.once import Shelf
from tests.testkit.project import DATA, EMBED, LOCAL, TRAIN, Project, copied, settle, write_config, write_weights

RESIDUES = 20
SPLITS = ("train", "train", "val", "val", "test", "test", "test", "test", "test")
# A project of `write_project`; a test adds train__task and what else it needs.
SMALL: Mapping[str, Any] = {
    "data": {"source": "manifest", "path": "data/manifest.csv"},
    **EMBED,
    "graph__neighbours": 8,
    **LOCAL,
    "train__options": TRAIN["train__options"],
    "train__effective_batch": 2,
}
TRAINED: Mapping[str, Any] = {
    **SMALL,
    "train__task": "trained_task:Own",
    "train__micro_batch": 1,
    "train__epochs": 1,
    "train__checkpoints": {"minutes": 0.00001},
}
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
DOCKING: Mapping[str, Any] = {
    **DATA,
    **EMBED,
    **LOCAL,
    "train": {
        "task": "docking_task:Own",
        "options": {"embedding_dim": 16, "scalars": 4, "vectors": 2, "layers": 3},
        "split": None,
        "effective_batch": 3,
        "micro_batch": 3,
        "epochs": 1,
        "validation": {"split": None},
        "checkpoints": {"minutes": 0.00001},
        "predict": {"options": {"samples": 5, "steps": 3, "top": 2}},
    },
}
DOCKING_TASK = '''\
"""The docking task, which writes down what it draws, and dies or lacks memory where a file says so."""

import os
from pathlib import Path

import torch

from pipeline.tasks.complex_docking import ComplexDocking

HERE = Path(os.environ.get("DOCKING_TASK", "/nonexistent"))


class Own(ComplexDocking):
    def outputs(self, model, batch):
        rows = sum(len(one.draw.translation_3) for one in batch.complexes)
        if HERE.is_dir():
            if rows > int((HERE / "most.txt").read_text() or 99):
                raise torch.OutOfMemoryError("as if the card were full")
            with (HERE / "drawn.txt").open("a") as file:
                file.write(f"{rows}\\n")
            order = HERE / "signal.txt"
            if order.exists() and len((HERE / "drawn.txt").read_text().split()) == 2:
                number = int(order.read_text())
                order.unlink()
                os.kill(os.getpid(), number)
        return super().outputs(model, batch)
'''


@dataclass(frozen=True)
class Trained(Project):
    """The project, and what its model comes to on its split `test`."""

    figures: dict[str, float] = field(default_factory=dict)
    file: Path = Path()  # where these were kept; it is gone
    content: str = ""  # of the file

    @property
    def model(self) -> Path:
        (found,) = (self.folder / "models").iterdir()
        return found

    def asked(self) -> list[str]:
        """Return the items that the task was asked about, in order."""
        path = self.folder / "task" / "asked.txt"
        return path.read_text().split() if path.exists() else []

    def tell_to_die(self, signal_number: int) -> None:
        """Let the process that does the third item send itself a signal, once."""
        (self.folder / "task" / "signal.txt").write_text(str(signal_number))


@dataclass(frozen=True)
class Docking(Project):
    """A project with a trained score model."""

    model: str = ""

    def poses(self, where: str = "predictions") -> Path:
        (folder,) = (self.folder / where).iterdir()
        return folder


@pytest.fixture
def trained(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Return a copy, without the figures of its model; its folder is the current one."""
    _enter(copied(shelf, "trained", make_trained, tmp_path), monkeypatch, "trained_task")
    (file,) = tmp_path.glob("models/*/evaluations/*.json")
    content = file.read_text()
    shutil.rmtree(file.parent)
    (tmp_path / "task").mkdir()
    monkeypatch.setenv("TRAINED_TASK", str(tmp_path / "task"))
    return Trained(tmp_path, figures=json.loads(content)["evaluation"]["figures"], file=file, content=content)


@pytest.fixture
def docking(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docking:
    """Return a copy; its folder is the current one."""
    _enter(copied(shelf, "docking", make_docking, tmp_path), monkeypatch, "docking_task")
    (tmp_path / "told").mkdir()
    for name in ("most.txt", "drawn.txt"):
        (tmp_path / "told" / name).write_text("")
    monkeypatch.setenv("DOCKING_TASK", str(tmp_path / "told"))
    (model,) = (tmp_path / "models").iterdir()
    return Docking(tmp_path, model=model.name)


def _enter(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Be in a folder whose module is another one than that of the test before."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, module, raising=False)


def make_trained(folder: Path) -> None:
    """Train and evaluate a model."""
    write_project(folder, TRAINED, {"trained_task.py": TASK}, SPLITS)
    Project(folder).finishes("all")


def make_docking(folder: Path) -> None:
    """Train a score model."""
    (folder / "data").mkdir()
    for number in range(3):
        (folder / "data" / f"c{number}.pdb").write_bytes(complex_pdb(number, 18, 14))
    settle(folder / "data")
    (folder / "docking_task.py").write_text(DOCKING_TASK)
    write_config(folder, **DOCKING)
    write_weights(folder)
    Project(folder).finishes("train")


def write_project(folder: Path, settings: Mapping[str, Any], code: Mapping[str, str], splits: Sequence[str]) -> None:
    """Write a project: a complex for each of some splits, tiny weights of an encoder, the user's code, settings."""
    (folder / "data").mkdir()
    rows = ["id,path,receptor_chains,ligand_chains,split,cluster"]
    for number, split in enumerate(splits):
        (folder / "data" / f"c{number}.pdb").write_bytes(complex_pdb(number, RESIDUES, RESIDUES + number))
        rows.append(f"c{number},c{number}.pdb,A,B,{split},{number}")
    (folder / "data" / "manifest.csv").write_text("\n".join([*rows, ""]))
    settle(folder / "data")
    write_weights(folder, layers=1)
    for name, text in code.items():
        (folder / name).write_text(text)
    write_config(folder, **settings)


def weights(model: Path, step: int | None = None) -> dict[str, bytes]:
    """Return the bits of all tensors of a model's newest checkpoint, which is to be of that step."""
    newest = max((model / "checkpoints").glob("step-*"))
    assert step is None or newest.name == f"step-{step:08}"
    with safe_open(newest / "state.safetensors", "np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118 - it is no dict
