"""A second user's project over the cache of a first: what is there is not computed again, and only read."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.cache_layout import MARKER, USERS
from pipeline.store.format.disk import Disk
from tests.testkit import project as kit
from tests.testkit.command import Command
from tests.testkit.once import Shelf
from tests.testkit.project import LOCAL, WEIGHTS, to_do, write_complexes, write_config, write_weights

pytestmark = pytest.mark.timeout(900)

WITHOUT = ("--set", "cache.under=[]")
WRITING = ("open_new", "new_folder", "link", "rename", "unlink")


def settings(made: Path, **more: Any) -> dict[str, Any]:
    """Return those of a project that reads data and weights where they were made."""
    given = {"data__source": "glob", "data__path": str(made / "data"), "data__limit": 3, **LOCAL}
    return {**given, "embed__weights": str(made / WEIGHTS), **more}


def make(folder: Path) -> None:
    """Make everything of three complexes; there are four."""
    write_complexes(folder / "data", 4)
    write_weights(folder, layers=1)
    write_config(folder, **settings(folder))
    kit.Project(folder).finishes("embed", "graph")


@pytest.fixture
def group(shelf: Shelf, tmp_path: Path, pipeline: Command, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a group whose first user has made everything; the second's is the current one."""
    made = shelf.pristine("group", make)
    shutil.copytree(made / "cache", tmp_path / "first/cache")
    write_config(tmp_path / "second", **settings(made, cache__under=["../first/cache"]))
    monkeypatch.chdir(tmp_path / "second")
    return tmp_path


def make_all(pipeline: Command, *sets: str) -> dict[str, tuple[int, int]]:
    """Make embeddings and graphs; return how much of each was cached and missing."""
    found: dict[str, tuple[int, int]] = {}
    for stage in ("embed", "graph"):
        done = pipeline("submit", "--stage", stage, "--follow", *(word for one in sets for word in ("--set", one)))
        assert done.code == 0, done.err
        found = {**to_do(), **found}
    return found


def state_of(root: Path) -> dict[Path, tuple[int, int]]:
    """Return the state of all files, but for those in which projects say that they use a cache."""
    paths = [path for path in root.rglob("*") if USERS not in path.parts]
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}


def refuse_writing(monkeypatch: pytest.MonkeyPatch, root: Path) -> list[Path]:
    """Let this process write nothing below a folder, as if it belonged to somebody else; return what it tried."""
    tried: list[Path] = []

    def guarded(real: Any) -> Any:
        def step(disk: Disk, *paths: Path) -> Any:
            if any(Path(os.path.abspath(path)).is_relative_to(root) for path in paths):  # noqa: PTH100 - as it is named
                tried.extend(path for path in paths if path.parent.name != USERS)  # which whoever may should write
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            return real(disk, *paths)

        return step

    for name in WRITING:
        monkeypatch.setattr(Disk, name, guarded(getattr(Disk, name)))
    return tried


@pytest.mark.nightly
def test_what_the_group_has_is_cached_for_the_second_user_who_may_only_read_it(
    group: Path, pipeline: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = group / "first/cache"
    before, tried = state_of(shared), refuse_writing(monkeypatch, shared)
    assert make_all(pipeline) == {"scan": (3, 0), "embed": (6, 0), "graph": (3, 0)}
    assert (tried, state_of(shared)) == ([], before)
    mine = CacheFolder(group / "second/cache")
    assert [kind for kind in ("scan", "embed", "graph") if mine.kind(kind).stat().records] == []


@pytest.mark.nightly
def test_what_is_new_goes_to_the_second_users_own_cache(group: Path, pipeline: Command) -> None:
    shared = group / "first/cache"
    before = state_of(shared)
    found = make_all(pipeline, "data.limit=4")
    assert (found["scan"], found["embed"]) == ((3, 1), (6, 2))
    assert state_of(shared) == before
    assert [CacheFolder(group / "second/cache").kind(kind).stat().records for kind in ("scan", "embed", "graph")] == [
        1,
        2,
        1,
    ]
    assert make_all(pipeline, "data.limit=4")["graph"] == (4, 0)


@pytest.mark.nightly
def test_what_is_damaged_in_the_shared_cache_is_made_anew_in_the_own_one(group: Path, pipeline: Command) -> None:
    store = CacheFolder(group / "first/cache").kind("graph")
    place = store.locate([next(store.keys())])[0][0]
    path = store.layout.shard(place.shard)
    content = bytearray(path.read_bytes())
    content[place.offset] ^= 1
    path.unlink()
    path.write_bytes(content)
    before = state_of(group / "first/cache")
    assert make_all(pipeline)["graph"] == (2, 1)
    assert state_of(group / "first/cache") == before
    assert make_all(pipeline)["graph"] == (3, 0)


@pytest.mark.nightly
def test_a_shared_cache_that_is_gone_is_refused_when_asked(group: Path, pipeline: Command) -> None:
    (group / "first").rename(group / "away")
    for words in (("submit", "--stage", "graph"), ("plan", "--stage", "graph"), ("config", "check")):
        done = pipeline(*words)
        assert done.code == 2
        assert "first/cache" in done.err
    assert pipeline("doctor").code == 2
    assert pipeline("submit", "--stage", "scan", "--dry-run", *WITHOUT).code == 0


@pytest.mark.nightly
@pytest.mark.parametrize("lay", ["newer", "itself"])
def test_what_cannot_be_shared_is_refused(group: Path, pipeline: Command, lay: str) -> None:
    if lay == "newer":
        (group / "first/cache" / MARKER).unlink()
        (group / "first/cache" / MARKER).write_text('{"format": 9}')
    sets = ("--set", "cache.root=../first/cache") if lay == "itself" else ()
    assert pipeline("submit", "--stage", "scan", *sets).code == 2
    assert pipeline("doctor", *sets).code == 2
