"""A small project in the current folder."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.keys import TICK_NS
from pipeline.structures.synthetic import complex_pdb
from tests.structures.pdb_text import chain

if TYPE_CHECKING:
    from tests.testkit.caches import Cached

RESIDUES = ("ALA", "CYS", "ASP", "GLU", "PHE", "GLY", "HIS", "ILE", "LYS", "LEU", "MET", "ASN", "PRO", "GLN", "ARG")
MakeProject = Callable[..., Path]


@pytest.fixture
def make_project(tmp_path: Path) -> MakeProject:
    """Return a function that writes `n` two-chain complexes and a configuration that takes all files of a folder."""

    def make(n: int = 3, settings: str = "") -> Path:
        data = tmp_path / "data"
        data.mkdir(exist_ok=True)
        for number in range(n):
            write_complex(data / f"c{number}.pdb", number)
        settle(data)
        config = "data:\n  source: glob\n  path: data\n" + settings
        (tmp_path / "pipeline.yaml").write_text(config)
        return tmp_path

    return make


def write_complex(path: Path, number: int) -> None:
    """Write a complex whose sequences differ from those of any other number."""
    names = [RESIDUES[number // 15**place % 15] for place in range(4)]
    path.write_text(chain("A", *names, "TRP") + chain("B", *names, "TYR", "TYR") + "END\n")


def write_growing(folder: Path, items: int) -> None:
    """Write complexes into the folder `data` of a project, each larger than the one before."""
    (folder / "data").mkdir()
    for number in range(items):
        (folder / "data" / f"c{number}.pdb").write_bytes(complex_pdb(number, 20 + 10 * number, 30))
    settle(folder / "data")


def submit_there(folder: Path, stage: str) -> None:
    """Run a stage of a project in a process of its own."""
    pipeline = str(Path(sys.executable).with_name("pipeline"))
    words = [pipeline, "submit", "--stage", stage, "--executor", "local", "--follow"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=300)


def settle(folder: Path) -> None:
    """Wait until the times of the files in a folder prove that they have not changed since."""
    newest_ns = max((path.stat().st_ctime_ns for path in folder.iterdir()), default=0)
    while time.time_ns() - newest_ns < 2 * TICK_NS:
        time.sleep(0.01)


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Cached:
    """A project whose cache holds records of every kind; what a test changes it changes in a copy."""
    from tests.testkit.caches import fill  # which needs what is here

    return fill(tmp_path_factory.mktemp("filled"))
