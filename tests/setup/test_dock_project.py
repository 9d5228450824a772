"""The folder that `pipeline dock` writes, without docking anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline.config.load import read_config
from pipeline.errors import ConfigError
from pipeline.setup import written_project
from pipeline.setup.written_project import Docking, write_dock_project
from pipeline.tasks.complex_docking import ComplexDocking
from pipeline.training.checkpoints.trained_weights import load_pretrained
from tests.tasks.originals import as_original


def test_published_weights_need_no_project_and_say_their_sizes_to_which_typed_options_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("left.pdb", "right.pdb", "other.pth"):
        Path(name).touch()
    sizes = {"as_published": True, "embedding_dim": 8, "scalars": 16, "vectors": 4, "layers": 3}
    torch.save(as_original(ComplexDocking(**sizes).model()), "score.pth")
    sets = ("train.options.final_noise=true", "train.predict.options={ode: true, psi: 0.5}")
    docking = Docking(Path("left.pdb"), Path("right.pdb"), "score.pth", poses=3, steps=2, sets=sets)
    config = read_config(write_dock_project(Path("out"), docking, read_config(None, ["data.path=."]))).config
    assert (config.embed.context, config.train.options) == ("partner", {**sizes, "final_noise": True})
    assert (config.cluster.executor, config.train.split) == ("local", None)
    drawn = ComplexDocking(**config.train.options | config.train.predict.options)
    assert (drawn.samples, drawn.temperature, drawn.psi, drawn.ode) == (3, 2.439, 0.5, True)
    assert load_pretrained(ComplexDocking(**config.train.options).model(), Path("score.pth")).is_whole
    torch.save({"elsewhere.weight": torch.zeros(2)}, "other.pth")
    with pytest.raises(ConfigError, match="docking model"):
        write_dock_project(Path("out"), replace(docking, model="other.pth"), read_config(None, ["data.path=."]))


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
