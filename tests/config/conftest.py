"""Writes one configuration file and reads it, or the complaint about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pipeline.config.load import LoadedConfig, read_config
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of every test, away from any other configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PIPELINE_CONFIG", raising=False)
    return tmp_path


@pytest.fixture
def loaded(project: Path) -> Callable[..., LoadedConfig]:
    """Load a YAML text that stands in ./pipeline.yaml."""

    def load_text(text: str | bytes, *sets: str) -> LoadedConfig:
        path = project / "pipeline.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return read_config(path.relative_to(project), sets)

    return load_text


@pytest.fixture
def complaint(loaded: Callable[..., LoadedConfig]) -> Callable[..., str]:
    """Load a YAML text that must be refused, and return what the person reads."""

    def refuse(text: str | bytes, *sets: str) -> str:
        with pytest.raises(ConfigError) as refused:
            loaded(text, *sets)
        assert refused.value.exit_code == 2
        assert refused.value.remedy
        return str(refused.value)

    return refuse
