"""Damage that a running training finds: it goes on and says what became of the records, or ends and says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from pipeline.store.format.disk import Disk
from pipeline.store.format.shard import read_table
from tests.testkit.command import Command
from tests.testkit.project import to_do
from tests.testkit.trained import SMALL, write_project

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared

ITEMS = 6
SETTINGS = {
    **SMALL,
    "train__task": "damaging_task:Damaging",
    "train__micro_batch": 1,
    "train__epochs": 4,
    "train__checkpoints": {"minutes": 1000.0},
}
TASK = '''\
"""The reference task, which damages what a file names when so many items were seen."""

import json
import os
import threading
from pathlib import Path

from pipeline.tasks.interface import Interface

ONE = threading.Lock()  # several threads collate
ORDER = Path(os.environ["DAMAGE_ORDER"])
SEEN = []


class Damaging(Interface):
    def collate(self, items, rng):
        with ONE:
            self.damage(items)
        return super().collate(items, rng)

    def damage(self, items):
        SEEN.extend(item.id for item in items)
        if ORDER.exists() and len(SEEN) > 6:
            order = json.loads(ORDER.read_text())
            ORDER.unlink()
            for name in order.pop("moved", ()):
                os.rename(name, f"{name}.moved")
            for name, places in order.items():
                os.chmod(name, 0o644)
                with open(name, "r+b", buffering=0) as file:
                    for place in places:
                        file.seek(place)
                        value = file.read(1)[0]
                        file.seek(place)
                        file.write(bytes([value ^ 0x10]))
'''
SUBMIT = ("submit", "--stage", "train", "--follow")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipeline: Command) -> Path:
    """Return a project whose graphs and embeddings are made; it trains for 4 epochs of 3 steps."""
    write_project(tmp_path, SETTINGS, {"damaging_task.py": TASK}, [""] * ITEMS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DAMAGE_ORDER", str(tmp_path / "order.json"))
    for stage in ("graph", "embed"):
        done = pipeline("submit", "--stage", stage, "--follow")
        assert done.code == 0, done.err
    return tmp_path


def order_damage(project: Path, kind: str, records: int) -> None:
    """Have the task damage so many records of a kind."""
    order: dict[str, list[int]] = {}
    for path in sorted((project / "cache" / kind / "shards").glob("*.safetensors")):
        offsets = [int(offset) for offset in read_table(Disk(), path).rows["offset"]][:records]
        order[str(path)], records = offsets, records - len(offsets)
    (project / "order.json").write_text(json.dumps(order))


def weights_of(models: Path) -> dict[str, object]:
    """Return the trained model of a folder of models."""
    newest = max(models.glob("*/checkpoints/step-*"))
    return {name: array.tobytes() for name, array in load_file(newest / "state.safetensors").items()}


@pytest.mark.nightly
def test_a_graph_that_is_damaged_meanwhile_is_made_anew_and_nothing_changes(project: Path, pipeline: Command) -> None:
    assert pipeline(*SUBMIT, "--set", "train.models=undamaged").code == 0
    order_damage(project, "graph", 2)
    done = pipeline(*SUBMIT)
    assert done.code == 0, done.err
    assert not (project / "order.json").exists()
    assert weights_of(project / "models") == weights_of(project / "undamaged")
    assert pipeline("cache", "repair", "--yes").code == 0
    assert pipeline("submit", "--stage", "graph", "--follow").code == 0
    assert to_do()["graph"] == (ITEMS, 0)


@pytest.mark.nightly
def test_an_item_whose_embedding_is_damaged_meanwhile_is_left_out_and_counted(project: Path, pipeline: Command) -> None:
    order_damage(project, "embed", 1)
    done = pipeline(*SUBMIT, "--set", "data.max_rejected_fraction=0.5")
    assert done.code == 0, done.err
    (stage,) = json.loads(pipeline("status", "--json").out)["stages"][-1:]
    assert stage["census"]["damaged"] == 1
    (epochs,) = (project / "models").glob("*/epochs.jsonl")
    assert [json.loads(line)["rejected"] for line in epochs.read_text().splitlines()][-1] == 1


@pytest.mark.nightly
def test_a_training_that_loses_too_much_is_saved_and_ends_with_what_to_do(project: Path, pipeline: Command) -> None:
    assert pipeline(*SUBMIT, "--set", "train.models=undamaged").code == 0
    order_damage(project, "embed", 99)
    done = pipeline(*SUBMIT)
    assert done.code == 4, done.err
    assert "pipeline cache repair --yes" in done.err
    assert list((project / "models").glob("*/checkpoints/step-*"))
    assert pipeline("cache", "repair", "--yes").code in (0, 4)
    again = pipeline("submit", "--stage", "train", "--follow")
    assert again.code == 0, again.err
    assert weights_of(project / "models") == weights_of(project / "undamaged")


@pytest.mark.nightly
@pytest.mark.parametrize("moved", ["project", "models"])
def test_a_folder_that_is_moved_meanwhile_is_not_made_again(
    project: Path, pipeline: Command, monkeypatch: pytest.MonkeyPatch, moved: str
) -> None:
    assert pipeline(*SUBMIT, "--set", "train.models=quiet").code == 0
    place = project if moved == "project" else project / "models"
    (project / "order.json").write_text(json.dumps({"moved": [str(place)]}))
    assert pipeline(*SUBMIT).code != 0
    aside = place.with_name(f"{place.name}.moved")
    assert list((aside if moved == "models" else aside / "models").glob("*/prepared.json"))
    assert not place.exists()
    now = aside if moved == "project" else project
    monkeypatch.chdir(now)
    again = pipeline(*SUBMIT)
    assert again.code == 0, again.err
    assert len(pipeline("model", "list", "--json").json()["models"]) == 1
    assert weights_of(now / "models") == weights_of(now / "quiet")
