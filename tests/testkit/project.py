"""The project of a test: small complexes, a configuration from settings, commands typed in it.

    project = make_project(tmp_path, items=4, train__epochs=1)
    assert project.submits("train").code == 0

In a setting's name, __ stands for the dot. Two fixtures work in the test's own folder, where `pipeline(...)` types
commands too: `make_project(items, **settings)` writes tiny complexes, and `project_of("graph")` copies a project
whose stages up to that one have run (made once a session, see `finished`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.encoder.synth import write_random_checkpoint
from pipeline.journal.run_folder import RunFolder, runs_in
from pipeline.journal.run_status import StatusReader
from pipeline.keys import TICK_NS
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.record import Record
from pipeline.structures.synthetic import complex_pdb
from tests.structures.pdb_text import chain
from tests.testkit.command import Typed
from tests.testkit.once import Shelf

PIPELINE = Path(sys.executable).with_name("pipeline")
TYPED_S = 300.0  # generous: a loaded machine is no failure
POLL_S = 0.05
DATA: Mapping[str, Any] = {"data__source": "glob", "data__path": "data"}
LOCAL: Mapping[str, Any] = {"cluster__executor": "local", "cluster__slots": {"cpus": 2}}
WEIGHTS = "weights/esm2_tiny.pt"
EMBED: Mapping[str, Any] = {"embed__weights": WEIGHTS}
TRAIN: Mapping[str, Any] = {
    "train__task": "pipeline.tasks.interface:Interface",
    "train__options": {"embedding_dim": 16, "width": 8, "layers": 1, "pair_width": 4},
    "train__split": None,
    "train__validation__split": None,
    "train__effective_batch": 2,
    "train__epochs": 2,
}
RESIDUES = ("ALA", "CYS", "ASP", "GLU", "PHE", "GLY", "HIS", "ILE", "LYS", "LEU", "MET", "ASN", "PRO", "GLN", "ARG")
MakeProject = Callable[..., Path]
ProjectOf = Callable[..., "Project"]
Records = dict[str, dict[bytes, bytes]]


@dataclass(frozen=True)
class Project:
    """A folder with a data set and a configuration, in which commands are typed."""

    folder: Path
    limit_s: float = TYPED_S  # for a command
    programs: str = os.environ["PATH"]

    def types(self, *words: str, **environment: str) -> Typed:
        """Type a command, in a process of its own."""
        known = {**os.environ, "PATH": f"{PIPELINE.parent}:{self.programs}", "COLUMNS": "200", **environment}
        done = subprocess.run(
            [PIPELINE, *words],
            cwd=self.folder, env=known, capture_output=True, text=True, timeout=self.limit_s, check=False,
        )  # fmt: skip
        return Typed(done.returncode, done.stdout, done.stderr)

    def submits(self, stage: str, *words: str, **environment: str) -> Typed:
        """Run a stage on this machine, to its end."""
        return self.types("submit", "--stage", stage, "--executor", "local", "--follow", *words, **environment)

    def finishes(self, *stages: str) -> None:
        """Run stages on this machine; each must succeed."""
        for stage in stages:
            done = self.submits(stage)
            assert done.code == 0, done.err

    def sets(self, **settings: Any) -> None:
        """Change settings in the configuration's file."""
        path = self.folder / "pipeline.yaml"
        path.write_text(yaml.safe_dump(merged(yaml.safe_load(path.read_text()), nested(settings)), sort_keys=False))

    @property
    def run(self) -> RunFolder:
        """The newest run."""
        return runs_in(self.folder / "runs")[-1]

    @property
    def cache(self) -> CacheFolder:
        """The cache as it is now."""
        return CacheFolder(self.folder / "cache")

    def keys(self) -> dict[str, set[bytes]]:
        """Return what each kind of the cache has, without reading it."""
        cache = self.cache
        return {kind: set(cache.kind(kind).keys()) for kind in cache.kinds()}

    def records(self, cache: str = "cache", kinds: Iterable[str] = ()) -> Records:
        """Return the content of every readable record of some kinds, or of all, by kind and key."""
        opened = CacheFolder(self.folder / cache)
        return {
            kind: {record.key: content(record) for record in opened.kind(kind).read(opened.kind(kind).keys())}
            for kind in opened.kinds()
            if not kinds or kind in kinds
        }

    def shards(self, kind: str) -> list[Path]:
        """Return the files of a kind."""
        return sorted((self.folder / "cache" / kind / "shards").iterdir())


def make_project(folder: Path, items: int = 3, *, growth: int = 1, **settings: Any) -> Project:
    """Write complexes data/c0.pdb, …, each larger than the last, and a configuration that takes them all."""
    write_complexes(folder / "data", items, growth=growth)
    write_config(folder, **{**DATA, **settings})
    return Project(folder)


def write_complexes(data: Path, items: int, residues: int = 20, growth: int = 1) -> None:
    """Write small complexes, each larger than the one before; sequences of no two are the same."""
    data.mkdir(parents=True, exist_ok=True)
    for number in range(items):
        (data / f"c{number}.pdb").write_bytes(complex_pdb(number, residues + growth * number, residues))
    settle(data)


def write_complex(path: Path, number: int) -> None:
    """Write a complex of 11 residues whose sequences differ from those of any other number."""
    names = [RESIDUES[number // 15**place % 15] for place in range(4)]
    path.write_text(chain("A", *names, "TRP") + chain("B", *names, "TYR", "TYR") + "END\n")


def write_weights(folder: Path, **sizes: int) -> Path:
    """Write a tiny ESM-2 with random weights where `EMBED` looks for it."""
    write_random_checkpoint(folder / WEIGHTS, **{"layers": 2, "dim": 16, "heads": 2, **sizes})
    settle((folder / WEIGHTS).parent)
    return folder / WEIGHTS


def write_config(folder: Path, **settings: Any) -> Path:
    """Write pipeline.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(nested(json.loads(json.dumps(settings))), sort_keys=False))
    return path


def finished(stage: str, items: int = 4) -> Callable[[Path], None]:
    """Return a maker for `shelf.copy`: a project whose stages up to this one have run on this machine."""

    def make(folder: Path) -> None:
        project = make_project(folder, items, **LOCAL, **EMBED, **(TRAIN if stage == "train" else {}))
        write_weights(folder)
        project.finishes(*(("embed", "graph") if stage == "graph" else (stage,)))

    return make


@pytest.fixture
def project_of(shelf: Shelf, tmp_path: Path) -> ProjectOf:
    """Return a function that copies a project whose stages up to one have run into the test's folder."""

    def copy(stage: str, items: int = 4) -> Project:
        return Project(copied(shelf, f"{stage}-{items}", finished(stage, items), tmp_path))

    return copy


def copied(shelf: Shelf, name: str, make: Callable[[Path], object], to: Path) -> Path:
    """Copy a finished project; data and weights are read where they were made: a copied file would count as new."""
    made = shelf.pristine(name, make)
    shelf.copy(name, make, to)
    config = yaml.safe_load((to / "pipeline.yaml").read_text())
    Project(to).sets(data__path=str(made / config["data"]["path"]))
    if "weights" in config.get("embed", {}):
        Project(to).sets(embed__weights=str(made / config["embed"]["weights"]))
    return to


@pytest.fixture(name="make_project")
def tiny_project(tmp_path: Path) -> MakeProject:
    """Return a function that writes tiny complexes and a configuration with some settings into the test's folder."""

    def make(items: int = 3, **settings: Any) -> Path:
        (tmp_path / "data").mkdir(exist_ok=True)
        for number in range(items):
            write_complex(tmp_path / "data" / f"c{number}.pdb", number)
        settle(tmp_path / "data")
        write_config(tmp_path, **{**DATA, **settings})
        return tmp_path

    return make


def content(record: Record) -> bytes:
    """Return all that a record holds as bytes."""
    arrays = [(name, *map(str, (array.dtype, array.shape)), array.tobytes()) for name, array in record.arrays.items()]
    return repr((sorted(arrays), json.dumps(record.meta, sort_keys=True))).encode()


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


def to_do(folder: Path = Path()) -> dict[str, tuple[int, int]]:
    """Return how much of each stage the newest run found cached, and how much missing."""
    stages = StatusReader(runs_in(folder / "runs")[-1]).read().in_order()
    return {stage.name: (stage.cached, stage.missing) for stage in stages}


def until(
    what: str, condition: Callable[[], object], timeout_s: float = TYPED_S, story: Callable[[], str] = str
) -> None:
    """Wait until something is so; fail by name, with the story so far, when it never is."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s in vain for {what}\n{story()}"
        time.sleep(POLL_S)


def settle(folder: Path) -> None:
    """Wait until the times of the files in a folder prove that they have not changed since."""
    newest_ns = max((path.stat().st_ctime_ns for path in folder.iterdir()), default=0)
    while time.time_ns() - newest_ns < 2 * TICK_NS:
        time.sleep(0.01)
