"""Docking as people type it: a model is trained, poses are drawn, ranked and written, whatever happens meanwhile."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path

import pytest

from tests.testkit.project import DATA, EMBED, LOCAL, nested, to_do

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared

SUBMIT = ("submit", "--stage", "predict", "--only", "--follow")


def rows(folder: Path, table: str = "predictions.csv") -> list[dict[str, str]]:
    with (folder / table).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.nightly
def test_poses_are_drawn_ranked_and_written_and_not_again(pipeline, docking):
    done = pipeline(*SUBMIT)
    assert done.code == 0, done.err
    found = rows(docking.poses())
    assert [row["id"] for row in found] == [f"c{item} {pose}" for item in range(3) for pose in range(5)]
    table = rows(docking.poses(), "poses.csv")
    assert [row["complex"] for row in table] == [f"c{item}" for item in range(3) for _ in range(5)]
    assert [row["file"] for row in table[:3]] == ["c0/rank-01.pdb", "c0/rank-02.pdb", ""]
    assert all(0 <= float(row["dockq"]) <= 1 for row in table)
    assert all(float(row["ligand_rmsd"]) > 0 for row in table)
    written = docking.poses() / "c0" / "rank-01.pdb"
    files = docking.folder / "data" / "c0.pdb", written
    kept = [[line[:30] for line in path.read_text().splitlines() if line.startswith("ATOM")] for path in files]
    assert kept[0] == kept[1]  # the same atoms, under the same numbers
    summary = rows(docking.poses(), "summary.csv")
    assert [row["among"] for row in summary] == ["top-1", "top-5", "oracle"]
    best = [min(float(row["ligand_rmsd"]) for row in table[at : at + 5]) for at in (0, 5, 10)]
    assert float(summary[2]["ligand_rmsd_mean"]) == pytest.approx(sum(best) / 3, abs=1e-3)
    assert "15 predictions (5 an item): 15 usable" in pipeline("status", "-v").out
    assert pipeline(*SUBMIT).code == 0
    assert to_do()["predict"] == (15, 0)


@pytest.mark.nightly
def test_more_poses_are_another_set_of_predictions_of_the_same_model(pipeline, docking):
    assert pipeline(*SUBMIT).code == 0
    more = pipeline(*SUBMIT, "--set", "train.predict.options.samples=6", "--set", "train.predict.folder=more")
    assert more.code == 0, more.err
    first, second = rows(docking.poses()), rows(docking.poses("more"))
    assert len(second) == 18
    assert [row for row in second if not row["id"].endswith(" 5")] == first


@pytest.mark.nightly
def test_killed_while_it_draws_it_goes_on_and_the_poses_are_the_same(pipeline, docking):
    assert pipeline(*SUBMIT).code == 0
    (docking.folder / "told" / "drawn.txt").write_text("")
    (docking.folder / "told" / "signal.txt").write_text(str(int(signal.SIGKILL)))
    done = pipeline(*SUBMIT, "--set", "train.predict.folder=again")
    assert done.code == 0, done.err
    assert not (docking.folder / "told" / "signal.txt").exists()
    assert rows(docking.poses("again")) == rows(docking.poses())
    assert rows(docking.poses("again"), "poses.csv") == rows(docking.poses(), "poses.csv")
    drawn = list(map(int, (docking.folder / "told" / "drawn.txt").read_text().split()))
    assert sum(drawn) == 15 + drawn[1]  # what was being drawn is drawn again, nothing else


@pytest.mark.nightly
def test_out_of_memory_draws_fewer_poses_at_once_and_the_same_ones(pipeline, docking):
    assert pipeline(*SUBMIT).code == 0
    (docking.folder / "told" / "drawn.txt").write_text("")
    (docking.folder / "told" / "most.txt").write_text("1")
    done = pipeline(*SUBMIT, "--set", "train.predict.folder=again")
    assert done.code == 0, done.err
    assert rows(docking.poses("again")) == rows(docking.poses())
    assert (docking.folder / "told" / "drawn.txt").read_text().split() == ["1"] * 15


@pytest.mark.nightly
def test_confidence_is_trained_on_poses_that_a_score_model_draws_and_ranks_the_next(pipeline, docking):
    task = {"embedding_dim": 16, "scalars": 4, "vectors": 2, "layers": 3, "poses": "./poses"}
    poses = {
        "checkpoint": docking.model,
        "for_training": True,
        "folder": "poses",
        "options": {"samples": 2, "steps": 2},
    }
    judge = "pipeline.tasks.docking.pose_confidence:PoseConfidence"
    train = {"task": judge, "options": task, "split": None, "epochs": 1, "effective_batch": 2, "predict": poses}
    given = nested({**DATA, **EMBED, **LOCAL, "train": {**train, "evaluate": {"split": None}}})
    Path("confidence.yaml").write_text(json.dumps(given))
    done = pipeline("submit", "--config", "confidence.yaml", "--stage", "all", "--follow")
    assert done.code == 0, done.err
    assert list(to_do()) == ["scan", "embed", "graph", "predict", "train", "evaluate"]
    assert len(rows(docking.folder / "poses")) == 6
    assert pipeline("submit", "--config", "confidence.yaml", "--stage", "all", "--follow").code == 0
    assert to_do()["predict"] == (6, 0)
    (judge,) = (path for path in (docking.folder / "models").iterdir() if path.name.startswith("poseconfidence"))
    (newest,) = (judge / "checkpoints").glob("step-*")
    ranked = pipeline(*SUBMIT, "--set", f"train.predict.options.confidence={newest}")
    assert ranked.code == 0, ranked.err
    table = rows(docking.poses(), "poses.csv")
    for item in range(3):
        told = [float(row["confidence"]) for row in table if row["complex"] == f"c{item}"]
        assert told == sorted(told, reverse=True)


@pytest.mark.nightly
def test_two_files_are_docked_by_a_trained_model(pipeline, docking):
    text = (docking.folder / "data" / "c1.pdb").read_text().splitlines(keepends=True)
    for name, chain in (("left", "A"), ("right", "B")):
        Path(f"{name}.pdb").write_text("".join(line for line in text if line[21:22] == chain))
    words = ("dock", "left.pdb", "right.pdb", "--model", docking.model, "--poses", "2", "--steps", "2", "--top", "1")
    done = pipeline(*words, "--out", "here", "--trajectory")
    assert done.code == 0, done.err
    (folder,) = (path for path in Path("here").iterdir() if (path / "poses.csv").is_file())
    assert sorted(path.name for path in (folder / "left-right").iterdir()) == ["rank-01-way.pdb", "rank-01.pdb"]
    told = "complex split rank sample contacts clashes file problem"
    assert [" ".join(row) for row in rows(folder, "poses.csv")] == [told] * 2  # no truth, and nothing ranks them
    known = pipeline(*words, "--out", "there", "--bound")
    assert known.code == 0, known.err
    (folder,) = (path for path in Path("there").iterdir() if (path / "poses.csv").is_file())
    assert all(float(row["ligand_rmsd"]) > 0 for row in rows(folder, "poses.csv"))


@pytest.mark.nightly
def test_what_cannot_be_docked_is_refused(pipeline, docking):
    for words, name in (
        (("nowhere.pdb", "right.pdb", "--model", docking.model), "nowhere.pdb"),
        (("data/c0.pdb", "data/c1.pdb", "--model", "no-such-model"), "no-such-model"),
    ):
        done = pipeline("dock", *words)
        assert (done.code, name in done.err) == (2, True)
    assert not Path("docked").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("killed", [False, True], ids=["undisturbed", "one of them killed"])
def test_tasks_that_share_the_rows_draw_the_same_poses(pipeline, docking, killed):
    assert pipeline(*SUBMIT).code == 0
    (docking.folder / "told" / "drawn.txt").write_text("")
    if killed:
        (docking.folder / "told" / "signal.txt").write_text(str(int(signal.SIGKILL)))
    done = pipeline(*SUBMIT, "--set", "cluster.predict.tasks=3", "--set", "train.predict.folder=again")
    assert done.code == 0, done.err
    assert to_do()["predict"] == (0, 15)
    assert (docking.folder / "told" / "signal.txt").exists() is False
    assert rows(docking.poses("again")) == rows(docking.poses())
    assert rows(docking.poses("again"), "poses.csv") == rows(docking.poses(), "poses.csv")
    assert not list(docking.poses("again").glob(".parts-*"))
    pipeline(*SUBMIT, "--set", "cluster.predict.tasks=3", "--set", "train.predict.folder=again")
    assert to_do()["predict"] == (15, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["diffdock_pp", "dreams"])
def test_a_model_goes_out_only_in_a_form_that_says_what_it_is(pipeline, docking, form):
    assert pipeline("model", "export", docking.model, "told/out", "--as", form).code == 2
    assert not (docking.folder / "told" / "out").exists()
