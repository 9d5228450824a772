"""The code of a run: a copy of this package as it was at submission, so that an edit between requeues changes nothing.

Runs of the same code share one copy, named by its digest.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import xxhash

import pipeline
from pipeline.journal.run_folder import PRIVATE, RunFolder, writing

if TYPE_CHECKING:
    from collections.abc import Iterator


PACKAGE = Path(pipeline.__file__).parent
BESIDE = ("sbatch", "configs")  # data that lies beside the package in a checkout, and in pipeline/data in a wheel
COPIES = ".code"
WORKER, SUPERVISOR = "pipeline.runs.worker", "pipeline.runs.supervisor"  # modules that jobs begin with


def freeze(runs: Path) -> Path:
    """Return the folder of a copy of the package, made unless there is one."""
    return freeze_files(sorted(_files()), runs)


def freeze_files(files: list[tuple[str, Path]], runs: Path) -> Path:
    """Return the folder of a copy of files, by their names in it, made unless there is one."""
    copy = _own_folder(runs) / digest_of(files)
    if not copy.exists():
        _publish(files, copy)
    return copy


def _own_folder(runs: Path) -> Path:
    """Return the folder of copies that this user alone may enter: what others could put there would be run as ours."""
    with writing(runs):
        runs.mkdir(parents=True, exist_ok=True)
        mine = _user_of(runs)
        for name in (COPIES, f"{COPIES}-{os.geteuid()}"):
            folder = runs / name
            with suppress(FileExistsError):
                folder.mkdir(PRIVATE)
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == mine:
                with suppress(PermissionError):  # somebody else's, where a mount shows all users as one
                    folder.chmod(PRIVATE)
                    return folder
        raise PermissionError(errno.EPERM, "the folders of frozen code belong to somebody else")


def _user_of(folder: Path) -> int:
    """Return who we are to a file system: a server may take root for nobody, and a mount all users for one."""
    with TemporaryDirectory(prefix=".who-", dir=folder) as made:
        return Path(made).stat().st_uid


def package_digest() -> str:
    """Return the digest of this package."""
    return digest_of(sorted(_files()))


def digest_of(files: list[tuple[str, Path]]) -> str:
    """Return the digest of files and their names."""
    digest = xxhash.xxh3_128()
    for name, path in files:
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _files() -> Iterator[tuple[str, Path]]:
    """Yield the files of the package by their names in the copy."""
    is_checkout = (PACKAGE.parent / "pyproject.toml").exists() or PACKAGE.parent.parent.name.startswith(COPIES)
    roots = [PACKAGE, *(PACKAGE.parent / name for name in BESIDE if is_checkout)]
    for root in roots:
        for path in root.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield str(path.relative_to(root.parent)), path


def _publish(files: list[tuple[str, Path]], copy: Path) -> None:
    """Copy files aside and move them into place; who comes second finds it done."""
    partial = copy.with_name(f"{copy.name}.{secrets.token_hex(4)}.partial")
    with writing(copy):
        try:
            for name, path in files:
                target = partial / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
            partial.rename(copy)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            if not copy.exists():
                with suppress(OSError):  # other copies are in it
                    copy.parent.rmdir()
                raise


def module_command(module: str, folder: RunFolder | None = None) -> tuple[str, ...]:
    """Return the command that runs a module of a run's frozen code, whatever lies in the current folder."""
    frozen = [folder.code.read_text()] if folder is not None and folder.code.exists() else []
    paths = f"sys.path[:] = [*{frozen!r}, *filter(None, sys.path)]"
    return (sys.executable, "-c", f"import sys; {paths}; from {module} import main; sys.exit(main(sys.argv[1:]))")
