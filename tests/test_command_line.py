"""A command to type next is a value: it is read, changed and written without searching its text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from pipeline.command_line import ANY, Command
from pipeline.errors import SubmissionRefused
from pipeline.stages.table import with_typed_command

PACKAGE = Path(__file__).resolve().parents[1] / "pipeline"


def test_what_was_written_is_read_back() -> None:
    for text in [
        "pipeline submit",
        "pipeline submit train --config 'my project/pipeline.yaml' --set train.epochs=6",
        "pipeline submit regenerate --list lost.jsonl --set 'data.path=a b'",
    ]:
        assert str(Command.read(text)) == text
    # a quote without its other half is still read
    assert Command.read("pipeline submit --set a='x").settings == (("a", "'x"),)


def test_a_setting_takes_the_place_of_the_one_before() -> None:
    command = Command.read("pipeline submit --set cluster.scan.mem=1GiB --set data.limit=3")
    changed = command.with_settings(("cluster.scan.mem", "2GiB"), then="   (finished work is kept)")
    wanted = "pipeline submit --set data.limit=3 --set cluster.scan.mem=2GiB   (finished work is kept)"
    assert str(changed) == wanted
    # what the reader is to choose is not quoted
    assert str(Command.submit("scan").with_settings(("a", ANY), then=", or wait")).endswith("--set a=…, or wait")


def test_another_stage_is_the_same_command() -> None:
    command = Command.read("pipeline submit predict --set a=b")
    assert (command.stage, str(command.with_stage("train"))) == ("predict", "pipeline submit train --set a=b")
    assert Command.read("pipeline status").stage == ""
    # as runs of earlier versions keep it
    assert Command.read("pipeline submit --stage train --set a=b") == command.with_stage("train")


def test_a_refusal_says_again_what_was_typed_with_what_is_to_change() -> None:
    typed = Command.submit("all").in_project(Command.about("", ["cluster.scan.mem=1GiB", "data.limit=3"]))
    remedy = Command.submit("scan").with_settings(("cluster.scan.mem", "4GiB"), then="   (or less)")
    error = with_typed_command(SubmissionRefused("too little", remedy=remedy), typed)
    wanted = "pipeline submit --set data.limit=3 --set cluster.scan.mem=4GiB   (or less)"
    assert error.remedy == str(error.command) == wanted
    assert with_typed_command(SubmissionRefused("x", remedy="sinfo"), typed).remedy == "sinfo"


PROGRAMS = ("less ", "ls ", "cat ", "head ", "rm ", "mv ", "cp ", "mkdir ", "df ", "gunzip ", "gzip ", "sed ", "file ")
QUOTING = ("quoted(", "quote(", "shlex.")
QUOTED_BEFORE = {  # or a number, or within quotes
    "source_rows.py": {"column", "meant", "name", "start"},
    "split_data.py": {"number", "hint"},
    "data_source.py": {"number", "line"},
    "sampled_items.py": {"line"},
    "cache_folder.py": {"marker", "json.dumps(_MARKED)"},
    "clean_cache.py": {"files"},
}


def unquoted(text: ast.JoinedStr) -> Iterator[str]:
    """Yield what stands in a command for a shell without quotes: until a comment in brackets, three spaces before."""
    begins = ast.unparse(text.values[0]).strip("'")
    if not begins.startswith(PROGRAMS) or begins.startswith("less than "):
        return
    for part in text.values:
        if isinstance(part, ast.Constant) and "   (" in str(part.value):
            return
        if isinstance(part, ast.FormattedValue) and not ast.unparse(part.value).startswith(QUOTING):
            yield ast.unparse(part.value)


def test_a_path_in_a_command_of_the_shell_is_quoted_wherever_one_is_told() -> None:
    assert list(unquoted(ast.parse('f"less {path}"', mode="eval").body)) == ["path"]  # type: ignore[arg-type]
    files, commands = list(PACKAGE.rglob("*.py")), 0
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr) and node.values:
                commands += ast.unparse(node.values[0]).strip("'").startswith(PROGRAMS)
                assert set(unquoted(node)) <= QUOTED_BEFORE.get(path.name, set()), f"{path}:{node.lineno}"
    assert len(files) > 200
    assert commands > 10
