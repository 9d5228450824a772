"""`pipeline init` and `pipeline doctor` as a newcomer types them, on a real cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import read_config
from pipeline.encoder.synth import write_random_checkpoint
from tests.testkit.cluster import Cluster
from tests.testkit.cluster import config as cluster_config
from tests.testkit.command import Command
from tests.testkit.project import write_complex


@pytest.fixture
def project(cluster: Cluster, pipeline: Command, tmp_path: Path) -> Path:
    """A project made by `pipeline init`, with data and weights put in place."""
    assert pipeline("init").code == 0
    write_random_checkpoint(read_config(tmp_path / "pipeline.yaml").config.embed.weights, layers=1, dim=16, heads=2)
    (tmp_path / "data").mkdir()
    write_complex(tmp_path / "data/c0.pdb", 0)
    rows = ["id,path,receptor_chains,ligand_chains", "c0,c0.pdb,A,B"]
    (tmp_path / "data/manifest.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


def rows(pipeline: Command, *sets: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit code of `doctor` and its rows; the last where several have a name."""
    done = pipeline("doctor", "--json", *(word for one in sets for word in ("--set", one)))
    return done.code, {row["what"]: row for row in json.loads(done.out)}


@pytest.mark.nightly
def test_what_was_found_is_what_the_cluster_is(project: Path) -> None:
    loaded = read_config(project / "pipeline.yaml")
    (profile,) = (project / "sites").iterdir()
    assert (loaded.config.cluster.executor, loaded.config.cluster.site) == ("slurm", profile.stem)
    assert (loaded.config.cluster.slurm.memory, loaded.config.cluster.slurm.cards) == ("mem", ())
    assert loaded.config.cluster.embed.gpus == 1
    text = profile.read_text()
    assert f"MaxArraySize. auto: {cluster_config.MAX_ARRAY_SIZE}." in text
    assert f"your default, {cluster_config.ACCOUNT}." in text
    for name in ("main*", "preempt", "urgent", "short"):
        assert any(line.startswith(f"# {name} ") and "2 gpu" in line for line in text.splitlines()), name


@pytest.mark.nightly
def test_a_new_project_is_one_that_the_cluster_takes(project: Path, pipeline: Command) -> None:
    width = "train.options.embedding_dim=16"  # of the small weights
    assert pipeline("config", "check", "--set", width).code == 0
    code, found = rows(pipeline, width)
    assert code == 0, found
    assert (found["job scan"]["verdict"], found["job supervise"]["verdict"]) == ("ok", "ok")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("setting", "row", "words"),
    [
        ("cluster.slurm.partition=mian", "job scan", "Invalid partition name specified"),
        ("cluster.slurm.account=nobody", "job scan", "Invalid account"),
        ("cluster.slurm.qos=huge", "job scan", "Invalid qos specification"),
        ("cluster.scan.mem=900GiB", "job scan", "memory"),
        ("cluster.slurm.constraint=nosuch", "job scan", "feature"),
        ("cluster.supervisor.partition=nosuch", "job supervise", "Invalid partition name specified"),
    ],
)
def test_what_the_scheduler_refuses_is_said_in_its_words_with_a_remedy(
    project: Path, pipeline: Command, setting: str, row: str, words: str
) -> None:
    code, found = rows(pipeline, setting)
    assert code == 6
    assert (found[row]["verdict"], found[row]["exit_code"]) == ("BAD", 6)
    assert words in found[row]["found"]
    assert "cluster." in found[row]["remedy"]


@pytest.mark.nightly
def test_nothing_was_submitted(project: Path, pipeline: Command, cluster: Cluster) -> None:
    from pipeline.cluster import slurm_commands

    rows(pipeline)
    assert slurm_commands.named("RUN-scan-0") == set()  # the name of the job that was tested
