"""Two ranks on a card each add up their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.training.ranks.process_group import ProcessGroup
from tests.card import card
from tests.card.on_card.test_refused_memory import step_on_card
from tests.training.loop.loops import Plot, Run
from tests.training.loop.test_loop_ranks import EXACT, LONG, apart, weights
from tests.training.ranks.crews import crew

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared
WITHIN_S = 600.0  # after which ranks that wait for each other are ended


@pytest.fixture(scope="module", autouse=True)
def cards_of_ranks() -> Iterator[None]:
    """Give processes that are ranks simulated cards, as soon as they import torch."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in card.environment(card.Cards()).items():
            patch.setenv(name, value)
        yield


def both(folder: Path, part: Any, *words: Any) -> list[Any]:
    """Let two ranks do a part to its end, each on a card of its own; return what came of it."""
    made = crew(folder, 2, part, folder, *words, device=card.NAME)
    codes = made.wait(WITHIN_S)
    assert codes == [0, 0], "".join(made.err(rank) for rank in range(2))
    return [made.result(rank) for rank in range(2)]


def trained(group: ProcessGroup, folder: Path, plot: Plot) -> dict[str, Any]:
    """Train on this rank's card; return the state in the end."""
    assert torch.accelerator.current_device_index() == group.rank
    return Run(plot, folder, ranks=group, make=step_on_card).to_end().state()


@pytest.mark.parametrize("terms", ["one", "weighted"])
def test_two_cards_train_bitwise_alike_and_as_one_card(tmp_path: Path, terms: str) -> None:
    plot = replace(LONG, terms=terms)
    first, second = both(tmp_path, trained, plot)
    alone = Run(plot, tmp_path / "alone", make=step_on_card).to_end().state()
    assert weights(first) == weights(second)
    assert apart(first, alone) < EXACT
