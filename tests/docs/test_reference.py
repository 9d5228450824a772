"""The reference is what schema and command line say."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.schema import LEAVES, SECTIONS
from pipeline.journal.run_folder import RunFolder, _RunFile
from pipeline.training.prepared import ModelFolder
from tests.docs import pictures
from tests.docs.conftest import Demo
from tests.docs.reference import EXITS, FOLDER, configuration, file_rows, pages

PAGES = pages()


@pytest.mark.parametrize("page", PAGES)
def test_the_reference_is_up_to_date(page: str) -> None:
    assert (FOLDER / page).read_text() == PAGES[page], "python -m tests.docs.reference"


def test_the_picture_of_the_stages_is_what_a_finished_demo_gives(demo: Demo) -> None:
    assert pictures.PICTURE.read_text() == pictures.stages(demo.made), "python -m tests.docs.pictures DEMO"


def test_pictures_are_small() -> None:
    drawn = [path for path in FOLDER.parent.rglob("*") if path.suffix in (".png", ".svg")]
    assert len(drawn) >= 2
    assert [path.name for path in drawn if path.stat().st_size > 150_000] == []


def test_nothing_else_lies_in_the_reference() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)


def test_every_setting_has_a_row_with_a_meaning() -> None:
    rows = [line.split(" | ") for line in configuration().splitlines() if line.startswith("| `")]
    assert {row[0].strip("| `") for row in rows} >= {key[-1] for key in LEAVES}
    assert all(len(row) == 4 and len(row[3]) > 5 for row in rows)
    headings = {
        name for line in configuration().splitlines() if line.startswith("##") for name in line.strip("# ").split(", ")
    }
    assert headings >= {".".join(key) for key in SECTIONS}


def test_every_file_of_a_folder_has_a_row(tmp_path: Path) -> None:
    run, model = RunFolder(tmp_path), ModelFolder(tmp_path)
    run_files = {getattr(run, name).name for name, kind in vars(RunFolder).items() if isinstance(kind, _RunFile)}
    model_files = {path.name for path in vars(model).values() if path != model.path}
    for folder, files in ((RunFolder, run_files), (ModelFolder, model_files)):
        assert {row.split("`")[1] for row in file_rows(folder)[2:-1]} == files


def test_every_exit_code_of_an_error_is_explained() -> None:
    assert set(EXITS) == set(range(8))
