"""`pipeline plan train` as people type it, on a machine without a GPU."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.testkit.command import Command
from tests.testkit.once import Shelf
from tests.testkit.project import EMBED, copied, make_project, settle, write_weights

PLAN = ("plan", "--stage", "train", "--set", "train.task=planlab:Task", "--json")
ITEMS = 8
TASK = '''
import torch
from torch import nn

WIDTH = 64

class Net(nn.Module):
    def __init__(self, width, depth=3):
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)

class Task:
    width = WIDTH

    def model(self):
        return Net(self.width)

    def cost(self, item):
        return {"nodes": item["nodes"]}

    def collate(self, items, rng):
        raise NotImplementedError

    def example(self, sizes):
        return torch.randn(sizes["nodes"], 8)

    def loss(self, model, batch):
        return {"square": (model(batch).square().sum(), float(len(batch)))}

class Wide(Task):
    width = 4096

class Middling(Task):  # alone an item does not fill an A100; four do
    width = 768

class Filtered(Task):
    """Its shapes depend on data: it cannot be traced."""
    def loss(self, model, batch):
        kept = model(batch)[batch[:, 0] > -10]
        return {"square": (kept.square().sum(), float(len(batch)))}

class Repeats(Task):
    """How often it runs is an option; so is the model's width."""
    def __init__(self, times=4, width=WIDTH):
        self.times, self.width = times, width
    def loss(self, model, batch):
        passes = [model(batch).square().sum() for _ in range(self.times)]
        return {"square": (sum(passes), float(len(batch)))}

class NoExample(Task):
    example = None

class OwnItems(NoExample):
    def collate(self, items, rng):
        sides = [side for item in items for side in item.sides.values()]
        return torch.cat([torch.randn(len(next(iter(side.nodes.values()))), 8) for side in sides])

class RaisesInModel(Task):
    def model(self):
        raise ValueError("no such checkpoint: best.pt")

class RaisesInCost(Task):
    def cost(self, item):
        return {"atoms": item["atoms"]}

class RaisesInLoss(Task):
    def loss(self, model, batch):
        return {"square": (model(batch) @ batch, 1.0)}

class NeedsKernels(Task):
    def model(self):
        import a_cuda_kernel_nobody_has

class Half:
    def model(self):
        return None

class BareLoss(Task):
    def loss(self, model, batch):
        return model(batch).sum()

class NoGradient(Task):
    def loss(self, model, batch):
        return {"square": (model(batch).detach().sum(), 1.0)}

class NotAModel(Task):
    def model(self):
        return None

class Exits(Task):
    def model(self):
        raise SystemExit(4)

class NoCost(Task):
    def cost(self, item):
        return {"nodes": item["nodes"] * 0}

class OneByOne(Task):
    def cost(self, item):
        return {"nodes": max(item["nodes"], 10)}

class IgnoresSizes(Task):
    def example(self, sizes):
        return torch.randn(7, 8)
'''


def make(folder: Path) -> None:
    project = make_project(folder, ITEMS, growth=10, **EMBED, train={"split": None, "effective_batch": 4, "epochs": 3})
    (folder / "planlab.py").write_text(TASK)
    write_weights(folder)
    project.finishes("embed", "graph")


@pytest.fixture(scope="module")
def project(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with graphs; the plans of earlier tests stay."""
    return copied(shelf, "planned", make, tmp_path_factory.mktemp("planned"))


@pytest.fixture
def typed(project: Path, pipeline: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return what types commands in the project."""
    monkeypatch.chdir(project)
    return pipeline


@pytest.fixture
def plan(typed: Command) -> Callable[..., dict[str, Any]]:
    """Return what plans with further options."""

    def run(*options: str) -> dict[str, Any]:
        done = typed(*PLAN, *options)
        assert done.code == 0, done.err
        (document,) = json.loads(done.out)
        return document

    return run


def test_a_plan_needs_no_gpu_and_says_where_every_number_is_from(plan):
    found = plan("--gpu", "a100-40gb")
    one = found["plans"]["all items"]
    assert (found["items"], found["ranks"], found["cards"]) == (ITEMS, 1, ["a100-40gb"])
    assert one["live"]["origin"] == "traced"
    assert one["reserved"]["origin"] == "simulated"
    assert one["probability"] == {"value": 0.95, "origin": "assumed"}
    assert sum(part["bytes"] for part in one["parts"]) == one["live"]["value"]
    assert one["live"]["value"] <= one["reserved"]["value"] <= one["total"]["value"] <= one["limit_bytes"]
    assert found["host"]["mem_bytes"] >= sum(part["bytes"] for part in found["host"]["parts"]) * 0.9


@pytest.mark.nightly
def test_a_second_plan_is_there_at_once_and_one_for_a_like_card_traces_nothing(typed, monkeypatch):
    words = (*PLAN, "--set", "train.effective_batch=3")
    first = typed(*words, "--gpu", "a100-40gb")
    monkeypatch.setattr("pipeline.memory.tracing.tracer.TraceSession", lambda *_: pytest.fail("traced again"))
    assert typed(*words, "--gpu", "a100-40gb").out == first.out
    other = typed(*words, "--gpu", "a100-80gb")  # of the same generation: attention takes the same kernels
    assert other.json()[0]["cards"] == ["a100-80gb-pcie"]


@pytest.mark.nightly
def test_a_plan_is_made_anew_when_something_it_follows_from_has_changed(typed, project):
    typed(*PLAN, "--gpu", "a100-40gb")
    file = project / "planlab.py"
    before = file.read_text()
    try:
        for words in (("--set", "train.ema=0.9"), ("--set", "cluster.train.cpus=2"), ("--gpu", "v100-16gb")):
            err = typed(*PLAN, "--gpu", "a100-40gb", *words).err
            assert "planning" in err
            assert "planned in" in err
        file.write_text(before.replace("WIDTH = 64", "WIDTH = 96"))
        settle(project)
        sys.modules.pop("planlab", None)
        assert "planning" in typed(*PLAN, "--gpu", "a100-40gb").err
    finally:
        file.write_text(before)
        sys.modules.pop("planlab", None)


@pytest.mark.nightly
def test_parameters_and_their_kin_are_what_the_model_has(plan):
    found = plan("--gpu", "a100-40gb", "--set", "train.ema=0.99")
    numbers = 8 * 64 + 64 + 3 * (64 * 64 + 64) + 64 + 1
    assert found["parameters"] == found["trained"] == numbers
    bytes_: Counter[str] = Counter()
    for part in found["standing"]:
        bytes_[part["category"]] += part["bytes"]
    steps = 2 * (1 + 3 + 1)  # AdamW counts the steps of each tensor in one number of its own
    assert bytes_ == {"parameters": 4 * numbers, "optimizer": 4 * (2 * numbers + steps), "ema": 4 * numbers}


@pytest.mark.nightly
def test_a_small_card_gets_smaller_micro_batches_and_the_same_step(plan):
    large = plan("--gpu", "a100-80gb", "--set", "train.task=planlab:Wide")["plans"]["all items"]
    small = plan("--gpu", "2200MiB", "--set", "train.task=planlab:Wide")["plans"]["all items"]
    assert (large["request"]["batch"], small["request"]["batch"]) == (4, 4)
    assert large["cuts"]["steps_most"] <= small["cuts"]["steps_most"]
    assert small["total"]["value"] <= small["limit_bytes"] < large["limit_bytes"]


@pytest.mark.nightly
def test_configurations_are_told_for_cards_of_24_40_80_and_141_gb(plan):
    rows = plan("--gpu", "rtx4090")["configurations"]
    assert [(row["items"], row["accumulation"]) for row in rows] == [(4, 1), (2, 2), (1, 4)]
    assert list(rows[0]["fits"]) == ["24GiB", "a100-40gb", "a100-80gb-sxm", "h200-141gb-sxm"]
    assert rows[0]["live"]["value"] > rows[1]["live"]["value"] > rows[2]["live"]["value"]


@pytest.mark.nightly
def test_offers_are_compared_side_by_side(plan):
    found = plan("--gpu", "3xa100-40gb", "--gpu", "a100-80gb")
    assert [one["ranks"] for one in found["alternatives"]] in ([1, 3], [3, 1])
    assert all(one["gpu_hours"] > 0 for one in found["alternatives"])
    assert found["ranks"] == 3


@pytest.mark.nightly
def test_half_precision_is_chosen_only_where_it_is_allowed(plan):
    assert plan("--gpu", "a100-40gb")["plans"]["all items"]["choice"]["precision"] == "fp32"
    pinned = plan("--gpu", "a100-40gb", "--set", "train.precision=bf16")
    assert pinned["plans"]["all items"]["choice"]["precision"] == "bf16"


@pytest.mark.nightly
def test_a_precision_left_to_the_planner_is_the_same_however_a_step_is_cut(plan):
    words = ("--gpu", "a100-40gb", "--set", "train.task=planlab:Middling", "--set", "train.precision=auto")
    cuts = {items: plan(*words, "--set", f"train.micro_batch={items}")["plans"]["all items"] for items in ("1", "auto")}
    assert [cut["cuts"]["items_most"] for cut in cuts.values()] == [1, ITEMS // 2]
    assert {items: cut["choice"]["precision"] for items, cut in cuts.items()} == {"1": "bf16", "auto": "bf16"}


@pytest.mark.nightly
def test_a_model_that_cannot_be_traced_is_rehearsed_and_the_plan_says_so(plan):
    one = plan("--gpu", "24GiB", "--set", "train.task=planlab:Filtered")["plans"]["all items"]
    assert one["live"]["origin"] == "extrapolated"
    assert one["notes"]


@pytest.mark.nightly
def test_a_task_without_an_example_is_planned_by_a_formula_that_is_not_trusted(plan):
    one = plan("--gpu", "24GiB", "--set", "train.task=planlab:NoExample")["plans"]["all items"]
    assert one["live"]["origin"] == "assumed"
    assert one["notes"]
    own = plan("--gpu", "24GiB", "--set", "train.task=planlab:OwnItems")["plans"]["all items"]
    traced = plan("--gpu", "24GiB")["plans"]["all items"]
    assert own["live"]["origin"] == "extrapolated"
    assert traced["live"]["value"] <= own["live"]["value"] <= 1.3 * traced["live"]["value"]


@pytest.mark.nightly
def test_a_curriculum_has_a_batch_plan_for_each_stage(typed, plan):
    found = plan("--gpu", "24GiB", "--set", "train.curriculum=[{epochs: 1, largest: {nodes: 80}}]")
    assert list(found["plans"]) == ["stage 1", "all items"]
    assert found["plans"]["stage 1"]["live"]["value"] < found["plans"]["all items"]["live"]["value"]
    wrong = typed(*PLAN, "--gpu", "24GiB", "--set", "train.curriculum=[{epochs: 1, largest: {residue: 80}}]")
    assert (wrong.code, "'residue'" in wrong.err) == (2, True)


@pytest.mark.nightly
def test_a_stage_of_other_options_is_planned_by_its_own_step(typed, plan):
    words = ("--gpu", "24GiB", "--set", "train.task=planlab:Repeats")
    found = plan(*words, "--set", "train.curriculum=[{epochs: 1, options: {times: 1}}]")
    alone = plan(*words, "--set", "train.options.times=1")
    first, last = found["plans"]["stage 1"]["live"]["value"], found["plans"]["all items"]["live"]["value"]
    assert first == alone["plans"]["all items"]["live"]["value"] < last
    for options, word in (("{width: 32}", "blocks.0.0.bias"), ("{tmies: 1}", "train.options.tmies")):
        wrong = typed(*PLAN, *words, "--set", f"train.curriculum=[{{epochs: 1, options: {options}}}]")
        assert (wrong.code, word in wrong.err) == (2, True), wrong.err


@pytest.mark.nightly
def test_a_node_without_gpus_is_planned_by_its_memory(plan):
    found = plan("--set", "cluster.train.mem=2GiB")
    one = found["plans"]["all items"]
    assert one["reserved"]["value"] == one["live"]["value"]  # no allocator stands between
    assert found["host"]["mem_bytes"] <= 2 << 30
    assert "CUDA context" not in {part["name"] for part in found["host"]["parts"]}


@pytest.mark.nightly
def test_a_node_that_no_slurm_describes_is_planned_by_an_assumed_memory(typed, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "/nonexistent")
    sets = [*PLAN[PLAN.index("--set") :], "--set", "cluster.train.gpus=0"]
    done = typed("submit", "--stage", "train", "--dry-run", "--executor", "slurm", *sets)
    assert (done.code, "16.0 GiB" in caplog.text, "#SBATCH --job-name=RUN-train" in done.out) == (0, True, True), (
        done.err
    )


@pytest.mark.nightly
def test_gpus_that_are_named_are_those_the_job_asks_for(plan):
    found, alone = (plan("--gpu", f"{count}xa100-40gb,{count}xa100-80gb") for count in (4, 1))
    assert (found["job"]["gpus"], len(found["plans"]["all items"]["cards"])) == (4, 2)  # a plan for both
    assert found["host"]["mem_bytes"] > 3 * alone["host"]["mem_bytes"]


WRONG_TASKS = {
    "planlab:RaisesInModel": ("best.pt", "planlab.py:"),
    "planlab:RaisesInCost": ("KeyError", "planlab.py:"),
    "planlab:RaisesInLoss": ("planlab.py:",),
    "planlab:NeedsKernels": ("a_cuda_kernel_nobody_has", "planlab.py:"),
    "planlab:Nothing": ("'Nothing'", "Wide"),
    "planlab:Half": ("cost()", "loss()"),
    "nolab:Task": ("'nolab'",),
    "planlab:BareLoss": ("loss()",),
    "planlab:NoGradient": ("'square'",),
    "planlab:NotAModel": ("model()",),
    "planlab:Exits": ("SystemExit", "planlab.py:"),
    "planlab:NoCost": ("cost()",),
    "planlab:OneByOne": ("cost()", "numpy"),
}
WRONG_SETTINGS = (
    ("--gpu rtx-5900", 2, "rtx-5090"),
    ("--gpu 0xa100", 2, "GPU"),
    ("--gpu 8xa100-40gb", 2, "effective batch"),
    ("--set train.micro_batch=8 --gpu t4", 2, "effective_batch"),
    ("--set train.task=planlab:Wide --gpu 1500MiB", 5, "MiB"),
    ("--set cluster.train.gpus=1", 2, "--gpu"),
    ("--set cluster.train.mem=64MiB", 5, "cluster.train.mem"),
)


@pytest.mark.nightly
@pytest.mark.parametrize("task", WRONG_TASKS)
def test_a_task_that_cannot_be_planned_is_refused_with_its_place(typed, task):
    done = typed(*PLAN, "--set", f"train.task={task}", "--gpu", "t4")
    assert (done.code, "Traceback" in done.err) == (2, False), done.err
    assert all(word in done.err for word in WRONG_TASKS[task]), done.err


@pytest.mark.nightly
def test_settings_that_cannot_be_planned_are_refused(typed):
    for words, code, word in WRONG_SETTINGS:
        done = typed(*PLAN, *words.split())
        assert (done.code, word in done.err, "next: " in done.err) == (code, True, True), done.err
