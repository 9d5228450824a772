"""The wheel and the sdist, built once from a clean copy, and an environment in which the wheel alone is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.command_line import DISTRIBUTION
from tests.conftest import ROOT
from tests.testkit.once import Shelf
from tests.testkit.stubs import silent_slurm

KEPT = ("PATH", "LANG", "TMPDIR")  # of this process's environment: nothing that says where the project is


@dataclass(frozen=True)
class Built:
    wheel: Path
    sdist: Path


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel in it, and what it needs, but not this checkout."""

    prefix: Path
    programs: Path  # further ones, such as Slurm's

    def __call__(self, *words: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        program, *rest = map(str, words)
        env = {name: os.environ[name] for name in KEPT if name in os.environ}
        env |= {"HOME": str(cwd), "COLUMNS": "100", "PATH": f"{self.prefix / 'bin'}:{self.programs}:{env['PATH']}"}
        done = subprocess.run(
            [self.prefix / "bin" / program, *rest], cwd=cwd, env=env, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, done.stderr + done.stdout
        return done


@pytest.fixture(scope="session")
def built(shelf: Shelf) -> Built:
    """Build the sdist from the project's files, and the wheel from the sdist: once, however many processes test."""

    def make(folder: Path) -> None:
        copy_project(folder / "clean")
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), "."]
        done = subprocess.run(build, cwd=folder / "clean", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    made = shelf.pristine("built", make) / "dist"
    (wheel,), (sdist,) = made.glob("*.whl"), made.glob("*.tar.gz")
    return Built(wheel, sdist)


@pytest.fixture(scope="session")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Install the wheel where nothing else is; its dependencies are seen by path, so that none is downloaded."""
    prefix = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(prefix / "bin" / "python")]
    by_name = ["--no-deps", "--no-index", "--find-links", str(built.wheel.parent), DISTRIBUTION]
    subprocess.run([*pip, "install", "--quiet", *by_name], check=True)
    (packages,) = (prefix / "lib").glob("python*/site-packages")
    # A folder that a .pth names is searched, but the .pth files in it are not read: the checkout stays unseen.
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(prefix, silent_slurm(prefix / "slurm"))


def project_files() -> list[str]:
    """Return the names of the files that are the project: those that git does not ignore, or all of an sdist."""
    if not (ROOT / ".git").exists():
        found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
        return [str(path) for path in found if not {"__pycache__", ".venv"} & set(path.parts)]
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def copy_project(folder: Path) -> None:
    for name in project_files():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
