"""`pipeline submit predict` as people type it: what is written, what is not written again, what is refused."""

from __future__ import annotations

import csv
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from pipeline.structures.synthetic import complex_pdb
from tests.testkit.project import settle, to_do
from tests.testkit.trained import SPLITS, Trained

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared

SUBMIT = ("submit", "--stage", "predict", "--only", "--follow")


def arrays(folder: Path) -> dict[str, Any]:
    """Return all arrays of a folder of predictions."""
    files = sorted(folder.glob("*.safetensors"))
    return {f"{id_}.{path.name[:-18]}": array for path in files for id_, array in load_file(path).items()}


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.nightly
def test_every_item_is_predicted_once_and_then_cached(pipeline, trained):
    done = pipeline(*SUBMIT)
    assert done.code == 0, done.err
    (folder,) = (trained.folder / "predictions").iterdir()
    assert folder.name.startswith("own-")
    assert "-manifest-all-" in folder.name  # its data set and split
    assert [row["id"] for row in rows(folder)] == [f"c{number}" for number in range(len(SPLITS))]
    lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    assert lines[3]["contacts.shape"] == [20, 23]
    found = arrays(folder)
    assert found["c3.contacts"].shape == (20, 23)
    assert ((found["c3.contacts"] > 0) & (found["c3.contacts"] < 1)).all()
    told = json.loads((folder / "predictions.json").read_text())
    assert told["items"] == len(SPLITS)
    assert told["checkpoint"].startswith("step-")
    assert set(told["files"]) == {path.name for path in folder.iterdir()} - {"predictions.json"}
    assert pipeline(*SUBMIT).code == 0
    assert to_do()["predict"] == (len(SPLITS), 0)
    assert len(trained.asked()) == len(SPLITS)


@pytest.mark.nightly
def test_two_ranks_predict_the_same_as_one(pipeline, trained):
    words = (*SUBMIT, "--set", "train.predict.split=test")
    assert pipeline(*words).code == 0
    assert pipeline(*words, "--set", "cluster.predict.ranks=2", "--set", "train.predict.folder=other").code == 0
    (one,), (two,) = (trained.folder / "predictions").iterdir(), (trained.folder / "other").iterdir()
    assert one.name == two.name
    assert rows(one) == rows(two)
    first, second = arrays(one), arrays(two)
    assert list(first) == list(second)
    for name, array in first.items():
        np.testing.assert_allclose(second[name], array, rtol=1e-5)


@pytest.mark.nightly
def test_a_killed_prediction_goes_on_with_the_items_that_are_left(pipeline, trained):
    trained.tell_to_die(signal.SIGKILL)
    done = pipeline(*SUBMIT)
    assert done.code == 0, done.err
    (folder,) = (trained.folder / "predictions").iterdir()
    assert [row["id"] for row in rows(folder)] == [f"c{number}" for number in range(len(SPLITS))]
    assert len(trained.asked()) == len(SPLITS) + 1
    assert not list(folder.glob(".parts-*"))


@pytest.mark.nightly
def test_a_damaged_table_is_written_anew(pipeline, trained):
    words = (*SUBMIT, "--set", "train.predict.split=val")
    assert pipeline(*words).code == 0
    (folder,) = (trained.folder / "predictions").iterdir()
    table = folder / "predictions.csv"
    whole = table.read_text()
    table.write_text(whole.replace("c2", "cX"))
    assert pipeline(*words).code == 0
    assert to_do()["predict"] == (0, 2)
    assert table.read_text() == whole


def test_a_task_without_outputs_is_refused_with_what_to_implement(pipeline, trained, tmp_path, monkeypatch):
    (tmp_path / "mute_task.py").write_text(
        "from pipeline.tasks.interface import Interface\nclass Mute(Interface):\n    outputs = None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    done = pipeline(*SUBMIT, "--set", "train.task=mute_task:Mute")
    assert done.code == 2
    assert "outputs" in done.err
    assert not (trained.folder / "predictions").exists()


@pytest.fixture
def others(trained: Trained) -> Path:
    """Return a folder with two complexes that the model has never seen: no table, no split, no label."""
    folder = trained.folder / "others"
    folder.mkdir()
    for number in (90, 91):
        (folder / f"new{number}.pdb").write_bytes(complex_pdb(number, 18, 24))
    settle(folder)
    return folder


@pytest.mark.nightly
def test_a_named_model_predicts_another_data_set_and_nothing_is_trained(pipeline, trained, others):
    assert pipeline(*SUBMIT).code == 0
    (first,) = (trained.folder / "predictions").iterdir()
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    model = trained.model
    there = sorted(path for path in model.rglob("*"))
    data = ("--set", "data.source=glob", "--set", f"data.path={others}")
    done = pipeline("submit", "--stage", "predict", "--model", model.name, *data, "--follow")
    assert done.code == 0, done.err
    assert "train" not in to_do()
    assert list((trained.folder / "models").iterdir()) == [model]
    assert sorted(path for path in model.rglob("*")) == there
    (second,) = set((trained.folder / "predictions").iterdir()) - {first}
    assert [row["id"] for row in rows(second)] == ["new90", "new91"]
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before
    told = json.loads((second / "predictions.json").read_text())
    assert told["model"] == model.name
    assert told["data"] == str(others)
    assert Path(told["source"]).parent.parent == model
    assert pipeline("submit", "--stage", "predict", "--model", f"models/{model.name}", *data, "--follow").code == 0
    assert to_do()["predict"] == (2, 0)
    *_, run = sorted(path for path in (trained.folder / "runs").iterdir() if not path.name.startswith("."))
    frozen = json.loads((run / "config.json").read_text())["train"]["predict"]["checkpoint"]
    assert frozen == str(model)  # a resume from another folder means the same one


@pytest.mark.nightly
def test_an_exported_model_is_used_where_nothing_else_of_it_is(pipeline, trained, others, tmp_path, monkeypatch):
    model = trained.model
    data = ("--set", "data.source=glob", "--set", f"data.path={others}")
    assert pipeline("submit", "--stage", "predict", "--model", model.name, *data, "--follow").code == 0
    (here,) = (trained.folder / "predictions").iterdir()
    trained.file.parent.mkdir(exist_ok=True)
    trained.file.write_text(trained.content)
    shown = pipeline("model", "show", model.name)
    assert (shown.code, shown.err) == (0, "")
    for part in ("trained_task:Own", "manifest.csv", "esm2_tiny.pt", *trained.figures):
        assert part in shown.out, shown.out
    away = tmp_path / "away"
    done = pipeline("model", "export", model.name, str(away))
    assert done.code == 0, done.err
    (away / "weights").mkdir()
    shutil.copy(trained.folder / "weights" / "esm2_tiny.pt", away / "weights")
    monkeypatch.chdir(away)
    used = pipeline("submit", "--stage", "predict", "--model", ".", *data, "--follow")
    assert used.code == 0, used.err
    (there,) = (away / "predictions").iterdir()
    assert rows(there)[0]["id"] == rows(here)[0]["id"] == "new90"
    mine, theirs = arrays(here), arrays(there)
    assert list(mine) == list(theirs)
    for name, array in mine.items():
        np.testing.assert_allclose(theirs[name], array, rtol=1e-5)
    assert not (away / "models").exists()
    weights = away / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    shutil.rmtree(away / "predictions")
    damaged = pipeline("submit", "--stage", "predict", "--model", ".", *data, "--follow")
    assert damaged.code != 0
    assert not list(away.glob("predictions/*/predictions.json"))


def test_a_model_is_refused_where_the_configuration_would_feed_it_other_inputs(pipeline, trained, others):
    model = trained.model
    data = ("--set", "data.source=glob", "--set", f"data.path={others}", "--set", "graph.neighbours=5")
    done = pipeline("submit", "--stage", "predict", "--model", model.name, *data, "--follow")
    assert done.code == 2
    assert "--set graph.neighbours=8" in done.err
    unknown = pipeline("submit", "--stage", "predict", "--model", "nobody", "--follow")
    assert (unknown.code, model.name in unknown.err) == (2, True)
    assert pipeline("submit", "--stage", "train", "--model", model.name).code == 2


@pytest.mark.nightly
def test_a_named_model_is_evaluated_on_other_data_and_nothing_is_trained(pipeline, trained, others):
    model = trained.model
    data = ("--set", "data.source=glob", "--set", f"data.path={others}", "--set", "train.evaluate.split=null")
    done = pipeline("submit", "--stage", "evaluate", "--model", model.name, *data, "--follow")
    assert done.code == 0, done.err
    assert "train" not in to_do()
    assert list((trained.folder / "models").iterdir()) == [model]
    (kept,) = (model / "evaluations").iterdir()
    told = json.loads(kept.read_text())["evaluation"]
    assert (told["items"], told["model"], told["data"]) == (2, model.name, str(others))
    assert set(told["figures"]) == set(trained.figures)
