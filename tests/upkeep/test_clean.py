"""Cleaning a cache: what nobody needs goes, and nothing that anybody may need ever does."""

from __future__ import annotations

import errno
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.dataset.loading import made_table
from pipeline.engine.lifecycle import new_run
from pipeline.errors import CacheUnusable, ConfigError
from pipeline.journal.ledger import Ledger
from pipeline.records import EventKind
from pipeline.store.format.disk import Disk
from pipeline.store.maintenance.overview import DAY_S, Cleaning, CleanRequest
from pipeline.store.maintenance.shard_plans import Fate
from pipeline.store.users import User, register, registered
from pipeline.upkeep import retention
from pipeline.upkeep.clean_cache import carry_out, foresee_cleaning
from tests.upkeep.cached import ITEMS, Copy, write_manifest
from tests.upkeep.cached import copy as copy

if TYPE_CHECKING:
    pass

NOW = CleanRequest(older_than_s=0)
FEWER = "graph.neighbours=3"
KINDS = ("scan", "files", "embed", "graph", "sets", "weights", "parity", "recipes")


def look(copy: Copy, asked: CleanRequest = NOW, *sets: str) -> Cleaning:
    return foresee_cleaning(copy.project(*sets), copy.file, asked)


def clean(copy: Copy, asked: CleanRequest = NOW, *sets: str) -> Cleaning:
    found = look(copy, asked, *sets)
    freed = sum(one.bytes for one in carry_out(found))
    assert freed == found.freed_bytes
    return found


def content(copy: Copy) -> dict[str, set[bytes]]:
    return {kind: copy.keys_of(kind) for kind in KINDS}


def dead(found: Cleaning) -> dict[str, int]:
    counted: dict[str, int] = {}
    for one in found.dead():
        counted[one.kind] = counted.get(one.kind, 0) + one.items
    return counted


@pytest.mark.nightly
def test_graphs_of_a_recipe_that_is_not_used_any_more_go_and_nothing_else(copy):
    before = content(copy)
    found = look(copy, NOW, FEWER)
    assert dead(found) == {"graph": ITEMS, "recipes": 1}
    clean(copy, NOW, FEWER)
    after = content(copy)
    assert after.pop("graph") == set()
    assert len(before.pop("recipes") - after.pop("recipes")) == 1
    before.pop("graph")
    assert after == before


@pytest.mark.nightly
def test_what_is_younger_than_the_grace_stays(copy):
    found = clean(copy, CleanRequest(), FEWER)
    assert found.stays(Fate.YOUNG)[0] == ITEMS
    assert len(copy.keys_of("graph")) == ITEMS


@pytest.mark.nightly
def test_orphans_go_and_the_data_set_is_whole(copy):
    write_manifest(copy.folder / "items.csv", [0, 2])
    clean(copy)
    assert len(copy.keys_of("graph")) == len(copy.keys_of("scan")) == len(copy.keys_of("files")) == 2
    assert dead(look(copy)) == {}
    assert copy.submits("graph", "--set", "cache.verify_bytes=1GiB").code == 0
    assert len(copy.keys_of("graph")) == 2


@pytest.mark.nightly
def test_on_a_full_disk_whole_files_of_every_kind_go_before_any_is_written_anew(copy, monkeypatch):
    write_manifest(copy.folder / "items.csv", [0, 2])
    found = look(copy, NOW, FEWER)
    assert next(one.kind for one in found.marked.values() if one.of(Fate.REWRITTEN)) == "embed"
    (doomed,) = (copy.cache.root / "graph/shards" / one.shard for one in found.marked["graph"].of(Fate.GOES))
    write_at = Disk.write_at

    def full(disk: Disk, fd: int, data: bytes | memoryview, offset: int) -> None:
        if doomed.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_at(disk, fd, data, offset)

    monkeypatch.setattr(Disk, "write_at", full)
    assert sum(one.bytes for one in carry_out(found)) == found.freed_bytes
    assert (len(copy.keys_of("graph")), len(copy.keys_of("scan"))) == (0, 2)
    assert dead(look(copy, NOW, FEWER)) == {}


@pytest.mark.nightly
def test_a_data_set_that_seems_to_be_away_keeps_its_records_while_old_recipes_go(copy, tmp_path):
    away = f"data.structures_dir={tmp_path / 'nothing'}"
    found = clean(copy, NOW, away, FEWER)
    assert found.notes[0].remedy
    assert dead(found) == {"graph": ITEMS, "recipes": 1}
    assert len(copy.keys_of("scan")) == len(copy.keys_of("files")) == ITEMS


@pytest.mark.nightly
def test_without_its_weights_a_project_keeps_all_embeddings(copy):
    before = copy.keys_of("embed")
    found = clean(copy, NOW, "embed.weights=nothing.pt")
    assert len(found.notes) == 1
    assert copy.keys_of("embed") == before


def other_user(copy: Copy, config: Path, last: float, *sets: str) -> User:
    """Let another project say that it uses the cache."""
    tags = retention.recipes_of(copy.project(*sets))
    user = User(str(config), str(config.parent / "runs"), frozenset((kind, tag.hex()) for kind, tag in tags), last)
    assert register(copy.cache.disk, copy.cache.root, user)
    return user


@pytest.mark.nightly
def test_what_another_project_uses_stays_as_long_as_that_is_there(copy, tmp_path):
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
    assert str(config) in waits.what
    assert waits.remedy.startswith(f"rm {copy.folder / 'cache' / '_users'}/")
    found = clean(copy, NOW, FEWER)
    assert copy.keys_of("graph") == set()
    assert str(config) not in {user.config for user in registered(copy.cache.disk, copy.cache.root)[0]}


@pytest.mark.nightly
def test_a_project_on_a_disk_that_is_not_mounted_is_not_forgotten_at_once(copy, tmp_path):
    user = other_user(copy, tmp_path / "unmounted" / "pipeline.yaml", time.time() - 2 * DAY_S)
    found = clean(copy, NOW, FEWER)
    assert found.others == (user,)
    assert len(copy.keys_of("graph")) == ITEMS


@pytest.mark.nightly
def test_a_user_of_whom_nothing_can_be_read_keeps_everything(copy):
    (copy.cache.root / "_users" / f"{'0' * 32}.json").write_text('{"user": 99}')
    before = content(copy)
    found = clean(copy, NOW, FEWER)
    assert len(found.notes) == 1
    assert content(copy)["graph"] == before["graph"]


@pytest.mark.nightly
def test_recipes_are_kept_when_that_is_asked_for_and_what_is_of_none_goes(copy):
    with copy.cache.kind("graph").writer() as writer:
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
def test_all_is_refused_while_a_run_goes_on(copy):
    ledger = going_run(copy)
    with pytest.raises(ConfigError):
        look(copy, CleanRequest(all=True))
    ledger.emit(EventKind.RUN_ENDED, state="done", error="", exit_code=0)
    assert look(copy, CleanRequest(all=True)).files


@pytest.mark.nightly
def test_after_all_is_gone_the_same_is_made_again(copy):
    before = content(copy)
    foreign = copy.cache.root / "graph" / "notes.txt"
    foreign.write_text("mine")
    clean(copy, CleanRequest(all=True))
    assert content(copy) == {kind: set() for kind in KINDS}
    assert foreign.exists()
    assert made_table(copy.project()) is None  # its table went, too: that is no damage
    assert copy.cache.root.joinpath("pipeline-cache.json").exists()
    copy.finishes("embed", "graph")
    assert content(copy) == before


@pytest.mark.nightly
def test_who_begins_to_use_the_cache_meanwhile_ends_the_cleaning(copy, tmp_path):
    found = look(copy, NOW, FEWER)
    other_user(copy, tmp_path / "pipeline.yaml", time.time())
    with pytest.raises(ConfigError) as caught:
        list(carry_out(found))
    assert caught.value.remedy == "pipeline cache clean"
    assert len(copy.keys_of("graph")) == ITEMS


@pytest.mark.nightly
def test_tables_of_runs_that_are_there_no_more_go(copy):
    assert len(copy.keys_of("sets")) == 1
    for path in (copy.folder / "runs").glob("*/table.txt"):
        path.unlink()
    assert dead(clean(copy)) == {"sets": 1}
    assert copy.keys_of("sets") == set()


@pytest.mark.nightly
def test_leftovers_that_are_old_go_and_young_ones_stay(copy):
    root = copy.cache.root
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
def test_this_project_says_anew_what_it_uses(copy):
    def tags() -> set[tuple[str, str]]:
        users = registered(copy.cache.disk, copy.cache.root)[0]
        return {tag for user in users if user.config == str(copy.file) for tag in user.tags}

    retention.register_use(copy.project(), ["graph"], copy.file)
    retention.register_use(copy.project(FEWER), ["graph"], copy.file)
    assert sum(kind == "graph" for kind, _ in tags()) == 2
    clean(copy, NOW, FEWER)
    assert {(kind, bytes.fromhex(tag)) for kind, tag in tags()} == set(retention.recipes_of(copy.project(FEWER)))


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["/", "data", "cache"])
def test_what_is_no_cache_is_refused(copy, tmp_path, place):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.pdb").write_text("")
    (copy.cache.root / "pipeline-cache.json").unlink()  # it lost its marker
    with pytest.raises(CacheUnusable) as caught:
        look(copy, NOW, f"cache.root={tmp_path / place}")
    assert caught.value.exit_code == 2
