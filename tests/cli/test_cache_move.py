"""`pipeline cache export` and `import` as people type them."""

from __future__ import annotations

import encodings.utf_8_sig  # noqa: F401 - who has no privileges may not be able to import it later
import http.client  # noqa: F401 - so, too
import json
import subprocess
from pathlib import Path

import pytest

from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.cache_layout import MANIFEST
from tests.store.content import is_right, key_of, put
from tests.testkit.command import Command


@pytest.fixture
def projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of two projects; the cache of the first has something in it."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pipeline.yaml").write_text("data: {path: data.csv}\n")
    for kind in ("scan", "graph"):
        with CacheFolder(tmp_path / "here/cache").kind(kind).writer(shard_bytes=2000) as writer:
            put(writer, *range(30))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def spoil(folder: Path) -> Path:
    """Cut a file short."""
    path = sorted(folder.glob("graph/shards/*"))[0]
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1])
    return path


def test_a_cache_is_moved_with_two_commands(pipeline: Command, projects: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = len(list((projects / "here/cache").glob("*/shards/*")))
    out = pipeline("cache", "export", "../my export")
    assert out.code == 0, out.err
    assert "pipeline cache import '../my export'" in out.out
    check = ["sha256sum", "--check", "--quiet", "MANIFEST.sha256"]
    assert subprocess.run(check, cwd=projects / "my export", check=False).returncode == 0
    monkeypatch.chdir(projects / "there")
    into = pipeline("cache", "import", "../my export")
    assert into.code == 0, into.err
    store = CacheFolder(projects / "there/cache").kind("graph")
    assert all(is_right(store.get(key_of(number)), key_of(number)) for number in range(30))
    again = json.loads(pipeline("cache", "import", "../my export", "--json").out)
    assert (again["copied"], again["there"]) == (0, files)


def test_damage_is_named_and_ends_with_4(pipeline: Command, projects: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = spoil(projects / "here/cache")
    out = pipeline("cache", "export", "../export", "--json")
    assert out.code == 4
    assert [one["file"] for one in json.loads(out.out)["refused"]] == [f"graph/shards/{path.name}"]
    assert "pipeline cache validate --full" in out.err
    path = spoil(projects / "export")
    monkeypatch.chdir(projects / "there")
    into = pipeline("cache", "import", "../export")
    assert into.code == 4
    assert path.name in into.err
    assert "next: pipeline cache import ../export" in into.err


def test_what_cannot_be_meant_is_refused(pipeline: Command, projects: Path) -> None:
    for words in (
        "export cache/inside",
        "export .",
        "export ../export --kind nothing",
        "import ../nowhere",
        "import cache",
        "export",
    ):
        assert pipeline("cache", *words.split()).code == 2, words
    assert pipeline("cache", "export", "../export").code == 0
    (projects / "export" / MANIFEST).unlink()  # as if it were not finished
    assert pipeline("cache", "import", "../export").code == 4


def test_links_within_the_cache_are_refused_also_in_a_circle(pipeline: Command, projects: Path) -> None:
    assert pipeline("cache", "export", "../export").code == 0
    shards = projects / "here/cache/graph/shards"
    (shards / "a.safetensors").symlink_to(shards / "b.safetensors")
    (shards / "b.safetensors").symlink_to(shards / "a.safetensors")
    for words in ("export ../export", "import ../export", "validate"):
        done = pipeline("cache", *words.split())
        assert (done.code, "a.safetensors" in done.err) == (2, True), words


def test_a_place_that_cannot_be_written_is_not_blamed_on_the_cache(
    pipeline: Command, projects: Path, unprivileged: Path
) -> None:
    (unprivileged / "pipeline.yaml").write_text("data: {path: data.csv}\n")
    with CacheFolder(unprivileged / "cache").kind("scan").writer() as writer:
        put(writer, 1)
    config = ("--config", str(unprivileged / "pipeline.yaml"))
    (unprivileged / "locked").mkdir(mode=0o555)
    done = pipeline("cache", "export", str(unprivileged / "locked/export"), *config)
    assert done.code == 2
    assert "the export cannot be written here" in done.err
    assert "next: pipeline cache export " in done.err
    assert pipeline("cache", "export", str(unprivileged / "export"), *config).code == 0
    done = pipeline(
        "cache", "import", str(unprivileged / "export"), "--set", f"cache.root={unprivileged}/locked/c", *config
    )
    assert done.code == 2
    assert "ask its owner" in done.err
    (unprivileged / "thesis").mkdir()
    (unprivileged / "thesis/thesis.tex").write_text("mine")
    done = pipeline("cache", "export", str(unprivileged / "thesis"), *config)
    assert "the folder is neither empty nor an export" in done.err
    assert "submit" not in done.err
