"""The scripts in `sbatch/`, submitted by hand as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cluster import sbatch
from pipeline.setup.demo_project import make_project
from tests.cluster.test_sbatch import Node

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("healthy")]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that submits a script in the folder of a small project and returns what it printed."""
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PIPELINE_CONFIG", raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")

    def submit(stage: str, *options: str) -> str:
        log = tmp_path / f"{stage}.out"
        words = ["sbatch", "--wait", f"--output={log}", *options, str(ROOT / "sbatch" / f"{stage}.sbatch")]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + (log.read_text() if log.exists() else "")
        return log.read_text()

    return submit


def done_of(said: str) -> dict[str, str]:
    """Return the stages that are done, in order, and the first number of what each made."""
    return dict(re.findall(r"^✓ (\w+) +(\d+) ", said, flags=re.MULTILINE))


@pytest.mark.nightly
def test_scan_as_it_is(by_hand: Callable[..., str]) -> None:
    assert done_of(by_hand("scan")) == {"scan": "24"}


@pytest.mark.nightly
def test_graph_does_what_it_needs_before_it(by_hand: Callable[..., str]) -> None:
    assert list(done_of(by_hand("graph"))) == ["scan", "graph"]


@pytest.mark.nightly
def test_validate_says_that_a_cache_is_whole(by_hand: Callable[..., str]) -> None:
    by_hand("scan")
    assert done_of(by_hand("validate")) == {"validate": "3"}  # shards


@pytest.mark.nightly
def test_embed_on_a_node_without_gpus(by_hand: Callable[..., str]) -> None:
    said = by_hand("embed", "--gres=none", "--mem=4G", "--cpus-per-task=2")
    assert done_of(said) == {"scan": "24", "embed": "30"}


def test_embed_uses_the_gpus_that_it_was_given(node_words: Callable[..., list[str]]) -> None:
    assert node_words("embed", SLURM_GPUS_ON_NODE="2")[-1] == "cluster.embed.gpus=2"


@pytest.fixture
def node_words(tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that runs a script as it is, and returns what it has srun start."""

    def run(stage: str, **environment: str) -> list[str]:
        node = Node(tmp_path)
        assert node.run((ROOT / "sbatch" / f"{stage}.sbatch").read_text(), **environment).returncode == 0
        return node.said("srun")

    return run


def test_names_of_scripts_are_those_of_the_stages() -> None:
    stages = {"scan", "embed", "graph", "train", "evaluate", "predict", "validate"}
    assert {path.stem for path in (ROOT / "sbatch").glob("*.sbatch")} == {*stages, "supervise", "allocation"}
    assert sbatch.template("embed") != sbatch.template("scan")
