"""What the README says to type on a cluster, typed on one."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from pipeline.structures.synthetic import complex_pdb
from tests.docs.blocks import ENVIRONMENT
from tests.docs.test_readme import README
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm
DEADLINE_S = 120.0


def test_every_command_for_a_cluster_works_in_its_order(healthy: Cluster, tmp_path: Path) -> None:
    (tmp_path / "structures").mkdir()
    (tmp_path / "structures" / "c0.pdb").write_bytes(complex_pdb(0, 40, 40))
    (tmp_path / "pipeline.yaml").write_text("data: {source: glob, path: structures}\n")
    (block,) = README.blocks("cluster")
    typed = [line[2:].split("  #")[0].strip() for line in block["body"].splitlines() if line.startswith("$ ")]
    assert len(typed) >= 8
    for command in typed:
        assert run(command, tmp_path).returncode == 0, command
        if command.startswith("pipeline submit") and "--dry-run" not in command:
            await_end(tmp_path)
    assert "graph: done" in run("pipeline status", tmp_path).stdout


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**ENVIRONMENT, "SLURM_CONF": os.environ["SLURM_CONF"]}
    return subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def await_end(folder: Path) -> None:
    """Wait until the run has ended."""
    deadline = time.monotonic() + DEADLINE_S
    while ": running" in run("pipeline status", folder).stdout.splitlines()[0]:
        assert time.monotonic() < deadline, run("pipeline status", folder).stdout
        time.sleep(0.5)
