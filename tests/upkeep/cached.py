"""A small project whose scan, embeddings and graphs are made, and copies of its cache to be cleaned."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.config.load import read_config
from pipeline.config.schema import Config
from pipeline.project import project
from tests.testkit.once import Shelf
from tests.testkit.project import EMBED, WEIGHTS, Project, write_complexes, write_config, write_weights

ITEMS = 4


def write_manifest(path: Path, numbers: Iterable[int]) -> None:
    """Write a table of complexes."""
    path.write_text("id,path\n" + "".join(f"c{number},c{number}.pdb\n" for number in numbers))


def make(folder: Path) -> None:
    """Make a project and run its stages; other projects read its data and weights where they are."""
    write_complexes(folder / "data", ITEMS)
    write_weights(folder)
    write_manifest(folder / "items.csv", range(ITEMS))
    data = {"source": "manifest", "path": "items.csv", "structures_dir": str(folder / "data")}
    write_config(folder, data=data, cache__visibility_s=0, **{**EMBED, "embed__weights": str(folder / WEIGHTS)})
    Project(folder).finishes("embed", "graph")
    shutil.rmtree(folder / "runs" / ".code")
    for path in (folder / "cache" / "_users").iterdir():
        path.unlink()


@dataclass(frozen=True)
class Copy(Project):
    """A project with a cache of its own, and the data and weights of another."""

    @property
    def file(self) -> Path:
        return self.folder / "pipeline.yaml"

    def config(self, *sets: str) -> Config:
        """Return its configuration."""
        return read_config(self.file, sets).config

    def project(self, *sets: str) -> project.Project:
        """Return it as it is opened."""
        return project.Project.open(self.config(*sets), remember=False)

    def keys_of(self, kind: str) -> set[bytes]:
        """Return the keys of a kind that are there."""
        return set(self.cache.kind(kind).keys())


@pytest.fixture
def copy(shelf: Shelf, tmp_path: Path) -> Copy:
    """Return one whose data set can be changed."""
    shelf.copy("to-be-cleaned", make, tmp_path)
    for name in ("data", "weights"):  # they are read where they were made
        shutil.rmtree(tmp_path / name)
    return Copy(tmp_path)
