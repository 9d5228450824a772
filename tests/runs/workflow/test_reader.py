"""Items that are no structures, through the runs as people type them: scan, train, evaluate, and what stops that."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import read_config
from pipeline.errors import ConfigError, DataError
from pipeline.journal.ledger import LedgerReader
from pipeline.journal.run_folder import RunFolder, find_run
from pipeline.project import run_code
from pipeline.project.project import Project
from pipeline.records import EventKind, TaskContext
from pipeline.runs.dataset.loading import made_table, open_loader, table_of
from pipeline.runs.dataset.reader_items import reader_of, reader_state
from pipeline.runs.engine.lifecycle import new_run
from pipeline.runs.model.prepare import recipe_of, training_name
from pipeline.runs.workflow import scan_stage
from pipeline.runs.workflow.scan_stage import EntriesRead, ReaderScanStage
from pipeline.runs.workflow.table import everything, up_to
from pipeline.training.sampling.epoch_order import SamplerSettings
from tests.runs.workflow.reader_project import SPLITS, write_project, write_spectrum
from tests.testkit.command import Command
from tests.testkit.project import settle

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared

DIES = """\
            import os, sys
            if path.stem == "s5" and "runs.worker" in " ".join(sys.orig_argv):
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
    assert "scan: 1 data set: 0 cached, 1 to do in 1 task" in done.err
    assert "8 items: 8 accepted, 0 rejected" in done.out
    (figures,) = folder.glob("models/*/evaluations/test-*.json")
    assert set(json.loads(figures.read_text())["evaluation"]["figures"]) == {"loss", "mean"}
    again = pipeline("submit", "--stage", "all", "--follow")
    assert again.code == 0, again.err
    assert "scan: 1 data set: 1 cached, 0 to do" in again.err
    assert "train: 3 steps: 3 cached, 0 to do" in again.err
    assert "evaluate: 2 items: 2 cached, 0 to do" in again.err
    assert [one["name"] for one in json.loads(pipeline("status", "--json").out)["stages"]] == [
        "scan",
        "train",
        "evaluate",
    ]


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


def test_a_path_among_a_stages_options_counts_by_its_name_and_not_by_where_it_lies(folder: Path) -> None:
    rewrite(folder, "class Sum:\n", "class Sum:\n    def __init__(self, library=''): ...\n\n")

    def name_of(library: str) -> str:
        stage = f"{{epochs: 1, options: {{library: {library}}}}}"
        project = opened("train.epochs=2", f"train.curriculum=[{stage}]")
        return training_name("spectra:Sum", recipe_of(project, "00", "fp32"))

    assert name_of("/here/a.h5") == name_of("/there/a.h5") != name_of("/here/b.h5")


def test_a_byte_that_changed_after_the_scan_is_an_error_that_names_the_item(folder: Path) -> None:
    project = opened()
    scan(project)
    loader = open_loader(None, SamplerSettings(batch=8, by=("peaks",)), slots=8, threads=1)
    whole = (folder / "data" / "s3.txt").read_text()
    (folder / "data" / "s3.txt").write_text(whole.replace("0.250", "0.251"))
    with pytest.raises(DataError, match="s3 is not what it was when the data set was scanned") as caught:
        list(loader)
    assert "pipeline submit --stage scan" in caught.value.remedy


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


def test_what_was_read_is_read_again_when_a_reader_of_ours_changed_of_which_the_users_may_make_use(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = tmp_path / "ours" / "readers"
    shutil.copytree(run_code.READERS, ours)
    monkeypatch.setattr(run_code, "READERS", ours)
    scan(opened())
    assert counts(opened()) == (1, 0)
    with (ours / "mgf.py").open("a") as file:
        file.write("# changed\n")
    assert counts(opened()) == (0, 1)


@pytest.mark.parametrize("text", ["[]", "{", '{"made": {}}', '{"format": 0, "table": "no"}'])
def test_what_another_version_or_nobody_wrote_of_a_data_set_counts_as_not_read(folder: Path, text: str) -> None:
    run, _, _ = scan(opened())
    told = json.loads(run.entered.read_text())
    told["format"] += 1
    for written in (text, json.dumps(told)):
        run.entered.write_text(written)
        assert counts(opened()) == (0, 1)
        assert ReaderScanStage().judge(opened(), run, 0.0).undone == 1


def test_a_scan_tells_now_and_then_how_far_it_is_and_where(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_stage, "TOLD_EVERY", 3)
    project, on = opened(), list[tuple[int, str]]()
    tell = TaskContext(lambda *_: None, on=lambda names: on.append((int(tell.report.figures["items_read"]), names[0])))
    list(ReaderScanStage().work(project, new_run(project.config, ["scan"], beside=project.beside), 0, tell))
    places = [(0, "item 1 (s0.txt)"), (3, "item 4 (s3.txt)"), (6, "item 7 (s6.txt)")]
    assert on == [(number, f"{place} or one soon after it") for number, place in places]


@pytest.mark.nightly
def test_a_reader_that_dies_is_tried_again_and_the_place_is_told(pipeline: Command, folder: Path) -> None:
    rewrite(folder, "        for path in self.files():\n", "        for path in self.files():\n" + DIES)
    done = pipeline(*SCAN)
    assert done.code == 7
    assert "it was on item 1 (s0.txt) or one soon after it" in " ".join(done.err.split())


@pytest.mark.nightly
def test_an_item_whose_reading_kills_a_training_is_found_and_left_out(pipeline: Command, folder: Path) -> None:
    """Items are read ahead of their step, so that at first others were being trained on when it died."""
    rewrite(folder, "        mz_P =", KILLS + "        mz_P =")
    done = pipeline(*TRAIN, "--set", "data.max_rejected_fraction=0.2")
    assert done.code == 0, done.out + done.err
    events = LedgerReader(find_run(folder / "runs", None)).fresh()
    assert [one.data["names"] for one in events if one.kind is EventKind.LEFT_OUT] == [["s3"]]
    again = pipeline(*TRAIN, "--set", "data.max_rejected_fraction=0.2")
    assert "0 to do" in again.err
    assert "trained without s3, on which its process died" in " ".join((again.out + again.err).split())
    assert "trained without s3" in pipeline("model", "show", "models/" + next((folder / "models").iterdir()).name).out


@pytest.mark.nightly
def test_steps_that_are_not_finite_and_left_out_are_told_of_the_run_and_later(pipeline: Command, folder: Path) -> None:
    rewrite(folder, "square().sum()", "square().sum() * (float('nan') if batch['total'].max() < 1 else 1)")
    words = (*TRAIN, "--set", "train.nan=skip", "--set", "train.effective_batch=1")
    for done in (pipeline(*words), pipeline(*words)):
        assert done.code == 0, done.out + done.err
        assert "2 of 6 steps were not finite, and left out (train.nan: skip)" in " ".join((done.out + done.err).split())


def test_rejections_are_counted_written_and_told_again_by_the_next_run(folder: Path) -> None:
    (folder / "data" / "s8.txt").write_text("bad")
    settle(folder / "data")
    for _ in range(2):
        run, judged, _ = scan(opened())
        (line,) = run.rejected.read_text().splitlines()
        assert json.loads(line) == {
            "id": "s8",
            "reason": "bad_entry",
            "detail": "it is said to be bad",
            "origin": "s8.txt",
            "split": "",
        }
        assert (judged.items, judged.accepted, judged.rejected) == (9, 8, {"bad_entry": 1})


@pytest.mark.nightly
def test_too_many_rejections_stop_the_run(pipeline: Command, folder: Path) -> None:
    write_spectrum(folder, 8, "bad")
    done = pipeline(*SCAN)
    assert done.code == 3
    assert "1 of 9 items cannot be used, more than data.max_rejected_fraction" in done.err
    assert "s8: it is said to be bad" in done.out


@pytest.mark.parametrize("on_leak", ["error", "warn", "ignore"])
def test_an_id_in_two_splits_is_a_leak(folder: Path, on_leak: str) -> None:
    rewrite(folder, "Entry(path.stem,", 'Entry("same" if path.stem in ("s0", "s7") else path.stem,')
    project = opened(f"data.on_leak={on_leak}", "data.max_rejected_fraction=1.0")
    what = "the same id is in the splits train and test: same"
    if on_leak == "error":
        with pytest.raises(DataError, match=what):
            scan(project)
        assert made_table(project) is None
    else:
        _, judged, said = scan(project)
        assert said == ([what] if on_leak == "warn" else [])
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
    with pytest.raises(DataError, match="changed while they were read"):
        list(ReaderScanStage().work(project, run, 0, TaskContext(lambda *_: None)))
    assert not run.entered.exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["data.reader=spectra:Missing"], "spectra has no 'Missing'; it has Spectra"),
        (["data.reader=nowhere:Spectra"], "there is no module 'nowhere'"),
        (["data.reader=spectra:Sum"], "data.options.scale: Sum takes no option 'scale'; there are none"),
        (["data.options={scale: -1.0}"], "data.options.scale: scale is -1.0, not above 0"),
        (["data.options={scale: wide}"], "spectra:Spectra() failed with TypeError"),
        (["train.oversize=crop"], "only graphs can be cropped"),
    ],
)
def test_what_cannot_be_read_or_cropped_is_refused_before_anything_runs(
    pipeline: Command, folder: Path, sets: list[str], said: str
) -> None:
    typed = [word for one in sets for word in ("--set", one)]
    for command in (TRAIN, ("config", "check")):
        done = pipeline(*command, *typed)
        assert done.code == 2, done.err
        assert said in done.err
    assert not list(folder.glob("runs/*-train"))


@pytest.mark.parametrize("stage", ["embed", "graph"])
def test_stages_of_structures_are_refused(pipeline: Command, folder: Path, stage: str) -> None:
    for command in ("submit", "plan"):
        done = pipeline(command, "--stage", stage)
        assert done.code == 2
        assert f"stage {stage} is of structures" in done.err


def test_only_the_stages_that_have_to_do_with_it_are_run(folder: Path) -> None:
    config = opened().config
    assert everything(config) == ["scan", "train", "evaluate"]
    assert up_to("predict", config) == ["scan", "train", "predict"]


@pytest.mark.nightly
def test_a_configuration_is_checked_with_its_task_on_items_that_were_read(pipeline: Command, folder: Path) -> None:
    assert pipeline("config", "check").code == 0  # with sizes alone
    scan(opened())
    done = pipeline("config", "check")
    assert done.code == 0, done.err
    rewrite(folder, "off_B.square().sum()", "off_B.square().mean()")
    scan(opened())  # the reader is in the same file
    done = pipeline("config", "check")
    assert done.code == 2
    assert "the sum of 'sum' over 3 items" in done.err


@pytest.mark.nightly
def test_the_doctor_looks_at_the_first_items(pipeline: Command, folder: Path) -> None:
    found = {one["what"]: one["found"] for one in json.loads(pipeline("doctor", "--json").out)}
    assert f"{len(SPLITS)} of the first {len(SPLITS)} items can be used" in found["data"]
    assert "weights" not in found


def test_a_table_that_a_run_names_stays_when_the_cache_is_cleaned(pipeline: Command, folder: Path) -> None:
    scan(opened())
    assert pipeline("cache", "stat").code == 0
    done = pipeline("cache", "clean", "--yes")
    assert done.code == 0, done.err
    assert counts(opened()) == (1, 0)


def test_a_table_that_is_written_and_not_checked_yet_stays_when_the_cache_is_cleaned(
    pipeline: Command, folder: Path
) -> None:
    project = opened()
    run = new_run(project.config, ["scan"], beside=project.beside)
    list(ReaderScanStage().work(project, run, 0, TaskContext(lambda *_: None)))
    assert not run.table.exists()
    done = pipeline("cache", "clean", "--older-than", "0", "--yes")
    assert done.code == 0, done.err
    assert ReaderScanStage().judge(project, run, 0.0).accepted == len(SPLITS)


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


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["data.reader=null"], "reader needs the name of a class"),
        (["data.source=glob"], "data.reader: is for data.source: reader, and the source is glob"),
        (["data.source=glob", "data.reader=null"], "data.options: is for data.source: reader"),
        (["data.options={path: here}"], "path is data.path"),
        (
            ["data.splits=splits.csv"],
            "--set data.splits=splits.csv: is for structures: what a reader takes, such as splits, is in data.options",
        ),
        (["data.structures_dir=here"], "--set data.structures_dir=here: is for structures"),
        (["data.pattern=['*.mgf']"], "--set data.pattern=['*.mgf']: is for structures"),
        (["data.state=unbound"], "--set data.state=unbound: is for structures"),
        (["data.partners=none"], "--set data.partners=none: is for structures"),
        (["data.receptor_chains=[A]"], "--set data.receptor_chains=[A]: is for structures"),
        (["data.ligand_chains=[A]"], "--set data.ligand_chains=[A]: is for structures"),
    ],
)
def test_settings_that_do_not_go_together_are_errors(folder: Path, sets: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_config(Path("pipeline.yaml"), sets)
