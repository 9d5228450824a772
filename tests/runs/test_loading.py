"""From a configuration to batches in a loop of one's own."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.encoder.synth import synth
from pipeline.errors import ConfigError, DataError
from pipeline.runs.loading import open_loader
from pipeline.structures.synthetic import write_demo
from pipeline.training.sampler import Settings
from tests.command import Command
from tests.runs.conftest import settle

CONFIG = """
data: {source: manifest, path: data/manifest.csv, max_rejected_fraction: 0.2}
embed: {weights: esm2_tiny.pt}
"""
SUBMIT = ("submit", "--stage", "all", "--executor", "local", "--follow")
EIGHT = Settings(batch=4, padding=None)


@pytest.fixture
def project(tmp_path: Path, pipeline: Command) -> Path:
    """Return a folder of which everything is in the cache."""
    write_demo(tmp_path / "data", n=8)
    synth(tmp_path / "esm2_tiny.pt", layers=2, dim=16, heads=2)
    (tmp_path / "pipeline.yaml").write_text(CONFIG)
    settle(tmp_path / "data" / "structures")
    done = pipeline(*SUBMIT)
    assert done.code == 0, done.err
    return tmp_path


def test_a_loop_of_ones_own_sees_every_item_once_with_its_embedding(project: Path) -> None:
    loader = open_loader("pipeline.yaml", EIGHT)
    seen: list[str] = []
    for batch in loader:
        seen += batch.ids
        receptor = batch.sides["receptor"]
        assert receptor.embedding is not None
        assert receptor.embedding.shape == (len(receptor.nodes["pos"]), 16)
        assert torch.isfinite(receptor.embedding).all()
        assert receptor.edges["near"].max() < len(receptor.nodes["pos"])
    assert sorted(seen) == [f"demo-{number:03d}" for number in range(1, 9)]


def test_a_split_and_a_rank_get_their_share(project: Path) -> None:
    shares = [open_loader(None, EIGHT, split="train", rank=rank, ranks=2, embed=False) for rank in range(2)]
    found = [sorted(one for batch in loader for one in batch.ids) for loader in shares]
    assert not set(found[0]) & set(found[1])
    assert len(found[0]) + len(found[1]) == len(shares[0].sampler.step_items(0, 0)) + (
        len(shares[0].sampler.step_items(0, 1)) if shares[0].sampler.steps > 1 else 0
    )


def arrays(project: Path, *sets: str) -> dict[str, dict[str, torch.Tensor]]:
    """Return everything that is loaded of each item."""
    loader = open_loader("pipeline.yaml", Settings(batch=1, padding=None), sets=sets)
    return {batch.ids[0]: {name: field.clone() for name, field in batch.fields.items()} for batch in loader}


def test_graphs_that_are_built_while_loading_have_the_same_numbers(project: Path, pipeline: Command) -> None:
    kept = arrays(project)
    assert pipeline("submit", "--stage", "graph", "--follow", "--set", "graph.cache=false").code == 0
    shutil.rmtree(project / "cache" / "graph")
    built = arrays(project, "graph.cache=false")
    assert kept.keys() == built.keys()
    for id_, fields in kept.items():
        assert fields.keys() == built[id_].keys()
        for name, field in fields.items():
            np.testing.assert_array_equal(field.numpy(), built[id_][name].numpy(), err_msg=f"{id_} {name}")


def test_a_file_that_changed_since_the_run_is_no_silent_other_graph(project: Path, pipeline: Command) -> None:
    assert pipeline("submit", "--stage", "graph", "--follow", "--set", "graph.cache=false").code == 0
    first = project / "data" / "structures" / "demo-001.pdb"
    first.write_text(first.read_text().replace("HEADER", "REMARK", 1))
    with pytest.raises(DataError, match="demo-001: its files or the configuration changed"):
        arrays(project, "graph.cache=false")


def test_without_a_run_of_this_configuration_the_way_to_one_is_said(project: Path) -> None:
    with pytest.raises(ConfigError, match="no run has made graphs of this data set with this configuration") as error:
        open_loader("pipeline.yaml", EIGHT, sets=["graph.neighbours=5"])
    assert error.value.remedy == "pipeline submit --stage all"
