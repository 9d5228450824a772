"""What the pages say to type on a cluster, typed on one."""

from __future__ import annotations

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
    """A reader who waits until what they submitted has ended, and goes on reading then."""

    def after(self, command: str) -> None:
        if command.startswith("pipeline submit") and "--dry-run" not in command and "--emit" not in command:
            deadline = time.monotonic() + DEADLINE_S
            while ": running" in (told := self.run("pipeline status").stdout).splitlines()[0]:
                assert time.monotonic() < deadline, told
                time.sleep(0.5)


@pytest.fixture
def reader(healthy: Cluster, tmp_path: Path) -> Waiting:
    """Return somebody who has a complex in a folder, and the cluster."""
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
    page = Page(ROOT / "docs/cluster.md")
    assert any(block.argument == "slow" for block in page.blocks)
    reader.follow(page)
    assert any((reader.folder / "models").glob("interface-*/checkpoints/*"))
