"""A command that a text says to type next is about the configuration that was typed."""

from __future__ import annotations

import re
import shlex
import sys

import pytest

from pipeline.cli.options import as_typed
from pipeline.command_line import Command
from pipeline.errors import CacheDamaged, ConfigError
from tests.testkit.command import Command as Cli
from tests.testkit.project import MakeProject

TYPED = ["cache", "validate", "--config", "my lab.yaml", "--set=cache.root=other", "--full"]
OPTIONS = "--config 'my lab.yaml' --set cache.root=other"


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        (Command.of("cache repair --list", "a b"), f"pipeline cache repair --list 'a b' {OPTIONS}"),
        (Command.submit("all", then="   (again)"), f"pipeline submit --stage all {OPTIONS}   (again)"),
        (Command.submit("all", before="ls -ld x   or   "), f"ls -ld x   or   pipeline submit --stage all {OPTIONS}"),
        (
            Command.submit("all").with_settings(("cache.root", "FOLDER")),
            "pipeline submit --stage all --config 'my lab.yaml' --set cache.root=FOLDER",
        ),
        (Command.of("cache import", "my folder"), f"pipeline cache import 'my folder' {OPTIONS}"),
    ],
)
def test_a_command_gets_the_options_that_it_does_not_have(
    command: Command, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pipeline", *TYPED])
    assert str(as_typed(command)) == wanted


def test_without_options_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pipeline", "cache", "repair"])
    assert str(as_typed(Command.of("cache repair --yes"))) == "pipeline cache repair --yes"


def test_an_error_is_about_the_project_that_was_typed_and_other_advice_stays() -> None:
    damaged = CacheDamaged("torn", remedy=Command.of("cache repair"))
    damaged.in_project(Command.typed(TYPED))
    assert damaged.remedy == f"pipeline cache repair {OPTIONS}"
    advised = ConfigError("unreadable", remedy="ls -l x")
    advised.in_project(Command.typed(TYPED))
    assert advised.remedy == "ls -l x"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("plan", "--set", "data.path=none.csv"), "config show"),
        (("model", "show", "none"), "model list"),
        (("config", "check", "--set", "data.state=unbound"), "config show"),
        (("compare",), "model list"),
        (("submit", "--stage", "scan", "--set", "cache.under=[none]"), "config show"),
        (("split", "--out", "x.csv", "--set", "data.source=reader", "--set", "data.reader=x:y"), "config show"),
    ],
)
def test_what_an_error_says_to_type_can_be_typed_in_any_folder(
    pipeline: Cli, make_project: MakeProject, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told: str
) -> None:
    project = make_project(1)
    (project / "elsewhere").mkdir()
    monkeypatch.chdir(project / "elsewhere")
    said = pipeline(*words, "--config", str(project / "pipeline.yaml"))
    (typed,) = re.findall(r"next: pipeline (.*?)(?:   |$)", said.err.strip())
    assert said.code == 2, said.err
    assert typed.startswith(told)
    assert f"--config {project / 'pipeline.yaml'}" in typed
    assert pipeline(*shlex.split(typed)).code == 0
