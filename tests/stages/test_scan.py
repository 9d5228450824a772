"""Stage scan: what it stores, what it does not do again, and what it does when the cache is hurt."""

from __future__ import annotations

import errno
import gzip
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.keys import TICK_NS
from pipeline.records import Inventory, Item, Part, Reason, Role
from pipeline.store.cache_folder import CacheFolder
from pipeline.structures import scan_items as stage
from pipeline.structures.inventory import ScanRecipe
from pipeline.structures.parsing import structure_files as read_module
from pipeline.structures.policy import Policy
from pipeline.structures.scan_items import ScanShelves, look_again, scan_items
from pipeline.structures.scan_items import look_up_items as seen_of
from tests.structures.pdb_text import chain

RECIPE = ScanRecipe()
LINES = chain("A", "ALA", "CYS", "ASP") + chain("B", "GLY", "HIS") + "END\n"


@pytest.fixture
def shelves(tmp_path: Path) -> ScanShelves:
    return open_shelves(tmp_path)


def open_shelves(folder: Path) -> ScanShelves:
    cache = CacheFolder(folder / "cache")
    return ScanShelves(cache.kind("scan"), cache.kind("files"), 1 << 20)


def make_item(folder: Path, name: str = "a", lines: str = LINES) -> Item:
    """Write a structure that has stood still for a while, as data sets do."""
    path = folder / f"{name}.pdb"
    path.write_text(lines)
    settle(path)
    return Item(name, parts=(Part(Role.COMPLEX, str(path)),))


def settle(path: Path, age_s: float = 60.0) -> None:
    """Let a file look as if it was written a while ago; its change time cannot be set, so that is waited for."""
    os.utime(path, (time.time() - age_s, time.time() - age_s))
    while time.time_ns() - path.stat().st_ctime_ns < 2 * TICK_NS:
        time.sleep(0.01)


def look_up(items: list[Item], recipe: ScanRecipe, shelves: ScanShelves) -> list[Inventory | None]:
    return [seen.inventory for seen in seen_of(items, recipe, shelves)]


def scan_all(items: list[Item], shelves: ScanShelves, recipe: ScanRecipe = RECIPE) -> list[Reason | None]:
    return list(scan_items(items, recipe, shelves))


def test_what_was_scanned_is_known_without_reading_a_file_again(
    tmp_path: Path, shelves: ScanShelves, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [make_item(tmp_path, name) for name in "abc"]  # copies, which share one inventory
    bad = [make_item(tmp_path, f"bad{name}", "REMARK nothing\n") for name in "ab"]
    assert look_up(items, RECIPE, shelves) == [None] * 3
    assert scan_all([*items, *bad], shelves) == [None] * 3 + [Reason.NO_ATOMS] * 2
    assert (shelves.inventories.stat().records, shelves.files.stat().records) == (2, 5)
    with monkeypatch.context() as patch:
        patch.setattr(stage, "read_file", lambda path, max_bytes: pytest.fail(f"{path} was read again"))
        found, *_, rejected = look_up([*items, *bad], RECIPE, open_shelves(tmp_path))
    assert [[one.sequence for one in partner.chains] for partner in found.partners] == [["ACD"], ["GH"]]
    assert rejected.reason is Reason.NO_ATOMS
    assert look_up(items[:1], ScanRecipe(policy=Policy(require="backbone")), shelves) == [None]
    gone = Item("gone", parts=(Part(Role.COMPLEX, str(tmp_path / "gone.pdb")),))
    (missing,) = look_up([gone], RECIPE, shelves)
    assert missing.reason is Reason.MISSING_FILE


def test_a_changed_file_is_scanned_again_and_the_old_inventory_stays_for_the_old_content(
    tmp_path: Path, shelves: ScanShelves
) -> None:
    item = make_item(tmp_path)
    scan_all([item], shelves)
    make_item(tmp_path, lines=LINES.replace("ALA", "TRP"))
    assert look_up([item], RECIPE, shelves) == [None]
    scan_all([item], shelves)
    (found,) = look_up([item], RECIPE, shelves)
    assert found.partners[0].chains[0].sequence == "WCD"
    assert shelves.inventories.stat().records == 2


def test_a_touched_file_is_read_but_its_inventory_is_not_made_again(tmp_path: Path, shelves: ScanShelves) -> None:
    item = make_item(tmp_path)
    scan_all([item], shelves)
    settle(Path(item.parts[0].path), age_s=30)
    assert look_up([item], RECIPE, shelves) == [None]
    scan_all([item], shelves)
    assert shelves.inventories.stat().records == 1
    assert None not in look_up([item], RECIPE, shelves)


def test_a_file_written_just_now_is_scanned_but_not_trusted_to_stand_still(
    tmp_path: Path, shelves: ScanShelves
) -> None:
    path = tmp_path / "fresh.pdb"
    path.write_text(LINES)
    os.utime(path, (1_700_000_000, 1_700_000_000))  # a clock of whole seconds, so the file is young for two of them
    item = Item("fresh", parts=(Part(Role.COMPLEX, str(path)),))
    assert scan_all([item], shelves) == [None]
    assert look_up([item], RECIPE, shelves) == [None]
    assert look_again(item, RECIPE, shelves, since_ns=time.time_ns()).inventory is not None
    assert look_again(item, RECIPE, shelves, since_ns=time.time_ns() + 10**10).inventory is None


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    tmp_path: Path, shelves: ScanShelves, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = make_item(tmp_path)
    read = stage.read_file

    def read_and_change(path: Path, max_bytes: int) -> bytes:
        data = read(path, max_bytes)
        path.write_text(LINES.replace("ALA", "TRP"))
        return data

    monkeypatch.setattr(stage, "read_file", read_and_change)
    scan_all([item], shelves)
    assert shelves.files.stat().records == 0


def test_a_damaged_inventory_is_made_anew(tmp_path: Path, shelves: ScanShelves) -> None:
    item = make_item(tmp_path)
    scan_all([item], shelves)
    (shard,) = (tmp_path / "cache/scan/shards").iterdir()
    data = bytearray(shard.read_bytes())
    position = data.index(b'"partners"', data.index(b"\0" * 4))
    data[position + 3] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(data)
    hurt = open_shelves(tmp_path)
    assert look_up([item], RECIPE, hurt) == [None]
    scan_all([item], hurt)
    assert None not in look_up([item], RECIPE, open_shelves(tmp_path))


def test_an_interrupted_scan_keeps_what_it_had_finished(tmp_path: Path, shelves: ScanShelves) -> None:
    items = [make_item(tmp_path, name, LINES.replace("ALA", residue)) for name, residue in (("a", "ALA"), ("b", "TRP"))]
    going = scan_items(items, RECIPE, shelves)
    next(going)
    with pytest.raises(KeyboardInterrupt):
        going.throw(KeyboardInterrupt)
    first, second = look_up(items, RECIPE, open_shelves(tmp_path))
    assert first is not None
    assert second is None


def test_an_item_that_a_parser_chokes_on_costs_itself_and_nothing_else(
    tmp_path: Path, shelves: ScanShelves, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [make_item(tmp_path, name, LINES.replace("ALA", residue)) for name, residue in (("a", "ALA"), ("b", "TRP"))]
    examine = stage.examine_item

    def choke(item: Item, *rest: object) -> object:
        if item.id == "a":
            raise ZeroDivisionError("deep inside")
        return examine(item, *rest)

    monkeypatch.setattr(stage, "examine_item", choke)
    assert scan_all(items, shelves) == [Reason.SCAN_FAILED, None]
    assert None not in look_up(items, RECIPE, shelves)


@pytest.mark.parametrize(
    "error", [ImportError("libXrender.so.1: cannot open"), OSError(errno.EIO, "input/output error")]
)
def test_what_only_this_machine_cannot_read_is_told_and_not_remembered(
    tmp_path: Path, shelves: ScanShelves, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    items, told = [make_item(tmp_path, name) for name in "ab"], list[tuple[str, Reason, str]]()

    def choke(*_: object) -> object:
        raise error

    with monkeypatch.context() as here:
        here.setattr(stage, "examine_item", choke)
        refused = scan_items(items, RECIPE, shelves, refuse=lambda *what: told.append(what))
        assert list(refused) == [Reason.SCAN_FAILED] * 2
    assert told == [(item.id, Reason.SCAN_FAILED, f"{type(error).__name__}: {error}") for item in items]
    assert scan_all(items, shelves) == [None, None]
    assert None not in look_up(items, RECIPE, shelves)


def test_a_lowered_limit_holds_for_what_was_scanned_under_a_higher_one(tmp_path: Path, shelves: ScanShelves) -> None:
    item = make_item(tmp_path)
    packed = tmp_path / "p.pdb.gz"
    packed.write_bytes(gzip.compress(LINES.encode()))
    settle(packed)
    item = Item("p", parts=(Part(Role.COMPLEX, str(packed)),))
    assert scan_all([item], shelves) == [None]
    low, high = ScanRecipe(max_file_bytes=packed.stat().st_size + 1), ScanRecipe(max_file_bytes=1 << 30)
    (found,) = look_up([item], low, shelves)
    assert found.reason is Reason.FILE_TOO_LARGE
    assert look_up([item], high, shelves) != [None]
    assert scan_all([item], shelves, low) == [Reason.FILE_TOO_LARGE]


def test_a_missing_extra_is_not_remembered(
    tmp_path: Path, shelves: ScanShelves, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.bcif"
    path.write_bytes(b"\x80")
    settle(path)
    item = Item("x", parts=(Part(Role.WHOLE, str(path)),))
    with monkeypatch.context() as without:
        without.setattr(read_module, "HAS_BIOTITE", False)
        assert scan_all([item], shelves) == [Reason.NEEDS_EXTRA]
    assert look_up([item], RECIPE, shelves) == [None]


@pytest.fixture
def _whole_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a file system that keeps whole seconds, in one of which all files were written."""

    def coarse(path: Path, max_bytes: int) -> SimpleNamespace:
        state = read_module.stat_file(path, max_bytes)
        at_ns = 1_700_000_000 * 10**9
        kept = {name: getattr(state, name) for name in ("st_dev", "st_ino", "st_size")}
        return SimpleNamespace(**kept, st_mtime_ns=at_ns, st_ctime_ns=at_ns)

    monkeypatch.setattr(stage, "stat_file", coarse)


@pytest.mark.usefixtures("_whole_seconds")
def test_a_file_is_not_taken_for_another_of_its_size_and_times_in_whose_place_it_is(
    tmp_path: Path, shelves: ScanShelves
) -> None:
    for name, residue in (("v1", "ALA"), ("v2", "TRP")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.pdb").write_text(LINES.replace("ALA", residue))
    current = tmp_path / "current"
    item = Item("a", parts=(Part(Role.COMPLEX, str(current / "a.pdb")),))
    for name, sequence in (("v1", "ACD"), ("v2", "WCD")):
        current.unlink(missing_ok=True)
        current.symlink_to(name)
        assert look_up([item], RECIPE, shelves) == [None]
        scan_all([item], shelves)
        (found,) = look_up([item], RECIPE, shelves)
        assert found.partners[0].chains[0].sequence == sequence
