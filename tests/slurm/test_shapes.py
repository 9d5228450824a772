"""Which cards a stage asks for on a cluster of several kinds; and a supervisor that stays on the login node."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.api import cancel, submit
from tests.encoder.sequences import natural
from tests.testkit.cluster import Cluster

pytestmark = pytest.mark.slurm
PIPELINE = str(Path(sys.executable).with_name("pipeline"))
SETTINGS = """
data: {source: fasta, path: s.fasta}
embed: {weights: esm2_tiny.pt, device: cpu}
cluster:
  executor: slurm
  slurm: {poll: 1s, cards: [{feature: small, mem: 64MiB}, {feature: large, mem: 80GiB}]}
  embed: {gpus: 1, mem: 2GiB}
"""


def typed(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PIPELINE, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def featured(healthy: Cluster) -> Iterator[Cluster]:
    """The cluster with one node of large cards."""
    first, *others = healthy.nodes
    for node, feature in ((first, "large"), *((other, "small") for other in others)):
        healthy.run("scontrol", "update", f"NodeName={node}", f"Features={feature}")
    yield healthy
    for node in healthy.nodes:
        healthy.run("scontrol", "update", f"NodeName={node}", "Features=")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    weights = ("--layers", "2", "--dim", "32", "--heads", "4", "--out", "esm2_tiny.pt")
    assert typed(tmp_path, "weights", "synth", *weights).returncode == 0
    text = "".join(f">s{number}\n{sequence}\n" for number, sequence in enumerate(natural(6)))
    (tmp_path / "s.fasta").write_text(text)
    (tmp_path / "pipeline.yaml").write_text(SETTINGS)
    return tmp_path


def ended(folder: Path) -> dict[str, object]:
    deadline = time.monotonic() + 120
    while True:
        state: dict[str, object] = json.loads(typed(folder, "status", "--json").stdout)
        if state["state"] not in ("running", "waiting"):
            return state
        assert time.monotonic() < deadline, state
        time.sleep(0.5)


@pytest.mark.nightly
def test_a_stage_asks_only_for_cards_that_its_plan_fits(featured: Cluster, project: Path) -> None:
    done = typed(project, "submit", "--stage", "embed")
    assert done.returncode == 0, done.stderr
    state = ended(project)
    assert state["state"] == "done", state["error"]
    job = next(iter(stage for stage in state["stages"] if stage["name"] == "embed"))["jobs"][0]  # type: ignore[attr-defined, index]
    assert job["constraint"] == "[large]"
    rows = featured.run("sacct", "-n", "-P", "-X", "-j", job["id"], "-o", "NodeList").stdout.split()
    assert rows == [featured.nodes[0]]


@pytest.mark.nightly
def test_a_plan_that_fits_no_card_is_infeasible(featured: Cluster, project: Path) -> None:
    small = SETTINGS.replace("80GiB", "65MiB")
    (project / "pipeline.yaml").write_text(small)
    assert typed(project, "submit", "--stage", "embed").returncode in (0, 5)
    state = ended(project)
    assert (state["state"], state["exit_code"]) == ("failed", 5)
    assert "large, has 65.0 MiB" in str(state["error"])


@pytest.mark.nightly
def test_a_supervisor_on_the_login_node_brings_a_run_to_its_end(healthy: Cluster, project: Path) -> None:
    login = ("--set", "cluster.supervisor.where=login", "--set", "cluster.slurm.cards=[]")
    done = typed(project, "submit", "--stage", "embed", "--follow", *login)
    assert done.returncode == 0, done.stderr
    assert {stage["state"] for stage in ended(project)["stages"]} == {"done"}
    names = healthy.run("sacct", "-n", "-P", "-X", "-S", "now-10minutes", "-o", "JobName").stdout
    assert Path(str(ended(project)["name"])).name not in "".join(name for name in names.split() if "supervise" in name)


@pytest.mark.nightly
def test_a_program_submits_jobs_by_a_function_and_cancels_them_by_another(healthy: Cluster, project: Path) -> None:
    settings = {"cluster.slurm.cards": []}
    begun = submit(project, "embed", set=settings)
    ended = cancel(project, begun["run"])
    assert (begun["new"], list(begun["plan"]["scripts"])[-1], ended["state"]) == (True, "supervise.sbatch", "stopped")
    healthy.settle()
    done = submit(project, "embed", set=settings, wait=True)
    assert (done["status"]["state"], done["run"] == begun["run"]) == ("done", False)
