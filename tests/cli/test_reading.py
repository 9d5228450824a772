"""Every verb that reads prints one JSON document when asked for it, and no colour to what is no terminal."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from pipeline.cli.main import app
from tests.testkit.command import Command
from tests.testkit.once import Shelf
from tests.testkit.project import PIPELINE, make_project

# Each verb that only reads, as it is typed in a project that has been scanned, and its exit code there.
READING: dict[str, tuple[tuple[str, ...], int]] = {
    "doctor": ((), 0),
    "plan": (("scan",), 0),
    "explain": (("--stage", "scan"), 0),
    "compare": ((), 2),  # nor is there anything to compare
    "submit": (("scan", "--dry-run"), 0),
    "status": ((), 0),
    "logs": ((), 0),
    "data items": ((), 0),
    "report": ((), 0),
    "replay": (("--step", "1"), 2),  # nothing was trained
    "runs list": ((), 0),
    "runs prune": ((), 0),
    "cache stat": ((), 0),
    "cache validate": (("--full",), 0),
    "cache repair": ((), 0),
    "cache clean": ((), 0),
    "cache compact": ((), 0),
    "weights check": (("nothing.pt",), 2),
    "model list": ((), 0),
    "model show": (("nothing",), 2),
    "config show": ((), 0),
    "config check": ((), 0),
    "config schema": ((), 0),
}
# Verbs whose work is told as one document, too.
WORKING = {"cache regenerate", "cache export", "cache import", "embeddings export", "data split", "find-batch"}
# Verbs that change something, or print what is no data.
OTHERS = {"demo", "dock", "embed", "init", "resume", "cancel", "completion", "model export"}
OTHERS |= {"weights fetch", "weights import", "weights synth"}
IS_JSON = "config schema"  # without being asked


def leaves(command: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, one in command.commands.items():
        if one.hidden:
            continue
        if hasattr(one, "commands"):
            yield from leaves(one, f"{before}{name} ")
        else:
            yield f"{before}{name}", one


def as_json(verb: str) -> tuple[str, ...]:
    return (*verb.split(), *READING[verb][0], *(() if verb == IS_JSON else ("--json",)))


def scanned(folder: Path) -> None:
    done = make_project(folder, 3).submits("scan")
    assert done.code == 0, done.err
    assert "\x1b" not in done.out + done.err
    assert "✓ scan      3 usable" in done.err  # a line in the place of a bar


@pytest.fixture
def typed(pipeline: Command, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    shelf.copy("read", scanned, tmp_path)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return pipeline


def test_every_verb_is_known_to_read_or_not_and_those_that_do_have_an_option_for_a_document() -> None:
    known = dict(leaves(get_command(app)))
    assert {*READING} | WORKING | OTHERS == {*known}
    asked = sorted({*READING, *WORKING} - {IS_JSON})
    assert [verb for verb in asked if not any("--json" in one.opts for one in known[verb].params)] == []


@pytest.mark.nightly
def test_a_document_is_all_that_is_printed_and_text_has_no_colour_and_no_trailing_space(typed: Command) -> None:
    for verb, (words, code) in READING.items():
        done = typed(*as_json(verb))
        assert done.code == code, (verb, done.err)
        if code:  # there is nothing to tell of what is not there
            assert (done.out, done.err[:7]) == ("", "error: "), verb
        else:
            json.loads(done.out)
        done = typed(*verb.split(), *words)
        assert done.code == code, (verb, done.err)
        assert "\x1b" not in done.out + done.err, verb
        assert verb == "logs" or [line for line in done.out.splitlines() if line.endswith(" ")] == [], verb


def test_an_error_is_on_stderr_with_its_exit_code_and_stdout_stays_empty(pipeline: Command) -> None:
    for verb in {*READING} - {IS_JSON, "doctor", "weights check"}:
        done = pipeline(*as_json(verb), "--config", "nothing.yaml")
        assert (done.code, done.out) == (2, ""), verb
        assert done.err.startswith("error: --config: "), verb


@pytest.mark.parametrize("words", [("plan",), ("plan", "--stage", "scan", "--set", "structures.min_residues=1")])
def test_a_plan_can_be_pasted_into_a_message(typed: Command, words: tuple[str, ...]) -> None:
    """Of a column's width, with nothing cut off, and the same whatever the terminal was."""
    done = typed(*words)
    assert done.code in (0, 2), done.err
    lines = done.out.splitlines()
    assert lines == [] or max(map(len, lines)) <= 100
    assert "…" not in done.out
    assert {*done.out} & {*"│┃━─┏┓└┘"} == set()


def test_a_dry_run_tells_the_same_as_a_document_and_as_text(typed: Command) -> None:
    words = ("submit", "--stage", "scan", "--dry-run", "--set", "structures.altlocs=first")
    told = json.loads(typed(*words, "--json").out)
    (stage,) = told["stages"]
    assert (stage["stage"], stage["counts"]["items"], told["scripts"]) == ("scan", 3, {})
    assert f"{stage['counts']['missing']}" in typed(*words).out.splitlines()[3].split()
    wet = typed("submit", "--stage", "scan", "--json")
    assert (wet.code, wet.out) == (2, "")


def test_where_nothing_can_be_printed_to_a_command_does_the_same(typed: Command) -> None:
    for closed, code, said in [
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        (">&- 2>&-", 0, ""),
        (">/dev/full", 6, "error: cannot write the output: No space left on device\n"),
    ]:
        words = ["sh", "-c", f'"$0" status {closed}', PIPELINE]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (code, said), closed


def test_an_interruption_before_anything_was_read_is_told_in_a_word(
    pipeline: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.cli.main.main", interrupt)
    interrupted = pipeline("status")
    assert (interrupted.code, interrupted.err) == (130, "interrupted\n")
