"""A command that a text says to type next is about the configuration that was typed."""

from __future__ import annotations

import gzip
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli.options import as_typed
from pipeline.command_line import Command
from pipeline.errors import CacheDamaged, ConfigError
from tests.testkit.command import Command as Cli
from tests.testkit.project import LOCAL, PIPELINE, Project, make_project

TYPED = ["cache", "validate", "--config", "my lab.yaml", "--set=cache.root=other", "--full"]
OPTIONS = "--config 'my lab.yaml' --set cache.root=other"


def test_a_command_gets_the_options_that_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pipeline", *TYPED])
    for command, wanted in (
        (Command.of("cache repair --list", "a b"), f"pipeline cache repair --list 'a b' {OPTIONS}"),
        (Command.submit("all", then="   (again)"), f"pipeline submit {OPTIONS}   (again)"),
        (Command.submit("all", before="ls -ld x   or   "), f"ls -ld x   or   pipeline submit {OPTIONS}"),
        (
            Command.submit("all").with_settings(("cache.root", "FOLDER")),
            "pipeline submit --config 'my lab.yaml' --set cache.root=FOLDER",
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


HEADER = "id,path,receptor_chains,ligand_chains\n"


def rows(header: str = HEADER) -> bytes:
    return (header + "".join(f"i{n},data/c{n}.pdb,A,B\n" for n in range(3))).encode()


def no_run(project: Project) -> str:
    return "status"


def nothing_scanned(project: Project) -> str:
    return "data items"


def another_name_of_a_column(project: Project) -> str:
    (project.folder / "items.csv").write_bytes(rows(HEADER.replace("receptor_chains", "receptor")))
    return "submit scan --follow --set data.source=manifest --set data.path=items.csv"


def gzip_under_a_plain_name(project: Project) -> str:
    (project.folder / "items.csv").write_bytes(gzip.compress(rows()))
    return "submit scan --follow --set data.source=manifest --set data.path=items.csv"


def no_folder_for_the_output(project: Project) -> str:
    return "data split --out lists/divided.csv"


def a_preview(project: Project) -> str:
    project.finishes("scan")
    return "cache clean --all"


def damage(project: Project) -> str:
    project.finishes("scan")
    (shard, *_) = project.shards("scan")
    shard.chmod(0o600)
    shard.write_bytes(shard.read_bytes()[:-9])
    return "cache validate --full"


def a_model_that_is_not_there(project: Project) -> str:
    return "model show none"


def a_run_that_is_not_there(project: Project) -> str:
    project.finishes("scan")
    return "logs 19991231"


@pytest.mark.parametrize(
    "arrange",
    [
        no_run, nothing_scanned, another_name_of_a_column, gzip_under_a_plain_name, no_folder_for_the_output, a_preview,
        damage, a_model_that_is_not_there, a_run_that_is_not_there,
    ],
    ids=lambda arrange: arrange.__name__,
)  # fmt: skip
def test_the_fix_that_a_message_gives_works_when_it_is_typed(
    pipeline: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrange: Callable[[Project], str]
) -> None:
    project = make_project(tmp_path, 3, **LOCAL)
    monkeypatch.setenv("PATH", f"{PIPELINE.parent}:{os.environ['PATH']}")
    done = pipeline(*arrange(project).split())
    fixes = re.findall(r"(?:next|to apply):\s+(.*?)(?:   |$)", done.out + done.err, re.MULTILINE)
    assert fixes, done
    typed = subprocess.run(fixes[-1], shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert typed.returncode == 0, (fixes, typed.stderr)
