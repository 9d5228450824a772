"""`pipeline cache export` and `import` as people type them."""

from __future__ import annotations

import encodings.utf_8_sig  # noqa: F401 - who has no privileges may not be able to import it later
import http.client  # noqa: F401 - so, too
import json
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
    assert f"{files} files copied" in out.out
    assert "cd '../my export' && sha256sum --check --quiet MANIFEST.sha256" in out.out
    assert "pipeline cache import '../my export'" in out.out
    assert "export: " in out.err
    monkeypatch.chdir(projects / "there")
    into = pipeline("cache", "import", "../my export")
    assert into.code == 0, into.err
    assert "graph" in into.out
    store = CacheFolder(projects / "there/cache").kind("graph")
    assert all(is_right(store.get(key_of(number)), key_of(number)) for number in range(30))
    again = pipeline("cache", "import", "../my export")
    assert f"0 files copied (0 B), {files} were there already" in again.out


def test_the_outcome_is_one_json_document(pipeline: Command, projects: Path) -> None:
    told = json.loads(pipeline("cache", "export", "../export", "--kind", "graph", "--json").out)
    assert told["kinds"] == {"graph": told["copied"]}
    assert (told["there"], told["refused"]) == (0, [])
    told = json.loads(pipeline("cache", "import", "../export", "--json").out)
    assert told["there"] == told["kinds"]["graph"]


def test_damage_is_named_and_ends_with_4(pipeline: Command, projects: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = spoil(projects / "here/cache")
    out = pipeline("cache", "export", "../export", "--json")
    assert out.code == 4
    assert [one["file"] for one in json.loads(out.out)["refused"]] == [f"graph/shards/{path.name}"]
    assert f"1 file was not exported\n  graph/shards/{path.name}: the shard's end is damaged or missing" in out.err
    assert "next: pipeline cache validate --full" in out.err
    path = spoil(projects / "export")
    monkeypatch.chdir(projects / "there")
    into = pipeline("cache", "import", "../export")
    assert into.code == 4
    assert path.name in into.err
    assert "next: pipeline cache import ../export" in into.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("export", "cache/inside"), 2, "cannot lie in its cache"),
        (("export", "."), 2, "cannot lie in its cache"),
        (("export", "../export", "--kind", "nothing"), 2, "there are graph, scan"),
        (("import", "../nowhere"), 2, "no export of a cache"),
        (("import", "cache"), 2, "no export of a cache"),
        (("export",), 2, "Missing argument"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    pipeline: Command, projects: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    done = pipeline("cache", *words)
    assert done.code == code
    assert said in done.err


@pytest.mark.parametrize("verb", ["export", "import"])
@pytest.mark.parametrize("place", ["graph/shards", "graph", "extra/shards"])
def test_nothing_is_written_or_read_through_a_link_that_leads_out(
    pipeline: Command, projects: Path, verb: str, place: str
) -> None:
    assert pipeline("cache", "export", "../export").code == 0
    (projects / "outside").mkdir()
    link = projects / "here/cache" / place
    link.parent.mkdir(exist_ok=True)
    if link.exists():
        link.rename(projects / "moved")
    link.symlink_to(projects / "outside")
    done = pipeline("cache", verb, "../export")
    assert done.code == 2
    assert "a symbolic link leads out of the cache" in done.err
    assert list((projects / "outside").iterdir()) == []


@pytest.mark.parametrize("verb", ["export", "import", "validate"])
def test_links_that_lead_round_in_a_circle_are_refused(pipeline: Command, projects: Path, verb: str) -> None:
    assert pipeline("cache", "export", "../export").code == 0
    shards = projects / "here/cache/graph/shards"
    (shards / "a.safetensors").symlink_to(shards / "b.safetensors")
    (shards / "b.safetensors").symlink_to(shards / "a.safetensors")
    done = pipeline("cache", verb, *(["../export"] if verb != "validate" else []))
    assert done.code == 2
    assert "a symbolic link leads round in a circle" in done.err


def test_an_export_that_is_not_finished_is_refused(pipeline: Command, projects: Path) -> None:
    assert pipeline("cache", "export", "../export").code == 0
    (projects / "export" / MANIFEST).unlink()
    done = pipeline("cache", "import", "../export")
    assert done.code == 4
    assert "the export is not finished: it has no manifest" in done.err


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
    assert "the folder is not empty, and no export" in done.err
    assert "submit" not in done.err
