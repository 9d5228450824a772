"""What a person writes is what the pipeline gets, and `config show` knows from where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import dump_resolved, find_config, from_resolved, missing_inputs, read_config, settings_shown
from pipeline.errors import ConfigError


def test_one_key_is_enough(loaded: Any, project: Path) -> None:
    config = loaded("data: {path: complexes.csv}\n").config
    assert config.data.path == project / "complexes.csv"
    assert config.cache.root == project / "cache"
    assert config.cluster.runs == project / "runs"
    assert config.structures.max_file_bytes == 64 << 20


def test_command_line_beats_the_file(loaded: Any) -> None:
    assert loaded("data: {path: a, limit: 3}\n", "data.limit=5").config.data.limit == 5


def test_last_set_wins(loaded: Any) -> None:
    assert loaded("data: {path: a}\n", "data.limit=5", "data.limit=null").config.data.limit is None


def test_set_to_nothing_is_null(loaded: Any) -> None:
    assert loaded("data: {path: a, splits: s.csv}\n", "data.splits=").config.data.splits is None


def test_set_of_a_section_adds_to_the_section_of_the_file(loaded: Any) -> None:
    scan = loaded("data: {path: a}\ncluster: {scan: {cpus: 4}}\n", "cluster.scan={time: 2h}").config.cluster.scan
    assert (scan.cpus, scan.time) == (4, 7200)


def test_set_repairs_a_section_that_the_file_spoils(loaded: Any) -> None:
    assert loaded("data: {path: a}\ncluster: nonsense\n", "cluster.scan.cpus=2").config.cluster.scan.cpus == 2


def test_every_value_knows_its_origin(loaded: Any) -> None:
    origins = loaded("data:\n  path: a\n  limit: 3\n  state: bound\n", "data.limit=5").origins
    assert origins["data.path"] == "pipeline.yaml:2"
    assert origins["data.limit"] == "--set"
    assert origins["data.state"] == "pipeline.yaml:4"
    assert origins["data.on_leak"] == "default"
    assert origins["cache.root"] == "default"


def test_show_prints_sizes_and_times_as_people_write_them(loaded: Any) -> None:
    rows = {row.key: row for row in settings_shown(loaded("data: {path: a}\n", "cluster.scan.time=90m"))}
    assert rows["cluster.scan.time"].value == "01:30:00"
    assert rows["cache.shard_bytes"].value == "256MiB"
    assert rows["cluster.scan.time"].origin == "--set"
    assert all(row.meaning for row in rows.values())


def test_paths_of_the_file_start_from_its_folder_and_typed_ones_from_here(project: Path) -> None:
    (project / "configs").mkdir()
    (project / "configs/pipeline.yaml").write_text("data: {path: ../data/m.csv, splits: s.csv}\n")
    data = read_config(Path("configs/pipeline.yaml"), ["data.splits=s.csv"]).config.data
    assert data.path == project / "data/m.csv"
    assert data.splits == project / "s.csv"


def test_home_and_variables_expand(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("SCRATCH", "/scratch")
    config = loaded("data: {path: ~/m.csv}\ncache: {root: '${SCRATCH}/cache'}\n").config
    assert config.data.path == Path("/home/ada/m.csv")
    assert config.cache.root == Path("/scratch/cache")


@pytest.mark.parametrize("written", ["[no, on, N, Y]", "[ no, 'on', \"N\", Y ]", "\n  - no\n  - on\n  - N\n  - Y"])
def test_chains_may_be_called_no_and_on(loaded: Any, written: str) -> None:
    assert loaded(f"data:\n  path: a\n  receptor_chains: {written}\n").config.data.receptor_chains == (
        "no",
        "on",
        "N",
        "Y",
    )


@pytest.mark.parametrize("written", ["01:30:00", "1:30:00", "'1:30:00'", "90m", "5400s", "0-01:30:00"])
def test_times_need_no_quotes(loaded: Any, written: str) -> None:
    assert loaded(f"data: {{path: a}}\ncluster:\n  scan:\n    time: {written}\n").config.cluster.scan.time == 5400


def test_scientific_notation_is_a_number(loaded: Any) -> None:
    assert loaded("data: {path: a, max_rejected_fraction: 1e-3}\n").config.data.max_rejected_fraction == 0.001


@pytest.mark.parametrize("text", ["data:\n  path: a\ncache:\n", "data:\n  path: a\ncache: # nothing\n  # root: x\n"])
def test_section_whose_keys_are_commented_out_is_empty(loaded: Any, text: str) -> None:
    assert loaded(text).config.cache.visibility_s == 10


def test_byte_order_mark_and_windows_line_ends_are_read(loaded: Any) -> None:
    assert loaded(b"\xef\xbb\xbfdata:\r\n  path: a\r\n  limit: 2\r\n").config.data.limit == 2


def test_anchors_are_followed(loaded: Any) -> None:
    text = "data: {path: a, receptor_chains: &both [A], pattern: *both}\n"
    assert loaded(text).config.data.pattern == ("A",)


def test_nothing_but_the_command_line_is_a_configuration(project: Path) -> None:
    loaded = read_config(None, ["data.path=a", "cluster.slots={cpus: 2, mem: 4G}"])
    assert loaded.config.data.path == project / "a"
    assert loaded.config.cluster.slots.mem == 4 << 30
    assert loaded.path is None


def test_frozen_configuration_reads_back_the_same(loaded: Any) -> None:
    config = loaded("data: {path: a}\ncache: {shard_bytes: 1000001}\n", "cluster.scan.time=3-00:00:01").config
    text = dump_resolved(config)
    assert from_resolved(text) == config
    assert json.loads(text)["structures"]["max_file_bytes"] == "64MiB"


def test_frozen_configuration_of_another_version_is_refused_by_name(loaded: Any) -> None:
    text = dump_resolved(loaded("data: {path: a}\n").config).replace('"state"', '"mood"')
    with pytest.raises(ConfigError, match=r"runs/7/config.json: .* data.mood") as refused:
        from_resolved(text, where="runs/7/config.json")
    assert refused.value.remedy


def test_configuration_cannot_be_changed(loaded: Any) -> None:
    config = loaded("data: {path: a}\n").config
    with pytest.raises(ValueError, match="frozen"):
        config.data.limit = 3


def test_check_names_inputs_that_are_missing_and_where_they_were_written(loaded: Any, project: Path) -> None:
    (project / "m.csv").touch()
    missing = missing_inputs(loaded("data:\n  path: m.csv\n  splits: gone.csv\n", "data.structures_dir=pdbs"))
    assert missing == [
        f"--set: data.structures_dir: {project}/pdbs does not exist, or may not be read",
        f"pipeline.yaml:3: data.splits: {project}/gone.csv does not exist, or may not be read",
    ]


def test_file_is_found_in_the_promised_order(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "configs").mkdir()
    order = [Path("configs/pipeline.yaml"), Path("pipeline.yaml"), Path("environment.yaml"), Path("explicit.yaml")]
    for path in order:
        path.touch()
        if path.name == "environment.yaml":
            monkeypatch.setenv("PIPELINE_CONFIG", str(path))
        assert find_config(path if path.name == "explicit.yaml" else None) == path


def test_no_configuration_anywhere_says_what_to_type() -> None:
    with pytest.raises(ConfigError, match=r"neither pipeline.yaml nor configs/pipeline.yaml") as refused:
        find_config(None)
    assert refused.value.remedy.startswith("pipeline init")
    assert "pipeline demo DIR" in refused.value.remedy


def test_configuration_that_is_named_must_exist(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "pipeline.yaml").touch()
    with pytest.raises(ConfigError, match=r"--config: .*gone.yaml does not exist"):
        find_config(Path("gone.yaml"))
    monkeypatch.setenv("PIPELINE_CONFIG", str(project))
    with pytest.raises(ConfigError, match=r"\$PIPELINE_CONFIG: .* is a folder"):
        find_config(None)
