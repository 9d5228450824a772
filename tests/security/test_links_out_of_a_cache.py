"""A link in a cache or an export that leads elsewhere: nothing there is read as ours, changed or removed.

Each command alone is tried beside its own tests (tests/cli/test_cache_*.py, tests/store/maintenance/test_sweep.py,
tests/store/maintenance/test_transfer.py); here every command meets a link in every place.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import PipelineError
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from pipeline.store.maintenance.transfer import export_cache
from pipeline.store.store import Store, WholeRecords
from tests.testkit.command import Command

PLACES = (
    "graph", "graph/shards", "graph/tmp", "graph/quarantine", "graph/index.bin", "graph/shards/SHARD", "_reports",
    "_users", "pipeline-cache.json", "graph/tmp/20260101T000000Z-0123456789abcdef.partial",
)  # fmt: skip
COMMANDS = {
    "validate": ("cache", "validate"),
    "repair": ("cache", "repair", "--yes"),
    "compact": ("cache", "clean", "--compact", "--yes"),
    "clean": ("cache", "clean", "--all", "--yes"),
    "export": ("cache", "export", "../export"),
}
KEY = b"sixteen bytes..."


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a project with a cache of some records."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return filled(tmp_path / "project")


def filled(folder: Path) -> Path:
    (folder / "pipeline.yaml").write_text("data: {source: glob, path: data}\n")
    for number in range(2):
        with CacheFolder(folder / "cache").kind("graph").writer() as writer:
            writer.put(KEY[:-1] + bytes([number]), {"a": np.arange(100) + number})
    CacheFolder(folder / "cache").kind("graph").write_index()
    return folder


def moved_out(root: Path, place: str, outside: Path) -> None:
    """Replace something in a cache by a link to what was moved out of it."""
    path = root / place.replace("SHARD", min(one.name for one in (root / "graph/shards").iterdir()))
    outside.mkdir()
    if path.exists():
        shutil.move(path, outside / path.name)
        (outside / path.name / "precious").write_bytes(b"precious") if (outside / path.name).is_dir() else None
    elif path.suffix:
        (outside / path.name).write_bytes(b"precious")
    else:
        (outside / path.name).mkdir()
        (outside / path.name / "precious.safetensors").write_bytes(b"precious")
    path.parent.mkdir(exist_ok=True, parents=True)
    path.symlink_to(outside / path.name)


def content(folder: Path) -> dict[str, str]:
    """Return the digest of every file below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.nightly
def test_what_is_outside_stays_as_it_is_whatever_is_done_with_the_cache(
    pipeline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in PLACES:
        for name, words in COMMANDS.items():
            top = tmp_path / f"{name}-{PLACES.index(place)}"
            (top / "project").mkdir(parents=True)
            monkeypatch.chdir(filled(top / "project"))
            moved_out(top / "project/cache", place, top / "outside")
            before = content(top / "outside")
            done = pipeline(*words)
            assert before, (place, name)
            assert content(top / "outside") == before, (place, name)
            wanted = (0, 2) if name in ("export", "clean") else (2,)
            assert done.code in wanted, (place, name, done.err + done.out)
            assert "Traceback" not in done.err, (place, name)


def test_an_export_with_a_link_in_it_brings_nothing_from_elsewhere(
    pipeline: Command, project: Path, tmp_path: Path
) -> None:
    for number, place in enumerate(("graph", "graph/shards", "graph/shards/SHARD", "MANIFEST.sha256")):
        top = tmp_path / f"{number}"
        export_cache(CacheFolder(project / "cache"), top / "export")
        moved_out(top / "export", place, top / "outside")
        done = pipeline("cache", "import", f"../{number}/export", "--set", f"cache.root=new-{number}")
        assert done.code in (2, 4), (place, done.out)
        assert "link" in done.err + done.out or "not a plain file" in done.err + done.out, place
        found = len(list((project / f"new-{number}").rglob("*.safetensors")))
        assert found == (1 if place.endswith("SHARD") else 0), place


def test_a_shard_behind_a_link_is_believed_only_as_far_as_its_digests_go(project: Path, tmp_path: Path) -> None:
    moved_out(project / "cache", "graph/shards/SHARD", tmp_path / "outside")
    (elsewhere,) = (tmp_path / "outside").iterdir()
    shutil.move(elsewhere, aside := tmp_path / "aside")
    changed = bytearray(aside.read_bytes())
    changed[len(changed) // 2] ^= 1
    elsewhere.write_bytes(changed)
    store = CacheFolder(project / "cache").kind("graph")
    found = [got(store, KEY[:-1] + bytes([number])) for number in range(2)]
    assert sum(one is None for one in found) == 1
    assert all(np.array_equal(one, np.arange(100) + number) for number, one in enumerate(found) if one is not None)


def got(store: Store, key: bytes) -> Any:
    """Return what is in a record, or None where it does not verify."""
    try:
        return store.get(key).arrays["a"]
    except PipelineError:
        return None


def test_a_name_that_is_taken_by_a_link_is_never_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "new").symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError):
        Disk().open_new(tmp_path / "new")
    assert (tmp_path / "precious").read_bytes() == b"precious"


@pytest.mark.timeout(120)  # it would wait for ever
@pytest.mark.parametrize("place", ["graph/shards/SHARD", "graph/index.bin", "_users/USER", "_reports/REPORT"])
def test_a_fifo_in_a_cache_keeps_no_reader_waiting(pipeline: Command, project: Path, place: str) -> None:
    shard = min(path.name for path in (project / "cache/graph/shards").iterdir())
    report = shard.replace(".safetensors", ".jsonl")
    path = project / "cache" / place.replace("SHARD", shard).replace("USER", f"{0:032}.json").replace("REPORT", report)
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    store = CacheFolder(project / "cache").kind("graph")
    left = len(WholeRecords(store).metas([KEY[:-1] + b"\0", KEY[:-1] + b"\1"]))
    codes = [pipeline("cache", *words).code for words in (("stat",), ("validate", "--full"), ("clean",))]
    assert (left, *codes) == ((1, 0, 4, 0) if "SHARD" in place else (2, 0, 4 * ("index" in place), 0))
