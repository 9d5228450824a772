"""The wheel in an environment of its own, far from the repository: commands, types, and the whole demo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import pipeline
from pipeline.command_line import DISTRIBUTION
from tests.conftest import ROOT
from tests.packaging.conftest import Built, Installed

USER = """\
from pathlib import Path

from pipeline.config.load import read_config
from pipeline.keys import recipe_tag


def limit(path: Path) -> int:
    return read_config(path).config.data.limit or 0


TAG: bytes = recipe_tag("graph", {"k": 1})
WRONG: int = recipe_tag("graph", {"k": 1})
"""


@pytest.fixture
def project(installed: Installed, tmp_path: Path) -> Path:
    installed("pipeline", "init", ".", cwd=tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/manifest.csv").write_text("id,path\na,a.pdb\n")
    return tmp_path


@pytest.mark.nightly
def test_the_package_comes_from_the_wheel_under_its_own_name_and_nothing_of_the_checkout_is_seen(
    installed: Installed, tmp_path: Path
) -> None:
    code = "import json, sys, pipeline; print(json.dumps([pipeline.__file__, pipeline.__version__, *sys.path]))"
    file, version, *paths = json.loads(installed("python", "-c", code, cwd=tmp_path).stdout)
    assert Path(file).is_relative_to(installed.prefix)
    assert version == pipeline.__version__
    assert str(ROOT) not in paths
    code = "from importlib.metadata import distribution as of; d = of('%s'); print(d.version, *d.entry_points.names)"
    told = installed("python", "-c", code % DISTRIBUTION, cwd=tmp_path).stdout.split()
    assert told == [pipeline.__version__, "pipeline"]
    assert installed("pipeline", "--version", cwd=tmp_path).stdout == f"pipeline {pipeline.__version__}\n"


@pytest.mark.nightly
def test_a_new_project_is_checked_planned_and_finds_the_scripts_and_recipes_of_the_wheel(
    installed: Installed, project: Path
) -> None:
    checked = installed("pipeline", "config", "check", cwd=project, check=False)
    assert (checked.returncode, "pipeline weights fetch" in checked.stderr) == (2, True)  # all else is right
    told = installed("pipeline", "submit", "--stage", "scan", "--executor", "local", "--dry-run", cwd=project)
    assert ("scan" in told.stdout, (project / "runs").exists()) == (True, False)
    installed("pipeline", "submit", "--stage", "scan", "--executor", "slurm", "--emit", "scripts", cwd=project)
    assert "srun" in (project / "scripts/scan-0.sbatch").read_text()
    found = "from pipeline.files import shipped; print(shipped('sbatch'), shipped('configs/recipes'))"
    folders = installed("python", "-c", found, cwd=project).stdout.split()
    assert all(Path(folder).is_relative_to(installed.prefix) and any(Path(folder).iterdir()) for folder in folders)
    installed("pipeline", "init", "other", "--recipe", "rna_ligand", cwd=project)
    assert "RNA" in (project / "other/pipeline.yaml").read_text()


@pytest.mark.nightly
def test_a_program_that_uses_the_wheel_is_checked_against_its_types(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    python = str(installed.prefix / "bin/python")
    words = ["--strict", "--no-error-summary", "--python-executable", python, "--cache-dir", str(tmp_path / "cache")]
    mypy = [sys.executable, "-m", "mypy", *words, "user.py"]
    done = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True, check=False)
    wrong = 'user.py:12: error: Incompatible types in assignment (expression has type "bytes", variable has type "int")'
    assert done.stdout.splitlines() == [f"{wrong}  [assignment]"]


@pytest.mark.nightly
def test_the_whole_demo_runs_from_the_wheel_in_an_empty_environment(installed: Installed, tmp_path: Path) -> None:
    told = installed("pipeline", "demo", "demo", cwd=tmp_path)
    assert "! 1 rejected: demo-broken" in told.stdout
    again = installed("pipeline", "submit", "--stage", "all", "--executor", "local", "--follow", cwd=tmp_path / "demo")
    assert "nothing to do" in again.stdout
    code = Path(next((tmp_path / "demo/runs").glob("2*/code.txt")).read_text())
    assert (code / "pipeline/data/sbatch/train.sbatch").is_file()  # what a run froze is the wheel's, whole


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_pip_install_by_name_and_the_demo_are_all_that_an_empty_environment_needs(built: Built, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=300)
    pip = [tmp_path / "venv/bin/pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    found = ["-c", ROOT / "constraints.txt", "--find-links", built.wheel.parent, DISTRIBUTION]
    done = subprocess.run([*pip, *found], capture_output=True, text=True, check=False, timeout=1200)
    if "Failed to establish a new connection" in done.stderr:
        pytest.skip("no package index answers here: torch and the others cannot be installed")
    assert done.returncode == 0, done.stderr
    empty = Installed(tmp_path / "venv", tmp_path)
    assert "! 1 rejected: demo-broken" in empty("pipeline", "demo", "demo", cwd=tmp_path).stdout
    torch = empty("python", "-c", "import torch; print(torch.__version__, torch.__file__)", cwd=tmp_path).stdout
    assert torch.startswith("2.13.0")
    assert str(tmp_path / "venv") in torch
