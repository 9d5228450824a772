"""Steps in which memory ends: whatever fails, the step is the one that had been cut like that from the beginning."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.memory.runtime.recovery import Oom, Path, ReplayedStep, StepSnapshot, replay_until_it_fits
from tests.testkit.limited import device as limited
from tests.testkit.limited.device import LimitedDevice, RefuseOne

pytestmark = pytest.mark.usefixtures("quick")
ROWS = 13  # of a step


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


@dataclass
class World:
    """A model in the middle of its training, and what a step is made of."""

    network: Network
    rows_BD: Tensor
    snapshot: StepSnapshot

    @classmethod
    def new(cls) -> World:
        torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
        network, rows_BD = Network(), torch.randn(ROWS, 24)
        first = StepSnapshot(network, device="cpu")
        network(rows_BD).backward()
        network.zero_grad()
        return cls(network, rows_BD, StepSnapshot(network, device="cpu", before=first))

    def run(self, part: range) -> None:
        self.network(self.rows_BD[part.start : part.stop]).backward()

    def again(self) -> None:
        self.snapshot.rewind()

    def left(self) -> dict[str, object]:
        """Return all that a step leaves, and what would be drawn next."""
        grads = {f"{name}.grad": one.grad for name, one in self.network.named_parameters()}
        drawn = {"torch": torch.rand(3), "python": random.random(), "numpy": np.random.rand()}  # noqa: NPY002
        return grads | dict(self.network.named_buffers()) | drawn


def halve(part: range) -> Sequence[range]:
    middle = len(part) // 2
    return [part[:middle], part[middle:]] if middle else [part]


def refuse(part: object, oom: Oom) -> Callable[[object], Sequence[object]]:
    raise AssertionError(f"{part} cannot be halved: {oom}")


@dataclass
class Steps:
    """The parts of a step."""

    parts: Sequence[range] = (range(5), range(5, 9), range(9, ROWS))
    begun: int = 0

    def __iter__(self) -> Iterator[range]:
        self.begun += 1
        return iter(self.parts)


def cut(parts: Sequence[range], ran: Sequence[Path]) -> list[range]:
    """Return the parts that paths name."""
    found = []
    for path in ran:
        part = parts[path[0]]
        for half in path[1:]:
            part = halve(part)[half]
        found.append(part)
    return found


def expected_of(parts: Sequence[range]) -> dict[str, object]:
    world = World.new()
    for part in parts:
        world.run(part)
    return world.left()


def assert_same(left: dict[str, object], right: dict[str, object]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(right[name])), name


def stepped(place: int) -> tuple[dict[str, object], ReplayedStep, int]:
    """Make a step of which one block is refused; return what it leaves, and how many blocks it took in all."""
    refuse_one = RefuseOne()
    with LimitedDevice(through=refuse_one) as device:
        world = World.new()
        before_bytes = device.live_bytes
        refuse_one.after = place

        def again() -> None:
            world.again()
            assert device.live_bytes == before_bytes  # nothing of the failed pass, nor of those before it

        done = replay_until_it_fits(Steps(), world.run, again=again, halve=halve, cannot=refuse)
        taken = place - refuse_one.after
        left = {name: torch.as_tensor(value).clone() for name, value in world.left().items()}
        world.again()
        assert device.live_bytes - before_bytes == sum(
            one.nbytes for one in left.values() if one.dtype != torch.float64
        )
    return left, done, taken


def test_a_step_that_fails_at_any_block_is_the_one_that_was_cut_so_from_the_start() -> None:
    limited.need()
    _, undisturbed, blocks = stepped(1 << 40)
    assert not undisturbed.ooms
    assert blocks >= 150
    expected: dict[tuple[Path, ...], dict[str, object]] = {}
    for place in range(blocks):
        left, done, _ = stepped(place)
        assert len(done.ooms) == 1, place
        if done.ran not in expected:
            expected[done.ran] = expected_of(cut(Steps().parts, done.ran))
        assert_same(left, expected[done.ran])
    assert sorted(map(len, expected)) == [4, 4, 4]  # each of the three parts has failed somewhere


class Trials:
    """Runs parts that fit up to a size, and notes what was run."""

    def __init__(self, fits: int) -> None:
        self.fits, self.now, self.begun, self.noted = fits, [], 0, []

    def run(self, part: range) -> None:
        if len(part) > self.fits:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried {len(part)}\nand more")
        self.now.append(part)

    def again(self) -> None:
        self.now.clear()
        self.begun += 1

    def note(self, part: range, oom: Oom) -> None:
        self.noted.append((part, oom))


def tried(fits: int, parts: Sequence[range], **more: object) -> tuple[Trials, ReplayedStep]:
    trials = Trials(fits)
    options = {"halve": halve, "cannot": refuse, "note": trials.note, **more}
    return trials, replay_until_it_fits(parts, trials.run, again=trials.again, **options)


def test_only_the_part_that_failed_is_halved_until_it_fits() -> None:
    trials, done = tried(4, [range(4), range(4, 9), range(9, 10)])
    assert trials.now == [range(4), range(4, 6), range(6, 9), range(9, 10)]
    assert done.ran == ((0,), (1, 0), (1, 1), (2,))
    assert [part for part, _ in trials.noted] == [range(4, 9)]
    assert trials.begun == 1
    trials, done = tried(1, [range(4)])
    assert trials.now == [range(1), range(1, 2), range(2, 3), range(3, 4)]
    assert [(oom.path, oom.attempt) for oom in done.ooms] == [((0,), 0), ((0, 0), 1), ((0, 1), 2)]


def test_with_costs_what_comes_later_and_costs_no_less_need_not_fail() -> None:
    parts = [range(2), range(2, 6), range(6, 10), range(10, 12)]
    slow, quick = tried(2, parts), tried(2, parts, cost=len)
    assert slow[0].now == quick[0].now
    assert (slow[0].begun, quick[0].begun) == (2, 1)


def test_what_ran_before_is_not_cut_for_what_failed_after_it() -> None:
    """The first micro-batch has room that the gradients take from the later ones."""
    runs = []

    def run(part: range) -> None:
        if len(part) > 2 and len(runs) % 10 == 1:
            raise MemoryError
        runs.append(part)

    done = replay_until_it_fits([range(4), range(4, 8)], run, again=runs.clear, halve=halve, cannot=refuse, cost=len)
    assert runs == [range(4), range(4, 6), range(6, 8)]
    assert done.ooms[0].error == "MemoryError"


def test_parts_are_asked_for_anew_and_not_kept() -> None:
    steps = Steps()
    alive: list[weakref.ref[np.ndarray]] = []

    class Read:
        """Reads a part whenever it is asked for it."""

        def __iter__(self) -> Iterator[np.ndarray]:
            for part in steps:
                read = np.arange(part.start, part.stop)
                alive.append(weakref.ref(read))
                yield read

    def run(part: np.ndarray) -> None:
        gc.collect()
        assert sum(one() is not None for one in alive) == 1
        if len(part) > 4:
            raise MemoryError

    done = replay_until_it_fits(
        Read(), run, again=lambda: None, halve=lambda part: np.array_split(part.copy(), 2), cannot=refuse
    )
    assert done.ran == ((0, 0), (0, 1), (1,), (2,))
    assert steps.begun == 2


def test_an_item_that_does_not_fit_climbs_until_it_fits_or_is_left_out() -> None:
    rungs = ["plain", "checkpointing", "offload"]
    climbed = []

    def run(part: tuple[str, str]) -> None:
        if part in {("huge", rung) for rung in rungs} or part == ("large", "plain"):
            raise MemoryError

    def cannot(part: tuple[str, str], oom: Oom) -> Callable[[tuple[str, str]], Sequence[tuple[str, str]]]:
        assert oom.is_single
        climbed.append(part)
        if part[1] == rungs[-1]:
            return lambda part: []
        return lambda part: [(part[0], rungs[rungs.index(part[1]) + 1])]

    ran = []
    parts = [("small", "plain"), ("large", "plain"), ("huge", "plain")]
    done = replay_until_it_fits(
        parts,
        lambda part: (run(part), ran.append(part)),
        again=ran.clear,
        halve=lambda part: [part],
        cannot=cannot,
        cost=lambda part: 1.0,
    )
    assert ran == [("small", "plain"), ("large", "checkpointing")]
    assert climbed == [("large", "plain"), *(("huge", rung) for rung in rungs)]
    assert len(done.ooms) == 4


def test_other_errors_pass_through() -> None:
    def run(part: range) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay_until_it_fits([range(4)], run, again=lambda: pytest.fail("began again"), halve=halve, cannot=refuse)


def test_buffers_that_never_change_are_copied_once_and_not_where_the_model_is() -> None:
    network = Network()
    first = StepSnapshot(network, device="cpu")
    assert first.copied_bytes == 0
    network(torch.randn(8, 24)).backward()
    second = StepSnapshot(network, device="cpu", before=first)
    moving = sum(one.nbytes for name, one in network.named_buffers() if name != "constant")
    assert second.copied_bytes == moving
    for _ in range(3):
        network(torch.randn(8, 24)).backward()
        second = StepSnapshot(network, device="cpu", before=second)
    assert second.copied_bytes == moving


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
