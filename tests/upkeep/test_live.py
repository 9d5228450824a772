"""Which records a data set needs: exactly those that its stages made; and never less because a disk is away."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from pipeline.journal.run_folder import runs_in
from pipeline.upkeep.retention import Needed, needed
from tests.testkit.once import Shelf
from tests.upkeep.cached import ITEMS, Copy, make, write_manifest
from tests.upkeep.cached import copy as copy

KINDS = ("scan", "files", "embed", "graph")


def keys_of(found: Needed, kind: str) -> set[bytes]:
    keys = bytes(getattr(found, kind))
    return {keys[at : at + 16] for at in range(0, len(keys), 16)}


def test_a_data_set_needs_exactly_what_its_stages_have_made(copy: Copy) -> None:
    found = needed(copy.project())
    assert (found.unknown, found.items) == ("", ITEMS)
    assert {kind: keys_of(found, kind) for kind in KINDS} == {kind: copy.keys_of(kind) for kind in KINDS}
    listed = {(kind, tag) for run in runs_in(copy.folder / "runs") for kind, tag in json.loads(run.recipes.read_text())}
    assert listed >= {(kind, key[:4].hex()) for kind in ("scan", "embed", "graph") for key in copy.keys_of(kind)}


def test_an_item_that_is_no_more_in_the_data_set_needs_nothing(copy: Copy) -> None:
    write_manifest(copy.folder / "items.csv", range(1, ITEMS))
    found = needed(copy.project())
    assert found.unknown == ""
    for kind in KINDS:
        assert keys_of(found, kind) < copy.keys_of(kind)
    assert len(keys_of(found, "graph")) == ITEMS - 1


def test_an_embedding_that_may_stand_in_for_the_wanted_one_is_needed_too(copy: Copy) -> None:
    wanted = keys_of(needed(copy.project()), "embed")
    found = keys_of(needed(copy.project("embed.precision=fp16", "embed.storage=fp32")), "embed")
    assert wanted < found
    assert len(found) == 2 * len(wanted)
    strict = needed(copy.project("embed.precision=fp16", "embed.storage=fp32", "embed.half_fallback=none"))
    assert not keys_of(strict, "embed") & wanted


def test_files_that_were_never_read_leave_it_open_what_is_needed(copy: Copy, shelf: Shelf) -> None:
    made = shelf.pristine("to-be-cleaned", make)
    shutil.copytree(made / "data", copy.folder / "copies")  # the same bytes: only a scan can tell
    found = needed(copy.project(f"data.structures_dir={copy.folder / 'copies'}"))
    assert "c0" in found.unknown
    assert str(found.remedy) == "pipeline submit scan"


def test_a_disk_that_is_not_mounted_leaves_it_open_what_is_needed(copy: Copy, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for settings in ([f"data.structures_dir={empty}"], [f"data.structures_dir={tmp_path / 'nothing'}"]):
        assert needed(copy.project(*settings)).unknown
    for path in (empty, tmp_path / "nothing"):
        found = needed(copy.project("data.source=glob", f"data.path={path}", "data.structures_dir=null"))
        assert found.unknown
        assert found.remedy


def test_a_trial_of_a_few_items_says_nothing_of_the_rest(copy: Copy) -> None:
    found = needed(copy.project("data.limit=2"))
    assert "data.limit" in found.unknown
    assert not found.graph
