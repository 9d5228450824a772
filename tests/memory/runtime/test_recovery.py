"""The rule for memory that ends: smaller pieces, then remedies, then without; and the start of a step."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.device.accelerator import out_of_memory_error
from pipeline.memory.runtime.recovery import Cut, Governor, StepSnapshot, each_that_fits
from tests.testkit.limited import device as limited
from tests.testkit.limited.device import LimitedDevice, RefuseOne

pytestmark = pytest.mark.usefixtures("quick")
LADDER = ("checkpointing", "offload")


def spans(cuts: list[Cut]) -> list[tuple[int, int, int]]:
    return [(cut.start, cut.stop, cut.rung) for cut in cuts]


def test_a_failed_piece_is_halved_and_so_are_those_that_cost_as_much_until_the_step_ends() -> None:
    governor = Governor(planned=100)
    costs = [20, 20, 20, 20]
    assert spans(governor.cuts(costs)) == [(0, 4, 0)]
    assert governor.failed(costs)
    assert spans(governor.cuts(costs)) == [(0, 2, 0), (2, 4, 0)]
    assert spans(governor.cuts([20, 20])) == [(0, 2, 0)], "it costs half of what failed"
    assert governor.failed(costs[:2])
    assert spans(governor.cuts(costs)) == [(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 4, 0)]
    want = governor.after_step()
    governor.adopt(want.budget)
    assert spans(governor.cuts(costs)) == [(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 4, 0)]


def test_a_single_item_climbs_the_ladder_and_its_like_start_on_its_rung() -> None:
    governor = Governor(planned=100, ladder=LADDER)
    assert governor.failed([90])
    assert spans(governor.cuts([95, 50])) == [(0, 1, 1), (1, 2, 0)]
    assert governor.failed([90], 1)
    assert not governor.failed([90], 2), "nothing is left"
    assert spans(governor.cuts([90])) == [(0, 1, 2)]
    assert governor.after_step().budget == 100, "an item alone says nothing of the budget"


@pytest.mark.parametrize("costs", [[0, 0, 0], [1, 1], [0, 5], [7, 7, 7, 7, 7]])
@pytest.mark.parametrize("padded", [False, True])
def test_any_costs_end_in_single_items(costs: list[int], padded: bool) -> None:
    governor = Governor(padded=padded)
    for _ in range(10):
        largest = max(governor.cuts(costs), key=lambda cut: cut.stop - cut.start)
        if largest.stop - largest.start == 1:
            return
        assert governor.failed(costs[largest.start : largest.stop])
    pytest.fail("it is cut for ever")


def test_what_leaves_nothing_behind_runs_again_by_itself() -> None:
    ran, tried = [], []

    def run(cut: Cut) -> None:
        tried.append((cut.start, cut.stop, cut.rung))
        if cut.stop - cut.start > 2 or cut.stop == 6 or (cut.start == 0 and cut.rung < 1):
            raise MemoryError("full")
        ran.append((cut.start, cut.stop, cut.rung))

    governor = Governor(ladder=("cpu",))
    done = list(each_that_fits(governor, [9, 1, 1, 1, 1, 9], run, device="cpu"))
    assert [(cut.start, cut.stop, error) for cut, error in done] == [
        (0, 1, ""),
        (1, 3, ""),
        (3, 5, ""),
        (5, 6, "full"),
    ]
    assert ran == [(0, 1, 1), (1, 3, 0), (3, 5, 0)]
    assert tried.count((1, 3, 0)) == 1, "what fits runs once"


def test_other_errors_pass() -> None:
    def run(_: Cut) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(each_that_fits(Governor(), [1], run, device="cpu"))


# A step that fails anywhere

ROWS = 12  # of a step


class Network(nn.Module):
    """Has everything that a forward pass may move: statistics, random numbers of every kind, buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(24, 48), nn.BatchNorm1d(48), nn.Linear(48, 1)
        self.beside = nn.Linear(24, 48)  # where ways part, a backward that fails leaves work in a queue
        self.drop = nn.Dropout(0.3)
        self.register_buffer("constant", torch.arange(24.0))
        self.register_buffer("written", torch.zeros(48))  # in place
        self.register_buffer("exchanged", torch.zeros(48))  # by another tensor
        self.register_buffer("quiet", torch.zeros(48))  # through .data, as vector quantisation does
        self.register_buffer("late", None)

    def forward(self, x_BD: Tensor) -> Tensor:
        hidden_BD = self.norm(self.first(x_BD + self.constant) + self.beside(x_BD).tanh())
        with torch.no_grad():
            self.written.mul_(0.9).add_(hidden_BD.mean(0))
            self.exchanged = 0.9 * self.exchanged + hidden_BD.mean(0)
            self.quiet.data.lerp_(hidden_BD.mean(0), 0.1)
            if self.late is None:
                self.late = hidden_BD.mean(0)
        scale = 1 + random.random() + np.random.rand()  # noqa: NPY002 - as users do
        return self.second(self.drop(hidden_BD).relu()).sum() * scale


class World:
    """A model in the middle of its training, and the snapshot that a step goes back to."""

    def __init__(self) -> None:
        torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
        self.network, self.rows_BD = Network(), torch.randn(ROWS, 24)
        first = StepSnapshot(self.network, device="cpu")
        self.network(self.rows_BD).backward()
        self.network.zero_grad()
        self.snapshot = StepSnapshot(self.network, device="cpu", before=first)

    def run(self, cut: Cut) -> None:
        self.network(self.rows_BD[cut.start : cut.stop]).backward()

    def left(self) -> dict[str, object]:
        """Return all that a step leaves, and what would be drawn next."""
        grads = {f"{name}.grad": parameter.grad for name, parameter in self.network.named_parameters()}
        drawn = {"torch": torch.rand(3), "python": random.random(), "numpy": np.random.rand()}  # noqa: NPY002
        return grads | dict(self.network.named_buffers()) | drawn


def expected_of(cuts: tuple[Cut, ...]) -> dict[str, object]:
    world = World()
    for cut in cuts:
        world.run(cut)
    return world.left()


def assert_same(left: dict[str, object], right: dict[str, object]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(right[name])), name


def stepped(place: int) -> tuple[dict[str, object], tuple[Cut, ...], int, int]:
    """Make a step of which one block is refused; return what it leaves, its cuts, its failures and its blocks."""
    refuse_one, governor, failures = RefuseOne(), Governor(planned=4), []
    with LimitedDevice(through=refuse_one) as device:
        world = World()
        before_bytes = device.live_bytes
        refuse_one.after = place

        def attempt() -> list[Cut] | None:
            for cut in (cuts := governor.cuts([1] * ROWS)):
                if out_of_memory_error(world.run, cut) is not None:
                    failures.append(cut)
                    governor.failed([1] * (cut.stop - cut.start), cut.rung)
                    return None
            return cuts

        def rewind() -> None:
            world.snapshot.rewind()
            assert device.live_bytes == before_bytes  # nothing of the failed pass, nor of those before it

        while (cuts := attempt()) is None:
            rewind()
        taken = place - refuse_one.after
        left = {name: torch.as_tensor(value).clone() for name, value in world.left().items()}
        rewind_bytes = sum(value.nbytes for value in left.values() if value.dtype != torch.float64)
        world.snapshot.rewind()
        assert device.live_bytes - before_bytes == rewind_bytes
    return left, tuple(cuts), len(failures), taken


def test_a_step_that_fails_at_any_block_is_the_one_that_was_cut_so_from_the_start() -> None:
    limited.need()
    _, undisturbed, failures, blocks = stepped(1 << 40)
    assert failures == 0
    assert blocks >= 150
    expected: dict[tuple[Cut, ...], dict[str, object]] = {}
    for place in range(blocks):
        left, cuts, failures, _ = stepped(place)
        assert failures == 1, place
        if cuts not in expected:
            expected[cuts] = expected_of(cuts)
        assert_same(left, expected[cuts])
    assert undisturbed not in expected


# Its start


def test_a_buffer_that_changes_late_is_brought_back_too() -> None:
    class Rare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

    module, snapshot = Rare(), None
    for _ in range(3):
        snapshot = StepSnapshot(module, device="cpu", before=snapshot)
    module.count.add_(5)
    snapshot.restore()
    assert module.count.tolist() == [0, 0, 0]
    module.count.add_(1)
    snapshot = StepSnapshot(module, device="cpu", before=snapshot)
    module.count.add_(1)
    snapshot.restore()
    snapshot.restore()
    assert module.count.tolist() == [1, 1, 1]


def test_the_scale_of_half_precision_goes_back_too() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.1)
    model = nn.Module()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    snapshot = StepSnapshot(model, device="cpu", scaler=scaler)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)  # a second one without update() is refused
        scaler.update(2.0)
        snapshot.restore()
        assert scaler.get_scale() == 16.0
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        snapshot.restore()
