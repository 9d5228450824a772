"""The reference, with every command's help, every setting and every file, is what the code says."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.schema import LEAVES, SECTIONS
from pipeline.journal.run_folder import RunFolder, _RunFile
from pipeline.training.prepared import ModelFolder
from tests.docs.reference import EXITS, FOLDER, configuration, file_rows, pages


def test_the_reference_is_up_to_date() -> None:
    assert {name: (FOLDER / name).read_text() for name in pages()} == pages(), "python -m tests.docs.reference"


def test_every_setting_and_every_section_has_a_place() -> None:
    lines = configuration().splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| `")]
    assert {row[0].strip("| `") for row in rows} >= {key[-1] for key in LEAVES}
    assert all(len(row) == 4 and len(row[3]) > 5 for row in rows)
    headings = {name for line in lines if line.startswith("##") for name in line.strip("# ").split(", ")}
    assert headings >= {".".join(key) for key in SECTIONS}


def test_every_file_of_a_folder_and_every_exit_code_has_a_row(tmp_path: Path) -> None:
    run, model = RunFolder(tmp_path), ModelFolder(tmp_path)
    run_files = {getattr(run, name).name for name, kind in vars(RunFolder).items() if isinstance(kind, _RunFile)}
    model_files = {path.name for path in vars(model).values() if path != model.path}
    for folder, files in ((RunFolder, run_files), (ModelFolder, model_files)):
        assert {row.split("`")[1] for row in file_rows(folder)[2:-1]} == files
    assert set(EXITS) == set(range(8))
