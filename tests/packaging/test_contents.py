"""What is in the wheel and in the sdist, and what they say about themselves."""

from __future__ import annotations

import re
import tarfile
import zipfile
from email import message_from_string

import pytest
import yaml

import pipeline
from pipeline.command_line import DISTRIBUTION
from tests.conftest import ROOT
from tests.packaging.conftest import Built, project_files

BESIDE = ("configs", "sbatch", "docs")  # what the wheel carries from beside the package
SOURCES = ("pipeline", "tests", "benchmarks", *BESIDE)
ALONE = ("pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md", "RELEASING.md", "Makefile")
UNWANTED = re.compile(r"(^|/)(__pycache__|\.venv|\.git)/|^(runs|demo)/|\.pyc$|\.safetensors$|\.sock$")


def files_below(*names: str) -> set[str]:
    """Return the project's files in some folders."""
    return {name for name in project_files() if name.split("/")[0] in names}


@pytest.fixture(scope="module")
def wheel_names(built: Built) -> set[str]:
    with zipfile.ZipFile(built.wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def sdist_names(built: Built) -> set[str]:
    with tarfile.open(built.sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def metadata(built: Built) -> dict[str, list[str]]:
    with zipfile.ZipFile(built.wheel) as archive:
        text = archive.read(f"protein_training_pipeline-{pipeline.__version__}.dist-info/METADATA").decode()
    message = message_from_string(text)
    return {name: message.get_all(name, []) for name in {key.title() for key in message}}


def test_the_wheel_has_every_module_and_all_that_lies_beside_the_package(wheel_names: set[str]) -> None:
    tracked = {name for name in wheel_names if name.startswith("pipeline/") and not name.startswith("pipeline/data/")}
    assert {name for name in files_below("pipeline") if name.endswith(".py")} <= tracked
    shipped = {name.removeprefix("pipeline/data/") for name in wheel_names if name.startswith("pipeline/data/")}
    assert {"configs/pipeline.yaml", "sbatch/train.sbatch", "docs/troubleshooting.md"} <= shipped
    assert shipped >= {name for name in files_below("configs", "sbatch") if not name.rpartition("/")[2].startswith(".")}
    assert {name for name in shipped if name.startswith("configs/recipes/")}
    assert {name for name in shipped if name.startswith("configs/presets/")}
    assert {name for name in shipped if name.startswith("configs/sites/")}


def test_the_wheel_has_nothing_that_is_no_part_of_the_program(wheel_names: set[str]) -> None:
    places = {name.split("/")[0] for name in wheel_names}
    assert places == {"pipeline", f"protein_training_pipeline-{pipeline.__version__}.dist-info"}
    assert not [name for name in wheel_names if UNWANTED.search(name)]


def test_the_wheel_says_that_it_is_typed_and_whose_licence_it_has(wheel_names: set[str], metadata) -> None:
    assert "pipeline/py.typed" in wheel_names
    assert f"protein_training_pipeline-{pipeline.__version__}.dist-info/licenses/LICENSE" in wheel_names
    assert metadata["License-Expression"] == ["MIT"]
    assert "Typing :: Typed" in metadata["Classifier"]


def test_the_sdist_has_what_builds_and_tests_the_program(sdist_names: set[str]) -> None:
    assert set(ALONE) <= sdist_names
    assert {name for name in files_below("pipeline", "tests") if name.endswith(".py")} <= sdist_names
    assert {name.split("/")[0] for name in sdist_names} >= set(SOURCES)
    assert not [name for name in sdist_names if UNWANTED.search(name)]


def test_one_place_says_the_version(metadata: dict[str, list[str]]) -> None:
    assert metadata["Version"] == [pipeline.__version__]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == pipeline.__version__
    assert not re.search(r'^version = "', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"## {pipeline.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_citation_and_the_wheel_name_the_same_licence(metadata: dict[str, list[str]]) -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["license"] == metadata["License-Expression"][0]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert [citation["title"]] == metadata["Name"] == [DISTRIBUTION]
    assert (ROOT / "LICENSE").read_text().startswith("MIT License")


def test_nothing_tells_people_to_install_a_stranger(built: Built) -> None:
    told = re.compile(r"pip install [^\n]*(?<![-\w./])pipeline(\[|\b(?![-./_]))")
    wrong = [
        f"{name}: {line.strip()}"
        for name in project_files()
        if name.split("/")[0] not in ("tests", "CHANGELOG.md") and not name.endswith((".xz", ".png", ".zst", ".gz"))
        for line in (ROOT / name).read_text(errors="replace").splitlines()
        if told.search(line)
    ]
    assert not wrong
    wheel = built.wheel.name.partition("-")[0]
    assert f"dist/{wheel}-*.whl" in (ROOT / "containers/pipeline.def").read_text()


def test_pages_that_messages_name_are_in_the_wheel(wheel_names: set[str]) -> None:
    texts = [path.read_text() for path in (ROOT / "pipeline").rglob("*.py")]
    named = {page for text in texts for page in re.findall(r"[\"' ](docs/\w+\.md)", text)}
    assert named  # else this looks at nothing
    assert {f"pipeline/data/{page}" for page in named} <= wheel_names
