"""`train.preset`: a file of settings below everything that was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.load import read_config
from pipeline.config.schema_train import TrainSection
from pipeline.config.site_profiles import FOLDER
from pipeline.errors import ConfigError
from pipeline.files import shipped

NAMES = ("standard", "careful", "extreme")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    file = tmp_path / "pipeline.yaml"
    file.write_text("data: {source: glob, path: x}\ntrain: {preset: extreme, slots: 7}\n")
    return file


def test_there_are_files_for_exactly_the_names_that_the_schema_knows() -> None:
    assert sorted(path.stem for path in shipped(FOLDER).glob("*.yaml")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_is_valid_and_says_where_each_value_is_from(tmp_path: Path, name: str) -> None:
    loaded = read_config(None, ["data.path=x", f"train.preset={name}"])
    assert loaded.origins["train.too_large"].startswith(f"presets/{name}.yaml:")
    assert loaded.origins["train.preset"] == "--set"
    assert loaded.config.train.effective_batch == TrainSection().effective_batch, "never another effective batch"


def test_the_file_beats_the_preset_and_the_command_line_beats_both(written: Path) -> None:
    assert read_config(written).config.train.slots == 7
    assert read_config(written).config.train.micro_batch == 1
    assert read_config(written).config.train.validation.limit == 100
    again = read_config(written, ["train.micro_batch=auto", "train.preset=careful"])
    assert (again.config.train.micro_batch, again.config.train.collect_every) == ("auto", 25)
    assert again.config.train.validation.limit is None, "nothing is left of the preset that the file names"


def test_a_preset_that_nobody_knows_is_refused_with_those_that_there_are(written: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.preset.*standard, careful, extreme"):
        read_config(written, ["train.preset=ultra"])
    with pytest.raises(ConfigError, match=r"train\.preset"):
        read_config(written, ["train.preset=../sites/generic"])


def test_standard_changes_nothing_but_says_it() -> None:
    plain, preset = (read_config(None, ["data.path=x", *more]).config.train for more in ([], ["train.preset=standard"]))
    assert preset.model_copy(update={"preset": None}) == plain
