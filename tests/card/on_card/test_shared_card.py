"""Points of a sweep share a card: one that takes more than its part recovers in it, and the others never notice."""

from __future__ import annotations

import json

import pytest
import yaml

from pipeline.journal.run_folder import runs_in
from pipeline.planning.trainings import read_trainings
from tests.card.on_card.typed_on_cards import CARD, Typist
from tests.card.on_card.typed_on_cards import projects_root as projects_root
from tests.card.on_card.typed_on_cards import typist as typist
from tests.recipes.projects import as_words
from tests.testkit.trained import write_project

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared

TOTAL_BYTES, GREED_BYTES = 16 << 30, 6 << 30
CONFIG = """\
data: {source: manifest, path: data/manifest.csv}
embed: {weights: weights/esm2_tiny.pt}
graph: {neighbours: 8}
cluster: {executor: local, slots: {cpus: 4}, train: {time: 1h, gpus: 1, cpus: 1}}
train:
  task: "greedy:Greedy"
  options: {embedding_dim: 16, width: 8, layers: 1, pair_width: 4}
  effective_batch: 4
  micro_batch: 4
  precision: fp32
  epochs: 2
  validation: {split: null}
"""
TASK = f'''\
"""The reference task, which takes more than a third of the card for several items, where an option says so."""

import torch

from pipeline.tasks.interface import Interface


class Greedy(Interface):
    def __init__(self, greedy: bool = False, **options):
        super().__init__(**options)
        self.greedy = greedy

    def loss(self, model, batch):
        first = next(model.parameters())
        if self.greedy and len(batch.shapes) > 1 and first.device.type == "simcard":  # the plan knows nothing of it
            torch.empty({GREED_BYTES}, dtype=torch.uint8, device=first.device)
        return super().loss(model, batch)
'''


def test_a_point_that_is_greedy_recovers_in_its_part_and_no_other_runs_out_of_memory(typist: Typist) -> None:
    folder = typist.root / "greedy"
    folder.mkdir()
    typist.monkeypatch.chdir(folder)
    write_project(folder, yaml.safe_load(CONFIG), {"greedy.py": TASK}, ["train"] * 8)
    (folder / "points.csv").write_text("train.options.greedy,train.seed\ntrue,0\nfalse,0\nfalse,1\n")
    words = ("submit", "train", "--sweep-file", "points.csv", *as_words(CARD, "train.sweep.per_gpu=auto"), "--follow")
    done = typist.pipeline(*words)
    assert done.code == 0, done.out[-4000:] + done.err[-4000:]
    (run,) = runs_in(folder / "runs")
    (stage,) = (
        stage for stage in json.loads(typist.pipeline("status", "--json").out)["stages"] if stage["name"] == "train"
    )
    assert [(job["tasks"], job["sharing"], job["gpus"]) for job in stage["jobs"]] == [("0-2", 3, 1)]
    trainings = read_trainings(run)
    assert len(trainings) == 3
    for number, training in enumerate(trainings):
        plan = training.prepared
        assert plan is not None
        assert 3 * (plan.held_bytes + plan.process_bytes) <= TOTAL_BYTES
        assert plan.held_bytes < GREED_BYTES
        lines = (run.points / training.name / "epochs.jsonl").read_text().splitlines()
        trained = [json.loads(line) for line in lines]
        assert max(epoch["peak_bytes"] for epoch in trained) <= plan.held_bytes
        assert sum(epoch["steps"] for epoch in trained) == 4  # none is lost
        (log,) = run.logs.glob(f"{stage['jobs'][0]['id']}_{number}.err")
        assert ("out of memory" in log.read_text()) == ("greedy=true" in training.name)
