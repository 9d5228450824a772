"""A command that a text says to type next is about the configuration that was typed."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from pipeline.cli.options import as_typed
from pipeline.command_line import Command
from pipeline.errors import CacheDamaged, ConfigError
from tests.testkit.command import Command as Cli
from tests.testkit.project import make_project

TYPED = ["cache", "validate", "--config", "my lab.yaml", "--set=cache.root=other", "--full"]
OPTIONS = "--config 'my lab.yaml' --set cache.root=other"


def test_a_command_gets_the_options_that_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pipeline", *TYPED])
    for command, wanted in (
        (Command.of("cache repair --list", "a b"), f"pipeline cache repair --list 'a b' {OPTIONS}"),
        (Command.submit("all", then="   (again)"), f"pipeline submit all {OPTIONS}   (again)"),
        (Command.submit("all", before="ls -ld x   or   "), f"ls -ld x   or   pipeline submit all {OPTIONS}"),
        (
            Command.submit("all").with_settings(("cache.root", "FOLDER")),
            "pipeline submit all --config 'my lab.yaml' --set cache.root=FOLDER",
        ),
    ):
        assert str(as_typed(command)) == wanted
    monkeypatch.setattr(sys, "argv", ["pipeline", "cache", "repair"])
    assert str(as_typed(Command.of("cache repair --yes"))) == "pipeline cache repair --yes"


def test_an_error_is_about_the_project_that_was_typed_and_other_advice_stays() -> None:
    damaged = CacheDamaged("torn", remedy=Command.of("cache repair"))
    damaged.in_project(Command.typed(TYPED))
    assert damaged.remedy == f"pipeline cache repair {OPTIONS}"
    advised = ConfigError("unreadable", remedy="ls -l x")
    advised.in_project(Command.typed(TYPED))
    assert advised.remedy == "ls -l x"


def test_what_an_error_says_to_type_can_be_typed_in_any_folder(
    pipeline: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_project(tmp_path, 1).folder / "pipeline.yaml"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for words in (
        "plan --set data.path=none.csv",
        "model show none",
        "config check --set data.state=unbound",
        "compare",
        "submit scan --set cache.under=[none]",
        "split --out x.csv --set data.source=reader --set data.reader=x:y",
    ):
        refused = pipeline(*words.split(), "--config", str(config))
        (typed,) = re.findall(r"next: pipeline (.*?)(?:   |$)", refused.err.strip())
        assert (refused.code, f"--config {config}" in typed) == (2, True), (words, refused.err)
        assert pipeline(*shlex.split(typed)).code == 0, typed
