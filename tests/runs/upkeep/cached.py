"""A small project whose scan, embeddings and graphs are made, and copies of its cache to be cleaned."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.load import read_config
from pipeline.encoder.checkpoints.synth import write_random_checkpoint
from pipeline.project.project import Project
from pipeline.store.cache_folder import CacheFolder
from pipeline.structures.synthetic import complex_pdb
from tests.testkit.project import settle

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeline.config.schema import Config

ITEMS = 4
RESIDUES = 20
CONFIG = """data: {source: manifest, path: items.csv, structures_dir: data}
embed: {weights: esm2_tiny.pt}
cache: {visibility_s: 0}
"""


def write_manifest(path: Path, numbers: Iterable[int]) -> None:
    """Write a table of complexes."""
    path.write_text("id,path\n" + "".join(f"c{number},c{number}.pdb\n" for number in numbers))


@cache
def made(base: Path) -> Path:
    """Make a project and run its stages, once for all tests of a session."""
    folder = base / "made"
    (folder / "data").mkdir(parents=True)
    for number in range(ITEMS):
        (folder / "data" / f"c{number}.pdb").write_bytes(complex_pdb(number, RESIDUES, RESIDUES + number))
    write_random_checkpoint(folder / "esm2_tiny.pt", layers=2, dim=16, heads=2)
    write_manifest(folder / "items.csv", range(ITEMS))
    (folder / "pipeline.yaml").write_text(CONFIG)
    settle(folder / "data")
    settle(folder)
    for stage in ("embed", "graph"):
        submit(folder, stage)
    return folder


def submit(folder: Path, stage: str, *words: str) -> None:
    """Run a stage of a project to its end."""
    command = [sys.executable, "-m", "pipeline.cli.main", "submit", "--stage", stage, "--executor", "local", "--follow"]
    subprocess.run([*command, *words], cwd=folder, check=True, capture_output=True)


@dataclass(frozen=True)
class Copy:
    """A project with a cache of its own, and the data, weights and run folders of another."""

    folder: Path
    file: Path

    @classmethod
    def of(cls, made: Path, folder: Path) -> Copy:
        """Make one whose data set can be changed without changing that of the other."""
        strangers = shutil.ignore_patterns("????????????????????????????????.json")  # the other one, as a user
        shutil.copytree(made / "cache", folder / "cache", ignore=strangers)
        shutil.copytree(made / "runs", folder / "runs", ignore=shutil.ignore_patterns(".code"))
        write_manifest(folder / "items.csv", range(ITEMS))
        text = CONFIG.replace("structures_dir: data", f"structures_dir: {made / 'data'}")
        (folder / "pipeline.yaml").write_text(text.replace("esm2_tiny.pt", str(made / "esm2_tiny.pt")))
        return cls(folder, folder / "pipeline.yaml")

    def config(self, *sets: str) -> Config:
        """Return its configuration."""
        return read_config(self.file, sets).config

    def project(self, *sets: str) -> Project:
        """Return it as it is opened."""
        return Project.open(self.config(*sets), remember=False)

    @property
    def store(self) -> CacheFolder:
        """Return its cache as it is now."""
        return CacheFolder(self.folder / "cache")

    def keys(self, kind: str) -> set[bytes]:
        """Return the keys of a kind that are there."""
        return set(self.store.kind(kind).keys())
