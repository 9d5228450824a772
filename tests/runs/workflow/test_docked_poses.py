"""Docking as people type it: a model is trained, poses are drawn, ranked and written, whatever happens meanwhile."""

from __future__ import annotations

import csv
import signal
from pathlib import Path

import pytest

from tests.runs.docking_project import Docking, docking_project
from tests.testkit.command import Command

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared

SUBMIT = ("submit", "--stage", "predict", "--only", "--follow")
CONFIDENCE = """\
data: {source: glob, path: data}
embed: {weights: weights/esm2_tiny.pt}
train:
  task: "pipeline.tasks.docking.pose_confidence:PoseConfidence"
  options: {embedding_dim: 16, scalars: 4, vectors: 2, layers: 3, poses: ./poses}
  split: null
  epochs: 1
  effective_batch: 2
  evaluate: {split: null}
  predict: {checkpoint: MODEL, for_training: true, folder: poses, options: {samples: 2, steps: 2}}
cluster: {executor: local, slots: {cpus: 2}}
"""


def rows(folder: Path, table: str = "predictions.csv") -> list[dict[str, str]]:
    with (folder / table).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def project(tmp_path_factory: pytest.TempPathFactory, pipeline: Command, monkeypatch: pytest.MonkeyPatch) -> Docking:
    return docking_project(tmp_path_factory, pipeline, monkeypatch)


@pytest.mark.nightly
def test_poses_are_drawn_ranked_and_written_and_not_again(pipeline: Command, project: Docking) -> None:
    done = pipeline(*SUBMIT)
    assert done.code == 0, done.err
    found = rows(project.poses())
    assert [row["id"] for row in found] == [f"c{item} {pose}" for item in range(3) for pose in range(5)]
    table = rows(project.poses(), "poses.csv")
    assert [row["complex"] for row in table] == [f"c{item}" for item in range(3) for _ in range(5)]
    assert [row["file"] for row in table[:3]] == ["c0/rank-01.pdb", "c0/rank-02.pdb", ""]
    assert all(0 <= float(row["dockq"]) <= 1 for row in table)
    assert all(float(row["ligand_rmsd"]) > 0 for row in table)
    written = project.poses() / "c0" / "rank-01.pdb"
    files = project.folder / "data" / "c0.pdb", written
    kept = [[line[:30] for line in path.read_text().splitlines() if line.startswith("ATOM")] for path in files]
    assert kept[0] == kept[1]  # the same atoms, under the same numbers
    assert (project.poses() / "success.csv").read_text().startswith("group,among,complexes,rmsd_below_2")
    assert "c0,,1,0" in done.out
    again = pipeline(*SUBMIT)
    assert "predict: 15 items: 15 cached, 0 to do" in again.err


@pytest.mark.nightly
def test_more_poses_are_another_set_of_predictions_of_the_same_model(pipeline: Command, project: Docking) -> None:
    assert pipeline(*SUBMIT).code == 0
    more = pipeline(*SUBMIT, "--set", "train.predict.options.samples=6", "--set", "train.predict.folder=more")
    assert more.code == 0, more.err
    first, second = rows(project.poses()), rows(project.poses("more"))
    assert len(second) == 18
    assert [row for row in second if not row["id"].endswith(" 5")] == first


@pytest.mark.nightly
def test_killed_while_it_draws_it_goes_on_and_the_poses_are_the_same(pipeline: Command, project: Docking) -> None:
    assert pipeline(*SUBMIT).code == 0
    (project.folder / "told" / "drawn.txt").write_text("")
    (project.folder / "told" / "signal.txt").write_text(str(int(signal.SIGKILL)))
    done = pipeline(*SUBMIT, "--set", "train.predict.folder=again")
    assert done.code == 0, done.err
    assert not (project.folder / "told" / "signal.txt").exists()
    assert rows(project.poses("again")) == rows(project.poses())
    assert rows(project.poses("again"), "poses.csv") == rows(project.poses(), "poses.csv")
    drawn = list(map(int, (project.folder / "told" / "drawn.txt").read_text().split()))
    assert sum(drawn) == 15 + drawn[1]  # what was being drawn is drawn again, nothing else


@pytest.mark.nightly
def test_out_of_memory_draws_fewer_poses_at_once_and_the_same_ones(pipeline: Command, project: Docking) -> None:
    assert pipeline(*SUBMIT).code == 0
    (project.folder / "told" / "drawn.txt").write_text("")
    (project.folder / "told" / "most.txt").write_text("1")
    done = pipeline(*SUBMIT, "--set", "train.predict.folder=again")
    assert done.code == 0, done.err
    assert rows(project.poses("again")) == rows(project.poses())
    assert (project.folder / "told" / "drawn.txt").read_text().split() == ["1"] * 15


@pytest.mark.nightly
def test_confidence_is_trained_on_poses_that_a_score_model_draws_and_ranks_the_next(
    pipeline: Command, project: Docking
) -> None:
    Path("confidence.yaml").write_text(CONFIDENCE.replace("MODEL", project.model))
    done = pipeline("submit", "--config", "confidence.yaml", "--stage", "all", "--follow")
    assert done.code == 0, done.err
    stages = [line.partition(":")[0] for line in done.out.splitlines() if ": done in" in line]
    assert stages == ["scan", "embed", "graph", "predict", "train", "evaluate"]
    assert len(rows(project.folder / "poses")) == 6
    again = pipeline("submit", "--config", "confidence.yaml", "--stage", "all", "--follow")
    assert "predict: 6 items: 6 cached, 0 to do" in again.err
    (judge,) = (path for path in (project.folder / "models").iterdir() if path.name.startswith("poseconfidence"))
    (newest,) = (judge / "checkpoints").glob("step-*")
    ranked = pipeline(*SUBMIT, "--set", f"train.predict.options.confidence={newest}")
    assert ranked.code == 0, ranked.err
    table = rows(project.poses(), "poses.csv")
    for item in range(3):
        told = [float(row["confidence"]) for row in table if row["complex"] == f"c{item}"]
        assert told == sorted(told, reverse=True)


@pytest.mark.nightly
def test_two_files_are_docked_by_a_trained_model(pipeline: Command, project: Docking) -> None:
    text = (project.folder / "data" / "c1.pdb").read_text().splitlines(keepends=True)
    for name, chain in (("left", "A"), ("right", "B")):
        Path(f"{name}.pdb").write_text("".join(line for line in text if line[21:22] == chain))
    words = ("dock", "left.pdb", "right.pdb", "--model", project.model, "--poses", "2", "--steps", "2", "--top", "1")
    done = pipeline(*words, "--out", "here", "--trajectory")
    assert done.code == 0, done.err
    (folder,) = (path for path in Path("here").iterdir() if (path / "poses.csv").is_file())
    assert sorted(path.name for path in (folder / "left-right").iterdir()) == ["rank-01-way.pdb", "rank-01.pdb"]
    assert [row["ligand_rmsd"] for row in rows(folder, "poses.csv")] == ["", ""]  # nobody knows the truth
    known = pipeline(*words, "--out", "there", "--bound")
    assert known.code == 0, known.err
    (folder,) = (path for path in Path("there").iterdir() if (path / "poses.csv").is_file())
    assert all(float(row["ligand_rmsd"]) > 0 for row in rows(folder, "poses.csv"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere.pdb", "right.pdb", "--model", "MODEL"), "there is no such file"),
        (("data/c0.pdb", "data/c1.pdb", "--model", "no-such-model"), "there is no such model"),
    ],
)
def test_what_cannot_be_docked_is_refused_with_what_is_there(
    pipeline: Command, project: Docking, words: tuple[str, ...], said: str
) -> None:
    done = pipeline("dock", *(project.model if word == "MODEL" else word for word in words))
    assert done.code == 2
    assert said in done.err
    assert not Path("docked").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("killed", [False, True], ids=["undisturbed", "one of them killed"])
def test_tasks_that_share_the_rows_draw_the_same_poses(pipeline: Command, project: Docking, killed: bool) -> None:
    assert pipeline(*SUBMIT).code == 0
    (project.folder / "told" / "drawn.txt").write_text("")
    if killed:
        (project.folder / "told" / "signal.txt").write_text(str(int(signal.SIGKILL)))
    done = pipeline(*SUBMIT, "--set", "cluster.predict.tasks=3", "--set", "train.predict.folder=again")
    assert done.code == 0, done.err
    assert "15 items: 0 cached, 15 to do in 3 tasks" in done.err
    assert (project.folder / "told" / "signal.txt").exists() is False
    assert rows(project.poses("again")) == rows(project.poses())
    assert rows(project.poses("again"), "poses.csv") == rows(project.poses(), "poses.csv")
    assert not list(project.poses("again").glob(".parts-*"))
    again = pipeline(*SUBMIT, "--set", "cluster.predict.tasks=3", "--set", "train.predict.folder=again")
    assert "predict: 15 items: 15 cached, 0 to do" in again.err


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("form", "says"),
    [
        ("diffdock_pp", "these would be weights of DiffDock-PP, which mean something only where the network has its"),
        ("dreams", "no names of 'dreams' for this model; its task knows diffdock_pp"),
    ],
)
def test_a_model_goes_out_only_in_a_form_that_says_what_it_is(
    pipeline: Command, project: Docking, form: str, says: str
) -> None:
    refused = pipeline("model", "export", project.model, "told/out", "--as", form)
    assert refused.code == 2, refused.out
    assert says in refused.err
    assert not (project.folder / "told" / "out").exists()
