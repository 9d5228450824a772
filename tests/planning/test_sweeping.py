"""A sweep on this machine, from its submission to its comparison: each point is a training as any other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.codec import plain
from pipeline.config.load import dump_resolved
from pipeline.config.schema import Config
from pipeline.journal.run_folder import RunFolder, runs_in
from pipeline.journal.run_status import StatusReader
from pipeline.training.prepared import ModelFolder, PhasePlan
from pipeline.views.compared_models import ComparedModel, compared, read_model
from tests.testkit.command import Command, Typed
from tests.testkit.once import Shelf
from tests.testkit.project import Project, copied, to_do, until
from tests.testkit.trained import SMALL, weights, write_project
from tests.training.loop.loops import prepared_of

pytestmark = pytest.mark.timeout(900)

SETTINGS = {**SMALL, "train__task": "swept_task:Own", "train__epochs": 2, "train__log_every": 1}
TASK = '''\
"""The reference task, which can be made to fail by an option."""

from torch._subclasses import FakeTensor

from pipeline.tasks.interface import Interface


class Own(Interface):
    def __init__(self, fails: bool = False, **options):
        super().__init__(**options)
        self.fails = fails

    def loss(self, model, batch):
        if self.fails and not isinstance(next(model.parameters()), FakeTensor):  # a plan is made all the same
            raise ValueError("this point was told to fail")
        return super().loss(model, batch)
'''
SWEEP = ("submit", "--stage", "train", "--sweep", "train.seed=0:2", "--sweep", "train.learning_rate=1e-4,3e-4")
NAMES = [f"seed={seed} learning_rate={rate}" for seed in (0, 1) for rate in ("1e-4", "3e-4")]


def make(folder: Path) -> None:
    """Make a project of which one of four points was trained by a plain submission, and then all are, by a sweep."""
    write_project(folder, SETTINGS, {"swept_task.py": TASK}, ["train"] * 3 + ["val"] * 2)
    plain = ("submit", "--stage", "train", "--set", "train.seed=1", "--set", "train.learning_rate=3e-4", "--follow")
    for words in (plain, (*SWEEP, "--follow")):
        typed(folder, *words)


@pytest.fixture
def there(shelf: Shelf, tmp_path: Path, pipeline: Command, monkeypatch: pytest.MonkeyPatch) -> Path:
    copied(shelf, "swept", make, tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "swept_task", raising=False)
    return tmp_path


def typed(folder: Path, *words: str, code: int = 0) -> Typed:
    """Type a command in a process of its own."""
    done = Project(folder).types(*words)
    assert done.code == code, done.err
    return done


def stage(pipeline: Command, run: str = "") -> dict[str, Any]:
    """Return what the status of a run says of its training."""
    told = json.loads(pipeline("status", *([run] if run else []), "--json").out)
    found: dict[str, Any] = next(part for part in told["stages"] if part["name"] == "train")
    return found


def sweep_run(folder: Path) -> Path:
    """Return the run of the sweep: the second."""
    return sorted((folder / "runs").iterdir())[1 + sum(p.name.startswith(".") for p in (folder / "runs").iterdir())]


@pytest.mark.nightly
def test_each_point_is_a_task_but_for_what_was_trained_before(there: Path, pipeline: Command) -> None:
    told = stage(pipeline, str(sweep_run(there)))
    assert told["tasks"] == 3  # the fourth was trained by a plain submission
    assert StatusReader(RunFolder(sweep_run(there))).read().stages["train"].names == NAMES[:3]
    assert [(point["name"], point["state"]) for point in told["census"]["points"]] == [(name, "done") for name in NAMES]
    assert told["cached"] == 4
    assert len(list((there / "models").iterdir())) == 4


@pytest.mark.nightly
def test_the_points_are_linked_by_what_differs_and_trained_as_their_plain_twins(there: Path, tmp_path: Path) -> None:
    points = sweep_run(there) / "points"
    assert sorted(path.name for path in points.iterdir()) == sorted(NAMES)
    model = (points / NAMES[1]).resolve()
    rate = ("--set", "train.learning_rate=3e-4", "--set", f"train.models={tmp_path}")
    typed(there, "submit", "--stage", "train", *rate, "--follow")
    assert weights(tmp_path / model.name) == weights(model)


@pytest.mark.nightly
def test_submitting_it_again_does_nothing(there):
    typed(there, *SWEEP, "--follow")
    assert to_do(there)["train"][1] == 0


@pytest.mark.nightly
def test_compare_shows_what_differs_and_means_over_seeds(there: Path, pipeline: Command, tmp_path: Path) -> None:
    run = str(sweep_run(there))
    shown = pipeline("compare", run, "--html", str(tmp_path / "page.html"))
    assert shown.code == 0, shown.err
    assert f"pipeline compare {Path(run).name}" in pipeline("status", run).out
    told = json.loads(pipeline("compare", run, "--json").out)
    assert told["differing"] == ["seed", "learning_rate"]
    bests = [model["best"] for model in told["models"]]
    assert bests == sorted(bests)
    assert {group["known"] for group in told["groups"]} == {2}
    first = told["models"][0]
    assert first["planned_bytes"] > first["peak_bytes"] > 0
    page = (tmp_path / "page.html").read_text()
    assert page.count("<figure") >= 2
    assert all(name in page for name in NAMES)
    assert "http" not in page.replace("http-equiv", "")


def test_models_of_one_name_in_two_folders_have_their_own_figures() -> None:
    curves = {"a": {"loss": [(1, 0.5)]}, "b": {"loss": [(1, 0.3), (2, 0.4)]}}
    models = [ComparedModel("own-1", folder, "done", {}, 2, 4, 0.1, 0, 0, curve) for folder, curve in curves.items()]
    told = compared(models, "loss", lower=True).to_json()["models"]
    assert [(model["folder"], model["best"], model["best_epoch"]) for model in told] == [("b", 0.3, 1), ("a", 0.5, 1)]


def test_models_of_other_numbers_of_epochs_are_no_seeds_of_one_another(tmp_path: Path) -> None:
    for name, seed, epochs in (("a", 1, 8), ("b", 2, 8), ("c", 3, 60)):
        phase = PhasePlan("all items", epochs, 1, 1, 1, 1, {"item": 1.0})
        prepared = prepared_of([phase])
        recipe = {"seed": seed, "epochs": None}  # under a constant schedule more epochs are a longer training
        (tmp_path / name).mkdir()
        ModelFolder(tmp_path / name).prepared.write_text(json.dumps({**plain(prepared), "recipe": recipe}))
    told = compared([read_model(path) for path in sorted(tmp_path.iterdir())], "loss", lower=True)
    assert [list(group.models) for group in told.groups] == [["a", "b"], ["c"]]


def test_a_table_is_named_by_its_file_and_not_by_its_digest_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        made = ModelFolder(tmp_path / name)
        table = name * 32
        told = {**plain(prepared_of([PhasePlan("all", 2, 1, 1, 1, 1, {"item": 1.0})])), "table": table}
        made.prepared.write_text(json.dumps(told | {"recipe": {"table": table}}))
        data = {"source": "manifest", "path": tmp_path / f"{name}.csv"}
        made.settings.write_text(dump_resolved(Config.model_validate({"data": data})))
    shown = compared([read_model(tmp_path / "a"), read_model(tmp_path / "b")], "loss", lower=True)
    assert [shown.called(model) for model in shown.models] == ["table=a.csv aaaaaaaa", "table=b.csv bbbbbbbb"]


@pytest.mark.nightly
def test_models_are_compared_by_name_folder_and_any_figure(there: Path, pipeline: Command) -> None:
    names = [path.name for path in (there / "models").iterdir()][:2]
    told = json.loads(pipeline("compare", names[0], f"models/{names[1]}", "--metric", "interface_auroc", "--json").out)
    assert (told["metric"], told["lower_is_better"]) == ("interface_auroc", False)
    assert {model["name"] for model in told["models"]} == set(names)
    for words in (("nothing",), (names[0], "--metric", "x")):
        assert pipeline("compare", *words).code == 2


@pytest.mark.nightly
def test_a_point_that_fails_is_named_and_the_others_are_done(there: Path, pipeline: Command) -> None:
    words = ("--sweep", "train.options.fails=true,false", "--set", "train.seed=7", "--follow")
    failed = typed(there, "submit", "--stage", "train", *words, code=7)
    assert "fails=true" in failed.err
    told = stage(pipeline)
    assert {point["name"]: point["state"] for point in told["census"]["points"]} == {
        "fails=true": "not done",
        "fails=false": "done",
    }


@pytest.mark.nightly
def test_a_point_that_fits_no_machine_is_told_with_what_helps_and_the_others_are_done(
    there: Path, pipeline: Command
) -> None:
    words = ("--sweep", "train.options.width=8,2500", "--set", "cluster.slots.mem=1700MiB", "--follow")
    done = typed(there, "submit", "--stage", "train", *words)
    assert "width=2500" in done.err
    told = stage(pipeline)
    assert [point["state"] for point in told["census"]["points"]] == ["done", "infeasible"]
    assert typed(there, "submit", "--stage", "train", *words).code == 0


LONG = "train.seed,train.epochs\n30,2\n31,100000\n32,100000\n"
LONG_NAMES = ["seed=30 epochs=2", "seed=31 epochs=100000", "seed=32 epochs=100000"]


@pytest.mark.nightly
def test_points_are_cancelled_alone_and_the_others_are_done(there: Path, pipeline: Command) -> None:
    (there / "long.csv").write_text(LONG)
    submit = ("submit", "--stage", "train", "--sweep-file", "long.csv", "--set", "cluster.slots.cpus=2")
    typed(there, *submit)  # two at once: the third waits until the first is done
    run = runs_in(there / "runs")[-1].name
    until("a step of the second", lambda: any(process.startswith("train-000001") for process in done_of(there)))
    assert pipeline("cancel", "--point", "seed=33 epochs=2").code == 2
    shown = pipeline("cancel", "--point", "epochs=100000")
    assert f"to apply: pipeline cancel {run} --point epochs=100000 --yes" in shown.out
    assert pipeline("cancel", "--point", "epochs=1*", "--yes").code == 0
    assert [stage(pipeline)["task_states"].get(state) for state in ("cancelled", "failed")] == [2, None]
    until("the run to end", lambda: stage(pipeline)["state"] != "running")
    told = stage(pipeline)
    assert [(point["name"], point["state"]) for point in told["census"]["points"]] == [
        (name, "cancelled" if at else "done") for at, name in enumerate(LONG_NAMES)
    ]
    assert (told["state"], told["failures"]) == ("done", [])
    assert pipeline("cancel", "--point", "seed=30", "--yes").code == 2  # it is done


def done_of(folder: Path) -> dict[str, int]:
    """Return how many steps the processes of the newest run's training have said that they did."""
    found = StatusReader(runs_in(folder / "runs")[-1]).read().stages.get("train")
    return found.done if found else {}


NO_SWEEPS = (
    "--stage evaluate --sweep train.seed=0:2",
    "--stage all --sweep train.seed=0:2",
    "--stage train --prune median",
    "--stage train --prune medium --sweep train.seed=0:2",
    "--stage train --sweep train.seed=0:2 --accept-code",
    "--stage evaluate --set train.sweep.points=[{train.seed:1}]",
    "--stage train --sweep train.epochs=1,2",
    "--stage train --sweep train.seed=0:2 --prune median --set=train.validation.split=null",
)


@pytest.mark.nightly
def test_what_makes_no_sweep_is_refused(there: Path, pipeline: Command) -> None:
    codes = {words: pipeline("submit", *words.split()).code for words in NO_SWEEPS}
    assert codes == dict.fromkeys(NO_SWEEPS, 2)


@pytest.mark.nightly
def test_what_falls_behind_is_pruned_stays_so_and_goes_on_as_a_plain_training(there: Path, pipeline: Command) -> None:
    words = ("--sweep", "train.learning_rate=1e-3,3e-3,1e-2,1", "--prune", "median", "--set", "train.sweep.grace=1")
    more = ("--set", "train.epochs=4", "--set", "cluster.slots.cpus=1", "--follow")  # one after the other
    typed(there, "submit", "--stage", "train", *words, *more)
    told = stage(pipeline)
    states = {point["name"]: point for point in told["census"]["points"]}
    assert states["learning_rate=1"]["state"] == "pruned"
    assert states["learning_rate=1"]["epochs"] < 4
    assert told["state"] == "done"
    assert told["failures"] == []
    typed(there, "submit", "--stage", "train", *words, *more)
    assert to_do(there)["train"][1] == 0
    plain = ("--set", "train.learning_rate=1", "--set", "train.epochs=4", "--follow")
    typed(there, "submit", "--stage", "train", *plain)
    assert stage(pipeline)["census"]["epochs"] == 4


@pytest.mark.nightly
def test_points_that_share_a_job_are_their_plain_twins_bit_for_bit_and_one_that_fails_ends_no_other(
    there: Path, pipeline: Command, tmp_path: Path
) -> None:
    models = tmp_path / "shared"
    shared = ("--set", "train.sweep.per_gpu=2", "--set", f"train.models={models}", "--set", "cluster.train.cpus=1")
    fails = ("--sweep", "train.options.fails=false,true")
    typed(there, *SWEEP[:5], *fails, *shared, "--follow", code=7)
    told = stage(pipeline)
    states = {point["name"]: point["state"] for point in told["census"]["points"]}
    assert states == {
        f"seed={seed} fails={fails}": "done" if fails == "false" else "not done"
        for seed in (0, 1)
        for fails in ("false", "true")
    }
    first = [job for job in told["jobs"] if job["attempt"] == 1]
    assert [(job["tasks"], job["sharing"]) for job in first] == [("0-3", 2)]
    assert {failure["task"] for failure in told["failures"]} == {1, 3}
    assert all("told to fail" in Path(failure["log"]).read_text() for failure in told["failures"])
    alone = tmp_path / "alone"
    settings = ("train.seed=1", "train.options.fails=false", f"train.models={alone}", "cluster.train.cpus=1")
    words = [word for setting in settings for word in ("--set", setting)]
    typed(there, "submit", "--stage", "train", *words, "--follow")
    (twin,) = alone.iterdir()
    assert weights(models / twin.name) == weights(twin)
