"""What threads collate ahead of a step: what memory does not hold, what is left out, what kills, what is wrong."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.training.loop.metrics_log import read_epochs
from pipeline.training.loop.train import Job
from tests.training.loop.loops import Plot, Run, Tiny, Weighted

pytestmark = pytest.mark.usefixtures("quick")
WHOLE = 1 << 20  # nodes: all items of a step are one micro-batch


class Seen(Tiny):
    """Notes what is collated; memory ends at more than a few items of a batch, in the loss."""

    def __init__(self, plot: Plot, *, run: int = 1 << 20) -> None:
        super().__init__(plot)
        self.most_run = run
        self.seen: set[str] = set()

    def collate(self, items: Sequence[Any], rng: Any) -> dict[str, Any]:
        self.seen |= {item.id for item in items}
        return super().collate(items, rng)

    def loss(self, model: Any, batch: Any) -> Any:
        if len(batch["ids"]) > self.most_run:
            raise MemoryError
        return super().loss(model, batch)


def test_what_is_left_out_is_not_collated_after_memory_has_ended_either(tmp_path: Path) -> None:
    plot = Plot(budget=WHOLE, leave_out=("item3",))
    task = Seen(plot, run=2)
    run = Run(plot, tmp_path, task=task).to_end()
    assert sum(epoch.ooms for epoch in read_epochs(run.made.folder.path)) > 0
    assert task.seen == {f"item{number}" for number in range(plot.items)} - {"item3"}


@pytest.mark.parametrize("leave_out", [("item15",), ("item14", "item15", "item16")])
def test_what_is_left_out_of_a_training_is_left_out_of_its_validation(
    tmp_path: Path, leave_out: tuple[str, ...]
) -> None:
    plot = Plot(train={"validation": {"split": "val"}}, validated=3, leave_out=leave_out)
    task = Seen(plot)
    run = Run(plot, tmp_path, task=task).to_end()
    assert task.seen == {f"item{number}" for number in range(plot.items + 3)} - set(leave_out)
    assert all(bool(epoch.validation) == (len(leave_out) < 3) for epoch in read_epochs(run.made.folder.path))


class Ends(Tiny):
    """Asks for the next of nothing."""

    def collate(self, items: Sequence[Any], rng: Any) -> dict[str, Any]:
        if any(item.id == "item3" for item in items):
            next(iter(()))
        return super().collate(items, rng)


def test_a_collate_that_asks_for_the_next_of_nothing_ends_the_training_and_not_the_epoch(tmp_path: Path) -> None:
    plot = Plot()
    with pytest.raises(RuntimeError) as failed:
        Run(plot, tmp_path, task=Ends(plot)).to_end()
    assert isinstance(failed.value.__cause__, StopIteration)


class OneAtATime(Run):
    """A training that was begun again to find out on what it dies; `on` is what its note says."""

    def job(self) -> Job:
        self.on: list[str] = []
        self.context = replace(self.context, careful=True, on=lambda names: self.on.__setitem__(slice(None), names))
        return super().job()


@pytest.mark.parametrize("kind", [Tiny, Weighted])
def test_one_thing_at_a_time_what_is_collated_is_noted_alone(tmp_path: Path, kind: type[Tiny]) -> None:
    """With what ran before it, whose weights were asked for beforehand, it was not known which of the two kills."""
    noted: list[tuple[list[str], list[str]]] = []

    class Noting(kind):  # type: ignore[misc, valid-type]
        def collate(self, items: Sequence[Any], rng: Any) -> dict[str, Any]:
            assert threading.current_thread() is threading.main_thread()
            noted.append(([item.id for item in items], list(run.on)))
            batch: dict[str, Any] = super().collate(items, rng)
            return batch

    plot = Plot(terms="weighted" if kind is Weighted else "several")
    run = OneAtATime(plot, tmp_path, task=Noting(plot))
    run.to_end()
    assert {name for collated, _ in noted for name in collated} == {f"item{number}" for number in range(plot.items)}
    assert all(collated == on for collated, on in noted)
