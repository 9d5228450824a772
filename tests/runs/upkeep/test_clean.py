"""Cleaning a cache: what nobody needs goes, and nothing that anybody may need ever does."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.errors import CacheUnusable, ConfigError
from pipeline.journal.ledger import Ledger
from pipeline.records import EventKind
from pipeline.report.cleaning_tables import DAY_S, Cleaning, CleanRequest
from pipeline.runs.dataset.loading import made_table
from pipeline.runs.engine.lifecycle import new_run
from pipeline.runs.upkeep import retention
from pipeline.runs.upkeep.clean_cache import carry_out, foresee_cleaning, has_vanished
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from pipeline.store.maintenance.leftovers import User, register, registered
from pipeline.store.maintenance.sweep import Fate
from tests.runs.upkeep import cached
from tests.runs.upkeep.cached import ITEMS, Copy, submit, write_manifest
from tests.store.faulty_disks import FailingDisk

if TYPE_CHECKING:
    from collections.abc import Iterator

NOW = CleanRequest(older_than_s=0)
FEWER = "graph.neighbours=3"
KINDS = ("scan", "files", "embed", "graph", "sets", "weights", "parity", "recipes")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cached.made(tmp_path_factory.getbasetemp())


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Copy:
    return Copy.of(made, tmp_path)


def look(copy: Copy, asked: CleanRequest = NOW, *sets: str) -> Cleaning:
    return foresee_cleaning(copy.project(*sets), copy.file, asked)


def clean(copy: Copy, asked: CleanRequest = NOW, *sets: str) -> Cleaning:
    found = look(copy, asked, *sets)
    freed = sum(one.bytes for one in carry_out(found))
    assert freed == found.freed_bytes
    return found


def content(copy: Copy) -> dict[str, set[bytes]]:
    return {kind: copy.keys(kind) for kind in KINDS}


def dead(found: Cleaning) -> dict[str, int]:
    counted: dict[str, int] = {}
    for one in found.dead():
        counted[one.kind] = counted.get(one.kind, 0) + one.items
    return counted


@pytest.mark.nightly
def test_of_a_cache_that_is_all_in_use_nothing_goes(copy: Copy) -> None:
    before = content(copy)
    found = clean(copy)
    assert dead(found) == {}
    assert found.files == 0
    assert found.notes == []
    assert content(copy) == before


@pytest.mark.nightly
def test_graphs_of_a_recipe_that_is_not_used_any_more_go_and_nothing_else(copy: Copy) -> None:
    before = content(copy)
    found = look(copy, NOW, FEWER)
    assert dead(found) == {"graph": ITEMS, "recipes": 1}
    assert [one.why for one in found.dead()] == ["of a recipe that is not used", "nothing is made by them"]
    clean(copy, NOW, FEWER)
    after = content(copy)
    assert after.pop("graph") == set()
    assert len(before.pop("recipes") - after.pop("recipes")) == 1
    before.pop("graph")
    assert after == before


@pytest.mark.nightly
def test_what_is_looked_at_first_is_left_as_it_is(copy: Copy) -> None:
    files = sorted(path for path in copy.store.root.rglob("*"))
    look(copy, NOW, FEWER)
    assert sorted(path for path in copy.store.root.rglob("*")) == files


@pytest.mark.nightly
def test_what_is_younger_than_the_grace_stays(copy: Copy) -> None:
    found = clean(copy, CleanRequest(), FEWER)
    assert found.stays(Fate.YOUNG)[0] == ITEMS
    assert len(copy.keys("graph")) == ITEMS


@pytest.mark.nightly
def test_orphans_go_and_the_data_set_is_whole(copy: Copy) -> None:
    write_manifest(copy.folder / "items.csv", [0, 2])
    found = clean(copy)
    assert {one.why for one in found.dead() if one.kind == "graph"} == {"not in the data set"}
    assert len(copy.keys("graph")) == len(copy.keys("scan")) == len(copy.keys("files")) == 2
    assert dead(look(copy)) == {}
    submit(copy.folder, "graph", "--set", "cache.verify_bytes=1GiB")
    assert len(copy.keys("graph")) == 2


@pytest.mark.nightly
def test_on_a_full_disk_whole_files_of_every_kind_go_before_any_is_written_anew(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest(copy.folder / "items.csv", [0, 2])
    found = look(copy, NOW, FEWER)
    assert next(one.kind for one in found.marked.values() if one.of(Fate.REWRITTEN)) == "embed"
    (doomed,) = (copy.store.root / "graph/shards" / one.shard for one in found.marked["graph"].of(Fate.GOES))
    write_at = Disk.write_at

    def full(disk: Disk, fd: int, data: bytes | memoryview, offset: int) -> None:
        if doomed.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_at(disk, fd, data, offset)

    monkeypatch.setattr(Disk, "write_at", full)
    assert sum(one.bytes for one in carry_out(found)) == found.freed_bytes
    assert (len(copy.keys("graph")), len(copy.keys("scan"))) == (0, 2)
    assert dead(look(copy, NOW, FEWER)) == {}


@pytest.mark.nightly
def test_a_data_set_that_seems_to_be_away_keeps_its_records_while_old_recipes_go(copy: Copy, tmp_path: Path) -> None:
    away = f"data.structures_dir={tmp_path / 'nothing'}"
    found = clean(copy, NOW, away, FEWER)
    assert "cannot be told" in found.notes[0].what
    assert found.notes[0].remedy
    assert dead(found) == {"graph": ITEMS, "recipes": 1}
    assert len(copy.keys("scan")) == len(copy.keys("files")) == ITEMS


@pytest.mark.nightly
def test_without_its_weights_a_project_keeps_all_embeddings(copy: Copy) -> None:
    before = copy.keys("embed")
    found = clean(copy, NOW, "embed.weights=nothing.pt")
    assert "which embeddings" in found.notes[0].what
    assert copy.keys("embed") == before


@pytest.mark.nightly
def test_graphs_that_are_not_kept_on_disk_are_not_needed_there(copy: Copy) -> None:
    clean(copy, NOW, "graph.cache=false")
    assert copy.keys("graph") == set()


def other_user(copy: Copy, config: Path, last: float, *sets: str) -> User:
    """Let another project say that it uses the cache."""
    tags = retention.recipes_of(copy.project(*sets))
    user = User(str(config), str(config.parent / "runs"), frozenset((kind, tag.hex()) for kind, tag in tags), last)
    assert register(copy.store.disk, copy.store.root, user)
    return user


@pytest.mark.nightly
def test_what_another_project_uses_stays_as_long_as_that_is_there(copy: Copy, tmp_path: Path) -> None:
    config = tmp_path / "other" / "pipeline.yaml"
    config.parent.mkdir()
    config.touch()
    other_user(copy, config, time.time() - 2 * DAY_S)
    write_manifest(copy.folder / "items.csv", [0])
    before = content(copy)
    found = clean(copy, NOW, FEWER)
    assert [user.config for user in found.others] == [str(config)]
    assert content(copy) == before
    config.unlink()
    (waits,) = look(copy, CleanRequest(older_than_s=9 * DAY_S), FEWER).notes
    assert f"{config} is there no more; it was last used " in waits.what
    assert "and counts until " in waits.what
    assert waits.remedy.startswith(f"rm {copy.folder / 'cache' / '_users'}/")
    found = clean(copy, NOW, FEWER)
    assert "is there no more" in found.notes[0].what
    assert copy.keys("graph") == set()
    assert str(config) not in {user.config for user in registered(copy.store.disk, copy.store.root)[0]}


@pytest.mark.nightly
def test_a_project_whose_configuration_was_moved_has_not_gone_while_its_run_goes_on(copy: Copy, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    user = other_user(copy, tmp_path / "other" / "pipeline.yaml", time.time() - 2 * DAY_S)
    ledger = going_run(copy, f"cluster.runs={user.runs}")
    before = content(copy)
    found = clean(copy, NOW, FEWER)
    assert found.others == (user,)
    assert content(copy) == before
    with pytest.raises(ConfigError, match="goes on"):
        look(copy, CleanRequest(all=True))
    ledger.emit(EventKind.RUN_ENDED, state="done", error="", exit_code=0)
    assert look(copy, NOW, FEWER).forgotten == (user,)


@pytest.fixture
def private(unprivileged: Path) -> Iterator[Path]:
    """Return a folder that can be closed to this user."""
    (home := unprivileged / "home").mkdir()
    (home / "runs" / "20260101-000000-0000-scan").mkdir(parents=True)
    yield home
    home.chmod(0o755)


@pytest.mark.nightly
def test_a_configuration_in_a_private_home_is_not_gone(private: Path) -> None:
    user = User(str(private / "pipeline.yaml"), str(private / "runs"), frozenset(), 0.0)
    (private / "pipeline.yaml").touch()
    private.chmod(0o000)
    assert not has_vanished(user, time.time(), 0.0)
    user = replace(user, config=str(private / "deeper" / "pipeline.yaml"))
    assert not has_vanished(user, time.time(), 0.0)


@pytest.mark.nightly
def test_who_keeps_runs_private_is_not_forgotten_at_once(private: Path) -> None:
    user = User(str(private / "pipeline.yaml"), str(private / "runs"), frozenset(), time.time() - 2 * DAY_S)
    assert has_vanished(user, time.time(), DAY_S)
    (private / "runs").chmod(0o000)
    assert not has_vanished(user, time.time(), DAY_S)
    (private / "runs").chmod(0o755)


@pytest.mark.nightly
def test_a_project_on_a_disk_that_is_not_mounted_is_not_forgotten_at_once(copy: Copy, tmp_path: Path) -> None:
    user = other_user(copy, tmp_path / "unmounted" / "pipeline.yaml", time.time() - 2 * DAY_S)
    found = clean(copy, NOW, FEWER)
    assert found.others == (user,)
    assert len(copy.keys("graph")) == ITEMS


@pytest.mark.nightly
def test_a_user_of_whom_nothing_can_be_read_keeps_everything(copy: Copy) -> None:
    (copy.store.root / "_users" / f"{'0' * 32}.json").write_text('{"user": 99}')
    before = content(copy)
    found = clean(copy, NOW, FEWER)
    assert "cannot be read" in found.notes[0].what
    assert content(copy)["graph"] == before["graph"]


@pytest.mark.nightly
def test_recipes_are_kept_when_that_is_asked_for_and_what_is_of_none_goes(copy: Copy) -> None:
    with copy.store.kind("graph").writer() as writer:
        writer.put(b"of no recipe....", {})
    before = content(copy)
    found = clean(copy, replace(NOW, keep_recipes=True), FEWER)
    assert dead(found) == {"graph": 1}
    assert content(copy)["graph"] == before["graph"] - {b"of no recipe...."}
    assert content(copy)["embed"] == before["embed"]


def going_run(copy: Copy, *sets: str) -> Ledger:
    """Begin a run that seems to be looked after by this process."""
    folder = new_run(copy.config(*sets), ["scan", "graph"])
    ledger = Ledger(folder, "supervisor-000001")
    ledger.emit(EventKind.RUN_STARTED, stages=["scan", "graph"], host=socket.gethostname(), pid=os.getpid())
    return ledger


@pytest.mark.nightly
def test_what_a_run_needs_that_goes_on_stays(copy: Copy) -> None:
    going_run(copy)
    write_manifest(copy.folder / "items.csv", [0])
    before = content(copy)
    found = clean(copy, NOW, FEWER)
    assert "goes on" in found.notes[0].what
    assert content(copy) == before


@pytest.mark.nightly
def test_the_table_of_a_run_that_goes_on_stays_wherever_its_folder_is(copy: Copy, tmp_path: Path) -> None:
    (run,) = (path.parent for path in (copy.folder / "runs").glob("*/table.txt"))
    elsewhere = f"cluster.runs={tmp_path / 'elsewhere'}"
    ledger = going_run(copy, elsewhere)
    (going,) = (tmp_path / "elsewhere").glob("2*")
    (run / "table.txt").rename(going / "table.txt")
    retention.register_use(copy.project(elsewhere), ["graph"], copy.file)
    assert dead(clean(copy)) == {}
    ledger.emit(EventKind.RUN_ENDED, state="done", error="", exit_code=0)
    assert dead(clean(copy)) == {}  # as that of one that has ended
    assert len(copy.keys("sets")) == 1


@pytest.mark.nightly
def test_a_run_on_another_cache_is_none_of_its_business(copy: Copy, tmp_path: Path) -> None:
    going_run(copy, f"cache.root={tmp_path / 'elsewhere'}")
    clean(copy, NOW, FEWER)
    assert copy.keys("graph") == set()


@pytest.mark.nightly
def test_a_run_whose_needs_cannot_be_told_is_named(copy: Copy) -> None:
    going_run(copy)
    folder = sorted((copy.folder / "runs").glob("2*"))[-1]
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be told") as caught:
        look(copy)
    assert "pipeline cancel" in caught.value.remedy


@pytest.mark.nightly
def test_all_is_refused_while_a_run_goes_on(copy: Copy) -> None:
    ledger = going_run(copy)
    with pytest.raises(ConfigError, match="goes on"):
        look(copy, CleanRequest(all=True))
    ledger.emit(EventKind.RUN_ENDED, state="done", error="", exit_code=0)
    assert look(copy, CleanRequest(all=True)).files


@pytest.mark.nightly
def test_after_all_is_gone_the_same_is_made_again(copy: Copy) -> None:
    before = content(copy)
    foreign = copy.store.root / "graph" / "notes.txt"
    foreign.write_text("mine")
    clean(copy, CleanRequest(all=True))
    assert content(copy) == {kind: set() for kind in KINDS}
    assert foreign.exists()
    assert made_table(copy.project()) is None  # its table went, too: that is no damage
    assert copy.store.root.joinpath("pipeline-cache.json").exists()
    for stage in ("embed", "graph"):
        submit(copy.folder, stage)
    assert content(copy) == before


@pytest.mark.nightly
def test_who_begins_to_use_the_cache_meanwhile_ends_the_cleaning(copy: Copy, tmp_path: Path) -> None:
    found = look(copy, NOW, FEWER)
    other_user(copy, tmp_path / "pipeline.yaml", time.time())
    with pytest.raises(ConfigError, match="was submitted while") as caught:
        list(carry_out(found))
    assert caught.value.remedy == "pipeline cache clean"
    assert len(copy.keys("graph")) == ITEMS


@pytest.mark.nightly
def test_who_begins_to_use_the_cache_at_the_very_end_stays_known(copy: Copy, tmp_path: Path) -> None:
    config = tmp_path / "other" / "pipeline.yaml"
    config.parent.mkdir()
    other_user(copy, config, time.time() - 2 * DAY_S)
    found = look(copy, NOW)
    assert [user.config for user in found.forgotten] == [str(config)]
    assert found.files == 0
    other_user(copy, config, time.time())
    with pytest.raises(ConfigError, match="was submitted while"):
        list(carry_out(found))
    assert str(config) in {user.config for user in registered(copy.store.disk, copy.store.root)[0]}


@pytest.mark.nightly
def test_tables_of_runs_that_are_there_no_more_go(copy: Copy) -> None:
    assert len(copy.keys("sets")) == 1
    for path in (copy.folder / "runs").glob("*/table.txt"):
        path.unlink()
    assert dead(clean(copy)) == {"sets": 1}
    assert copy.keys("sets") == set()


@pytest.mark.nightly
def test_the_half_of_a_name_of_a_table_takes_no_table_from_another_run(copy: Copy) -> None:
    (whole,) = (path for path in (copy.folder / "runs").glob("*/table.txt"))
    before = copy.keys("sets")
    for year, digits in (("2020", 12), ("2099", 20)):  # together as long as one, with the whole one between them
        half = whole.parent.with_name(f"{year}0101-000000-abcd-graph")
        shutil.copytree(whole.parent, half)
        (half / whole.name).write_text(whole.read_text()[:digits])
    clean(copy)
    assert copy.keys("sets") == before != set()


@pytest.mark.nightly
def test_leftovers_that_are_old_go_and_young_ones_stay(copy: Copy) -> None:
    root = copy.store.root
    shard = next((root / "graph" / "shards").iterdir()).name
    (root / "graph" / "quarantine").mkdir()
    (root / "graph" / "tmp").mkdir(exist_ok=True)
    temporary = root / "graph" / "tmp" / shard.replace(".safetensors", ".partial")
    for path in (temporary, root / "graph" / "quarantine" / shard):
        path.write_bytes(b"12345")
    found = look(copy, CleanRequest())
    assert [one.path.name for one in found.leftovers] == []
    assert len(found.young) == 2
    found = clean(copy)
    assert {one.path for one in found.leftovers} == {root / "graph" / "quarantine" / shard}
    old = temporary.with_name(f"20200101T000000Z{temporary.name[16:]}")
    temporary.rename(old)
    os.utime(old, (0, 0))
    assert {one.path for one in clean(copy).leftovers} == {old}
    assert not old.exists()


@pytest.mark.nightly
def test_a_writer_that_has_not_closed_its_file_is_not_in_the_way_however_young_its_files_may_be(copy: Copy) -> None:
    with copy.store.kind("graph").writer() as writer:
        writer.put(b"sixteen letters.", {})
        (temporary,) = (copy.store.root / "graph" / "tmp").iterdir()
        found = clean(copy)
        assert [one.path for one in found.young] == [temporary]
    assert b"sixteen letters." in copy.keys("graph")
    temporary.touch()
    os.utime(temporary, (0, 0))
    assert temporary in {one.path for one in look(copy, CleanRequest(all=True)).leftovers}


@pytest.mark.nightly
def test_a_cache_that_cannot_be_told_of_its_readers_is_named(
    copy: Copy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    under = CacheFolder(tmp_path / "under")
    with under.kind("graph").writer() as writer:
        writer.put(b"sixteen letters.", {})
    project = copy.project(f"cache.under=[{under.root}]")
    retention.register_use(project, ["graph"], copy.file)
    assert caplog.messages == []
    for refusing in (project.cache.under[0], project.cache):
        refusing.disk = FailingDisk("open_new", errno.EROFS)
    retention.register_use(project, ["graph"], copy.file)
    assert [message.split(":")[0] for message in caplog.messages] == [str(copy.store.root), str(under.root)]


@pytest.mark.nightly
def test_this_project_says_anew_what_it_uses(copy: Copy) -> None:
    def tags() -> set[tuple[str, str]]:
        users = registered(copy.store.disk, copy.store.root)[0]
        return {tag for user in users if user.config == str(copy.file) for tag in user.tags}

    retention.register_use(copy.project(), ["graph"], copy.file)
    retention.register_use(copy.project(FEWER), ["graph"], copy.file)
    assert sum(kind == "graph" for kind, _ in tags()) == 2
    clean(copy, NOW, FEWER)
    assert {(kind, bytes.fromhex(tag)) for kind, tag in tags()} == set(retention.recipes_of(copy.project(FEWER)))


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["/", "data"])
def test_what_is_no_cache_is_refused(copy: Copy, tmp_path: Path, place: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.pdb").write_text("")
    with pytest.raises(CacheUnusable) as caught:
        look(copy, NOW, f"cache.root={tmp_path / place}")
    assert caught.value.exit_code == 2


@pytest.mark.nightly
def test_a_cache_that_lost_its_marker_is_refused_and_where_none_is_yet_nothing_can_go(
    copy: Copy, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for place in ("empty", "nothing"):
        found = look(copy, NOW, f"cache.root={tmp_path / place}")
        assert (found.files, found.freed_bytes, found.cache.is_there) == (0, 0, False)
    (copy.store.root / "pipeline-cache.json").unlink()
    with pytest.raises(CacheUnusable, match="no cache"):
        look(copy)


def values(data: Any) -> None:
    """Fail on what is no plain JSON."""
    import json

    json.dumps(data)


@pytest.mark.nightly
def test_what_is_said_is_plain_json(copy: Copy) -> None:
    values(look(copy, NOW, FEWER).to_json())
