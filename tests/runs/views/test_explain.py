"""`pipeline explain` and `plan --graph` on a project whose scan, embeddings and graphs were made once.

Each test changes another item, and what it changes stays changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import dump_resolved, read_config
from pipeline.journal.run_folder import RunFolder, runs_in
from pipeline.project.project import Project
from pipeline.records import Item, Part, Role
from pipeline.runs.dataset import worklist
from pipeline.runs.dataset.loading import made_table
from pipeline.runs.model.prepare import recipe_of
from pipeline.runs.views import explained_item
from pipeline.runs.views.explained_item import explain_item, near_names
from pipeline.stages import scan
from tests.runs.workflow.trained import SMALL, write_project
from tests.testkit.command import Command
from tests.testkit.project import settle

CONFIG = f"""{SMALL}
  task: "pipeline.tasks.interface:Interface"
  epochs: 1
"""
SPLITS = ("train",) * 7 + ("test",) * 2
TORCHLESS = """\
import sys
from pipeline.cli.main import main
for words in (["explain", "c8"], ["explain", "--stage", "embed"], ["plan", "--graph", "--stage", "graph"]):
    sys.argv = ["pipeline", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
print("imported:", sorted({"torch", "scipy"} & set(sys.modules)))
"""
MANY = 100_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a project, and what its stages up to the graphs make."""
    folder = tmp_path_factory.mktemp("explained")
    write_project(folder, CONFIG, {}, SPLITS)
    submit(folder)
    return folder


@pytest.fixture
def project(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


def submit(folder: Path) -> None:
    command = [Path(sys.executable).with_name("pipeline"), "submit", "--executor", "local", "--follow", "--stage"]
    for stage in ("embed", "graph"):
        subprocess.run([*command, stage], cwd=folder, check=True, capture_output=True, timeout=300)


def of_item(pipeline: Command, name: str, *sets: str) -> dict[str, Any]:
    """Explain an item, and return what is said of each stage."""
    done = pipeline("explain", name, "--json", *(word for one in sets for word in ("--set", one)))
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["item"] == name
    return {stage["stage"]: stage for stage in document["stages"]} | {"next": document["next"]}


def states(told: dict[str, Any]) -> list[str]:
    return [told[stage]["state"] for stage in ("scan", "embed", "graph")]


@pytest.mark.nightly
def test_an_item_of_which_all_is_done_has_nothing_next(pipeline: Command, project: Path) -> None:
    told = of_item(pipeline, "c0")
    assert states(told) == ["done", "done", "done"]
    assert len(told["embed"]["keys"]) == 2
    shown = pipeline("explain", "c0")
    assert shown.out.startswith("c0   (manifest.csv:2)\n")
    found = pipeline("items", "--key", told["graph"]["keys"]["graph"][:16])
    assert found.out.splitlines()[1].startswith("c0 ")  # by the key that is shown


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("setting", "stage", "changes"),
    [
        ("structures.altlocs=first", "scan", [("structures.altlocs", "highest", "first")]),
        ("embed.context=partner", "embed", [("embed.context", "chain", "partner")]),
        ("graph.neighbours=7", "graph", [("graph.neighbours", 8, 7)]),
    ],
)
def test_a_setting_that_changed_is_named_with_what_it_was(
    pipeline: Command, project: Path, setting: str, stage: str, changes: list[tuple[str, Any, Any]]
) -> None:
    told = of_item(pipeline, "c0", setting)
    assert told[stage]["state"] == "to do"
    assert [(change["setting"], change["was"], change["now"]) for change in told[stage]["changes"]] == changes
    assert told["next"] == f"pipeline submit --stage {stage}"
    after = [other for other in ("embed", "graph") if stage == "scan"]
    assert all(told[other]["state"] == "waiting" for other in after)
    whole = json.loads(pipeline("explain", "--stage", stage, "--json", "--set", setting).out)
    assert [change["setting"] for change in whole["changes"]] == [name for name, _, _ in changes]
    typed = pipeline("explain", "c0", "--set", setting).out.splitlines()[-1]
    assert typed == f"next: pipeline submit --stage {stage} --set {setting}"


@pytest.mark.nightly
def test_a_file_with_other_bytes_is_told_with_both_digests(pipeline: Command, project: Path) -> None:
    path = project / "data/c1.pdb"
    path.write_bytes(path.read_bytes().replace(b" N   ALA", b" N   GLY", 1) + b"REMARK\n")
    settle(path.parent)
    told = of_item(pipeline, "c1")
    assert states(told) == ["to do", "waiting", "waiting"]
    run = runs_in(project / "runs")[-1].name
    assert f"the bytes of {path} changed since run {run}: they were " in told["scan"]["why"]
    assert states(of_item(pipeline, "c0")) == ["done"] * 3  # of the others nothing changed


@pytest.mark.nightly
def test_a_file_that_was_only_touched_is_read_again_and_nothing_computed(pipeline: Command, project: Path) -> None:
    os.utime(project / "data/c2.pdb")
    settle(project / "data")
    told = of_item(pipeline, "c2")
    assert states(told) == ["to do", "done", "done"]
    assert "with the same bytes; nothing is computed anew for that" in told["scan"]["why"]


@pytest.mark.nightly
def test_a_file_that_is_gone_or_empty_is_refused_with_its_reason(pipeline: Command, project: Path) -> None:
    for content, reason in ((None, "missing_file"), (b"", "empty_file")):
        path = project / "data/c3.pdb"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
            settle(path.parent)
        told = of_item(pipeline, "c3")
        assert states(told) == ["refused", "nothing to do", "nothing to do"]
        assert told["scan"]["why"].startswith(f"{reason}: ")
        assert told["next"] == "pipeline submit --stage scan   (once that is mended)"


@pytest.mark.nightly
def test_a_reason_that_the_scan_has_found_is_told_from_its_record(pipeline: Command, project: Path) -> None:
    told = of_item(pipeline, "c0", "structures.max_residues=10")
    assert told["scan"]["changes"][0]["setting"] == "structures.max_residues"
    done = pipeline("submit", "--stage", "scan", "--follow", "--set", "structures.max_residues=10")
    assert done.code == 3  # all are too large
    told = of_item(pipeline, "c0", "structures.max_residues=10")
    assert states(told) == ["refused", "nothing to do", "nothing to do"]
    assert told["scan"]["why"].startswith("too_many_residues: ")


@pytest.mark.nightly
def test_why_an_earlier_run_left_an_item_out_is_told_when_it_is_tried_again(pipeline: Command, project: Path) -> None:
    told = {"id": "c4", "reason": "killed_its_task", "detail": "task 3 died of it"}
    newest = runs_in(project / "runs")[-1]
    newest.rejected.write_text(json.dumps(told) + "\n" + (newest.rejected.read_text()))
    said = of_item(pipeline, "c4", "embed.context=partner")["embed"]
    assert said["why"] == "2 of 2 sequences: it was done with other settings"  # which is why, and not the other
    os.utime(project / "data/c4.pdb")
    settle(project / "data")
    said = of_item(pipeline, "c4")["scan"]
    assert said["why"].endswith(f"(run {newest.name} left it out: killed_its_task: task 3 died of it)")


@pytest.mark.nightly
def test_an_item_that_was_added_was_never_done(pipeline: Command, project: Path) -> None:
    manifest = project / "data/manifest.csv"
    (project / "data/new.pdb").write_bytes((project / "data/c8.pdb").read_bytes() + b"REMARK\n")
    manifest.write_text(manifest.read_text() + "new,new.pdb,A,B,train,9\n")
    settle(project / "data")
    told = of_item(pipeline, "new")
    assert states(told) == ["to do", "waiting", "waiting"]
    assert "new.pdb is not read yet" in told["scan"]["why"]


@pytest.mark.nightly
def test_a_damaged_record_is_told_as_damaged_and_a_lost_one_as_gone(pipeline: Command, project: Path) -> None:
    key = bytes.fromhex(of_item(pipeline, "c8")["graph"]["keys"]["graph"])
    opened = Project.open(read_config(project / "pipeline.yaml").config, remember=False)
    (place, *_) = opened.graphs.store.locate([key])[0]
    (shard,) = (project / "cache/graph").rglob(f"{place.shard}*")
    whole = shard.read_bytes()
    try:
        middle = place.offset + place.length // 2
        shard.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        told = of_item(pipeline, "c8")["graph"]
        assert told["state"] == "to do"
        assert told["why"].startswith("its record is damaged, and made anew: ")
        assert of_item(pipeline, "c0")["graph"]["state"] == "done"
        shard.unlink()
        run = next(run.name for run in reversed(runs_in(project / "runs")) if run.name.endswith("-graph"))
        gone = of_item(pipeline, "c0")["graph"]
        assert gone["state"] == "to do"
        assert gone["why"].startswith(f"run {run} had this record, and the cache has it no more")
    finally:
        shard.write_bytes(whole)


@pytest.mark.nightly
@pytest.mark.parametrize(("typed", "meant"), [("C5", "c5"), ("c55", "c5"), ("cc4", "c4")])
def test_a_wrong_name_gets_names_like_it(pipeline: Command, project: Path, typed: str, meant: str) -> None:
    done = pipeline("explain", typed)
    assert (done.code, done.out) == (2, "")
    assert f"no item is called {typed!r}; did you mean" in done.err
    assert meant in done.err.partition("did you mean ")[2]
    assert "next: pipeline items" in done.err


@pytest.mark.nightly
def test_a_name_like_no_other_is_told_how_many_there_are(pipeline: Command, project: Path) -> None:
    assert "no item is called 'zzzzzzz'; there are " in pipeline("explain", "zzzzzzz").err


@pytest.mark.nightly
@pytest.mark.parametrize("words", [(), ("c0", "--stage", "train")])
def test_an_item_or_a_stage_is_named_and_not_both(pipeline: Command, project: Path, words: tuple[str, ...]) -> None:
    done = pipeline("explain", *words)
    assert done.code == 2
    assert "name an item, or a stage" in done.err


@pytest.mark.nightly
def test_an_unknown_stage_or_form_gets_the_nearest(pipeline: Command, project: Path) -> None:
    assert "did you mean train?" in pipeline("explain", "--stage", "trian").err
    assert "did you mean mermaid?" in pipeline("plan", "--graph=mermiad").err
    done = pipeline("plan", "--graph", "--stage", "train", "--gpu", "a100-80gb")
    assert (done.code, "two questions" in done.err) == (2, True)


@pytest.mark.nightly
def test_a_training_is_compared_with_the_nearest_earlier_model(pipeline: Command, project: Path) -> None:
    assert "no model was trained before" in pipeline("explain", "--stage", "train").out
    opened = Project.open(read_config(project / "pipeline.yaml").config, remember=False, beside=project)
    recipe = recipe_of(opened, made_table(opened) or "", "fp32")
    others = {"far": {"seed": 5, "learning_rate": 0.5, "epochs": 9}, "near": {"seed": 5}, "torn": None}
    for name, other in others.items():
        (project / "models" / name).mkdir(parents=True)
        text = json.dumps({"recipe": {**recipe, **other}}) if other else '{"reci'
        (project / "models" / name / "prepared.json").write_text(text)
    shown = pipeline("explain", "--stage", "train")
    assert shown.out.startswith("train: to do: it is another training than near, the nearest\n  train.seed: 5 → 0\n")
    assert shown.out.endswith("next: pipeline submit --stage train\n")
    told = json.loads(pipeline("explain", "--stage", "train", "--json", "--set", "embed.context=partner").out)
    assert (told["model"], told["state"]) == ("near", "to do")
    assert {"train.seed", "embed.context"} == {change["setting"] for change in told["changes"]}
    item = of_item(pipeline, "c0")["train"]
    assert [change["setting"] for change in item["changes"]] == ["train.seed"]
    assert "its split is test, and train.split is train" in of_item(pipeline, "c8")["train"]["why"]


@pytest.mark.nightly
def test_the_graph_shows_what_is_to_do_and_why(pipeline: Command, project: Path) -> None:
    shown = pipeline("plan", "--graph", "--set", "graph.neighbours=7")
    assert shown.code == 0, shown.err
    drawn, rows = shown.out.split("\n\n")
    assert drawn.splitlines() == [
        "data ──> scan ─┬─> embed ─┬─> train ──> evaluate",
        "               └─> graph ─┘",
    ]
    (row,) = [row for row in rows.splitlines() if row.startswith("graph ")]
    assert "made with other settings: graph.neighbours: 8 → 7" in row
    told = json.loads(pipeline("plan", "--graph", "--json").out)
    assert [stage["name"] for stage in told["stages"]] == ["data", "scan", "embed", "graph", "train", "evaluate"]
    assert ["scan", "embed"] in told["arrows"]
    few = pipeline("plan", "--graph", "--stage", "embed").out
    assert few.startswith("data ──> scan ──> embed\n")


@pytest.mark.nightly
@pytest.mark.parametrize("words", [("--graph=mermaid",), ("--graph", "mermaid")])
def test_the_graph_is_written_in_other_languages(pipeline: Command, project: Path, words: tuple[str, ...]) -> None:
    assert pipeline("plan", *words).out.startswith("flowchart LR\n")
    assert pipeline("plan", "--graph=dot").out.startswith("digraph pipeline {\n")


@pytest.mark.nightly
def test_nothing_that_is_shown_waits_for_torch(project: Path) -> None:
    done = subprocess.run([sys.executable, "-c", TORCHLESS], cwd=project, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["imported: []"], done.stderr


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run that froze 100,000 items, of which three files are there; whoever lists the data set fails."""
    (tmp_path / "data").mkdir()
    (tmp_path / "pipeline.yaml").write_text("data: {source: glob, path: data}\n")
    folder = RunFolder(tmp_path / "runs/20260101-000000-0000-scan")
    folder.path.mkdir(parents=True)
    folder.stages.write_text('["scan"]')
    folder.config.write_text(dump_resolved(read_config(tmp_path / "pipeline.yaml").config))
    with folder.items.open("w") as items, folder.inventory.open("w") as rows:
        rows.write("id,split,scan_key,graph_key,origin\n")
        for number in range(MANY):
            part = Part(Role.COMPLEX, str(tmp_path / f"data/i{number}.pdb"))
            items.write(worklist.item_line(Item(f"i{number}", (part,))) + "\n")
            rows.write(f"i{number},,{number:032x},{number:032x},\n")
    for number in (0, 77_777, MANY - 1):
        (tmp_path / f"data/i{number}.pdb").write_text("nothing of a structure\n")
    settle(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worklist, "list_items", lambda _project: pytest.fail("the data set was listed"))
    return folder


@pytest.mark.nightly
def test_of_100_000_items_one_is_looked_up_and_no_other(listed: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = list[str]()

    def counting(path: str, recipe: Any) -> Any:
        looked.append(path)
        return scan.glance(path, recipe)

    monkeypatch.setattr(explained_item, "glance", counting)
    monkeypatch.setattr(worklist, "read_items", lambda _path: pytest.fail("a listing was parsed as a whole"))
    project = Project.open(read_config(Path("pipeline.yaml")).config, remember=False)
    for number in (0, 77_777, MANY - 1):
        explained = explain_item(project, f"i{number}")
        assert explained.stages[0].because.why.endswith(f"i{number}.pdb is not read yet")
    assert len(looked) == 3


@pytest.mark.nightly
def test_names_like_a_name_come_in_order_and_few() -> None:
    names = [f"demo-{number:03}" for number in range(300)] + ["DEMO-1", "x/1abc"]
    assert near_names("demo-1", names)[0] == "DEMO-1"
    assert near_names("1abc", names) == ["x/1abc"]
    assert near_names("demo-2999", names)
    assert len(near_names("demo", names)) == 5
    assert near_names("qqqqqq", names) == near_names("a", []) == []
