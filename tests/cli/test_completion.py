"""TAB offers what the parser takes: by the same commands, in real shells, fast, and without torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from pipeline.cli.main import app
from pipeline.cli.options import answer, shell_script
from tests.journal.ledgers import Told
from tests.testkit.command import Command

PIPELINE = Path(sys.executable).with_name("pipeline")
ROOT = get_command(app)
# As readline calls a function: with the line, and its words broken at spaces.
IN_BASH = """source {script}
COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}
compopt() {{ local IFS=' '; echo "compopt $*"; }}
_pipeline {pipeline} '' ''
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
# What zsh's own function would be handed.
IN_ZSH = """compdef() {{ :; }}
_describe() {{ print -l -- "${{(@P)2}}" }}
_files() {{ print files }}
source {script}
words=({line}); CURRENT=$#words
words[1]={pipeline}
_pipeline
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pipeline.yaml").write_text(
        "data: {source: fasta, path: a.fasta}\ncluster: {runs: runs}\ncache: {root: cache}\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def offered(line: str) -> list[str]:
    return [one.partition("\t")[0] for one in answer(ROOT, line)]


def script(shell: str, folder: Path) -> Path:
    path = folder / f"completion.{shell}"
    path.write_text(shell_script(shell))
    return path


def test_what_can_follow_is_offered() -> None:
    for line, words in [
        ("pipeline st", ["status"]),
        ("pipeline cache va", ["validate"]),
        ("pipeline cache 'va", ["validate"]),
        ("pipeline config ", ["show", "check", "schema"]),
        ("pipeline --debug st", ["status"]),
        ("pipeline logs --st", ["--stage"]),
        ("pipeline submit t", ["train"]),
        ("pipeline submit --stage t", ["train"]),
        ("pipeline submit --stage=e", ["--stage=embed", "--stage=evaluate"]),
        ("pipeline submit --executor ", ["local", "slurm", "allocation"]),
        ("pipeline plan val", ["validate"]),
        ("pipeline logs --stage sup", ["supervise"]),
        ("pipeline cancel --stage sc", ["scan"]),
        ("pipeline init --recipe c", ["complex_docking", "contrastive_pair"]),
        ("pipeline plan --gpu h100-80gb-s", ["h100-80gb-sxm"]),
        ("pipeline weights fetch esm2_t6", ["esm2_t6_8M_UR50D"]),
        ("pipeline submit --set train.effective", ["train.effective_batch="]),
        ("pipeline submit --set cluster.site=gen", ["cluster.site=generic"]),
        ("pipeline completion ", ["bash", "zsh", "fish"]),
        ("pipeline submit --config pipe", []),  # the shell's own: files
    ]:
        assert offered(line) == words, line


def test_every_verb_and_every_option_of_each_is_offered() -> None:
    verbs = {name for name, one in ROOT.commands.items() if not one.hidden}  # type: ignore[attr-defined]
    assert set(offered("pipeline ")) == verbs
    for name in verbs:
        params = ROOT.commands[name].params  # type: ignore[attr-defined]
        options = {one.opts[0] for one in params if one.param_type_name == "option" and not one.hidden}
        assert {one for one in options if one.startswith("--")} <= {*offered(f"pipeline {name} -")}


def test_runs_are_offered_by_name_the_newest_first(runs: Path) -> None:
    first, second = Told(runs).folder, Told(runs).folder
    second.again.write_text("pipeline submit scan\n")
    lines = list(answer(ROOT, "pipeline status 2"))
    assert lines == [f"{second.name}\tpipeline submit scan", first.name]  # which says no more what it was
    assert offered("pipeline logs ") == [second.name, first.name]
    assert offered(f"pipeline report --set cluster.runs={runs.parent} 2") == []
    (runs.parent / "pipeline.yaml").write_text("nonsense: [")
    assert offered("pipeline status ") == []


def test_bash_completes(tmp_path: Path) -> None:
    for line, reply in [
        ("pipeline submit --stage tr", ["train"]),
        ("pipeline submit --stage=tr", ["train"]),  # readline keeps what stands before =
        ("pipeline submit --set cluster.site=gen", ["generic"]),
        ("pipeline submit --set train.effective", ["compopt -o nospace", "train.effective_batch="]),
        ("pipeline submit --config x", [""]),
    ]:
        text = IN_BASH.format(script=script("bash", tmp_path), line=line, pipeline=PIPELINE)
        done = subprocess.run(["bash", "--norc", "-c", text], capture_output=True, text=True, check=True)
        assert (done.stdout.splitlines(), done.stderr) == (reply, ""), line
    text = f"source {script('bash', tmp_path)}; complete -p pipeline"
    done = subprocess.run(["bash", "--norc", "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "complete -o default -F _pipeline pipeline\n"


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed here")
def test_zsh_completes(tmp_path: Path) -> None:
    for line, reply in (("pipeline cache va", "validate:"), ("pipeline submit --config x", "files")):
        text = IN_ZSH.format(script=script("zsh", tmp_path), line=line, pipeline=PIPELINE)
        done = subprocess.run(["zsh", "-f", "-c", text], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1].startswith(reply)
        assert done.stderr == ""


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed here")
def test_fish_completes(tmp_path: Path) -> None:
    place = f"set -x PATH {PIPELINE.parent} $PATH; set -x HOME {tmp_path}; source {script('fish', tmp_path)}"
    text = f"{place}; complete -C 'pipeline submit --stage tr'; complete -C 'pipeline cache va'"
    done = subprocess.run(["fish", "--no-config", "-c", text], capture_output=True, text=True, check=True)
    assert [line.partition("\t")[0] for line in done.stdout.splitlines()] == ["train", "validate"]


def imported_by(lines: list[str]) -> set[str]:
    """Return the packages that another process has imported after it answered these lines."""
    code = (
        "import sys\nfrom typer.main import get_command\nfrom pipeline.cli.main import app\n"
        "from pipeline.cli.options import answer\n"
        f"for line in {lines}: assert list(answer(get_command(app), f'pipeline {{line}}'))\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_an_answer_imports_no_more_than_it_takes_to_read_a_configuration(runs: Path) -> None:
    for _ in range(30):
        Told(runs).folder.again.write_text("pipeline submit\n")
    done = subprocess.run([PIPELINE, "__complete", "pipeline status "], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 30
    quick = imported_by(["", "status ", "submit --set ", "cancel --stage "])
    assert {"typer", "yaml", "pydantic"} <= quick
    assert not {"numpy", "rich", "gemmi", "safetensors", "jinja2", "torch", "scipy"} & quick
    assert not {"torch", "scipy"} & imported_by(["plan --gpu ", "weights fetch "])


def test_a_name_that_is_misspelt_is_a_usage_error_that_names_what_was_meant(pipeline: Command) -> None:
    for words, meant in {
        "submit trian": "train",
        "plan embde": "embed",
        "logs --stage supervisor": "supervise",
        "cancel --stage grpah": "graph",
        "submit xyz": "scan, embed, graph, train, evaluate, predict",
        "submit scan --executor slrum": "slurm",
        "statsu": "status",
        "completion fsh": "fish",
        "completion tcsh": "bash, zsh, fish",
    }.items():
        done = pipeline(*words.split())
        assert (done.code, done.out, meant in " ".join(done.err.split())) == (2, "", True), words
