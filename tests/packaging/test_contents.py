"""What is in the wheel and in the sdist, and what they say about themselves."""

from __future__ import annotations

import re
import tarfile
import zipfile
from email import message_from_string
from importlib import metadata

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import pipeline
from pipeline.command_line import DISTRIBUTION
from tests.conftest import ROOT
from tests.packaging.conftest import Built, project_files

BESIDE = ("configs", "sbatch", "docs")  # what the wheel carries from beside the package
SOURCES = ("pipeline", "tests", "benchmarks", *BESIDE)
ALONE = ("pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md", "RELEASING.md", "Makefile")
UNWANTED = re.compile(r"(^|/)(__pycache__|\.venv|\.git)/|^(runs|demo)/|\.pyc$|\.safetensors$|\.sock$")


def files_below(*names: str) -> set[str]:
    return {name for name in project_files() if name.split("/")[0] in names}


@pytest.fixture(scope="module")
def wheel_names(built: Built) -> set[str]:
    with zipfile.ZipFile(built.wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_has_every_module_all_that_lies_beside_the_package_and_nothing_else(wheel_names: set[str]) -> None:
    assert {name for name in files_below("pipeline") if name.endswith(".py")} | {"pipeline/py.typed"} <= wheel_names
    shipped = {name.removeprefix("pipeline/data/") for name in wheel_names if name.startswith("pipeline/data/")}
    assert {"configs/pipeline.yaml", "sbatch/train.sbatch", "docs/how-to/troubleshooting.md"} <= shipped
    assert shipped >= {name for name in files_below("configs", "sbatch") if not name.rpartition("/")[2].startswith(".")}
    for folder in ("recipes", "presets", "sites"):
        assert any(name.startswith(f"configs/{folder}/") for name in shipped), folder
    about = f"protein_training_pipeline-{pipeline.__version__}.dist-info"
    assert {name.split("/")[0] for name in wheel_names} == {"pipeline", about}
    assert f"{about}/licenses/LICENSE" in wheel_names
    assert not [name for name in wheel_names if UNWANTED.search(name)]


def test_the_sdist_has_what_builds_and_tests_the_program(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert set(ALONE) <= names
    assert {name for name in files_below("pipeline", "tests") if name.endswith(".py")} <= names
    assert {name.split("/")[0] for name in names} >= set(SOURCES)
    assert not [name for name in names if UNWANTED.search(name) and not name.startswith("tests/reference/")]


def test_every_package_that_the_tests_install_is_pinned() -> None:
    pins = {canonicalize_name(line.partition("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    needed, looked_at = [(DISTRIBUTION, frozenset({"bcif", "bench", "test"}))], set()
    while needed:
        looked_at.add(asked := needed.pop())
        for requirement in map(Requirement, metadata.requires(asked[0]) or ()):
            marker, further = requirement.marker, (canonicalize_name(requirement.name), frozenset(requirement.extras))
            is_asked = marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *asked[1]))
            if is_asked and further not in looked_at:
                needed.append(further)
    names = {name for name, _ in looked_at if name != DISTRIBUTION}
    assert len(names) > 100
    assert {name for name in names - pins if not name.startswith(("nvidia-", "cuda-", "triton"))} == set()


def test_wheel_citation_and_changelog_say_the_same_name_version_and_licence(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        text = archive.read(f"protein_training_pipeline-{pipeline.__version__}.dist-info/METADATA").decode()
    told = message_from_string(text)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == told["Version"] == pipeline.__version__
    assert citation["license"] == told["License-Expression"] == "MIT"
    assert citation["title"] == told["Name"] == DISTRIBUTION
    assert "Typing :: Typed" in told.get_all("Classifier", [])
    assert f"## {pipeline.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_nothing_tells_people_to_install_a_stranger() -> None:
    told = re.compile(r"pip install [^\n]*(?<![-\w./])pipeline(\[|\b(?![-./_]))")
    binary = (".xz", ".png", ".zst", ".gz")
    read = [name for name in project_files() if not name.startswith("tests/") and not name.endswith(binary)]
    assert not [name for name in read if told.search((ROOT / name).read_text(errors="replace"))]
