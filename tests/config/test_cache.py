"""Where results are kept: caches under one's own, and the folder of a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.load import dump_resolved, from_resolved, missing_inputs, read_config

DATA = "data: {path: data/manifest.csv}\n"


def write(text: str) -> Path:
    path = Path("pipeline.yaml")
    path.write_text(DATA + text)
    return path


def test_caches_under_it_are_paths_from_where_they_are_written(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP", "/group")
    path = write("cache: {under: [shared, ../theirs, $GROUP/cache, /abs]}\n")
    here = project.absolute()
    found = read_config(path).config.cache.under
    assert found == (here / "shared", here.parent / "theirs", Path("/group/cache"), Path("/abs"))
    assert read_config(path, ["cache.under=[]"]).config.cache.under == ()
    assert from_resolved(dump_resolved(read_config(path).config)) == read_config(path).config


def test_the_folder_of_a_node_is_not_looked_up_here(project: Path) -> None:
    config = read_config(write("cache: {stage: $NOT_SET_HERE/x}\n")).config
    assert config.cache.stage == "$NOT_SET_HERE/x"
    assert from_resolved(dump_resolved(config)) == config
    assert read_config(write("cache: {stage: null}\n")).config.cache.stage is None


def test_a_cache_under_it_that_is_not_there_is_named(project: Path) -> None:
    (project / "there").mkdir()
    loaded = read_config(write("cache:\n  under: [there, gone]\n"))
    assert [line for line in missing_inputs(loaded) if "cache.under" in line] == [
        f"pipeline.yaml:3: cache.under: {project.absolute() / 'gone'} does not exist, or may not be read"
    ]
