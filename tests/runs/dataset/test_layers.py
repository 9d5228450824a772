"""A second user's project over the cache of a first: what is there is not computed again, and only read."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import read_config
from pipeline.encoder.checkpoints.synth import write_random_checkpoint
from pipeline.errors import CacheUnusable
from pipeline.project.project import Project
from pipeline.runs.workflow.scan_stage import ScanStage
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.cache_layout import MARKER, USERS
from pipeline.store.format.disk import Disk
from pipeline.structures.synthetic import complex_pdb
from tests.testkit.command import Command
from tests.testkit.project import settle

pytestmark = pytest.mark.timeout(900)

CONFIG = """\
data: {{source: glob, path: {made}/data, limit: 3}}
embed: {{weights: {made}/weights/esm2_tiny.pt}}
cluster: {{executor: local, slots: {{cpus: 2}}}}
"""
UNDER = "cache: {under: [../first/cache]}\n"
WITHOUT = ("--set", "cache.under=[]")
WRITING = ("open_new", "new_folder", "link", "rename", "unlink")

_made: list[Path] = []


@pytest.fixture
def group(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, pipeline: Command, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Return the folder of a group whose first user has made everything of three complexes; there are four."""
    if not _made:
        made = tmp_path_factory.mktemp("group")
        for number in range(4):
            (made / "data").mkdir(exist_ok=True)
            (made / f"data/c{number}.pdb").write_bytes(complex_pdb(number, 20, 20 + number))
        settle(made / "data")
        write_random_checkpoint(made / "weights/esm2_tiny.pt", layers=1, dim=16, heads=2)
        (made / "pipeline.yaml").write_text(CONFIG.format(made=made))
        monkeypatch.chdir(made)
        make_all(pipeline)
        _made.append(made)
    shutil.copytree(_made[0] / "cache", tmp_path / "first/cache")
    (tmp_path / "second").mkdir()
    (tmp_path / "second/pipeline.yaml").write_text(CONFIG.format(made=_made[0]) + UNDER)
    monkeypatch.chdir(tmp_path / "second")
    return tmp_path


def make_all(pipeline: Command, *sets: str) -> str:
    """Make embeddings and graphs; return what was said of what is to be done."""
    said = ""
    for stage in ("embed", "graph"):
        done = pipeline("submit", "--stage", stage, "--follow", *(word for one in sets for word in ("--set", one)))
        assert done.code == 0, done.err
        said += done.err
    return said


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
    said = make_all(pipeline)
    assert "scan: 3 items: 3 cached, 0 to do" in said
    assert "embed: 6 sequences: 6 cached, 0 to do" in said
    assert "graph: 3 graphs: 3 cached, 0 to do" in said
    assert (tried, state_of(shared)) == ([], before)
    mine = CacheFolder(group / "second/cache")
    assert [kind for kind in ("scan", "embed", "graph") if mine.kind(kind).stat().records] == []


@pytest.mark.nightly
def test_what_is_new_goes_to_the_second_users_own_cache(group: Path, pipeline: Command) -> None:
    shared = group / "first/cache"
    before = state_of(shared)
    said = make_all(pipeline, "data.limit=4")
    assert "scan: 4 items: 3 cached, 1 to do" in said
    assert "embed: 8 sequences: 6 cached, 2 to do" in said
    assert state_of(shared) == before
    assert [CacheFolder(group / "second/cache").kind(kind).stat().records for kind in ("scan", "embed", "graph")] == [
        1,
        2,
        1,
    ]
    assert "graph: 4 graphs: 4 cached, 0 to do" in make_all(pipeline, "data.limit=4")


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
    assert "graph: 3 graphs: 2 cached, 1 to do" in make_all(pipeline)
    assert state_of(group / "first/cache") == before
    assert "graph: 3 graphs: 3 cached, 0 to do" in make_all(pipeline)


@pytest.mark.nightly
def test_a_shared_cache_that_is_gone_is_refused_when_asked(group: Path, pipeline: Command) -> None:
    (group / "first").rename(group / "away")
    for words in (("submit", "--stage", "graph"), ("plan", "--stage", "graph"), ("config", "check")):
        done = pipeline(*words)
        assert done.code == 2
        assert "first/cache" in done.err
    doctor = pipeline("doctor", "--json")
    assert doctor.code == 2
    assert "there is no cache" in doctor.out
    assert pipeline("submit", "--stage", "scan", "--dry-run", *WITHOUT).code == 0


@pytest.mark.nightly
def test_a_shared_cache_that_goes_away_while_a_run_goes_on_counts_as_empty(
    group: Path, pipeline: Command, caplog: pytest.LogCaptureFixture
) -> None:
    config = read_config(Path("pipeline.yaml")).config
    assert survey(Project.open(config, strict=True)) == 0
    (group / "first").rename(group / "away")
    assert survey(Project.open(config)) == 3
    assert "there is no cache: it is left out" in caplog.text
    with pytest.raises(CacheUnusable, match="there is no cache"):
        Project.open(config, strict=True)


def survey(project: Project) -> int:
    """Return how many items a run would scan."""
    return ScanStage().survey(project, None, 1).counts["missing"]


@pytest.mark.nightly
@pytest.mark.parametrize(("lay", "why"), [("newer", "newer pipeline (format 9)"), ("itself", "under itself")])
def test_what_cannot_be_shared_is_refused_with_the_reason(group: Path, pipeline: Command, lay: str, why: str) -> None:
    if lay == "newer":
        (group / "first/cache" / MARKER).unlink()
        (group / "first/cache" / MARKER).write_text('{"format": 9}')
    sets = ("--set", "cache.root=../first/cache") if lay == "itself" else ()
    done = pipeline("submit", "--stage", "scan", *sets)
    assert done.code == 2
    assert why in done.err
    assert why in pipeline("doctor", "--json", *sets).out


@pytest.mark.nightly
def test_doctor_and_check_tell_of_the_caches_under_it(group: Path, pipeline: Command) -> None:
    doctor = pipeline("doctor", "--json")
    assert '"cache under it"' in doctor.out
    assert "first/cache" in doctor.out
    assert pipeline("config", "check").code == 0
    shown = pipeline("config", "show").out
    assert str(group / "first/cache") in shown.replace("\n", "")
