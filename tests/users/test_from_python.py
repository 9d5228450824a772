"""A notebook works on projects by the functions of `pipeline.api`, and stays as it was."""

from __future__ import annotations

import json
import logging
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pipeline.api import PipelineError, cancel, predict, predictions, status, submit, wait
from tests.testkit.project import make_project

if TYPE_CHECKING:
    from tests.testkit.project import Project

READER = """\
from pathlib import Path

import numpy as np

from pipeline.api import Entry


class Numbers:
    def __init__(self, path):
        self.path = Path(path)

    def files(self):
        return [self.path]

    def entries(self):
        for name in {names}:
            yield Entry(name, name, self.read(name), origin=name)

    def read(self, place):
        return {{"x": np.zeros(3, np.float32)}}
"""


def with_reader(folder: Path, *names: str) -> Path:
    """Return a project with a reader, whose module is called the same in each."""
    folder.mkdir(exist_ok=True)
    (folder / "numbers.txt").write_text("")
    (folder / "mine.py").write_text(READER.format(names=names))
    data = "{source: reader, reader: 'mine:Numbers', path: numbers.txt}"
    (folder / "pipeline.yaml").write_text(f"data: {data}\ncluster: {{executor: local, slots: {{cpus: 1}}}}\n")
    return folder


def items(done: dict) -> list[str]:
    return [row.split(",")[0] for row in (Path(done["folder"]) / "inventory.csv").read_text().splitlines()[1:]]


def about_the_process() -> tuple:
    log = logging.getLogger("pipeline")
    signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)]
    return signals, logging.getLogger().handlers[:], log.handlers[:], log.level, sys.path[:], {*sys.modules} & {"mine"}


def test_the_documents_are_those_of_the_command_line(tmp_path: Path) -> None:
    project = make_project(tmp_path, 2)
    would_do = submit(project.folder, "scan", executor="local", dry_run=True)
    typed = project.types("submit", "scan", "--executor", "local", "--dry-run", "--json")
    assert (would_do["plan"], would_do["run"], would_do["stages"]) == (json.loads(typed.out), None, ["scan"])
    done = submit(project.folder / "pipeline.yaml", "scan", executor="local", wait=True)
    assert (done["run"], done["new"], done["folder"]) == (project.run.name, True, str(project.run.path))
    assert status(project.folder) == done["status"] == json.loads(project.types("status", "--json").out)
    assert wait(project.folder, done["run"]) == cancel(project.folder) == done["status"]


def test_a_thread_of_a_notebook_works_on_two_projects_after_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    first, second = with_reader(tmp_path / "first", "a", "b"), with_reader(tmp_path / "second", "c")
    before = about_the_process()

    def cells() -> list[list[str]]:
        with pytest.raises(PipelineError) as refused:
            submit(first, "scan", set={"data.lmit": 3})
        assert "limit" in refused.value.what
        with pytest.raises(PipelineError):
            submit(first, "train", only=True, set=["train.task=mine:Missing"])
        found = [items(submit(folder, "scan", wait=True)) for folder in (first, second)]
        with_reader(first, "a", "edited")
        return [*found, items(submit(first, "scan", wait=True))]

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(cells).result() == [["a", "b"], ["c"], ["a", "edited"]]
    assert about_the_process() == before
    assert capfd.readouterr() == ("", "")


def test_a_failed_run_raises_its_error(tmp_path: Path) -> None:
    project = make_project(tmp_path, 1).folder
    for file in (project / "data").iterdir():
        file.write_text("no structure")
    with pytest.raises(PipelineError, match="cannot be used") as failed:
        submit(project, "scan", wait=True)
    assert (failed.value.exit_code, bool(failed.value.remedy), status(project)["state"]) == (3, True, "failed")


@pytest.mark.nightly
def test_predictions_are_read_item_by_item(trained: Project) -> None:
    (model,) = (trained.folder / "models").iterdir()
    done = predict(trained.folder, model.name, executor="local", set={"train.predict.split": None})
    read = list(predictions(done["predictions"]))
    table = [json.loads(line) for line in (Path(done["predictions"]) / "predictions.jsonl").read_text().splitlines()]
    assert [item["id"] for item in read] == [row["id"] for row in table]
    assert all(item["contacts"].shape == tuple(row["contacts.shape"]) for item, row in zip(read, table, strict=True))
    assert isinstance(read[0]["contacts"], np.ndarray)
    with pytest.raises(PipelineError, match="no complete predictions"):
        next(predictions(trained.folder))
