"""A command that a text says to type next is about the configuration that was typed."""

from __future__ import annotations

import pytest

from pipeline.cli.options import as_typed

TYPED = ["cache", "validate", "--config", "my lab.yaml", "--set=cache.root=other", "--full"]
OPTIONS = "--config 'my lab.yaml' --set cache.root=other"


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("next: pipeline cache repair --list x", f"next: pipeline cache repair --list x {OPTIONS}"),
        ("next: pipeline cache repair", f"next: pipeline cache repair {OPTIONS}"),
        ("pipeline submit --stage all   (does only what is missing)", None),
        ("`pipeline submit` computes it", f"`pipeline submit {OPTIONS}` computes it"),
        ("pipeline submit --set cache.root=FOLDER", "pipeline submit --set cache.root=FOLDER --config 'my lab.yaml'"),
        ("pipeline cache import 'my folder'   (again)", f"pipeline cache import {OPTIONS} 'my folder'   (again)"),
        ("pipeline cache repair --list 'a b' --yes, then", f"pipeline cache repair --list 'a b' --yes {OPTIONS}, then"),
        ("ls -ld x   or   pipeline cache clean", f"ls -ld x   or   pipeline cache clean {OPTIONS}"),
    ],
)
def test_a_command_gets_the_options_that_it_does_not_have(said: str, wanted: str | None) -> None:
    wanted = wanted or f"pipeline submit --stage all {OPTIONS}   (does only what is missing)"
    assert as_typed(said, TYPED) == wanted


@pytest.mark.parametrize(
    "said",
    ["pipeline status NAME", "pipeline weights fetch NAME", "the pipeline cache is empty", "ls -l pipeline/cache"],
)
def test_what_is_no_such_command_stays(said: str) -> None:
    assert as_typed(said, TYPED) == said


def test_an_option_that_is_there_in_quotes_is_there() -> None:
    said = "pipeline submit --stage scan --set 'data.labels=[split]'"
    assert as_typed(said, ["submit", "--set", "data.labels=[split]"]) == said


def test_without_options_nothing_changes() -> None:
    assert as_typed("pipeline cache repair --yes", ["cache", "repair"]) == "pipeline cache repair --yes"
