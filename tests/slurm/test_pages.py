"""Typing on a real cluster what the pages say to type there."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from pipeline.structures.synthetic import complex_pdb
from tests.docs.blocks import Page
from tests.docs.reader import ENVIRONMENT, Reader
from tests.docs.test_pages import ALL, ROOT, name
from tests.testkit.cluster import Cluster

pytestmark = pytest.mark.slurm
DEADLINE_S = 240.0


class Waiting(Reader):
    """A reader who waits for each submitted run to end before reading on."""

    def after(self, command: str) -> None:
        if command.startswith("pipeline submit") and "--dry-run" not in command and "--emit" not in command:
            deadline = time.monotonic() + DEADLINE_S
            while json.loads(status := self.run("pipeline status --json").stdout)["state"] == "running":
                assert time.monotonic() < deadline, status
                time.sleep(0.5)


@pytest.fixture
def reader(healthy: Cluster, tmp_path: Path) -> Waiting:
    """Return a reader with one complex in a folder, and the cluster."""
    (tmp_path / "structures").mkdir()
    (tmp_path / "structures" / "c0.pdb").write_bytes(complex_pdb(0, 40, 40))
    environment = {**ENVIRONMENT, "SLURM_CONF": os.environ["SLURM_CONF"]}
    return Waiting(tmp_path, typing=("run", "cluster"), environment=environment)


@pytest.mark.nightly
@pytest.mark.parametrize("page", [page for page in ALL if Page(page).has("cluster")], ids=name)
def test_every_command_for_a_cluster_works_in_its_order(reader: Waiting, page: Path) -> None:
    reader.patient = False
    reader.follow(Page(page))
    assert reader.typed >= 3


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_page_goes_up_to_a_trained_model_on_a_cluster(reader: Waiting) -> None:
    page = Page(ROOT / "docs/tutorials/first_cluster_run.md")
    assert any(block.argument == "slow" for block in page.blocks)
    reader.follow(page)
    assert any((reader.folder / "models").glob("interface-*/checkpoints/*"))
