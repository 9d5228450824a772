"""The README is run: every command in it, and the output that it shows is what the demo prints."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from pipeline.structures.synthetic import complex_pdb
from tests.docs.blocks import ENVIRONMENT, Page

ROOT = Path(__file__).resolve().parents[2]
README = Page(ROOT / "README.md")
VARIABLE = (
    (re.compile(r"run \S+:"), "run R:"),
    (re.compile(r"\d+(\.\d+)? (ms|s|min)\b"), "T"),
    (re.compile(r"[\d,]+ residues/s"), "N residues/s"),
    (re.compile(r"peak \d+ MiB"), "peak M"),
    (re.compile(r"\d+ MiB (allocated|reserved|at the peak)"), "M"),
    (re.compile(r"[\d.,]+ items/s, waited for data [\d.]+%"), "N items/s, waited"),
    (
        re.compile(r"(interface|contacts|loss|_auroc|_auprc|_l5) [\d.e-]+"),
        r"\1 F",
    ),  # the last digits are the processor's
    (re.compile(r"is \d of 3:"), "is E of 3:"),
    (re.compile(r" +$", re.MULTILINE), ""),
)


def plain(text: str) -> str:
    for pattern, stand_in in VARIABLE:
        text = pattern.sub(stand_in, text)
    return text


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "structures").mkdir()
    for seed in range(3):
        (folder / "structures" / f"{seed}.pdb").write_bytes(complex_pdb(seed, 40, 40))
    README.write_files(folder)
    return folder


@pytest.mark.parametrize("command", README.commands())
def test_every_command_in_the_readme_works(project: Path, command: str) -> None:
    done = subprocess.run(
        command, cwd=project, env=ENVIRONMENT, capture_output=True, text=True, check=False, shell=True
    )
    assert done.returncode == 0, done.stderr


def test_every_console_block_says_whether_it_is_run() -> None:
    assert README.unmarked() == ["$ make demo\n"]


def test_make_demo_prints_what_the_readme_shows(tmp_path: Path) -> None:
    if not (ROOT / ".venv" / "ready").exists():
        pytest.skip("this environment was not made by make, which would first make one")
    done = subprocess.run(
        ["make", "demo", f"DIR={tmp_path / 'demo'}"],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (shown,) = README.blocks("output")
    assert plain(shown["body"]) in plain(done.stdout)
    check_what_to_look_at(tmp_path / "demo", done.stdout)


def check_what_to_look_at(folder: Path, printed: str) -> None:
    """Every command that the demo suggests works as typed."""
    suggested = re.findall(r"^  (pipeline .*?)(?:   .*)?$", printed, re.MULTILINE)
    assert len(suggested) >= 5
    for command in suggested:
        done = subprocess.run(command.split(), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stderr)
