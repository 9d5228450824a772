"""The folder that `pipeline dock` writes, without docking anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.load import read_config
from pipeline.setup.dock_project import Docking, write_dock_project


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
