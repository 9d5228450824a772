"""`pipeline init` writes what a newcomer can read and the pipeline can load, on any cluster and on none."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.slurm_words import Gpus, parse_gres
from pipeline.config.load import read_config
from pipeline.config.schema import Config
from pipeline.config.schema_cluster import CardSection, SlurmSection
from pipeline.errors import ConfigError
from pipeline.files import shipped
from pipeline.memory.hardware.gpus import sizes_gib
from pipeline.setup.init_files import config_text, file_name, profile_text, write_init_files, yaml_word
from tests.setup.clusters import ALL, BARE, MIXED, NO_GPUS, PLAIN, PLAIN_CONFIG, site_of
from tests.testkit.command import Command
from tests.testkit.stubs import program

GIB = 1 << 30
GOLDEN = Path(__file__).parent / "golden"
REAL = sorted((Path(__file__).parents[1] / "reference/structures/complexes").glob("*.pdb"))


@pytest.fixture
def started(tmp_path: Path) -> Any:
    """Start a project on a cluster and load what was written."""

    def start(printed: dict[str, str]) -> Config:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        return read_config(write_init_files(folder / "project", site_of(printed))[0]).config

    return start


def test_gpus_are_read_from_what_a_node_has() -> None:
    for text, found in {
        "(null)": (),
        "": (),
        "gpu": (Gpus("", 1),),
        "gpu:a100:4(S:0-1)": (Gpus("a100", 4),),
        "gpu:a100:4(S:0,3),nvme:3500": (Gpus("a100", 4),),
        "gpu:1g.10gb:2,gpu:2g.20gb:1": (Gpus("1g.10gb", 2), Gpus("2g.20gb", 1)),
        "gpu:a100_1g.5gb:28(S:0-1)": (Gpus("a100_1g.5gb", 28),),
        "gpu:tesla_v100-pcie-32gb:2": (Gpus("tesla_v100-pcie-32gb", 2),),
        "gpu:kepler:no_consume:2": (Gpus("kepler", 2),),
        "gpu:a100:2,shard:a100:16,mps:200": (Gpus("a100", 2),),
        "gpus:3,gpu_mem:80G": (),
    }.items():
        assert parse_gres(text) == found, text


def test_a_name_promises_no_more_memory_than_the_card_has() -> None:
    for name, sizes in {
        "a100": (39, 79),
        "nvidia_a100-sxm4-80gb": (79,),
        "A100-PCIE-40GB": (39,),
        "nvidia_h100_80gb_hbm3": (79,),
        "h200": (140,),
        "tesla_v100-sxm2-32gb": (31,),
        "1g.10gb": (9,),
        "a100_3g.20gb": (18,),
        "rtx_pro_6000_blackwell": (95,),
        "nvidia_rtx_6000_ada_generation": (47,),
        "gh200": (),
        "": (),
        "mystery-48g": (45,),
    }.items():
        assert sizes_gib(name) == sizes, name


def test_whether_the_scheduler_allocates_memory() -> None:
    without_memory = PLAIN | {"config": PLAIN_CONFIG.replace("CR_CORE_MEMORY", "CR_CORE")}
    silent = PLAIN | {"config": "ClusterName = x\n"}
    for printed, counts in ((PLAIN, True), (without_memory, False), (MIXED, True), (BARE, False), (silent, None)):
        assert site_of(printed).counts_memory == counts, printed["config"]


def test_what_is_written_is_as_written_down_and_loads_on_every_cluster(started: Any) -> None:
    """With PIPELINE_TEST_WRITE=1 what `init` writes is written down again."""
    for name, printed in ALL.items():
        config, site = started(printed), site_of(printed)
        assert config.cluster.executor == "slurm"
        named = {"name": "", "partition": None, "cards": (), "memory": "mem"}
        assert config.cluster.slurm.name == file_name(site.name)
        assert config.cluster.slurm.model_copy(update=named) == SlurmSection().model_copy(update={"name": ""}), name
        text = f"{config_text(site)}\n--- the profile\n{profile_text(site)}"
        golden = GOLDEN / f"{'-'.join(name.split())}.txt"
        if os.environ.get("PIPELINE_TEST_WRITE"):
            golden.write_text(text)
        assert text == golden.read_text(), name


def test_what_a_cluster_has_decides_what_is_written(started: Any) -> None:
    assert started(PLAIN).cluster.slurm == SlurmSection(name="plain")
    assert "secret" not in profile_text(site_of(PLAIN))  # an account of another cluster
    mixed = started(MIXED).cluster
    assert mixed.slurm.cards == (  # told apart by type, feature and partition
        CardSection(gres="1g.10gb", partition="slices", mem=9 * GIB),
        CardSection(gres="3g.40gb", partition="slices", mem=37 * GIB),
        CardSection(gres="a100", feature="a100-40g", partition="gpu", mem=39 * GIB),
        CardSection(gres="a100", feature="a100-80g", partition="gpu", mem=79 * GIB),
        CardSection(gres="tesla_v100-sxm2-32gb", partition="scavenge", mem=31 * GIB),
    )
    assert (mixed.train.gpus, mixed.train.partition) == (1, "gpu")  # where the GPUs are: the default has none
    assert (started(NO_GPUS).cluster.embed.gpus, started(NO_GPUS).cluster.slurm.cards) == (0, ())
    bare = started(BARE).cluster.slurm  # without a default partition one is named
    assert (bare.partition, bare.memory) == ("gpu:fast", "none")


def test_any_name_survives_yaml(tmp_path: Path) -> None:
    for name in ["null", "true", "3", "1e3", "😀", "a b", "é", "a: b", "- x", "#x", '"', "~", "{}"]:
        (tmp_path / "pipeline.yaml").write_text(
            f"data: {{path: a}}\ncluster: {{slurm: {{partition: {yaml_word(name)}}}}}\n"
        )
        assert read_config(tmp_path / "pipeline.yaml").config.cluster.slurm.partition == name


def test_no_cluster_can_choose_where_its_profile_goes_or_break_out_of_a_comment(tmp_path: Path) -> None:
    for name in ("../../etc/x", "/", "..", "a\nb", "", "β"):
        assert os.sep not in file_name(name)
        assert file_name(name) not in ("", ".", "..")
    evil = "22\nslurm: {account: evil}\n#"
    for key in ("SLURM_VERSION", "SelectTypeParameters", "ClusterName"):
        site = site_of({name: text for name, text in PLAIN.items() if name != "qos"})  # so that sacctmgr is silent
        site.partitions = tuple(replace(one, name=evil) for one in site.partitions)
        site.settings = {**site.settings, key: evil}
        site.default_account = evil
        site._silent["sinfo"] = evil
        written, _ = write_init_files(tmp_path / key, site)
        assert read_config(written).config.cluster.slurm.account is None, key


def test_without_slurm_or_without_an_answer_jobs_run_here_and_it_says_so(
    pipeline: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = pipeline("init", "new project")
    assert (done.code, "cd 'new project'" in done.out) == (0, True)
    assert read_config(tmp_path / "new project/pipeline.yaml").config.cluster.executor == "local"
    assert [path.name for path in (tmp_path / "new project").iterdir()] == ["pipeline.yaml"]
    for name in ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo"):
        program(tmp_path / "bin", name, "echo 'scontrol: error: Unable to contact slurm controller' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    done = pipeline("init")
    assert (done.code, "Unable to contact slurm controller" in done.err) == (0, True)
    assert read_config(tmp_path / "pipeline.yaml").config.cluster.executor == "local"


def test_nothing_is_ever_written_over(pipeline: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "pipeline.yaml").write_text("mine\n")
    assert pipeline("init").code == 2
    assert (tmp_path / "pipeline.yaml").read_text() == "mine\n"
    assert [path.name for path in tmp_path.iterdir()] == ["pipeline.yaml"]
    (tmp_path / "new/sites").mkdir(parents=True)
    (tmp_path / "new/sites/plain.yaml").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="already exists"):
        write_init_files(tmp_path / "new", site_of(PLAIN))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["sites"]
    for folder in ("pipeline.yaml/below", "/proc/none"):
        done = pipeline("init", folder)
        assert (done.code, "cannot write" in done.err) == (2, True), folder


def test_a_recipe_makes_a_project_that_only_lacks_its_data(pipeline: Command, tmp_path: Path) -> None:
    for name in sorted(path.stem for path in shipped("configs/recipes").glob("*.yaml")):
        assert pipeline("init", name, "--recipe", name).code == 0, name
        loaded = read_config(tmp_path / name / "pipeline.yaml")
        assert loaded.config.train.task is not None, name
        assert "pipeline.yaml:" in loaded.origins["cluster.executor"], "where its jobs run is said"
    done = pipeline("init", "x", "--recipe", "complex_dock")
    assert (done.code, "complex_docking" in done.err, Path("x").exists()) == (2, True, False)


@pytest.mark.nightly
def test_a_project_of_init_trains_on_real_structures(pipeline: Command, tmp_path: Path) -> None:
    assert pipeline("init", ".").code == 0
    rows = [f"{path.stem},{path},{split}" for path, split in zip(REAL, ("train", "train", "test"), strict=True)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/manifest.csv").write_text("\n".join(["id,path,split", *rows, ""]))
    small = ["embed.weights=esm2_small.pt", "train.options={embedding_dim: 32, width: 16}", "train.epochs=1"]
    sets = [word for setting in small for word in ("--set", setting)]
    tiny = ("--layers", "2", "--dim", "32", "--heads", "4", "--out", "esm2_small.pt")
    assert pipeline("weights", "synth", *tiny).code == 0
    untrained = pipeline("submit", "--stage", "all", "--dry-run", *sets, "--set", "train.task=null")
    assert "train.task is not set: stopping after graph" in untrained.err
    done = pipeline("submit", "--stage", "all", "--follow", *sets)
    assert done.code == 0, done.err
    assert list(Path("models").glob("interface-*/evaluations/test-*.json"))
