"""Items that are no structures, through the runs as people type them: scan, train, evaluate, and what stops that."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import read_config
from pipeline.dataset.loading import made_table, open_loader, table_of
from pipeline.dataset.reader_items import reader_of, reader_state
from pipeline.engine.lifecycle import new_run
from pipeline.errors import ConfigError, DataError
from pipeline.journal.ledger import LedgerReader
from pipeline.journal.run_folder import RunFolder, find_run
from pipeline.planning.prepare import recipe_of, training_name
from pipeline.project.project import Project
from pipeline.records import EventKind, TaskContext
from pipeline.stages.scan import EntriesRead, ReaderScanStage
from pipeline.stages.table import everything, up_to
from pipeline.training.sampling import SamplerSettings
from tests.stages.reader_project import SPLITS, write_project, write_spectrum
from tests.testkit.command import Command
from tests.testkit.project import settle, to_do

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared

DIES = """\
            import os, sys
            if path.stem == "s5" and "engine.worker" in " ".join(sys.orig_argv):
                os.abort()
"""
KILLS = """\
        import os, sys
        if place == "s3.txt" and "pipeline.training.loop.trainer" in sys.modules:
            os.abort()
"""
SCAN, TRAIN = ("submit", "--stage", "scan", "--follow"), ("submit", "--stage", "train", "--follow")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of eight spectra in the current folder; its modules are not those of the test before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "spectra", raising=False)
    return write_project(tmp_path)


def opened(*sets: str) -> Project:
    loaded = read_config(Path("pipeline.yaml"), sets)
    return Project.open(loaded.config, beside=loaded.base_dir.absolute())


def scan(project: Project) -> tuple[RunFolder, EntriesRead, list[str]]:
    """Do what a run does of the data set, in this process."""
    folder = new_run(project.config, ["scan"], beside=project.beside)
    found = ReaderScanStage().survey(project, folder, 1)
    for number in range(len(found.shards)):
        list(ReaderScanStage().work(project, folder, number, TaskContext(lambda *_: None)))
    judged = ReaderScanStage().judge(project, folder, 0.0)
    return folder, judged, ReaderScanStage().check(project, folder, judged)


def counts(project: Project) -> tuple[int, int]:
    found = ReaderScanStage().survey(project, None, 1).counts
    return found["cached"], found["missing"]


def rewrite(folder: Path, before: str, after: str) -> None:
    """Change the user's own code, which is loaded anew."""
    code = (folder / "spectra.py").read_text()
    assert before in code
    (folder / "spectra.py").write_text(code.replace(before, after))
    sys.modules.pop("spectra", None)


def touched(path: Path, text: str) -> None:
    path.write_text(text)
    settle(path.parent)


@pytest.mark.nightly
def test_a_model_is_trained_and_evaluated_on_what_a_reader_gives_and_again_there_is_nothing_to_do(
    pipeline: Command, folder: Path
) -> None:
    done = pipeline("submit", "--stage", "all", "--follow")
    assert done.code == 0, done.err
    (figures,) = folder.glob("models/*/evaluations/test-*.json")
    assert set(json.loads(figures.read_text())["evaluation"]["figures"]) == {"loss", "mean"}
    again = pipeline("submit", "--stage", "all", "--follow")
    assert again.code == 0, again.err
    assert {stage: missing for stage, (_, missing) in to_do().items()} == {"scan": 0, "train": 0, "evaluate": 0}


@pytest.mark.nightly
def test_a_file_that_changed_is_scanned_again_and_trained_on_anew(folder: Path) -> None:
    names = set()
    for peaks in ("1.0 2.0", "5.0 6.0 7.0"):
        touched(folder / "data" / "s1.txt", f"train {peaks}")
        project = opened()
        assert counts(project) == (0, 1)
        assert made_table(project) is None
        scan(project)
        table = made_table(project)
        assert table is not None
        names.add(training_name("spectra:Sum", recipe_of(project, table, "fp32")))
    assert len(names) == 2


def test_a_byte_that_changed_after_the_scan_is_an_error_that_names_the_item(folder: Path) -> None:
    project = opened()
    scan(project)
    loader = open_loader(None, SamplerSettings(batch=8, by=("peaks",)), slots=8, threads=1)
    whole = (folder / "data" / "s3.txt").read_text()
    (folder / "data" / "s3.txt").write_text(whole.replace("0.250", "0.251"))
    with pytest.raises(DataError, match="s3") as caught:
        list(loader)
    assert "pipeline submit scan" in caught.value.remedy


def test_the_values_of_a_batch_are_joined_along_each_axis_and_each_item_has_its_own(folder: Path) -> None:
    scan(opened())
    loader = open_loader(None, SamplerSettings(batch=6, by=("peaks",), padding=None), split="train")
    (batch,) = list(loader)
    assert sorted(batch.ids) == [f"s{number}" for number in range(6)]
    assert batch["peaks.mz"].shape == (sum(range(1, 7)),)
    assert batch["total"].shape == (6,)
    assert batch.ptr("peaks").diff().tolist() == [int(name[1:]) + 1 for name in batch.ids]
    for item in batch.items:
        assert len(item.values["peaks.mz"]) == int(item.id[1:]) + 1
        assert float(item.values["total"]) == pytest.approx(float(item.values["peaks.mz"].sum()))
        assert not item.sides


@pytest.mark.parametrize("change", ["a file", "an option", "the code", "a new file", "the limit", "nothing", "times"])
def test_what_was_read_is_known_until_anything_of_it_changes(folder: Path, change: str) -> None:
    _, judged, _ = scan(opened())
    sets = []
    if change == "a file":
        touched(folder / "data" / "s1.txt", "train 5.0 6.0 7.0")
    elif change == "an option":
        sets = ["data.options={scale: 2.0}"]
    elif change == "the code":
        rewrite(folder, "mz_P > 1", "mz_P > 2")
    elif change == "a new file":
        write_spectrum(folder, 9, "train")
    elif change == "the limit":
        sets = ["data.limit=3"]
    elif change == "times":
        os.utime(folder / "data" / "s1.txt")
        settle(folder / "data")
    assert counts(opened(*sets)) == ((1, 0) if change == "nothing" else (0, 1))
    if change == "times":  # its items are what they were, and so is their table
        assert scan(opened())[1].table == judged.table
        assert counts(opened()) == (1, 0)


@pytest.mark.nightly
def test_a_reader_that_dies_is_tried_again_and_the_place_is_told(pipeline: Command, folder: Path) -> None:
    rewrite(folder, "        for path in self.files():\n", "        for path in self.files():\n" + DIES)
    done = pipeline(*SCAN)
    assert (done.code, "s0.txt" in done.err) == (7, True)


@pytest.mark.nightly
def test_an_item_whose_reading_kills_a_training_is_found_and_left_out(pipeline: Command, folder: Path) -> None:
    """Items are read ahead of their step, so that at first others were being trained on when it died."""
    rewrite(folder, "        mz_P =", KILLS + "        mz_P =")
    done = pipeline(*TRAIN, "--set", "data.max_rejected_fraction=0.2")
    assert done.code == 0, done.out + done.err
    events = LedgerReader(find_run(folder / "runs", None)).fresh()
    assert [one.data["names"] for one in events if one.kind is EventKind.LEFT_OUT] == [["s3"]]
    assert pipeline(*TRAIN, "--set", "data.max_rejected_fraction=0.2").code == 0
    assert to_do()["train"][1] == 0
    assert "s3" in pipeline("model", "show", "models/" + next((folder / "models").iterdir()).name).out


def test_rejections_are_counted_written_and_told_again_by_the_next_run(folder: Path) -> None:
    (folder / "data" / "s8.txt").write_text("bad")
    settle(folder / "data")
    for _ in range(2):
        run, judged, _ = scan(opened())
        (line,) = run.rejected.read_text().splitlines()
        found = json.loads(line)
        assert (found["id"], found["reason"], found["origin"]) == ("s8", "bad_entry", "s8.txt")
        assert (judged.items, judged.accepted, judged.rejected) == (9, 8, {"bad_entry": 1})


@pytest.mark.parametrize("on_leak", ["error", "warn", "ignore"])
def test_an_id_in_two_splits_is_a_leak(folder: Path, on_leak: str) -> None:
    rewrite(folder, "Entry(path.stem,", 'Entry("same" if path.stem in ("s0", "s7") else path.stem,')
    project = opened(f"data.on_leak={on_leak}", "data.max_rejected_fraction=1.0")
    if on_leak == "error":
        with pytest.raises(DataError):
            scan(project)
        assert made_table(project) is None
    else:
        _, judged, said = scan(project)
        assert len(said) == (on_leak == "warn")
        assert judged.rejected == {"duplicate_id": 1}


def test_a_limit_takes_the_first_items_and_splits_are_those_of_the_entries(folder: Path) -> None:
    _, judged, _ = scan(opened("data.limit=7"))
    assert judged.splits == {"train": 6, "test": 1}
    table = table_of(opened("data.limit=7"))
    assert [table.ids[number] for number in range(7)] == [f"s{number}" for number in range(7)]
    assert table.sizes["peaks"].tolist() == list(range(1, 8))


def test_files_that_change_while_they_are_read_are_an_error(folder: Path) -> None:
    project = opened()
    run = new_run(project.config, ["scan"], beside=project.beside)
    reader = reader_of(project)
    entries = reader.entries

    def changing() -> Any:
        for entry in entries():
            yield entry
            if entry.id == "s7":
                time.sleep(0.01)
                os.utime(folder / "data" / "s0.txt")

    reader.entries = changing  # type: ignore[method-assign]
    with pytest.raises(DataError):
        list(ReaderScanStage().work(project, run, 0, TaskContext(lambda *_: None)))
    assert not run.entered.exists()


@pytest.mark.nightly
def test_what_cannot_be_read_or_cropped_is_refused_before_anything_runs(pipeline: Command, folder: Path) -> None:
    for setting, word in (
        ("data.reader=spectra:Missing", "'Missing'"),
        ("data.reader=nowhere:Spectra", "'nowhere'"),
        ("data.reader=spectra:Sum", "data.options.scale"),
        ("data.options={scale: -1.0}", "data.options.scale"),
        ("data.options={scale: wide}", "TypeError"),
        ("train.oversize=crop", "train.oversize"),
    ):
        for command in (TRAIN, ("config", "check")):
            done = pipeline(*command, "--set", setting)
            assert (done.code, word in done.err) == (2, True), done.err
    for stage in ("embed", "graph"):  # these are of structures
        assert pipeline("submit", "--stage", stage).code == 2
    assert not any("train" in stages.read_text() for stages in folder.glob("runs/*/stages.json"))


def test_only_the_stages_that_have_to_do_with_it_are_run(folder: Path) -> None:
    config = opened().config
    assert everything(config) == ["scan", "train", "evaluate"]
    assert up_to("predict", config) == ["scan", "train", "predict"]


def test_a_table_that_a_run_names_stays_when_the_cache_is_cleaned(pipeline: Command, folder: Path) -> None:
    scan(opened())
    assert pipeline("cache", "stat").code == 0
    done = pipeline("cache", "clean", "--yes")
    assert done.code == 0, done.err
    assert counts(opened()) == (1, 0)


def test_a_table_that_is_lost_is_made_anew(folder: Path) -> None:
    scan(opened())
    shutil.rmtree(folder / "cache")
    assert counts(opened()) == (0, 1)
    assert scan(opened())[1].accepted == len(SPLITS)


def test_the_frozen_copy_of_the_code_is_the_same_reader(folder: Path) -> None:
    run, _, _ = scan(opened())
    sys.modules.pop("spectra")
    frozen = Project.open(opened().config, beside=run.task_root)
    assert reader_state(frozen) == json.loads(run.entered.read_text())["made"]


def test_settings_that_do_not_go_together_are_errors_with_their_place(folder: Path) -> None:
    for sets, place in (
        (["data.reader=null"], "data.reader"),
        (["data.source=glob"], "data.reader"),
        (["data.source=glob", "data.reader=null"], "data.options"),
        (["data.options={path: here}"], "data.options"),
        *(
            ([f"data.{of_structures}"], f"data.{of_structures}")
            for of_structures in (
                "splits=splits.csv",
                "structures_dir=here",
                "pattern=['*.mgf']",
                "state=unbound",
                "partners=none",
                "receptor_chains=[A]",
                "ligand_chains=[A]",
            )
        ),
    ):
        with pytest.raises(ConfigError) as refused:
            read_config(Path("pipeline.yaml"), sets)
        assert place in str(refused.value), sets
