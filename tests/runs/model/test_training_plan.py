"""`pipeline plan --stage train` as people type it, on a machine without a GPU."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.testkit.command import Command
from tests.testkit.project import Project, settle, write_complexes

PLAN = ("plan", "--stage", "train", "--set", "train.task=planlab:Task", "--json")
CONFIG = """\
data: {source: glob, path: data}
train: {split: null, effective_batch: 4, epochs: 3}
"""
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

class Prints(Task):
    def model(self):
        print("a word from the model")
        return super().model()

class IgnoresSizes(Task):
    def example(self, sizes):
        return torch.randn(7, 8)
'''


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with graphs, in which nothing is changed."""
    folder = tmp_path_factory.mktemp("planned")
    write_complexes(folder / "data", ITEMS, growth=10)
    (folder / "pipeline.yaml").write_text(CONFIG)
    (folder / "planlab.py").write_text(TASK)
    Project(folder).finishes("graph")
    return folder


@pytest.fixture
def typed(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return what types commands in the project."""
    monkeypatch.chdir(project)
    return Command(monkeypatch, capsys)


@pytest.fixture
def plan(typed: Command) -> Callable[..., dict[str, Any]]:
    """Return what plans with further options."""

    def run(*options: str) -> dict[str, Any]:
        done = typed(*PLAN, *options)
        assert done.code == 0, done.err
        (document,) = json.loads(done.out)
        return document

    return run


def refused(typed: Command, *options: str) -> tuple[int, str]:
    """Return the exit code and the message of what cannot be planned."""
    done = typed(*PLAN, *options)
    assert "Traceback" not in done.err
    return done.code, done.err


def test_a_plan_needs_no_gpu_and_says_where_every_number_is_from(plan: Callable[..., dict[str, Any]]) -> None:
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
def test_a_second_plan_is_there_at_once_and_one_for_a_like_card_traces_nothing(
    typed: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*PLAN, "--set", "train.effective_batch=3")
    first = typed(*words, "--gpu", "a100-40gb")
    monkeypatch.setattr("pipeline.memory.tracing.tracer.TraceSession", lambda *_: pytest.fail("traced again"))
    again = typed(*words, "--gpu", "a100-40gb")
    assert "the plan that was made before" in again.err
    assert again.out == first.out
    other = typed(*words, "--gpu", "a100-80gb")  # of the same generation: attention takes the same kernels
    assert "planning" in other.err
    assert json.loads(other.out)[0]["cards"] == ["a100-80gb-pcie"]


@pytest.mark.nightly
def test_a_plan_is_made_anew_when_something_it_follows_from_has_changed(typed: Command, project: Path) -> None:
    typed(*PLAN, "--gpu", "a100-40gb")
    file = project / "planlab.py"
    before = file.read_text()
    try:
        for words in (("--set", "train.ema=0.9"), ("--set", "cluster.train.cpus=2"), ("--gpu", "v100-16gb")):
            assert "planning" in typed(*PLAN, "--gpu", "a100-40gb", *words).err
        file.write_text(before.replace("WIDTH = 64", "WIDTH = 96"))
        settle(project)
        sys.modules.pop("planlab", None)
        assert "planning" in typed(*PLAN, "--gpu", "a100-40gb").err
    finally:
        file.write_text(before)
        sys.modules.pop("planlab", None)


@pytest.mark.nightly
def test_a_plan_for_processors_speaks_of_their_cores(typed: Command, plan: Callable[..., dict[str, Any]]) -> None:
    words = [word for word in PLAN if word != "--json"]
    on_cpu = typed(*words, "--set", "cluster.train.cpus=1")
    assert (on_cpu.code, "core-hours" in on_cpu.out, "GPU" in on_cpu.out) == (0, True, False)
    assert plan()["gpu_hours"] == 0
    assert "GPU-hours" in typed(*words, "--gpu", "a100-40gb").out


@pytest.mark.nightly
def test_a_training_without_graphs_is_shown_as_one_that_is_planned_later(
    typed: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Path.cwd()
    shutil.copytree(made / "data", tmp_path / "new" / "data")
    for name in ("pipeline.yaml", "planlab.py"):
        shutil.copy(made / name, tmp_path / "new")
    monkeypatch.chdir(tmp_path / "new")
    shown = typed("submit", "--stage", "train", "--only", "--dry-run", "--set", "train.task=planlab:Task")
    (row,) = [line.split() for line in shown.out.splitlines() if line.startswith("train  ")]
    assert row[:7] == ["train", "steps", "?", "0", "0", "?", "?"]
    assert "train: planned when its graphs are there" in shown.out


@pytest.mark.nightly
def test_parameters_and_their_kin_are_what_the_model_has(plan: Callable[..., dict[str, Any]]) -> None:
    found = plan("--gpu", "a100-40gb", "--set", "train.ema=0.99")
    numbers = 8 * 64 + 64 + 3 * (64 * 64 + 64) + 64 + 1
    assert found["parameters"] == found["trained"] == numbers
    bytes_: Counter[str] = Counter()
    for part in found["standing"]:
        bytes_[part["category"]] += part["bytes"]
    steps = 2 * (1 + 3 + 1)  # AdamW counts the steps of each tensor in one number of its own
    assert bytes_ == {"parameters": 4 * numbers, "optimizer": 4 * (2 * numbers + steps), "ema": 4 * numbers}


@pytest.mark.nightly
def test_a_small_card_gets_smaller_micro_batches_and_the_same_step(plan: Callable[..., dict[str, Any]]) -> None:
    large = plan("--gpu", "a100-80gb", "--set", "train.task=planlab:Wide")["plans"]["all items"]
    small = plan("--gpu", "2200MiB", "--set", "train.task=planlab:Wide")["plans"]["all items"]
    assert (large["batch"], small["batch"]) == (4, 4)
    assert large["accumulation_most"] <= small["accumulation_most"]
    assert small["total"]["value"] <= small["limit_bytes"] < large["limit_bytes"]


@pytest.mark.nightly
def test_configurations_are_told_for_cards_of_24_40_80_and_141_gb(plan: Callable[..., dict[str, Any]]) -> None:
    rows = plan("--gpu", "rtx4090")["configurations"]
    assert [(row["items"], row["accumulation"]) for row in rows] == [(4, 1), (2, 2), (1, 4)]
    assert list(rows[0]["fits"]) == ["24GiB", "a100-40gb", "a100-80gb-sxm", "h200-141gb-sxm"]
    assert rows[0]["live"]["value"] > rows[1]["live"]["value"] > rows[2]["live"]["value"]


@pytest.mark.nightly
def test_offers_are_compared_side_by_side(plan: Callable[..., dict[str, Any]]) -> None:
    found = plan("--gpu", "3xa100-40gb", "--gpu", "a100-80gb")
    assert [one["ranks"] for one in found["alternatives"]] in ([1, 3], [3, 1])
    assert all(one["gpu_hours"] > 0 for one in found["alternatives"])
    assert found["ranks"] == 3


@pytest.mark.nightly
def test_one_plan_holds_on_all_cards_that_are_named_together(plan: Callable[..., dict[str, Any]]) -> None:
    both = plan("--gpu", "v100-16gb,a100-80gb")["plans"]["all items"]
    alone = plan("--gpu", "v100-16gb")["plans"]["all items"]
    assert both["limit_bytes"] == alone["limit_bytes"]
    assert len(both["cards"]) == 2


@pytest.mark.nightly
def test_half_precision_is_chosen_only_where_it_is_allowed(plan: Callable[..., dict[str, Any]]) -> None:
    assert plan("--gpu", "a100-40gb")["plans"]["all items"]["choice"]["precision"] == "fp32"
    pinned = plan("--gpu", "a100-40gb", "--set", "train.precision=bf16")
    assert pinned["plans"]["all items"]["choice"]["precision"] == "bf16"


@pytest.mark.nightly
def test_a_precision_left_to_the_planner_is_the_same_however_a_step_is_cut(plan: Callable[..., dict[str, Any]]) -> None:
    words = ("--gpu", "a100-40gb", "--set", "train.task=planlab:Middling", "--set", "train.precision=auto")
    cuts = {items: plan(*words, "--set", f"train.micro_batch={items}")["plans"]["all items"] for items in ("1", "auto")}
    assert [cut["items_most"] for cut in cuts.values()] == [1, ITEMS // 2]
    assert {items: cut["choice"]["precision"] for items, cut in cuts.items()} == {"1": "bf16", "auto": "bf16"}


@pytest.mark.nightly
def test_a_model_that_cannot_be_traced_is_rehearsed_and_the_plan_says_so(plan: Callable[..., dict[str, Any]]) -> None:
    one = plan("--gpu", "24GiB", "--set", "train.task=planlab:Filtered")["plans"]["all items"]
    assert one["live"]["origin"] == "extrapolated"
    assert any("nonzero" in note for note in one["notes"])


@pytest.mark.nightly
def test_a_task_without_an_example_is_planned_by_a_formula_that_is_not_trusted(
    plan: Callable[..., dict[str, Any]],
) -> None:
    one = plan("--gpu", "24GiB", "--set", "train.task=planlab:NoExample")["plans"]["all items"]
    assert one["live"]["origin"] == "assumed"
    assert any("trust is low" in note for note in one["notes"])


@pytest.mark.nightly
def test_a_curriculum_has_a_batch_plan_for_each_stage(typed: Command, plan: Callable[..., dict[str, Any]]) -> None:
    found = plan("--gpu", "24GiB", "--set", "train.curriculum=[{epochs: 1, largest: {nodes: 80}}]")
    assert list(found["plans"]) == ["stage 1", "all items"]
    assert found["plans"]["stage 1"]["live"]["value"] < found["plans"]["all items"]["live"]["value"]
    code, told = refused(typed, "--gpu", "24GiB", "--set", "train.curriculum=[{epochs: 1, largest: {residue: 80}}]")
    assert code == 2
    assert "no size is called 'residue'" in told


@pytest.mark.nightly
def test_a_stage_of_other_options_is_planned_by_its_own_step(
    typed: Command, plan: Callable[..., dict[str, Any]]
) -> None:
    words = ("--gpu", "24GiB", "--set", "train.task=planlab:Repeats")
    found = plan(*words, "--set", "train.curriculum=[{epochs: 1, options: {times: 1}}]")
    alone = plan(*words, "--set", "train.options.times=1")
    first, last = found["plans"]["stage 1"]["live"]["value"], found["plans"]["all items"]["live"]["value"]
    assert first == alone["plans"]["all items"]["live"]["value"] < last
    for options, said in (
        ("{width: 32}", "its options change the model: blocks.0.0.bias"),
        ("{tmies: 1}", "train.curriculum, stage 1: train.options.tmies: Repeats takes no option 'tmies'; did you mean"),
    ):
        code, told = refused(typed, *words, "--set", f"train.curriculum=[{{epochs: 1, options: {options}}}]")
        assert code == 2
        assert said in told


@pytest.mark.nightly
def test_a_node_without_gpus_is_planned_by_its_memory(plan: Callable[..., dict[str, Any]]) -> None:
    found = plan("--set", "cluster.train.mem=2GiB")
    one = found["plans"]["all items"]
    assert one["reserved"]["value"] == one["live"]["value"]  # no allocator stands between
    assert found["host"]["mem_bytes"] <= 2 << 30
    assert "CUDA context" not in {part["name"] for part in found["host"]["parts"]}


@pytest.mark.nightly
def test_what_a_task_prints_is_not_part_of_the_plan(typed: Command, plan: Callable[..., dict[str, Any]]) -> None:
    assert plan("--gpu", "t4", "--set", "train.task=planlab:Prints")["items"] == ITEMS


@pytest.mark.nightly
def test_a_batch_that_does_not_have_the_sizes_it_was_asked_is_told(plan: Callable[..., dict[str, Any]]) -> None:
    assert plan("--gpu", "t4", "--set", "train.task=planlab:IgnoresSizes")["ignores_sizes"]
    assert not plan("--gpu", "t4")["ignores_sizes"]


@pytest.mark.nightly
def test_gpus_that_are_named_are_those_the_job_asks_for(plan: Callable[..., dict[str, Any]]) -> None:
    found = plan("--gpu", "4xa100-40gb")
    assert found["job"]["gpus"] == 4
    alone = plan("--gpu", "a100-40gb")
    assert found["host"]["mem_bytes"] > 3 * alone["host"]["mem_bytes"]


@pytest.mark.nightly
def test_the_report_is_readable(typed: Command) -> None:
    done = typed(*PLAN[:-1], "--gpu", "rtx4090")
    assert done.code == 0, done.err
    for words in (
        "fits: ",
        "component",
        "optimizer state",
        "activations of blocks.*",
        "items x micro-batches",
        "--mem",
    ):
        assert words in done.out


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--gpu", "rtx-5900"), 2, ("rtx-5090", "24GiB")),
        (("--gpu", "0xa100"), 2, ("asks for no GPU",)),
        (("--gpu", "8xa100-40gb"), 2, ("effective batch of 4", "8 ranks")),
        (
            ("--set", "train.task=planlab:RaisesInModel", "--gpu", "t4"),
            2,
            ("no such checkpoint: best.pt", "planlab.py:"),
        ),
        (("--set", "train.task=planlab:RaisesInCost", "--gpu", "t4"), 2, ("KeyError", "nodes, edges", "planlab.py:")),
        (("--set", "train.task=planlab:RaisesInLoss", "--gpu", "t4"), 2, ("planlab.py:", "mat1 and mat2")),
        (("--set", "train.task=planlab:NeedsKernels", "--gpu", "t4"), 2, ("a_cuda_kernel_nobody_has", "planlab.py:")),
        (("--set", "train.task=planlab:Nothing", "--gpu", "t4"), 2, ("has no 'Nothing'; it has", "Wide")),
        (("--set", "train.task=planlab:Half", "--gpu", "t4"), 2, ("has no cost(), collate(), loss()",)),
        (("--set", "train.task=nolab:Task", "--gpu", "t4"), 2, ("there is no module 'nolab'", "PYTHONPATH")),
        (("--set", "train.task=planlab:BareLoss", "--gpu", "t4"), 2, ("loss() must return", "got a tensor")),
        (("--set", "train.task=planlab:NoGradient", "--gpu", "t4"), 2, ("'square' does not depend on any parameter",)),
        (("--set", "train.task=planlab:NotAModel", "--gpu", "t4"), 2, ("model() must return a torch.nn.Module",)),
        (("--set", "train.task=planlab:Exits", "--gpu", "t4"), 2, ("SystemExit", "planlab.py:")),
        (("--set", "train.task=planlab:NoCost", "--gpu", "t4"), 2, ("cost() is 0 for every item",)),
        (("--set", "train.task=planlab:OneByOne", "--gpu", "t4"), 2, ("write cost() with numpy",)),
        (("--set", "train.micro_batch=8", "--gpu", "t4"), 2, ("effective_batch",)),
        (("--set", "train.task=planlab:Wide", "--gpu", "1500MiB"), 5, ("MiB",)),
        (("--set", "cluster.train.gpus=1"), 2, ("which GPU", "--gpu")),
        (("--set", "cluster.train.mem=64MiB"), 5, ("cluster.train.mem",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_what_cannot_be_planned_says_why_and_what_to_do(
    typed: Command, options: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    found, told = refused(typed, *options)
    assert found == code, told
    assert all(word in told for word in words), told
    assert "next: " in told


@pytest.mark.nightly
def test_options_of_training_are_refused_for_other_stages(typed: Command) -> None:
    done = typed("plan", "--stage", "scan", "--gpu", "t4")
    assert done.code == 2
    assert "pipeline plan --stage train" in done.err
