"""The project of a test: small complexes, a configuration from settings, commands typed in it.

    project = make_project(tmp_path, items=4, train__epochs=1)
    assert project.submits("train").code == 0

In a setting's name, __ stands for the dot. `project_of("scan")` copies one whose stages have run (see `finished`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.encoder.checkpoints.synth import write_random_checkpoint
from pipeline.journal.run_folder import RunFolder, runs_in
from pipeline.keys import TICK_NS
from pipeline.structures.synthetic import complex_pdb

PIPELINE = Path(sys.executable).with_name("pipeline")
TYPED_S = 300.0
DATA: Mapping[str, Any] = {"data__source": "glob", "data__path": "data"}
LOCAL: Mapping[str, Any] = {"cluster__executor": "local", "cluster__slots": {"cpus": 2}}
WEIGHTS = "weights/esm2_tiny.pt"
EMBED: Mapping[str, Any] = {"embed__weights": WEIGHTS}
TRAIN: Mapping[str, Any] = {
    "train__task": "pipeline.tasks.interface:Interface",
    "train__split": None,
    "train__validation__split": None,
    "train__effective_batch": 2,
    "train__epochs": 2,
}


@dataclass(frozen=True)
class Typed:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """All that it printed, in one line's spacing."""
        return " ".join((self.out + self.err).split())

    def json(self) -> Any:
        """Return the document that a command with --json printed."""
        return json.loads(self.out)


@dataclass(frozen=True)
class Project:
    """A folder with a data set and a configuration, in which commands are typed."""

    folder: Path
    limit_s: float = TYPED_S  # for a command

    def types(self, *words: str, **environment: str) -> Typed:
        """Type a command, in a process of its own."""
        known = {**os.environ, "PATH": f"{PIPELINE.parent}:{os.environ['PATH']}", "COLUMNS": "200", **environment}
        done = subprocess.run(
            [PIPELINE, *words],
            cwd=self.folder, env=known, capture_output=True, text=True, timeout=self.limit_s, check=False,
        )  # fmt: skip
        return Typed(done.returncode, done.stdout, done.stderr)

    def submits(self, stage: str, *words: str, **environment: str) -> Typed:
        """Run a stage on this machine, to its end."""
        return self.types("submit", "--stage", stage, "--executor", "local", "--follow", *words, **environment)

    def sets(self, **settings: Any) -> None:
        """Change settings in the configuration's file."""
        path = self.folder / "pipeline.yaml"
        path.write_text(json.dumps(merged(json.loads(path.read_text()), nested(settings)), indent=1))

    @property
    def run(self) -> RunFolder:
        """The newest run."""
        return runs_in(self.folder / "runs")[-1]


def make_project(folder: Path, items: int = 3, **settings: Any) -> Project:
    """Write complexes data/c0.pdb, …, each larger than the last, and a configuration that takes them all."""
    write_complexes(folder / "data", items)
    write_config(folder, **{**DATA, **settings})
    return Project(folder)


def write_complexes(data: Path, items: int, residues: int = 20) -> None:
    """Write small complexes, each larger than the one before; sequences of no two are the same."""
    data.mkdir(parents=True, exist_ok=True)
    for number in range(items):
        (data / f"c{number}.pdb").write_bytes(complex_pdb(number, residues + number, residues))
    settle(data)


def write_weights(folder: Path, **sizes: int) -> Path:
    """Write a tiny ESM-2 with random weights where `EMBED` looks for it."""
    write_random_checkpoint(folder / WEIGHTS, **{"layers": 2, "dim": 16, "heads": 2, **sizes})
    settle((folder / WEIGHTS).parent)
    return folder / WEIGHTS


def write_config(folder: Path, **settings: Any) -> Path:
    """Write pipeline.yaml; JSON is YAML."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pipeline.yaml"
    path.write_text(json.dumps(nested(settings), indent=1))
    return path


def finished(stage: str, items: int = 4) -> Any:
    """Return a maker for `shelf.copy`: a project whose stages up to this one have run on this machine."""

    def make(folder: Path) -> None:
        project = make_project(folder, items, **LOCAL, **EMBED, **(TRAIN if stage == "train" else {}))
        write_weights(folder)
        done = project.submits(stage)
        assert done.code == 0, done.err

    return make


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings such as data__path as sections of a configuration."""
    root: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, last = name.split("__")
        place = root
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return root


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return sections with others laid over them."""
    both = dict(old)
    for name, value in new.items():
        both[name] = merged(old[name], value) if isinstance(value, dict) and isinstance(old.get(name), dict) else value
    return both


def settle(folder: Path) -> None:
    """Wait until the times of the files in a folder prove that they have not changed since."""
    newest_ns = max((path.stat().st_ctime_ns for path in folder.iterdir()), default=0)
    while time.time_ns() - newest_ns < 2 * TICK_NS:
        time.sleep(0.01)
