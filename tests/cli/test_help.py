"""The command line starts quickly: it waits neither for torch nor for what a command does not need."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from typer import Context
from typer.main import get_command

from pipeline.cli.help import ORDER, panels
from pipeline.cli.main import VERBS, app
from tests.testkit.command import Command

ROOT = Path(__file__).resolve().parents[2]
# What stands beside a training step while it runs, or is traced.
BESIDE_A_STEP = (
    "device/accelerator.py",
    "device/batch_transfer.py",
    "memory/leak_inspection.py",
    "memory/leak_detector.py",
    "memory/runtime/recovery.py",
    "training/loop/train.py",
)


def imports_none_of(code: str, *packages: str) -> bool:
    """Tell whether a program of its own ends well, and has imported none of these."""
    check = f"\nimport sys\nassert not {{*{packages!r}}} & set(sys.modules)"
    return subprocess.run([sys.executable, "-c", code + check], capture_output=True, check=False).returncode == 0


def test_nothing_reachable_from_the_command_line_imports_torch_before_there_is_something_to_encode() -> None:
    """The import rule keeps torch in two rooms, the tracer and a view; this loads all the rest and what it needs."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "pipeline").rglob("*.py"))
        if path.name not in ("__init__.py", "pyg_view.py")
        and not str(path).endswith(BESIDE_A_STEP)
        and not {"encoder", "training", "tasks", "tracing"} & set(path.parts)
    ]
    assert imports_none_of(f"import importlib\nfor name in {modules!r}: importlib.import_module(name)", "torch")
    assert not imports_none_of("import pipeline.memory.runtime.recovery", "torch")


def test_a_supervisor_and_a_task_that_make_no_graph_start_without_scipy() -> None:
    assert imports_none_of("import pipeline.engine.supervisor, pipeline.engine.worker", "torch", "scipy")


ALIASES = {
    "items": "data items",
    "split": "data split",
    "tune": "find-batch",
    "export embeddings": "embeddings export",
}


def command(words: str) -> Any:
    """Return the command that these words name."""
    return reduce(lambda group, word: group.commands[word], words.split(), get_command(app))


@pytest.mark.parametrize("old", ALIASES)
def test_an_old_name_is_hidden_and_does_the_same(old: str) -> None:
    assert get_command(app).commands[old.split()[0]].hidden
    assert command(old).callback.__wrapped__ is command(ALIASES[old]).callback.__wrapped__


@pytest.mark.parametrize(("typed", "meant"), [("train", "submit train"), ("run", "submit"), ("stop", "cancel")])
def test_a_word_of_another_tool_is_answered_with_the_command(typed: str, meant: str, pipeline: Command) -> None:
    done = pipeline(typed)
    assert (done.code, f"pipeline {meant}?" in done.err) == (2, True)


def test_a_stage_is_named_by_its_place_or_by_an_option(tmp_path: Path, pipeline: Command) -> None:
    config = tmp_path / "pipeline.yaml"
    config.write_text("data: {source: fasta, path: a.fasta}\ncache: {root: cache}\ncluster: {runs: runs}\n")
    (tmp_path / "a.fasta").write_text(">a\nMKV\n")
    for words in (("scan",), ("--stage", "scan"), ("scan", "--stage", "scan")):
        done = pipeline("plan", *words, "--json", "--config", str(config))
        assert (done.code, [stage["stage"] for stage in done.json()]) == (0, ["scan"]), done.err
        assert pipeline("submit", *words, "--dry-run", "--config", str(config)).code == 0
    for verb in ("plan", "submit"):
        refused = pipeline(verb, "scan", "--stage", "train", "--config", str(config))
        assert (refused.code, f"pipeline {verb} scan" in refused.err) == (2, True)
    text, dot = (pipeline("plan", "scan", *words, "--config", str(config)).out for words in (["--dag"], ["--dag=dot"]))
    assert (pipeline("plan", "scan", "--graph", "--config", str(config)).out, dot[:7]) == (text, "digraph")


def every(name: str, inner: Any) -> Iterator[tuple[str, Any]]:
    """Yield a command and those below it that help lists, each with what is typed for it."""
    yield name, inner
    for word, below in getattr(inner, "commands", {}).items():
        if not below.hidden:
            yield from every(f"{name} {word}", below)


COMMANDS = dict(every("pipeline", get_command(app)))


@pytest.mark.parametrize("columns", ["80", "120"])
def test_help_is_plain_where_it_is_no_terminal_and_nothing_in_it_is_cut(
    pipeline: Command, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert "\x1b" not in pipeline("submit", "--help").out
    monkeypatch.setenv("NO_COLOR", "1")
    for name, inner in COMMANDS.items():
        with Context(inner, info_name=name, max_content_width=100) as context:
            shown = inner.get_help(context)
            assert max(map(len, shown.splitlines())) <= int(columns), name
            for panel, rows in panels(inner, context).items():
                assert f"{panel}:" in shown.splitlines(), (name, panel)
                said = "".join(shown.split())
                assert [row for row in rows if "".join("".join(row).split()) not in said] == [], name
    root = COMMANDS["pipeline"]
    assert list(panels(root, Context(root)))[:6] == [*ORDER[3:9]]


def test_a_summary_fits_into_a_line_of_80_columns() -> None:
    for name, inner in COMMANDS.items():
        summary = inner.help.partition("\n")[0]
        assert name == "pipeline" or len(summary) <= 65, summary
        assert summary.endswith("."), name


def test_the_examples_of_help_are_commands_that_can_be_parsed() -> None:
    shown = [line for inner in COMMANDS.values() for line in (inner.epilog or "").splitlines() if "pipeline" in line]
    for line in shown:
        words, inner = shlex.split(line, comments=True)[1:], get_command(app)
        while hasattr(inner, "commands"):
            inner = inner.commands[words.pop(0)]
        inner.make_context("pipeline", words)
    assert len(shown) > 20
    assert {"submit", "plan", "status", "cache", "init", "explain", "report", "split"} <= {
        name.split()[-1] for name, inner in COMMANDS.items() if inner.epilog
    }


def test_the_list_of_commands_says_what_each_says_of_itself() -> None:
    listed = {name: summary for rows in VERBS.values() for name, (_, summary) in rows.items()}
    group = get_command(app)
    assert len(listed) > 20
    assert listed == {name: group.commands[name].help.partition("\n")[0] for name in listed}


def test_help_needs_neither_numpy_nor_pydantic_nor_a_verb() -> None:
    code = (
        "import sys; sys.argv = ['pipeline', '--help']\n"
        "from pipeline.cli.main import app\n"
        "try: app()\n"
        "except SystemExit: pass\n"
    )
    verbs = (f"pipeline.cli.{place.partition(':')[0]}" for rows in VERBS.values() for place, _ in rows.values())
    assert imports_none_of(code, "torch", "numpy", "pydantic", "gemmi", "yaml", "rich", "logging", *verbs)
