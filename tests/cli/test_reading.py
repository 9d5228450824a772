"""Every verb that reads prints one JSON document when asked for it, and no colour to what is no terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from pipeline.cli.main import app
from tests.testkit.command import Command
from tests.testkit.project import settle, write_complex

PIPELINE = Path(sys.executable).with_name("pipeline")
# Each verb that only reads, as it is typed in a project that has been scanned, and its exit code there.
READING: dict[str, tuple[tuple[str, ...], int]] = {
    "doctor": ((), 0),
    "plan": (("--stage", "scan"), 0),
    "explain": (("--stage", "scan"), 0),
    "compare": ((), 2),  # nor is there anything to compare
    "submit": (("--stage", "scan", "--dry-run"), 0),
    "status": ((), 0),
    "logs": ((), 0),
    "items": ((), 0),
    "report": ((), 0),
    "replay": (("--step", "1"), 2),  # nothing was trained
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
WORKING = {"cache regenerate", "cache export", "cache import", "export embeddings", "split", "tune"}
# Verbs that change something, or print what is no data.
OTHERS = {
    "model export",
    "demo",
    "dock",
    "embed",
    "init",
    "resume",
    "cancel",
    "completion",
    "weights fetch",
    "weights import",
    "weights synth",
}
IS_JSON = "config schema"  # without being asked


def leaves(command: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, one in command.commands.items():
        if hasattr(one, "commands"):
            yield from leaves(one, f"{before}{name} ")
        else:
            yield f"{before}{name}", one


LEAVES = dict(leaves(get_command(app)))


def as_json(verb: str) -> tuple[str, ...]:
    return (*verb.split(), *READING[verb][0], *(() if verb == IS_JSON else ("--json",)))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("read")
    data = folder / "data"
    data.mkdir()
    for number in range(3):
        write_complex(data / f"c{number}.pdb", number)
    settle(data)
    (folder / "pipeline.yaml").write_text("data: {source: glob, path: data}\n")
    words = [PIPELINE, "submit", "--stage", "scan", "--executor", "local", "--follow"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stdout + done.stderr
    assert "scan: 3 of 3 items" in done.stderr  # a line in the place of a bar
    return folder


@pytest.fixture
def typed(pipeline: Command, project: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.chdir(project)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return pipeline


@pytest.mark.nightly
def test_every_verb_is_known_to_read_or_not() -> None:
    assert {*READING} | WORKING | OTHERS == {*LEAVES}


@pytest.mark.nightly
@pytest.mark.parametrize("verb", sorted({*READING, *WORKING} - {IS_JSON}))
def test_a_verb_that_reads_has_an_option_for_a_document(verb: str) -> None:
    assert any("--json" in one.opts for one in LEAVES[verb].params)


@pytest.mark.nightly
@pytest.mark.parametrize("verb", READING)
def test_a_document_is_all_that_is_printed(typed: Command, verb: str) -> None:
    done = typed(*as_json(verb))
    assert done.code == READING[verb][1], done.err
    if verb in ("replay", "weights check", "model show", "compare"):  # there is nothing to tell of what is not there
        assert (done.out, done.err[:7]) == ("", "error: ")
    else:
        json.loads(done.out)


@pytest.mark.nightly
@pytest.mark.parametrize("verb", READING)
def test_there_is_no_colour_and_no_trailing_space_where_there_is_no_terminal(typed: Command, verb: str) -> None:
    done = typed(*verb.split(), *READING[verb][0])
    assert done.code == READING[verb][1], done.err
    assert "\x1b" not in done.out + done.err
    assert verb == "logs" or [line for line in done.out.splitlines() if line.endswith(" ")] == []


@pytest.mark.nightly
@pytest.mark.parametrize("verb", sorted({*READING} - {IS_JSON, "doctor", "weights check"}))
def test_an_error_is_on_stderr_with_its_exit_code_and_stdout_stays_empty(typed: Command, verb: str) -> None:
    done = typed(*as_json(verb), "--config", "nothing.yaml")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: --config: the configuration nothing.yaml does not exist")


@pytest.mark.nightly
@pytest.mark.parametrize("words", [("plan",), ("plan", "--stage", "scan", "--set", "structures.min_residues=1")])
def test_a_plan_can_be_pasted_into_a_message(typed: Command, words: tuple[str, ...]) -> None:
    """Of a column's width, with nothing cut off, and the same whatever the terminal was."""
    done = typed(*words)
    assert done.code in (0, 2), done.err
    lines = done.out.splitlines()
    assert lines == [] or max(map(len, lines)) <= 100
    assert "…" not in done.out
    assert {*done.out} & {*"│┃━─┏┓└┘"} == set()


@pytest.mark.nightly
def test_a_document_of_what_is_submitted_is_for_dry_runs(typed: Command) -> None:
    done = typed("submit", "--stage", "scan", "--json")
    assert (done.code, done.out) == (2, "")
    assert "pipeline submit --stage scan --dry-run --json" in done.err


@pytest.mark.nightly
def test_a_dry_run_tells_the_same_as_a_document_and_as_text(typed: Command) -> None:
    words = ("submit", "--stage", "scan", "--dry-run", "--set", "structures.altlocs=first")
    told = json.loads(typed(*words, "--json").out)
    (stage,) = told["stages"]
    assert (stage["stage"], stage["counts"]["items"], told["scripts"]) == ("scan", 3, {})
    assert f"{stage['counts']['missing']}" in typed(*words).out.splitlines()[1].split()


@pytest.mark.nightly
def test_what_cannot_be_written_where_it_is_printed_to_is_said(typed: Command) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [PIPELINE, "status"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 6
    assert done.stderr == "error: what this prints cannot be written: No space left on device\n"


@pytest.mark.nightly
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_where_nothing_can_be_printed_to_a_command_does_the_same_and_says_nothing(typed: Command, closed: str) -> None:
    words = ["sh", "-c", f'"$0" status {closed}', PIPELINE]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.nightly
def test_an_interruption_before_anything_was_read_is_told_in_a_word(
    typed: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.cli.main.main", interrupt)
    assert (typed("status").code, typed("status").err) == (130, "interrupted\n")
