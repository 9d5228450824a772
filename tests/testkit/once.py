"""What takes long to make is made once for all tests and all workers, and copied by those that change it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.testkit.cost import uncounted


class Shelf:
    """Folders by name, each made by the first test that asks for it; the maker may raise, then the next one tries."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def pristine(self, name: str, make: Callable[[Path], object]) -> Path:
        """Return a folder that nobody may change, filled by `make(folder)` when it is first asked for."""
        folder, done = self.base / name, self.base / f"{name}.done"
        self.base.mkdir(exist_ok=True)
        with uncounted(), (self.base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    def copy(self, name: str, make: Callable[[Path], object], to: Path) -> Path:
        """Copy such a folder, times of files included, to a place where nothing is, or an empty folder."""
        shutil.copytree(self.pristine(name, make), to, symlinks=True, dirs_exist_ok=True)
        return to


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """Return the shelf of this session, which its workers share."""
    base = tmp_path_factory.getbasetemp()
    return Shelf((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shelf")
