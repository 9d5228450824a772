"""The folder that `pipeline dock` writes, without docking anything."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.config.load import read_config
from pipeline.setup import written_project
from pipeline.setup.written_project import Docking, write_dock_project


def test_published_weights_need_no_project_and_see_a_partners_chains_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("left.pdb", "right.pdb", "score.pth"):
        Path(name).touch()
    docking = Docking(Path("left.pdb"), Path("right.pdb"), "score.pth", poses=3, steps=2)
    config = read_config(write_dock_project(Path("out"), docking, read_config(None, ["data.path=."]))).config
    assert (config.embed.context, config.train.options) == ("partner", {"as_published": True})
    assert (config.cluster.executor, config.train.split) == ("local", None)
    assert config.train.predict.options["samples"] == 3


def test_what_the_models_data_were_does_not_hold_for_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of unbound pairs, whose smaller partner moved: here the files are what they are called."""
    monkeypatch.chdir(tmp_path)
    for name in ("left.pdb", "right.pdb"):
        Path(name).touch()
    data = "data={source: pairs, path: pairs, state: unbound, ligand: smaller}"
    train = f"train={{task: '{written_project.TASK}', options: {{embedding_dim: 8}}}}"
    trained = SimpleNamespace(config=read_config(None, [data, train, "graph.neighbours=7"]).config)
    monkeypatch.setattr(written_project, "named_model", lambda *_: trained)
    docking = Docking(Path("left.pdb"), Path("right.pdb"), "mine", poses=3, steps=2)
    config = read_config(write_dock_project(Path("out"), docking, read_config(None, ["data.path=."]))).config
    assert (config.data.source, config.data.state, config.data.ligand) == ("manifest", "bound", "as_named")
    assert (config.graph.neighbours, config.train.options) == (7, {"embedding_dim": 8})
