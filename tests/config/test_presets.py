"""`train.preset`: a file of settings below everything that was written."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.config.load import read_config
from pipeline.config.schema_train import TrainSection
from pipeline.config.site_profiles import FOLDER
from pipeline.errors import ConfigError
from pipeline.files import shipped

NAMES = ("standard", "careful", "extreme")
TEXT = "data: {source: glob, path: x}\ntrain: {preset: extreme, slots: 7}\n"


def test_every_preset_is_valid_and_says_where_each_value_is_from() -> None:
    assert sorted(path.stem for path in shipped(FOLDER).glob("*.yaml")) == sorted(NAMES)
    for name in NAMES:
        loaded = read_config(None, ["data.path=x", f"train.preset={name}"])
        assert loaded.origins["train.too_large"].startswith(f"presets/{name}.yaml:")
        assert loaded.origins["train.preset"] == "--set"
        assert loaded.config.train.effective_batch == TrainSection().effective_batch, "never another effective batch"
    plain, preset = (read_config(None, ["data.path=x", *more]).config.train for more in ([], ["train.preset=standard"]))
    assert preset.model_copy(update={"preset": None}) == plain


def test_the_file_beats_the_preset_and_the_command_line_beats_both(loaded: Any) -> None:
    train = loaded(TEXT).config.train
    assert (train.slots, train.micro_batch, train.validation.limit) == (7, 1, 100)
    again = loaded(TEXT, "train.micro_batch=auto", "train.preset=careful").config.train
    assert (again.micro_batch, again.collect_every) == ("auto", 25)
    assert again.validation.limit is None, "nothing is left of the preset that the file names"
    for stranger in ("ultra", "../sites/generic"):
        with pytest.raises(ConfigError, match=r"train\.preset"):
            loaded(TEXT, f"train.preset={stranger}")
