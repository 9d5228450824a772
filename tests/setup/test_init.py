"""`pipeline init` writes what a newcomer can read and the pipeline can load, on any cluster and on none."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.site_facts import Site, parse_nodes, parse_partitions, parse_settings
from pipeline.cluster.slurm_words import Gpus, parse_gres
from pipeline.config.load import read_config
from pipeline.config.schema import Config
from pipeline.config.schema_cluster import CardSection, SlurmSection
from pipeline.files import shipped
from pipeline.memory.hardware.gpus import sizes_gib
from pipeline.setup.init_files import config_text, file_name, profile_text, write_init_files, yaml_word
from tests.setup.clusters import ALL, BARE, MIXED, NO_GPUS, PLAIN, PLAIN_CONFIG, partition, site_of
from tests.testkit.command import Command

GIB = 1 << 30


@pytest.fixture
def started(tmp_path: Path) -> Any:
    """Start a project on a cluster and load what was written."""

    def start(printed: dict[str, str]) -> Config:
        return read_config(write_init_files(tmp_path / "project", site_of(printed)).config).config

    return start


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("(null)", ()),
        ("", ()),
        ("gpu:2", (Gpus("", 2),)),
        ("gpu", (Gpus("", 1),)),
        ("gpu:a100:4(S:0-1)", (Gpus("a100", 4),)),
        ("gpu:a100:4(S:0,3),nvme:3500", (Gpus("a100", 4),)),
        ("nvme:1,gpu:4(S:0-7),cpu:72", (Gpus("", 4),)),
        ("gpu:1g.10gb:2,gpu:2g.20gb:1", (Gpus("1g.10gb", 2), Gpus("2g.20gb", 1))),
        ("gpu:a100_1g.5gb:28(S:0-1)", (Gpus("a100_1g.5gb", 28),)),
        ("gpu:tesla_v100-pcie-32gb:2", (Gpus("tesla_v100-pcie-32gb", 2),)),
        ("gpu:kepler:no_consume:2", (Gpus("kepler", 2),)),
        ("gpu:a100:2,shard:a100:16,mps:200", (Gpus("a100", 2),)),
        ("gpus:3,gpu_mem:80G", ()),
    ],
)
def test_gpus_are_read_from_what_a_node_has(text: str, found: tuple[Gpus, ...]) -> None:
    assert parse_gres(text) == found


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("a100", (39, 79)),
        ("nvidia_a100-sxm4-80gb", (79,)),
        ("A100-PCIE-40GB", (39,)),
        ("a100-80", (79,)),
        ("nvidia_h100_80gb_hbm3", (79,)),
        ("h200", (140,)),
        ("h200.35gb", (32,)),
        ("v100", (15, 31)),
        ("tesla_v100-sxm2-32gb", (31,)),
        ("1g.10gb", (9,)),
        ("a100_3g.20gb", (18,)),
        ("rtx_pro_6000_blackwell", (95,)),
        ("nvidia_rtx_6000_ada_generation", (47,)),
        ("geforce_gtx_1080_ti", (10,)),
        ("rtx2080ti", (10,)),
        ("a10", (22,)),
        ("l4", (22,)),
        ("l40s", (44,)),
        ("t4", (14,)),
        ("gh200", ()),
        ("mi300", ()),
        ("", ()),
        ("mystery-48g", (45,)),
    ],
)
def test_a_name_promises_no_more_memory_than_the_card_has(name: str, sizes: tuple[int, ...]) -> None:
    assert sizes_gib(name) == sizes


def test_settings_are_read_as_they_stand() -> None:
    settings = parse_settings(PLAIN_CONFIG)
    assert settings["SchedulerParameters"] == "bf_interval=1,bf_continue,batch_sched_delay=0"
    assert settings["SlurmctldHost[0]"] == "vm(127.0.0.1)"
    assert settings["PowerPlugin"] == ""
    assert settings["ConstrainRAMSpace"] == "yes"


def test_partitions_are_read_with_their_limits() -> None:
    main, long = parse_partitions(partition("main", default=True) + "\n" + partition("l-1", time="UNLIMITED") + "\n")
    assert (main.is_default, main.is_up, main.time_s, main.nodes, main.accounts) == (True, True, 86_400, 3, ())
    assert (long.name, long.is_default, long.time_s) == ("l-1", False, None)
    assert parse_partitions("No partitions in the system\n") == ()


def test_a_line_that_makes_no_sense_is_left_out() -> None:
    assert [nodes.partition for nodes in parse_nodes(BARE["nodes"])] == ["no", "gpu:fast"]


@pytest.mark.parametrize(
    ("config", "counts", "limits"),
    [
        (PLAIN_CONFIG, True, True),
        (PLAIN_CONFIG.replace("ConstrainRAMSpace       = yes", "ConstrainRAMSpace       = no"), True, False),
        (PLAIN_CONFIG.replace("ConstrainRAMSpace", "Other"), True, None),
        (PLAIN_CONFIG.replace("task/cgroup", "task/affinity"), True, False),
        (PLAIN_CONFIG.replace("task/cgroup", "affinity,cgroup"), True, True),
        (PLAIN_CONFIG.replace("CR_CORE_MEMORY", "CR_CORE"), False, False),
        (PLAIN_CONFIG.replace("JobAcctGatherParams     = (null)", "JobAcctGatherParams = OverMemoryKill"), True, True),
        (MIXED["config"], True, None),
        (BARE["config"], False, False),
        ("ClusterName = x\n", None, None),
    ],
)
def test_whether_memory_is_given_out_and_limited(config: str, counts: bool | None, limits: bool | None) -> None:
    site = Site(parse_settings(config))
    assert (site.counts_memory, site.limits_memory) == (counts, limits)


@pytest.mark.parametrize("printed", ALL.values(), ids=ALL.keys())
def test_what_is_written_loads_on_every_cluster(started: Any, printed: dict[str, str]) -> None:
    config = started(printed)
    assert config.cluster.executor == "slurm"
    assert config.cluster.slurm.name == file_name(site_of(printed).name)
    assert config.cluster.slurm.model_copy(update={"name": "", "partition": None, "cards": (), "memory": "mem"}) == (
        SlurmSection().model_copy(update={"name": ""})
    )


def test_a_plain_cluster_needs_nothing_but_its_name(started: Any) -> None:
    assert started(PLAIN).cluster.slurm == SlurmSection(name="plain")
    text = profile_text(site_of(PLAIN))
    assert "# main*      3      4      5.9 GiB  2 gpu  1-00:00:00" in text
    assert "your default, lab. You may charge lab, root." in text
    assert "secret" not in text  # an account of another cluster
    assert "50 in account lab, 4 in QOS tiny" in text
    assert "# - {mem: ?GiB}   # its memory is not told; also in preempt, short" in text


def test_mixed_cards_are_told_apart_by_type_feature_and_partition(started: Any) -> None:
    config = started(MIXED)
    assert config.cluster.slurm.cards == (
        CardSection(gres="1g.10gb", partition="slices", mem=9 * GIB),
        CardSection(gres="3g.40gb", partition="slices", mem=37 * GIB),
        CardSection(gres="a100", feature="a100-40g", partition="gpu", mem=39 * GIB),
        CardSection(gres="a100", feature="a100-80g", partition="gpu", mem=79 * GIB),
        CardSection(gres="tesla_v100-sxm2-32gb", partition="scavenge", mem=31 * GIB),
    )
    text = profile_text(site_of(MIXED))
    assert "# - {gres: p100, partition: old, mem: 11GiB}   # or 15GiB: which of them is not told; old is not up" in text
    assert "# - {gres: gtx1080ti, partition: old, mem: 10GiB}   # old is not up" in text
    assert "mem: 79GiB}   # hopper takes no account of yours, but physics, astro" in text
    assert "also in scavenge" in text
    assert "Without GPUs: cpu." in text
    assert "# hopper takes no account of yours, but physics, astro." in text


def test_a_stage_goes_where_the_gpus_are_when_the_default_has_none(started: Any) -> None:
    embed = started(MIXED).cluster.embed
    assert (embed.gpus, embed.partition) == (1, "gpu")


def test_a_cluster_without_gpus_embeds_on_cores(started: Any) -> None:
    config = started(NO_GPUS)
    assert (config.cluster.embed.gpus, config.cluster.slurm.cards) == (0, ())
    assert "No GPUs were found" in profile_text(site_of(NO_GPUS))


def test_without_a_default_partition_one_is_named_and_names_that_yaml_would_misread_are_quoted(started: Any) -> None:
    config = started(BARE)
    assert config.cluster.slurm.partition == "gpu:fast"
    assert config.cluster.slurm.memory == "none"
    text = profile_text(site_of(BARE))
    assert "Could not be asked: sacctmgr: error: Access denied" in text
    assert "one must be named: no, gpu:fast" in text


@pytest.mark.parametrize("name", ["null", "true", "3", "1e3", "😀", "a b", "é", "a: b", "- x", "#x", '"', "~", "{}"])
def test_any_name_survives_yaml(tmp_path: Path, name: str) -> None:
    (tmp_path / "pipeline.yaml").write_text(
        f"data: {{path: a}}\ncluster: {{slurm: {{partition: {yaml_word(name)}}}}}\n"
    )
    assert read_config(tmp_path / "pipeline.yaml").config.cluster.slurm.partition == name


@pytest.mark.parametrize("name", ["../../etc/x", "/", "..", "a\nb", "", "β"])
def test_no_cluster_can_choose_where_its_profile_goes(name: str) -> None:
    assert os.sep not in file_name(name)
    assert file_name(name) not in ("", ".", "..")


@pytest.mark.parametrize("key", ["SLURM_VERSION", "SelectTypeParameters", "ClusterName"])
def test_a_comment_cannot_be_broken_out_of(tmp_path: Path, key: str) -> None:
    site = site_of(PLAIN)
    evil = "22\nslurm: {account: evil}\n#"
    site = replace(site, settings={**site.settings, key: evil}, silent=(evil,), default_account=evil)
    site = replace(site, partitions=tuple(replace(one, name=evil) for one in site.partitions))
    assert read_config(write_init_files(tmp_path, site).config).config.cluster.slurm.account is None


def test_what_is_written_is_short_enough_to_read_and_no_line_is_too_long() -> None:
    for printed in ALL.values():
        site = site_of(printed)
        for text in (config_text(site), profile_text(site)):
            assert len(text.splitlines()) < 70
            assert max(map(len, text.splitlines())) <= 130


def test_without_slurm_jobs_run_here_and_it_says_so(
    pipeline: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = pipeline("init", "new project")
    assert (done.code, "not on the PATH" in done.err) == (0, True)
    assert "cd 'new project'" in done.out
    folder = tmp_path / "new project"
    assert read_config(folder / "pipeline.yaml").config.cluster.executor == "local"
    assert [path.name for path in folder.iterdir()] == ["pipeline.yaml"]


def test_a_controller_that_does_not_answer_leaves_a_project_for_this_machine(
    pipeline: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo"):
        (tools / name).write_text("#!/bin/sh\necho 'scontrol: error: Unable to contact slurm controller' >&2\nexit 1\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    done = pipeline("init")
    assert (done.code, "Unable to contact slurm controller" in done.err) == (0, True)
    assert read_config(tmp_path / "pipeline.yaml").config.cluster.executor == "local"


def test_nothing_is_ever_written_over(pipeline: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "pipeline.yaml").write_text("mine\n")
    done = pipeline("init")
    assert (done.code, "next: pipeline init NEWFOLDER" in done.err) == (2, True)
    assert (tmp_path / "pipeline.yaml").read_text() == "mine\n"
    assert [path.name for path in tmp_path.iterdir()] == ["pipeline.yaml"]


def test_a_profile_that_is_there_stops_it_before_anything_is_written(tmp_path: Path) -> None:
    from pipeline.errors import ConfigError

    (tmp_path / "sites").mkdir()
    (tmp_path / "sites/plain.yaml").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="exists already"):
        write_init_files(tmp_path, site_of(PLAIN))
    assert [path.name for path in tmp_path.iterdir()] == ["sites"]


def test_a_disk_that_was_full_leaves_nothing_that_stops_a_second_try(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from pipeline.errors import ConfigError

    opened = Path.open

    def full(path: Path, *_how: Any, **_more: Any) -> Any:
        if path.name == "pipeline.yaml":
            path.touch()
            path = Path("/dev/full")
        return opened(path, "w")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(ConfigError, match="No space left"):
        write_init_files(tmp_path, site_of(PLAIN))
    monkeypatch.undo()
    assert write_init_files(tmp_path, site_of(PLAIN)).profile is not None


@pytest.mark.parametrize("folder", ["file/below", "/proc/none"])
def test_a_folder_that_cannot_be_made_is_an_error_with_a_remedy(
    pipeline: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "file").touch()
    done = pipeline("init", folder)
    assert (done.code, "cannot write" in done.err, "next:" in done.err) == (2, True, True)


@pytest.mark.parametrize("name", sorted(path.stem for path in shipped("configs/recipes").glob("*.yaml")))
def test_a_recipe_makes_a_project_that_only_lacks_its_data(pipeline: Command, tmp_path: Path, name: str) -> None:
    assert pipeline("init", name, "--recipe", name).code == 0
    loaded = read_config(tmp_path / name / "pipeline.yaml")
    assert loaded.config.train.task is not None
    assert "pipeline.yaml:" in loaded.origins["cluster.executor"], "where its jobs run is said"


def test_a_recipe_that_nobody_knows_is_refused_with_the_nearest(pipeline: Command) -> None:
    done = pipeline("init", "x", "--recipe", "complex_dock")
    assert done.code == 2
    assert "did you mean complex_docking?" in done.err
    assert not Path("x").exists()
