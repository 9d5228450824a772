"""What models take that cannot be traced: what is measured small must hold when it is run large."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.errors import PlanInfeasible
from pipeline.memory import footprint
from pipeline.memory.estimating.oracle import BestOracle, Formula
from pipeline.memory.estimating.small_steps import Allowance, SmallSteps
from pipeline.memory.footprint import (
    Category,
    MemoryChoice,
    Provenance,
    StandingFootprint,
    StepTapes,
    Unmeasurable,
)
from tests.memory.tracing.traced import play
from tests.testkit.limited import device
from tests.testkit.limited.device import LimitedDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

CHOICE = MemoryChoice()
FLOAT = 4


class Masked(nn.Module):
    """Keeps the nodes that score above zero: how many they are, only their values tell."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(features, width)
        self.out = nn.Linear(width, 1)
        self.register_buffer("shift", torch.zeros(width))

    def forward(self, x_NF: Tensor) -> Tensor:
        hidden_NW = torch.relu(self.wide(x_NF)) + self.shift
        kept_KW = hidden_NW[x_NF[:, 0] > 0]
        unique_U = torch.unique((kept_KW[:, 0] * 4).detach().round())
        return self.out(kept_KW * kept_KW).sum() / max(len(unique_U.tolist()), 1)


class Graph(nn.Module):
    """Messages over edges, the distances of all pairs within a cut-off chosen by value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.message = nn.Linear(2 * width, width)

    def forward(self, x_NF: Tensor, edge_2E: Tensor) -> Tensor:
        h_NW = self.embed(x_NF)
        m_EW = torch.tanh(self.message(torch.cat([h_NW[edge_2E[0]], h_NW[edge_2E[1]]], dim=1)))
        h_NW = h_NW.index_add(0, edge_2E[1], m_EW)
        return torch.relu(torch.cdist(h_NW, h_NW)).mean()


class ItemByItem(nn.Module):
    """Goes through items in a loop: another number of items is another course."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(16, width)

    def forward(self, x_NF: Tensor, items: int) -> Tensor:
        return sum((torch.sigmoid(self.wide(part)).sum() for part in x_NF.chunk(items)), torch.zeros(()))


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def masked_batch(sizes: Mapping[str, int]) -> tuple[Any, ...]:
    return (torch.randn(sizes["nodes"], 16),)


def broad_batch(sizes: Mapping[str, int]) -> tuple[Any, ...]:
    return (torch.randn(sizes["nodes"], 800),)


def graph_batch(sizes: Mapping[str, int]) -> tuple[Any, ...]:
    return torch.randn(sizes["nodes"], 16), torch.randint(sizes["nodes"], (2, sizes["edges"]))


def loop_batch(sizes: Mapping[str, int]) -> tuple[Any, ...]:
    return torch.randn(sizes["nodes"], 16), sizes["items"]


@dataclass
class Training:
    """A plain loop, as anybody would write it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer = field(init=False)
    carrier: Any = None
    contrasts: bool = False
    ran: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def accumulate(self, batch: Any) -> None:
        self.ran.append(len(batch[0]))
        self.model(*batch).backward()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.release()

    def release(self) -> None:
        self.optimizer.zero_grad()

    def evaluate(self, batch: Any) -> None:
        self.model(*batch)

    def owned(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield "parameters", name, parameter
            if parameter.grad is not None:
                yield "gradients", name, parameter.grad
            for what, state in self.optimizer.state.get(parameter, {}).items():
                yield "optimizer", f"{name} {what}", state
        for name, buffer in self.model.named_buffers():
            yield "buffers", name, buffer


KINDS = {
    "masked": (lambda: Masked(16, 64), masked_batch, {"nodes": 16_000}),
    "gradients first": (lambda: Masked(800, 800), broad_batch, {"nodes": 1200}),
    "graph": (lambda: Graph(32), graph_batch, {"items": 8, "nodes": 1600, "edges": 24_000}),
    "loop": (lambda: ItemByItem(128), loop_batch, {"items": 16, "nodes": 6400}),
}
MOST_ABOVE = {"masked": 1.25, "gradients first": 2.0, "graph": 1.11, "loop": 4.5}
LEAST = {"items": 1, "nodes": 8, "edges": 16}


def measured(kind: str, most: float = 1 / 4, **options: Any) -> tuple[SmallSteps, Training]:
    """Return an oracle that may run up to a fraction of what is wanted."""
    make, example, wanted = KINDS[kind]
    training = Training(make())

    def up_to(sizes: Mapping[str, int]) -> tuple[Any, ...]:
        if sizes["nodes"] > most * wanted["nodes"]:
            raise RuntimeError("no more memory")
        return example(sizes)

    return SmallSteps(lambda choice, watch, model: training, up_to, LEAST, **options), training


def peak_of(run: Callable[[], object]) -> int:
    """Return the most that is really allocated at once, beyond what was there."""
    device.need()
    with LimitedDevice() as limited:
        run()
    return limited.peak_bytes


def real_step(kind: str, sizes: Mapping[str, int], micros: int) -> int:
    """Run two steps of the size itself and return the peak of the second."""
    make, example, _ = KINDS[kind]
    training = Training(make())
    training.accumulate(example(sizes))
    training.update()

    def step() -> None:
        for _ in range(micros):
            training.accumulate(example(sizes))
        training.update()

    return peak_of(step)


@pytest.mark.parametrize("most", [1 / 4, 1 / 8, 1 / 16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_from_small_batches_holds_when_the_large_one_is_run(kind: str, most: float) -> None:
    oracle, training = measured(kind, most)
    wanted = KINDS[kind][2]
    standing, micro = oracle.standing(CHOICE), oracle.micro(CHOICE, wanted)
    assert max(training.ran) <= most * wanted["nodes"]
    for micros in (1, 2):
        real = real_step(kind, wanted, micros)
        planned = StepTapes.of(standing, [micro] * micros).peak_bytes(0)
        assert 0.99 * real <= planned <= MOST_ABOVE[kind] * real, (real, planned, micro.notes)


def test_what_stands_is_what_is_live_after_a_step() -> None:
    oracle, training = measured("masked")
    standing = oracle.standing(CHOICE)
    state = sum(FLOAT * one.numel() for one in training.model.parameters())
    assert {part.category: part.bytes for part in standing.parts} == {
        Category.PARAMETERS: state,
        Category.BUFFERS: FLOAT * 64,
        Category.OPTIMIZER: 2 * state + 4 * FLOAT,  # and a step count of each
    }
    micro = oracle.micro(CHOICE, {"nodes": 200})
    assert standing.setup.left_bytes == state + FLOAT * 64
    assert micro.first.left_bytes == state
    assert standing.setup.left_bytes + micro.first.left_bytes + standing.first_update.left_bytes == standing.bytes
    assert standing.update.left_bytes == -state
    assert (micro.again.left_bytes, standing.parameters) == (0, state // FLOAT)


def test_tapes_follow_each_other_and_parts_add_up() -> None:
    oracle, _ = measured("graph")
    standing, micro = oracle.standing(CHOICE), oracle.micro(CHOICE, KINDS["graph"][2])
    live: dict[int, int] = {}
    for tape in (standing.setup, micro.first, micro.again, standing.first_update, micro.first, standing.update):
        play(live, tape)
    assert sum(live.values()) == standing.bytes
    gradients = micro.first.left_bytes
    assert sum(part.bytes for part in micro.parts) == standing.bytes + gradients + micro.again.peak_bytes
    assert sum(part.bytes for part in standing.update_parts) == standing.bytes + gradients + standing.update.peak_bytes


def test_what_is_extrapolated_says_so_and_a_size_that_can_be_run_itself_is_not() -> None:
    oracle, _ = measured("masked", 1 / 8)
    micro = oracle.micro(CHOICE, KINDS["masked"][2])
    assert micro.origin is oracle.standing(CHOICE).origin is Provenance.EXTRAPOLATED
    assert "×8" in micro.notes[0]
    assert len(oracle.micro(MemoryChoice(offload=True), KINDS["masked"][2]).notes) > len(micro.notes)
    assert "×" not in measured("masked", 1)[0].micro(CHOICE, {"nodes": 300}).notes[0]


def test_sizes_too_small_to_be_batches_are_passed_over() -> None:
    make, example, _ = KINDS["masked"]

    def picky(sizes: Mapping[str, int]) -> Any:
        if sizes["nodes"] in (1, 2, 3, 7, 15):
            raise ValueError("more nodes, please")
        return example(sizes)

    oracle = SmallSteps(lambda choice, watch, model: Training(make()), picky, LEAST)
    assert oracle.micro(CHOICE, {"nodes": 3000}).first.peak_bytes > 0


def test_growing_stops_before_memory_or_time_would_end() -> None:
    oracle, training = measured("masked", 1, allowance=Allowance(memory_bytes=2 << 20))
    micro = oracle.micro(CHOICE, KINDS["masked"][2])
    assert micro.first.peak_bytes > 2 << 20
    assert peak_of(lambda: training.accumulate(masked_batch({"nodes": max(training.ran)}))) < 2 << 20
    late, _ = measured("masked", 1, allowance=Allowance(time_s=0.0))
    with pytest.raises(Unmeasurable):
        late.micro(CHOICE, KINDS["masked"][2])


@pytest.mark.parametrize("is_busy", [True, False], ids=["computes", "waits"])
def test_too_few_different_sizes_are_no_plan_and_waiting_takes_none_of_the_allowed_time(is_busy: bool) -> None:
    make, example, wanted = KINDS["masked"]

    def slow(sizes: Mapping[str, int]) -> Any:
        ends_s = time.thread_time() + 0.1
        while is_busy and time.thread_time() < ends_s:
            pass
        time.sleep(0 if is_busy else 0.1)
        return example(sizes)

    oracle = SmallSteps(lambda choice, watch, model: Training(make()), slow, LEAST, Allowance(time_s=0.6))
    if is_busy:
        with pytest.raises(Unmeasurable, match="distinct"):
            oracle.micro(CHOICE, wanted)
    else:
        assert oracle.micro(CHOICE, wanted).again.peak_bytes >= 0.99 * real_step("masked", wanted, 1)


def test_a_size_that_varies_only_beyond_what_was_run_is_varied_by_itself() -> None:
    """Memory that grows with the items alone would pass for constant where each batch had one."""

    def truth(sizes: Mapping[str, int]) -> tuple[Any, ...]:
        if sizes["nodes"] > 200:
            raise RuntimeError("no more memory")
        return (torch.randn(sizes["nodes"] + 5000 * sizes["items"], 16),)

    oracle = SmallSteps(lambda choice, watch, model: Training(Masked(16, 64)), truth, LEAST)
    micro = oracle.micro(CHOICE, {"items": 16, "nodes": 3200})
    assert micro.again.peak_bytes >= 0.99 * real_step("masked", {"nodes": 83_200}, 1)


# The formula, and the ladder


@pytest.mark.parametrize("kind", ["masked", "gradients first", "loop"])
def test_the_formula_is_above_what_is_really_needed_and_says_that_it_is_crude(kind: str) -> None:
    make, _, wanted = KINDS[kind]
    with torch.device("meta"):
        formula = Formula(make(), states=2, averages=0, padded=False)
    standing, micro = formula.standing(CHOICE), formula.micro(CHOICE, wanted)
    for micros in (1, 2):
        assert StepTapes.of(standing, [micro] * micros).peak_bytes(0) >= real_step(kind, wanted, micros)
    assert micro.origin is standing.origin is Provenance.ASSUMED
    assert footprint.live_peak_bytes(standing, micro, accumulate=True) >= sum(part.bytes for part in micro.parts)


class Fails:
    """A rung that breaks."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.asked = 0

    def standing(self, choice: MemoryChoice) -> StandingFootprint:
        self.asked += 1
        raise Unmeasurable(self.why)


def test_the_ladder_goes_down_once_and_says_why() -> None:
    fails = Fails("aten.nonzero needs values")
    formula = Formula(Masked(16, 8), states=2, averages=0, padded=False)
    ladder = BestOracle([lambda: fails, lambda: formula])
    assert ladder.standing(CHOICE).notes[0] == "aten.nonzero needs values"
    assert ladder.micro(CHOICE, {"nodes": 10}).notes[0] == "aten.nonzero needs values"
    assert fails.asked == 1


def test_a_ladder_without_rungs_left_names_all_reasons_and_the_remedy() -> None:
    with pytest.raises(PlanInfeasible, match="one; two") as refused:
        BestOracle([lambda: Fails("one"), lambda: Fails("two")]).standing(CHOICE)
    assert refused.value.remedy
