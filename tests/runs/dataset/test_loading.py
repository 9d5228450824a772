"""From a configuration to batches in a loop of one's own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.config.load import read_config
from pipeline.encoder.checkpoints.synth import write_random_checkpoint
from pipeline.errors import CacheDamaged, ConfigError, DataError, RecordMissing
from pipeline.journal.run_folder import runs_in
from pipeline.project.project import Project
from pipeline.runs.dataset import reader_items
from pipeline.runs.dataset.loading import open_loader
from pipeline.runs.model.prepare import items_of
from pipeline.structures.synthetic import write_demo
from pipeline.training.ranks.process_group import place_in_group
from pipeline.training.sampling.epoch_order import SamplerSettings
from tests.testkit.command import Command
from tests.testkit.project import settle

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyG uses what torch has deprecated, as it is imported
    import torch_geometric.data  # noqa: F401 - so that it is there when a batch wants it

PIPELINE = str(Path(sys.executable).with_name("pipeline"))
GRAPH = ("submit", "--stage", "graph", "--executor", "local", "--follow")
FOUR = SamplerSettings(batch=4, padding=None)


def make(folder: Path, n: int) -> None:
    """Write a project of made complexes."""
    write_demo(folder / "data", n=n)
    settings = "data: {source: manifest, path: data/manifest.csv, max_rejected_fraction: 0.25}\n"
    (folder / "pipeline.yaml").write_text(settings + "embed: {weights: esm2_tiny.pt}\n")
    settle(folder / "data" / "structures")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project of which everything is in the cache; nobody changes it."""
    folder = tmp_path_factory.mktemp("finished")
    make(folder, 8)
    write_random_checkpoint(folder / "esm2_tiny.pt", layers=2, dim=16, heads=2)
    submit = [PIPELINE, "submit", "--stage", "all", "--executor", "local", "--follow"]
    subprocess.run(submit, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def here(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be in the finished project."""
    monkeypatch.chdir(finished)
    return finished


@pytest.fixture
def project(tmp_path: Path, pipeline: Command) -> Path:
    """Return a project with graphs, in the current folder; a test may change it."""
    make(tmp_path, 4)
    done = pipeline(*GRAPH)
    assert done.code == 0, done.err
    return tmp_path


def typed(sets: Sequence[str]) -> list[str]:
    """Return settings as they are typed."""
    return [word for one in sets for word in ("--set", one)]


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


@pytest.mark.nightly
@pytest.mark.parametrize("half", [{"rank": 0}, {"ranks": 2}])
def test_a_rank_without_the_number_of_ranks_is_refused(half: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="each says nothing without the other"):
        open_loader(None, FOUR, **half)


@pytest.mark.nightly
def test_without_a_run_of_this_configuration_the_way_to_one_is_said(here: Path) -> None:
    with pytest.raises(ConfigError, match="no run has made graphs of this data set with this configuration") as error:
        open_loader("pipeline.yaml", FOUR, sets=["graph.neighbours=5"])
    assert error.value.remedy == "pipeline submit --stage graph --config pipeline.yaml --set graph.neighbours=5"


@pytest.mark.nightly
def test_settings_that_change_no_graph_find_the_same_run(here: Path) -> None:
    sets = ["data.max_rejected_fraction=0.5", "data.on_leak=warn", "graph.atom.hops=1", "embed.batch.cap=1"]
    assert len(open_loader(None, FOUR, sets=sets)) == len(open_loader(None, FOUR)) == 2


@pytest.mark.nightly
def test_a_batch_is_shown_as_pyg_has_it(here: Path) -> None:
    for item in next(iter(open_loader(None, FOUR))).items:
        shown, receptor = item.pyg(), item.sides["receptor"]
        assert shown["receptor"].pos.shape == receptor.nodes["pos"].shape
        assert torch.equal(shown["receptor", "near", "receptor"].edge_index, receptor.edges["near"])
        assert torch.equal(shown["receptor"].x, receptor.embedding)
        assert shown["receptor"].x.data_ptr() == receptor.embedding.data_ptr()


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
    file = project / "data" / "structures" / "demo-003.pdb"
    if is_there:
        file.write_text(file.read_text().replace("HEADER", "REMARK", 1))
    else:
        file.unlink()
    what = "demo-003: its files or the configuration changed" if is_there else "demo-003: no such file"
    with pytest.raises(DataError, match=what):
        arrays("graph.cache=false")


@pytest.mark.nightly
def test_a_run_that_was_refused_is_not_loaded_from(project: Path, pipeline: Command) -> None:
    refused = ["graph.contacts=0.5"]
    assert pipeline(*GRAPH, *typed(refused)).code == 3
    with pytest.raises(ConfigError, match="no run has made graphs"):
        open_loader(None, FOUR, embed=False, sets=refused)


@pytest.mark.nightly
def test_run_folders_that_cannot_be_read_stand_in_nobodys_way(project: Path) -> None:
    (whole,) = (one.path for one in runs_in(project / "runs"))
    for number, (name, text) in enumerate((("config.json", "{}"), ("table.txt", ""), ("table.txt", "no key"))):
        copy = project / "runs" / f"2099010{number + 1}-000000-0000-graph"
        shutil.copytree(whole, copy)
        (copy / name).write_text(text)
    (project / "runs" / "20990109-000000-0000-graph").mkdir()
    assert len(open_loader(None, FOUR, embed=False)) == 1


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
    assert error.value.remedy == "pipeline submit --stage graph"
    assert pipeline(*GRAPH).code == 0
    assert len(open_loader(None, FOUR, embed=False)) == 1


@pytest.mark.nightly
def test_a_damaged_description_of_a_recipe_harms_nobody(project: Path, pipeline: Command) -> None:
    assert "neighbours 20" in pipeline("cache", "stat").out
    damage(project / "cache" / "recipes")
    shown = pipeline("cache", "stat")
    assert (shown.code, "neighbours 20" in shown.out) == (0, False)
    assert pipeline(*GRAPH).code == 0
    assert "neighbours 20" in pipeline("cache", "stat").out


@pytest.mark.nightly
def test_a_data_set_without_splits_says_so(project: Path, pipeline: Command) -> None:
    glob = ["data.source=glob", "data.path=data/structures"]
    assert pipeline(*GRAPH, *typed(glob)).code == 0
    with pytest.raises(ConfigError, match="no item is in split 'train'; this data set has no splits"):
        open_loader(None, FOUR, embed=False, sets=glob, split="train")
    opened, table = (
        Project.open(read_config(Path("pipeline.yaml"), glob).config),
        runs_in(Path("runs"))[-1].table.read_text(),
    )
    assert len(items_of(opened, table, "train")) == len(items_of(opened, table, None)) > 0, "nobody named a split"
    with pytest.raises(ConfigError, match="no item is in split 'trian'; this data set has no splits"):
        items_of(opened, table, "trian")


@pytest.mark.nightly
def test_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_in_group() == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 ranks were started") as refused:
        place_in_group()
    assert "rank=" in refused.value.remedy


@pytest.mark.nightly
def test_a_readers_file_is_told_from_one_of_its_size_and_second_in_whose_place_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Coarse(type(tmp_path)):  # type: ignore[misc]  # a path where all files were written in one second
        def stat(self, **how: bool) -> SimpleNamespace:
            state, at_ns = super().stat(**how), 1_700_000_000 * 10**9
            kept = {name: getattr(state, name) for name in ("st_dev", "st_ino", "st_size", "st_mode")}
            return SimpleNamespace(**kept, st_mtime_ns=at_ns, st_ctime_ns=at_ns)

    monkeypatch.setattr(reader_items, "Path", Coarse)
    place, digests = tmp_path / "current", []
    for name in ("v1", "v2", "v1"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "spectra.mgf").write_text(name)
        place.unlink(missing_ok=True)
        place.symlink_to(name)
        digests.append(reader_items.look_at_files(SimpleNamespace(files=lambda: [place / "spectra.mgf"])))
    (first, is_still), (second, _), (third, _) = digests
    assert is_still
    assert first == third != second
