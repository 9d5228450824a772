"""From a configuration to batches in a loop of one's own."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from pipeline.config.load import read_config
from pipeline.dataset.loading import open_loader
from pipeline.errors import CacheDamaged, ConfigError, DataError, RecordMissing
from pipeline.journal.run_folder import runs_in
from pipeline.planning.prepare import items_of
from pipeline.project.project import Project
from pipeline.structures.synthetic import write_demo
from pipeline.training.ranks.process_group import place_in_group
from pipeline.training.sampling import SamplerSettings
from tests.testkit import project as kit
from tests.testkit.command import Command
from tests.testkit.once import Shelf
from tests.testkit.project import EMBED, copied, settle, write_config, write_weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyG uses what torch has deprecated, as it is imported
    import torch_geometric.data  # noqa: F401 - so that it is there when a batch wants it

GRAPH = ("submit", "--stage", "graph", "--executor", "local", "--follow")
FOUR = SamplerSettings(batch=4, padding=None)


@pytest.mark.nightly
def test_a_loop_of_ones_own_sees_every_item_once_with_its_embedding(here: Path) -> None:
    seen: list[str] = []
    for batch in open_loader("pipeline.yaml", FOUR):
        seen += batch.ids
        receptor = batch.sides["receptor"]
        assert receptor.embedding is not None
        assert receptor.embedding.shape == (len(receptor.nodes["pos"]), 16)
        assert torch.isfinite(receptor.embedding).all()
        assert receptor.edges["near"].max() < len(receptor.nodes["pos"])
    assert sorted(seen) == [f"demo-{number:03d}" for number in range(1, 9)]


@pytest.mark.nightly
def test_the_items_of_a_split_are_divided_among_the_ranks(here: Path) -> None:
    both = [open_loader(None, FOUR, split="train", rank=rank, ranks=2, embed=False) for rank in range(2)]
    found = [{one for batch in loader for one in batch.ids} for loader in both]
    alone = {one for batch in open_loader(None, FOUR, split="train", embed=False) for one in batch.ids}
    assert not found[0] & found[1]
    assert found[0] | found[1] == alone
    assert 0 < len(alone) < 8


@pytest.mark.parametrize("half", [{"rank": 0}, {"ranks": 2}])
def test_a_rank_without_the_number_of_ranks_is_refused(half: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        open_loader(None, FOUR, **half)


@pytest.mark.nightly
def test_without_a_run_of_this_configuration_the_way_to_one_is_said(here: Path) -> None:
    with pytest.raises(ConfigError) as error:
        open_loader("pipeline.yaml", FOUR, sets=["graph.neighbours=5"])
    assert error.value.remedy == "pipeline submit graph --config pipeline.yaml --set graph.neighbours=5"


@pytest.mark.nightly
def test_settings_that_change_no_graph_find_the_same_run(here: Path) -> None:
    sets = ["data.max_rejected_fraction=0.5", "data.on_leak=warn", "graph.atom.hops=1", "embed.batch.cap=1"]
    assert len(open_loader(None, FOUR, sets=sets)) == len(open_loader(None, FOUR)) == 2


def arrays(*sets: str) -> dict[str, dict[str, torch.Tensor]]:
    """Return everything that is loaded of each graph."""
    loader = open_loader("pipeline.yaml", SamplerSettings(batch=1, padding=None), embed=False, sets=sets)
    return {batch.ids[0]: {name: field.clone() for name, field in batch.fields.items()} for batch in loader}


@pytest.mark.nightly
def test_graphs_that_are_built_while_loading_have_the_same_numbers(project: Path, pipeline: Command) -> None:
    kept = arrays()
    assert pipeline(*GRAPH, "--set", "graph.cache=false").code == 0
    shutil.rmtree(project / "cache" / "graph")
    built = arrays("graph.cache=false")
    assert kept.keys() == built.keys()
    for id_, fields in kept.items():
        assert fields.keys() == built[id_].keys()
        for name, field in fields.items():
            np.testing.assert_array_equal(field.numpy(), built[id_][name].numpy(), err_msg=f"{id_} {name}")


@pytest.mark.nightly
@pytest.mark.parametrize("is_there", [True, False], ids=["changed", "gone"])
def test_a_file_that_is_no_longer_what_it_was_stops_a_loop_that_builds_graphs(
    project: Path, pipeline: Command, *, is_there: bool
) -> None:
    assert pipeline(*GRAPH, "--set", "graph.cache=false").code == 0
    file = project / "own" / "structures" / "demo-003.pdb"
    if is_there:
        file.write_text(file.read_text().replace("HEADER", "REMARK", 1))
    else:
        file.unlink()
    with pytest.raises(DataError, match="demo-003"):
        arrays("graph.cache=false")


@pytest.mark.nightly
def test_a_run_that_was_refused_is_not_loaded_from(project: Path, pipeline: Command) -> None:
    refused = ["graph.contacts=0.5"]
    assert pipeline(*GRAPH, "--set", *refused).code == 3
    with pytest.raises(ConfigError):
        open_loader(None, FOUR, embed=False, sets=refused)


def make(folder: Path) -> None:
    write_demo(folder / "data", n=8)
    data = {"source": "manifest", "path": "data/manifest.csv", "max_rejected_fraction": 0.25}
    write_config(folder, data=data, **EMBED)
    settle(folder / "data" / "structures")
    write_weights(folder)
    kit.Project(folder).finishes("all")


@pytest.fixture
def here(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with all records, in the current folder."""
    monkeypatch.chdir(copied(shelf, "loaded", make, tmp_path))
    return tmp_path


@pytest.fixture
def project(here: Path) -> Path:
    """Return the same with structures of its own, which a test may change."""
    data = Path(yaml.safe_load((here / "pipeline.yaml").read_text())["data"]["path"]).parent
    shutil.copytree(data, here / "own")
    settle(here / "own" / "structures")
    kit.Project(here).sets(data__path="own/manifest.csv")
    kit.Project(here).finishes("graph")
    return here


def damage(folder: Path) -> None:
    """Turn a bit of every record of a kind."""
    for shard in (folder / "shards").iterdir():
        shard.chmod(0o600)
        content = bytearray(shard.read_bytes())
        at = content.index(b'{"key":"')  # where a record describes itself
        content[at + 20] ^= 1
        shard.write_bytes(content)


@pytest.mark.nightly
def test_a_damaged_table_is_refused_and_made_anew(project: Path, pipeline: Command) -> None:
    damage(project / "cache" / "sets")
    with pytest.raises((CacheDamaged, RecordMissing)) as error:
        open_loader(None, FOUR, embed=False)
    assert error.value.remedy == "pipeline submit graph"
    assert pipeline(*GRAPH).code == 0
    assert len(open_loader(None, FOUR, embed=False)) == 2


@pytest.mark.nightly
def test_a_data_set_without_splits_says_so(project: Path, pipeline: Command) -> None:
    glob = ["data.source=glob", "data.path=own/structures"]
    assert pipeline(*GRAPH, *(word for one in glob for word in ("--set", one))).code == 0
    with pytest.raises(ConfigError):
        open_loader(None, FOUR, embed=False, sets=glob, split="train")
    opened, table = (
        Project.open(read_config(Path("pipeline.yaml"), glob).config),
        runs_in(Path("runs"))[-1].table.read_text(),
    )
    assert len(items_of(opened, table, "train")) == len(items_of(opened, table, None)) > 0, "nobody named a split"
    with pytest.raises(ConfigError):
        items_of(opened, table, "trian")


def test_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_in_group() == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError) as refused:
        place_in_group()
    assert "rank=" in refused.value.remedy
