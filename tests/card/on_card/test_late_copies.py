"""Copies between pinned memory and a card happen late, in orders that seeds draw: no byte of any batch is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeline.device.accelerator import Card
from pipeline.encoder.embedding_recipe import Variant
from pipeline.encoder.engine.embed_engine import Embedding, RowWriter, Span
from pipeline.encoder.engine.memory_ladder import Work
from pipeline.training.items.item_source import ItemArrays
from pipeline.training.items.loader import Loader
from pipeline.training.step.optimizers import StepSettings
from pipeline.training.step.step import Step
from tests.card import card
from tests.memory.tracing.traced import Small
from tests.training.items.content import Micros

SEEDS = 1000
FEW = 40  # seeds, of which one at least goes wrong where nothing waits for copies
ITEMS, NUMBERS, BATCHES, SLOTS = 2, 400, 8, 3


class Numbered:
    """Items that hold their own number, again and again."""

    def read(self, numbers: Sequence[int]) -> Iterator[ItemArrays]:
        for number in numbers:
            values = {
                "peaks.mz": np.full(NUMBERS, number, np.int64),
                "ions.kind": np.full((NUMBERS, 2), -number, np.int32),
            }
            yield ItemArrays(number, f"i{number}", {}, {"partners": []}, values)


@dataclass
class Views:
    """What a collate may return: a dataclass of views of the items' memory."""

    mz: list[Tensor]
    kinds: dict[str, Tensor]


def as_dict(items: Any, _: Any) -> Any:
    return {"mz": [item.values["peaks.mz"] for item in items], "kinds": [item.values["ions.kind"] for item in items]}


def as_dataclass(items: Any, _: Any) -> Any:
    both = list(items)
    return Views([item.values["peaks.mz"] for item in both], {item.id: item.values["ions.kind"] for item in both})


COLLATES: dict[str, Callable[..., Any] | None] = {"batch": None, "dict": as_dict, "dataclass": as_dataclass}


def fields_of(batch: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the two fields of a batch, each as one tensor for all items or several."""
    if isinstance(batch, Views):
        return batch.mz, list(batch.kinds.values())
    if isinstance(batch, dict):
        return batch["mz"], batch["kinds"]
    return [batch["peaks.mz"]], [batch["ions.kind"]]


def is_right(batch: Any, numbers: Sequence[int]) -> bool:
    """Tell whether every number on the card is its item's own."""
    mz, kinds = (torch.cat([tensor.cpu().flatten() for tensor in field]) for field in fields_of(batch))
    wanted = np.repeat(numbers, NUMBERS)
    return bool((mz.numpy() == wanted).all() and (kinds.numpy() == -np.repeat(wanted, 2)).all())


class Mover:
    """A loader over few pinned slots, and the step that moves its batches."""

    def __init__(self, form: str) -> None:
        self.lists = [range(1 + ITEMS * batch, 1 + ITEMS * (batch + 1)) for batch in range(BATCHES)]
        sampler: Any = Micros(self.lists)
        self.loader = Loader(Numbered(), None, sampler, slots=SLOTS, threads=2, pin=True, collate=COLLATES[form])
        settings = StepSettings(way="loop")
        self.step = Step(Small(lambda: torch.nn.Linear(2, 2)), settings, device=card.NAME)  # type: ignore[arg-type]
        self.side = torch.Stream(card.NAME)

    def wrong(self, seed: int) -> int:
        """Return how many batches of an epoch are wrong on the card, in the order of a seed."""
        card.seed_order(seed)
        there = []
        with self.side if seed % 2 else nullcontext():
            for host in self.loader:
                there.append(self.step.moved(host))
                del host  # its slot is free for the readers, and the copies have not happened
        torch.accelerator.synchronize()
        assert len(there) == BATCHES
        assert {leaf.device.type for batch in there for leaf in tree_leaves(fields_of(batch))} == {card.NAME}
        return sum(not is_right(batch, numbers) for batch, numbers in zip(there, self.lists, strict=True))


@pytest.mark.parametrize("form", COLLATES)
def test_no_batch_is_wrong_on_the_card_whatever_the_order_of_copies(form: str) -> None:
    mover = Mover(form)
    assert {seed: wrong for seed in range(SEEDS) if (wrong := mover.wrong(seed))} == {}
    assert all(leaf.is_pinned() for host in mover.loader for leaf in tree_leaves(fields_of(host)))


# Rows that come back

ROWS, WIDTH, COMPUTED = 30, 16, 6


class Unwaited(torch.Stream):
    """A stream that nobody waits for."""

    def synchronize(self) -> None:
        pass


def wrong_rows(seed: int) -> int:
    """Return how many embeddings differ from what was computed, in the order of a seed."""
    card.seed_order(seed)
    got: dict[int, np.ndarray] = {}

    def sink(embedding: Embedding) -> None:
        got[embedding.index] = embedding.rows_LD

    writer = RowWriter(sink)
    with ThreadPoolExecutor(1) as behind:
        for number in range(COMPUTED):
            span = Span(card.NAME)
            rows_RD = torch.full((ROWS, WIDTH), float(number)).pin_memory().to(card.NAME, non_blocking=True)
            work = Work(number, "A" * ROWS, np.zeros(ROWS, np.uint8), card.NAME, Variant("fp32"))
            behind.submit(writer, [work], [rows_RD], span.stop())
            del rows_RD
    right = [number for number in got if (got[number] == number).all()]  # one that is missing had no finite numbers
    return COMPUTED - len(right)


def test_no_row_that_comes_back_is_wrong_whatever_the_order_of_copies() -> None:
    assert {seed: wrong for seed in range(SEEDS) if (wrong := wrong_rows(seed))} == {}


def unwaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Card, "new_stream", lambda on: Unwaited(torch.device(on.kind, on.index)))
    monkeypatch.setattr(Span, "seconds", lambda span: 0.0)  # which nobody knows before it is over


def unheld(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Span, "hold", lambda span, stream: None)
    monkeypatch.setattr(Span, "seconds", lambda span: 0.0)  # a step that nothing waits for may not be over


@pytest.mark.parametrize("switch_off", [unwaited, unheld])
def test_rows_that_nothing_waits_for_are_wrong(
    switch_off: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    switch_off(monkeypatch)
    assert any(wrong_rows(seed) for seed in range(FEW))
