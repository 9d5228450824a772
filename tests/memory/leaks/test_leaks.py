"""What grows from step to step is found, named and sized; what only fills, and what only varies, is not."""

from __future__ import annotations

import gc
import random
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.memory import leak_detector
from pipeline.memory.leak_detector import HOST, TENSORS, Leaks, Live, MemoryLeak, leaking
from pipeline.memory.leak_inspection import INSPECTED, Reachable
from tests.testkit.limited import device

HERE = Path(__file__)
ROWS, WIDTH, FLOAT = 64, 128, 4
ACTIVATION = ROWS * WIDTH * FLOAT
NODES = (ROWS // 2, ROWS * 2)
STEPS, EPOCHS = 6, 6
SEEN: list[Tensor] = []


@pytest.fixture(autouse=True)
def _nothing_stays(one_thread: None) -> Iterator[None]:
    yield
    SEEN.clear()
    gc.collect()


@pytest.fixture
def _limited(monkeypatch: pytest.MonkeyPatch) -> None:
    device.need()
    monkeypatch.setattr(leak_detector, "malloc_counter", lambda: int)  # tensors on a GPU take none of the host's memory


def line(marker: str) -> str:
    """Return the place of the line of this file that ends with a marker."""
    (found,) = (
        number for number, text in enumerate(HERE.read_text().splitlines(), 1) if text.endswith(f"# marker: {marker}")
    )
    return f"{HERE.name}:{found}"


class Model(nn.Module):
    """Takes any number of rows; subclasses leak."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.tables: dict[int, Tensor] = {}  # one a shape, filled in the first epoch
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.ones(len(x), 1)
        hidden = torch.tanh(self.first(x)) * self.tables[len(x)]
        self.last = hidden.detach()  # replaced at every step: stays, and does not grow
        return self.second(hidden).square().mean()


class KeepsLosses(Model):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        features = torch.sin(self.first(x))
        spread = features.exp()  # marker: saved
        self.losses.append(spread.sum())  # nobody goes back from it: its graph stays whole
        return self.second(features).square().mean()


class KeepsActivations(Model):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)).detach()
        SEEN.append(hidden * 2)  # marker: global
        return super().forward(x)


class KeepsGradients(Model):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden.register_hook(self.note)
        return self.second(hidden).square().mean()

    def note(self, gradient: Tensor) -> None:
        self.seen.append(gradient.abs())  # marker: hook


class Output(torch.autograd.Function):
    """Keeps its output where torch says not to: on ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.out = x.exp()  # marker: ctx
        return ctx.out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.out


class CyclesThroughAutograd(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(Output.apply(torch.tanh(self.first(x)))).square().mean()


class Node:
    def __init__(self, kept: Tensor) -> None:
        self.kept, self.me = kept, self


class CyclesThroughPython(Model):
    def forward(self, x: Tensor) -> Tensor:
        Node(torch.tanh(self.first(x)).detach() * 2)  # marker: cycle
        return super().forward(x)


class KeepsArrays(Model):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.history.append({"step": len(self.history), "map": np.ones((100, 1000))})  # marker: arrays
        return super().forward(x)


class KeepsNumbers(Model):
    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[int, tuple[float, ...]] = {}

    def forward(self, x: Tensor) -> Tensor:
        start = 1000 * len(self.numbers)
        for one in range(1000):
            self.numbers[start + one] = (float(start), start + one + 0.5)  # marker: numbers
        return super().forward(x)


class Run:
    """A plain loop, with averages and evaluation, watched."""

    def __init__(self, model: nn.Module, live: Callable[[], int] | None = None) -> None:
        self.reported: list[MemoryLeak] = []
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.averages = [one.detach().clone() for one in model.parameters()]
        self.leaks = Leaks(live=live, report=self.reported.append, limit_bytes=1 << 40)
        self.evaluated = Model()
        self.random = random.Random(0)
        self.watched = 0

    def step(self, rows: int) -> float:
        with (watch := self.leaks.watching()):
            loss = self.model(torch.ones(rows, WIDTH))
            loss.backward()
        self.watched += type(watch).__name__ != "nullcontext"
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, list(self.model.parameters()), 0.1)
        self.optimizer.zero_grad(set_to_none=True)
        self.leaks.step()
        return loss.item()

    def epochs(
        self, count: int = EPOCHS, steps: int = STEPS, rows: Callable[[], int] = lambda: ROWS
    ) -> list[MemoryLeak]:
        for _ in range(count):
            for _ in range(steps):
                self.step(rows())
            with torch.no_grad():
                self.evaluated(torch.ones(ROWS, WIDTH))
            self.leaks.epoch()
        self.leaks.close()
        return list(self.leaks.known.values())

    def varied(self) -> int:
        return self.random.randint(*NODES)


def limited(model: Callable[[], nn.Module], **options: Any) -> tuple[list[MemoryLeak], Run]:
    with device.LimitedDevice() as card:
        run = Run(model(), live=lambda: card.live_bytes)
        return run.epochs(**options), run


def only(leaks: list[MemoryLeak]) -> MemoryLeak:
    assert len(leaks) == 1, [leak.words() for leak in leaks]
    return leaks[0]


FORWARD, TENSOR = "forward", "Tensor float32 [64, 128]"
OF = f"of {__name__}."
TENSOR_LEAKS = (
    (KeepsLosses, "saved", FORWARD, f"list `losses` {OF}KeepsLosses"),
    (KeepsActivations, "global", FORWARD, f"list `SEEN` of module {__name__}"),
    (KeepsGradients, "hook", "note", f"list `seen` {OF}KeepsGradients"),
    (CyclesThroughAutograd, "ctx", FORWARD, "a cycle"),
)
OBJECT_LEAKS = (
    (KeepsArrays, HOST, 800_000, "ndarray float64 [100, 1000]", "arrays", f"list `history` {OF}KeepsArrays"),
    (KeepsNumbers, HOST, 1000 * (56 + 2 * 24 + 28), "tuple", "numbers", f"dict `numbers` {OF}KeepsNumbers"),
)


@pytest.mark.usefixtures("_limited")
@pytest.mark.parametrize(("model", "marker", "function", "holder"), TENSOR_LEAKS)
def test_a_leak_of_tensors_is_named(model: type[Model], marker: str, function: str, holder: str) -> None:
    leaks, run = limited(model)
    leak = only(leaks)
    assert leak.memory == TENSORS
    assert leak.bytes_per_step == pytest.approx(ACTIVATION, rel=0.1)
    assert leak.bytes_per_epoch == pytest.approx(ACTIVATION * STEPS, rel=0.3)
    assert any(TENSOR in one for one in leak.types)
    assert any(one.endswith(f"{line(marker)} in {function}") for one in leak.sites)
    assert holder in leak.holder
    assert run.reported[0].sites == leak.sites


@pytest.mark.usefixtures("_limited")
@pytest.mark.parametrize(("room", "is_named"), [("tasks", True), ("training", False)])
def test_lines_of_a_shipped_task_are_named_and_those_of_training_are_not(room: str, is_named: bool) -> None:
    place = Path(leak_detector.__file__).parents[1] / room / "made.py"
    made: dict[str, Any] = {"SEEN": SEEN}
    exec(compile("def keep(x): SEEN.append(x * 2)", place, "exec"), made)

    class Keeps(Model):
        def forward(self, x: Tensor) -> Tensor:
            made["keep"](torch.tanh(self.first(x)).detach())
            return super().forward(x)

    leaks, _ = limited(Keeps)
    assert only(leaks).sites[0].endswith("made.py:1 in keep") is is_named


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "memory", "bytes_per_step", "what", "marker", "holder"), OBJECT_LEAKS)
def test_a_leak_of_python_is_named(
    model: type[Model], memory: str, bytes_per_step: int, what: str, marker: str, holder: str
) -> None:
    run = Run(model())
    leak = only(run.epochs(steps=24))
    assert leak.memory == memory
    assert leak.bytes_per_step == pytest.approx(bytes_per_step, rel=0.1)
    assert any(what in one for one in leak.types)
    assert any(one.endswith(line(marker)) for one in leak.sites)
    assert leak.holder.startswith(holder)
    assert not tracemalloc.is_tracing()


@pytest.mark.usefixtures("_limited")
def test_fifty_epochs_of_varied_shapes_have_no_leak() -> None:
    for rows in range(NODES[0], NODES[1] + 1):  # of some sizes, on some processors, MKL keeps megabytes from then on
        Model()(torch.ones(rows, WIDTH)).backward()
    with device.LimitedDevice() as card:
        run = Run(Model(), live=lambda: card.live_bytes)
        assert run.epochs(50, rows=run.varied) == run.reported == []
        assert run.watched == 0


@pytest.mark.usefixtures("_limited")
def test_what_is_kept_of_varied_shapes_is_sized_by_the_long_run() -> None:
    with device.LimitedDevice() as card:
        run = Run(KeepsActivations(), live=lambda: card.live_bytes)
        before = card.live_bytes
        leak = only(run.epochs(8, steps=24, rows=run.varied))
        assert leak.bytes_per_step == pytest.approx(sum(one.nbytes for one in SEEN) / len(SEEN), rel=0.1)
        assert leak.total_bytes < card.live_bytes - before


@pytest.mark.usefixtures("_limited")
def test_one_huge_epoch_is_warned_before_it_ends_in_out_of_memory() -> None:
    steps = 0
    with device.LimitedDevice(8 << 20) as card:
        run = Run(KeepsActivations(), live=lambda: card.live_bytes)
        run.leaks.limit_bytes = card.limit_bytes
        while not run.reported:
            run.step(run.varied())  # torch.OutOfMemoryError, were it not for the warning
            steps += 1
        leak = only(run.reported)
        assert leak.bytes_per_epoch is None
        assert leak.sites[0].endswith(f"{line('global')} in forward")
        left = (8 << 20) - card.live_bytes
        assert leak.steps_left == pytest.approx(left / leak.bytes_per_step, abs=1)


@pytest.mark.usefixtures("_limited")
def test_a_slow_leak_far_from_the_limit_waits_for_the_end_of_epochs() -> None:
    with device.LimitedDevice(8 << 30) as card:
        run = Run(KeepsActivations(), live=lambda: card.live_bytes)
        run.leaks.limit_bytes = card.limit_bytes
        for _ in range(200):
            run.step(ROWS)
        assert (run.watched, run.reported) == (0, [])


@pytest.mark.usefixtures("_limited")
def test_a_known_leak_is_reported_again_only_when_it_has_doubled() -> None:
    _, run = limited(KeepsActivations, count=14)
    totals = [leak.total_bytes for leak in run.reported]
    assert 2 <= len(totals) <= 4
    assert all(after >= 2 * before for before, after in pairwise(totals))
    assert run.watched == INSPECTED


@pytest.mark.usefixtures("_limited")
def test_looking_changes_no_number() -> None:
    weights = []
    for watched in (True, False):
        torch.manual_seed(0)
        with device.LimitedDevice() as card:
            run = Run(KeepsActivations(), live=lambda: card.live_bytes if watched else 0)  # noqa: B023
            run.epochs()
        assert bool(run.watched) is watched
        weights.append(nn.utils.parameters_to_vector(run.model.parameters()))
    assert torch.equal(*weights)


@pytest.mark.usefixtures("_limited")
def test_cycles_that_are_never_collected_are_reported_as_such() -> None:
    gc.disable()
    try:
        leaks, _ = limited(CyclesThroughPython)
    finally:
        gc.enable()
    leak = only(leaks)
    assert leak.sites[0].endswith(f"{line('cycle')} in forward")
    assert "cycle" in leak.holder


class Hostile:
    """Objects that object to being looked at."""

    @property
    def __class__(self) -> type:
        raise RuntimeError("do not look at me")


@pytest.mark.usefixtures("_limited")
def test_a_search_among_hostile_objects_ends_no_run() -> None:
    hostile = Hostile()
    hostile.seen = [[SEEN]]  # so that the search comes by
    leaks, _ = limited(KeepsActivations)
    assert only(leaks).holder == f"list `SEEN` of module {__name__}"


@pytest.mark.nightly
def test_a_search_ends_no_thread_that_makes_tuples_meanwhile() -> None:
    failed: list[SystemError] = []
    is_over = threading.Event()

    def make() -> None:  # the interpreter goes from thread to thread while a tuple is half made
        try:
            while not is_over.is_set():
                tuple(number for number in range(300))
        except SystemError as error:
            failed.append(error)

    kept = [(("more", torch.ones(3)), number) for number in range(8)]
    tensors = tuple(pair[0][1] for pair in kept)
    thread = threading.Thread(target=make)
    thread.start()
    try:
        for _ in range(3):
            found = Reachable()
            assert {id(kept)} <= set(map(id, found.containers()))
            assert {id(tensor) for tensor in tensors} <= set(map(id, found.tensors()))
            assert found.holder_of(kept).startswith("list `kept` in ")
    finally:
        is_over.set()
        thread.join()
    assert not failed


GROWTH = [
    ((0, 100, 200), 10.0),
    ((0, 100, 100), 0.0),
    ((0, 100, 130), 0.0),  # slows down: a cache that fills
    ((0, 100, 50), 0.0),
    ((0, 10, 20), 0.0),  # below the floor
    ((0,), 0.0),
]


def test_growth_is_a_leak_if_it_goes_on_and_does_not_slow_down() -> None:
    spans = [[Live(size, 10 * place) for place, size in enumerate(sizes)] for sizes, _ in GROWTH]
    assert [leaking(lives, floor_bytes=50) for lives in spans] == pytest.approx([rate for _, rate in GROWTH])
