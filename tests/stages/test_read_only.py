"""A cache that may only be read, such as a group's: what is there is used, and what is not is told where to be made."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.store.cache_folder import CacheFolder
from tests.testkit.command import Command
from tests.testkit.once import Shelf
from tests.testkit.project import MakeProject, Project, copied
from tests.testkit.trained import make_trained

TRAIN = ("submit", "--stage", "train", "--executor", "local", "--follow")
ANOTHER = ("--set", "train.seed=5")


@pytest.fixture
def folder(shelf: Shelf, tmp_path: Path) -> Iterator[Path]:
    """Yield a project with all records of its data set in a cache on a file system that is mounted read-only."""
    folder = copied(shelf, "trained", make_trained, tmp_path)
    for name in ("models", "runs"):
        shutil.rmtree(folder / name)
    Project(folder).finishes("graph")
    for words in (["--bind", "cache", "cache"], ["-o", "remount,ro,bind", "cache"]):
        if subprocess.run(["mount", *words], cwd=folder, capture_output=True, check=False).returncode:
            pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", "cache"], cwd=folder, check=True)


@pytest.mark.nightly
def test_a_training_whose_records_are_all_there_needs_no_writing(folder: Path, pipeline: Command) -> None:
    done = pipeline(*TRAIN, *ANOTHER)
    assert done.code == 0, done.err
    assert list(folder.glob("models/*/checkpoints"))


@pytest.mark.nightly
def test_what_is_not_there_is_refused_with_how_to_lay_another_cache_over_it(folder: Path, pipeline: Command) -> None:
    done = pipeline(*TRAIN, "--set", "graph.neighbours=6")
    assert done.code == 2
    under = f"cache.under=[{folder / 'cache'}]"
    assert f"--set cache.root=FOLDER --set '{under}'" in done.err
    over = ("--set", "cache.root=own", "--set", under)
    done = pipeline(*TRAIN, "--set", "graph.neighbours=6", *over)
    assert done.code == 0, done.err
    own = CacheFolder(folder / "own")
    assert "graph" in own.kinds()
    assert "embed" not in own.kinds()  # those are read from the cache under it


@pytest.mark.nightly
def test_a_folder_of_models_that_may_not_be_written_is_told_by_its_own_setting(folder: Path, pipeline: Command) -> None:
    done = pipeline(*TRAIN, *ANOTHER, "--set", "train.models=cache/models")
    assert done.code == 7
    assert "models/own-" in done.err
    assert "--set train.models=FOLDER" in done.err
    assert "cluster.runs=FOLDER" not in done.err


def test_a_cache_that_is_not_there_and_cannot_be_made_is_not_laid_under_another(
    make_project: MakeProject, pipeline: Command
) -> None:
    make_project(1)
    done = pipeline("submit", "--stage", "scan", "--follow", "--set", "cache.root=/sys/none")
    assert done.code == 2
    assert "--set cache.root=FOLDER" in done.err
    assert "cache.under" not in done.err
