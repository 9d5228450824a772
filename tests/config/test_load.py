"""What a person writes is what the pipeline gets, and `config show` knows from where."""

from __future__ import annotations

import json
import os
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


def test_command_line_beats_the_file_and_the_last_wins(loaded: Any) -> None:
    data = loaded(
        "data: {path: a, limit: 3, splits: s.csv}\n", "data.limit=4", "data.limit=5", "data.splits="
    ).config.data
    assert (data.limit, data.splits) == (5, None)
    scan = loaded("data: {path: a}\ncluster: {scan: {cpus: 4}}\n", "cluster.scan={time: 2h}").config.cluster.scan
    assert (scan.cpus, scan.time) == (4, 7200), "a section that is set adds to that of the file"
    assert loaded("data: {path: a}\ncluster: nonsense\n", "cluster.scan.cpus=2").config.cluster.scan.cpus == 2


def test_what_people_write_is_read_as_they_mean_it(loaded: Any) -> None:
    def data(text: str | bytes) -> Any:
        return loaded(text).config.data

    for chains in ("[no, on, N, Y]", "[ no, 'on', \"N\", Y ]", "\n  - no\n  - on\n  - N\n  - Y"):
        assert data(f"data:\n  path: a\n  receptor_chains: {chains}\n").receptor_chains == ("no", "on", "N", "Y")
    for time in ("01:30:00", "1:30:00", "'1:30:00'", "90m", "5400s", "0-01:30:00"):
        text = f"data: {{path: a}}\ncluster:\n  scan:\n    time: {time}\n"
        assert loaded(text).config.cluster.scan.time == 5400, time
    assert data("data: {path: a, max_rejected_fraction: 1e-3}\n").max_rejected_fraction == 0.001
    assert data("data: {path: a, receptor_chains: &both [A], pattern: *both}\n").pattern == ("A",)
    assert data(b"\xef\xbb\xbfdata:\r\n  path: a\r\n  limit: 2\r\n").limit == 2
    for text in ("data:\n  path: a\ncache:\n", "data:\n  path: a\ncache: # nothing\n  # root: x\n"):
        assert loaded(text).config.cache.visibility_s == 10


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


def test_check_names_inputs_that_are_missing_and_where_they_were_written(loaded: Any, project: Path) -> None:
    (project / "m.csv").touch()
    missing = missing_inputs(loaded("data:\n  path: m.csv\n  splits: gone.csv\n", "data.structures_dir=pdbs"))
    assert missing == [
        f"--set: data.structures_dir: {project}/pdbs does not exist or is not readable",
        f"pipeline.yaml:3: data.splits: {project}/gone.csv does not exist or is not readable",
    ]


def test_file_is_found_in_the_promised_order(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "configs").mkdir()
    order = [Path("configs/pipeline.yaml"), Path("pipeline.yaml"), Path("environment.yaml"), Path("explicit.yaml")]
    for path in order:
        path.touch()
        if path.name == "environment.yaml":
            monkeypatch.setenv("PIPELINE_CONFIG", str(path))
        assert find_config(path if path.name == "explicit.yaml" else None) == path


def test_a_folder_whose_name_is_not_utf8_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = project / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"caf.udce9.* is not UTF-8; rename"):
        read_config(None, ["data.path=a"])


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
    assert find_config(None) == project / "pipeline.yaml"
    (project / "pipeline.yaml").unlink()
    with pytest.raises(ConfigError, match=r"\$PIPELINE_CONFIG: .* is a directory"):
        find_config(None)


def test_caches_under_it_are_paths_from_where_they_are_written(
    loaded: Any, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUP", "/group")
    text = "data: {path: a}\ncache: {under: [shared, ../theirs, $GROUP/cache, /abs], stage: $NOT_SET_HERE/x}\n"
    config, here = loaded(text).config, project.absolute()
    assert config.cache.under == (here / "shared", here.parent / "theirs", Path("/group/cache"), Path("/abs"))
    assert config.cache.stage == "$NOT_SET_HERE/x", "the folder of a node is not looked up here"
    assert from_resolved(dump_resolved(config)) == config
    assert loaded(text, "cache.under=[]").config.cache.under == ()
    (project / "there").mkdir()
    missing = missing_inputs(loaded("data: {path: a}\ncache:\n  under: [there, gone]\n"))
    assert [line.split()[:2] for line in missing if "cache.under" in line] == [["pipeline.yaml:3:", "cache.under:"]]
