"""A published docking benchmark, bound and unbound, from its folder to partners at their true pose."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.dataset.loading import open_loader
from pipeline.tasks.docking.docking_items import bound_frame
from pipeline.training.sampling import SamplerSettings
from tests.testkit.command import Command
from tests.testkit.project import settle, write_config

SUBMIT = ("submit", "--stage", "graph", "--executor", "local", "--follow")
NEAR = 12.0  # Å between CA atoms: those of a contact are so near, but for some whose loops have moved


@pytest.fixture
def benchmark(tmp_path: Path, structures: Path) -> Path:
    """Real pairs as the benchmark is published: a list, and the folder `structures` beside it."""
    folder = tmp_path / "db5" / "structures"
    shutil.copytree(structures / "pairs", folder)
    (folder / "splits.csv").rename(tmp_path / "db5" / "splits.csv")
    settle(folder)
    write_config(tmp_path, data={"source": "pairs", "path": "db5", "splits": "db5/splits.csv", "on_leak": "warn"})
    return tmp_path


@pytest.mark.nightly
def test_a_published_benchmark_is_read_in_both_states_up_to_the_true_pose(pipeline: Command, benchmark: Path) -> None:
    for state in ("bound", "unbound"):
        sets = f"data.state={state}"
        done = pipeline(*SUBMIT, "--set", sets)
        assert done.code == 0, done.err
        report = pipeline("status", "-v").out
        assert "5 items: 5 usable, 0 rejected" in report
        assert "splits: train 3, val 1, test 1" in report
        loader = open_loader("pipeline.yaml", SamplerSettings(batch=4, padding=None), sets=[sets], embed=False)
        items = [item for batch in loader for item in batch.items]
        assert len(items) == 5
        for item in items:
            receptor, ligand = item.sides["receptor"], item.sides["ligand"]
            assert ("bound" in receptor.nodes) == (state == "unbound")
            receptor_R3, ligand_L3 = bound_frame(receptor, ligand)
            rows_2P = item.labels["contact_pairs"].long().T
            apart_P = (receptor_R3[rows_2P[0]] - ligand_L3[rows_2P[1]]).norm(dim=-1)
            assert float(apart_P.median()) < NEAR, (state, item.id)
