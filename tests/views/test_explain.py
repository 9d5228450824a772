"""`pipeline explain` and `plan --dag` on a project whose scan, embeddings and graphs are made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import read_config
from pipeline.dataset.loading import made_table
from pipeline.planning.prepare import recipe_of
from pipeline.project.project import Project
from pipeline.views.explained_item import near_names
from tests.testkit import project as kit
from tests.testkit.command import Command
from tests.testkit.once import Shelf
from tests.testkit.project import TRAIN, settle
from tests.testkit.trained import SMALL, write_project

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


def make(folder: Path) -> None:
    write_project(folder, {**SMALL, "train__task": TRAIN["train__task"], "train__epochs": 1}, {}, SPLITS)
    kit.Project(folder).finishes("embed", "graph")


@pytest.fixture
def project(shelf: Shelf, tmp_path: Path) -> Path:
    """Return a project whose scan, embeddings and graphs are made, with files of its own."""
    shelf.copy("explained", make, tmp_path)
    settle(tmp_path / "data")
    kit.Project(tmp_path).finishes("scan", "embed")  # the copies are new files, the weights as well
    return tmp_path


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
    found = pipeline("items", "--key", told["graph"]["keys"]["graph"][:16])
    assert any(line.startswith("c0 ") for line in found.out.splitlines())  # by the key that is shown


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
    assert told["next"] == f"pipeline submit {stage}"
    after = [other for other in ("embed", "graph") if stage == "scan"]
    assert all(told[other]["state"] == "waiting" for other in after)
    whole = json.loads(pipeline("explain", "--stage", stage, "--json", "--set", setting).out)
    assert [change["setting"] for change in whole["changes"]] == [name for name, _, _ in changes]


@pytest.mark.nightly
def test_a_file_with_other_bytes_is_told_with_both_digests(pipeline: Command, project: Path) -> None:
    path = project / "data/c1.pdb"
    path.write_bytes(path.read_bytes().replace(b" N   ALA", b" N   GLY", 1) + b"REMARK\n")
    settle(path.parent)
    told = of_item(pipeline, "c1")
    assert states(told) == ["to do", "waiting", "waiting"]
    assert str(path) in told["scan"]["why"]
    assert states(of_item(pipeline, "c0")) == ["done"] * 3  # of the others nothing changed


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


@pytest.mark.nightly
def test_a_damaged_record_is_told_as_damaged_and_a_lost_one_as_gone(pipeline: Command, project: Path) -> None:
    key = bytes.fromhex(of_item(pipeline, "c8")["graph"]["keys"]["graph"])
    opened = Project.open(read_config(project / "pipeline.yaml").config, remember=False)
    (place, *_) = opened.graphs.store.locate([key])[0]
    (shard,) = (project / "cache/graph").rglob(f"{place.shard}*")
    whole = shard.read_bytes()
    middle = place.offset + place.length // 2
    shard.chmod(0o600)
    shard.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    told = of_item(pipeline, "c8")["graph"]
    assert (told["state"], "damaged" in told["why"]) == ("to do", True)
    assert of_item(pipeline, "c0")["graph"]["state"] == "done"
    shard.unlink()
    assert of_item(pipeline, "c0")["graph"]["state"] == "to do"


@pytest.mark.nightly
def test_a_training_is_compared_with_the_nearest_earlier_model(pipeline: Command, project: Path) -> None:
    opened = Project.open(read_config(project / "pipeline.yaml").config, remember=False, beside=project)
    recipe = recipe_of(opened, made_table(opened) or "", "fp32")
    others = {"far": {"seed": 5, "learning_rate": 0.5, "epochs": 9}, "near": {"seed": 5}, "torn": None}
    for name, other in others.items():
        (project / "models" / name).mkdir(parents=True)
        text = json.dumps({"recipe": {**recipe, **other}}) if other else '{"reci'
        (project / "models" / name / "prepared.json").write_text(text)
    told = json.loads(pipeline("explain", "--stage", "train", "--json", "--set", "embed.context=partner").out)
    assert (told["model"], told["state"]) == ("near", "to do")
    assert {"train.seed", "embed.context"} == {change["setting"] for change in told["changes"]}
    item = of_item(pipeline, "c0")["train"]
    assert [change["setting"] for change in item["changes"]] == ["train.seed"]


@pytest.mark.nightly
def test_the_graph_shows_what_is_to_do_and_why(pipeline: Command, project: Path) -> None:
    told = json.loads(pipeline("plan", "--graph", "--json").out)
    assert [stage["name"] for stage in told["stages"]] == ["data", "scan", "embed", "graph", "train", "evaluate"]
    assert ["scan", "embed"] in told["arrows"]
    for form, begins in (("mermaid", "flowchart LR\n"), ("dot", "digraph pipeline {\n")):
        assert pipeline("plan", f"--graph={form}").out.startswith(begins)


@pytest.mark.nightly
def test_nothing_that_is_shown_waits_for_torch(project: Path) -> None:
    done = subprocess.run([sys.executable, "-c", TORCHLESS], cwd=project, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["imported: []"], done.stderr


def test_names_like_a_name_come_in_order_and_few() -> None:
    names = [f"demo-{number:03}" for number in range(300)] + ["DEMO-1", "x/1abc"]
    assert near_names("demo-1", names)[0] == "DEMO-1"
    assert near_names("1abc", names) == ["x/1abc"]
    assert near_names("demo-2999", names)
    assert len(near_names("demo", names)) == 5
    assert near_names("qqqqqq", names) == near_names("a", []) == []
