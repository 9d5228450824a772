"""Gradients of several ranks are added up: whatever memory ends there, and while backward still runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.errors import ConfigError
from pipeline.training.loop.metrics_log import read_epochs
from pipeline.training.ranks import gradient_sums
from pipeline.training.ranks.gradient_sums import GradientSums
from pipeline.training.ranks.process_group import ProcessGroup
from pipeline.training.ranks.rank_protocol import SingleRank
from pipeline.training.step import local_contrastive
from pipeline.training.step.step import Step
from tests.testkit.limited import device as limited
from tests.testkit.limited.device import LimitedDevice
from tests.training.loop.loops import Aimed, Network, Plot, Refuse, Run, Tiny, warm
from tests.training.loop.test_loop import Tearing
from tests.training.loop.test_loop_ranks import ADAM, LONG, done, plain, trained, weights

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared

BUCKET_BYTES = 256  # so that the small network makes several
SHORT = Plot(train={**ADAM, "epochs": 1, "effective_batch": 4}, items=9, budget=60, dropout=0.3)  # 3 steps


def overlapped(run: Run) -> GradientSums:
    """Have gradients added up while the last backward runs, in small buckets; return what does it."""
    sums: GradientSums = run.trainer.whole._sums  # type: ignore[assignment]
    sums.overlaps = True
    sums._cut(BUCKET_BYTES)
    return sums


def early(sums: GradientSums) -> list[int]:
    """Return what is filled with the buckets that go before a backward has ended."""
    gone, go = list[int](), sums._go

    def noted(place: int) -> None:
        if sums._is_armed:
            gone.append(place)
        go(place)

    sums._go = noted  # type: ignore[method-assign]
    return gone


def spare_words(group: ProcessGroup, refuse: Refuse) -> None:
    """Refuse nothing of what ranks say to each other: on a card it would be in the host's memory."""
    exchange = type(group).exchange

    def spared(message: Any) -> Any:
        kept = refuse.at, refuse.count
        refuse.at = None
        try:
            return exchange(group, message)
        finally:
            refuse.at, refuse.count = kept

    group.exchange = spared  # type: ignore[method-assign]


def turned(gradient: Tensor) -> Tensor:
    """Return a gradient that is not contiguous."""
    return gradient.t().contiguous().t() if gradient.dim() == 2 else gradient


class Released(Step):
    """Refuses nothing any more once its optimizer begins."""

    refuse: Refuse

    def settle(self, weight: Any) -> None:
        """Refuse nothing: a number by which gradients are multiplied takes no memory on a card."""
        kept = self.refuse.at, self.refuse.count
        self.refuse.at = None
        super().settle(weight)
        self.refuse.at, self.refuse.count = kept

    def apply(self) -> None:
        """Count what was asked for until here."""
        self.refuse.at = None
        super().apply()


def refused_after_share(group: ProcessGroup, folder: Path, plot: Plot, blocks: list[int], lay: str) -> list[Any]:
    """Train once for each block: between the second share of a rank and its update that block is refused."""
    found = []
    for number, block in enumerate(blocks):
        run = Run(plot, folder / str(number), ranks=group, make=Released)
        warm(run)
        step, whole = run.trainer.step, run.trainer.whole
        assert isinstance(step, Released)
        step.refuse, told = Refuse(), whole._complete
        spare_words(group, step.refuse)
        counts: list[int] = []

        def complete(report: Any, told: Any = told, step: Released = step, block: int = block) -> None:
            told(report)
            counts.append(0)  # noqa: B023 - it is of this turn
            if len(counts) == 2:  # noqa: B023
                step.refuse.at, step.refuse.count = (block if group.rank == 1 else 0), 0

        whole._complete = complete
        if lay == "strided":
            for parameter in step.trained:
                parameter.register_hook(
                    lambda gradient: gradient.t().contiguous().t() if gradient.dim() == 2 else gradient
                )
        with LimitedDevice(through=step.refuse) as device:
            run.to_end()
            refused = device.refused
        found.append({"state": run.state(), "refused": refused, "count": step.refuse.count})
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(("items", "lay"), [(4, "plain"), (1, "plain"), (4, "strided")])
def test_memory_that_ends_after_a_share_on_one_rank_changes_nothing(tmp_path: Path, items: int, lay: str) -> None:
    limited.need()
    plot = replace(SHORT, train={**SHORT.train, "effective_batch": items})  # with one item the second rank has none
    blocks = list(range(8))  # the first is none
    told = done(2, tmp_path, refused_after_share, tmp_path, plot, blocks, lay)
    states = [one["state"] for rank in told for one in rank]
    assert all(weights(one) == weights(states[0]) for one in states)
    assert sum(one["refused"] for one in told[1]) >= 3, "gradients, buffers and the norm need memory"


def overlapping(group: ProcessGroup, folder: Path, plot: Plot) -> list[Any]:
    """Train with sums after the backward, and within it."""
    plain_run = Run(plot, folder / "after", ranks=group)
    sums: GradientSums = plain_run.trainer.whole._sums  # type: ignore[assignment]
    sums._cut(BUCKET_BYTES)
    after = plain_run.to_end().state()
    run = Run(plot, folder / "within", ranks=group)
    gone = early(overlapped(run))
    return [after, run.to_end().state(), len(gone), len(sums._buckets), run.trainer.done]


@pytest.mark.nightly
@pytest.mark.parametrize(("world", "terms"), [(2, "one"), (2, "weighted"), (3, "one"), (3, "several")])
def test_sums_within_the_last_backward_are_bitwise_those_after_it(tmp_path: Path, world: int, terms: str) -> None:
    plot = replace(LONG, terms=terms, dropout=0.3)
    for after, within, gone, buckets, steps in done(world, tmp_path, overlapping, tmp_path, plot):
        assert after == within
        assert buckets >= 4
        assert gone >= (steps // 2) * (buckets - 2) > 0, "not of the first step, nor what is unused"


def interrupted(group: ProcessGroup, folder: Path, plot: Plot, at: list[dict[int, int]]) -> list[dict[str, Any]]:
    """Train some times with overlap, while blocks are refused on one rank: of a call, which one."""
    found = []
    for number, one in enumerate(at):
        run = Run(plot, folder / str(number), ranks=group, make=Aimed)
        step, gone = run.trainer.step, early(overlapped(run))
        assert isinstance(step, Aimed)
        warm(run)
        step.refuse = Refuse()
        step.at = {int(call): block for call, block in one.items()} if group.rank == number % group.world else {}
        with LimitedDevice(through=step.refuse):
            run.to_end()
        ooms = read_epochs(run.made.folder.path)[0].ooms
        found.append({"cuts": step.cuts, "state": run.state(), "blocks": step.blocks, "ooms": ooms, "gone": len(gone)})
    return found


@pytest.mark.nightly
def test_memory_that_ends_while_gradients_are_added_up_is_a_step_made_again_by_all(tmp_path: Path) -> None:
    limited.need()
    plot = replace(SHORT, train={**SHORT.train, "effective_batch": 5})
    ((undisturbed,), _) = done(2, tmp_path / "first", interrupted, tmp_path / "first", plot, [{}])
    calls = undisturbed["blocks"]
    assert undisturbed["gone"] > 0
    blocks = range(1, calls[-1] + 1, 3)  # forward and backward
    at = [{len(calls) - 1: block} for block in blocks for _ in range(2)]
    told = done(2, tmp_path / "run", interrupted, tmp_path / "run", plot, at)
    reference, again = Run(plot, tmp_path / "reference"), 0
    for number, both in enumerate(zip(*told, strict=True)):
        expected = plain(plot, reference, [one["cuts"] for one in both])
        for rank, one in enumerate(both):
            assert weights(one["state"]) == weights(expected), (number, rank)
        again += both[1 - number % 2]["blocks"][-1] > 0 and len(both[1 - number % 2]["blocks"]) > len(calls)
    assert all(both[0]["ooms"] == 1 for both in zip(*told, strict=True))
    assert again >= 2, "some ended when sums were under way: the other rank, too, ran its share once more"


def torn(group: ProcessGroup, folder: Path, plot: Plot, at: list[int]) -> list[Any]:
    """Train with overlap while memory ends in the optimizer of the second rank."""
    run = Run(plot, folder, ranks=group, make=Tearing)
    overlapped(run)
    if group.rank == 1:
        run.trainer.step.at = frozenset(at)  # type: ignore[attr-defined]
    return [run.to_end().state()]


@pytest.mark.nightly
@pytest.mark.parametrize("terms", ["one", "weighted"])
def test_a_rank_without_parameters_takes_part_in_the_sums_of_the_others(tmp_path: Path, terms: str) -> None:
    plot = replace(LONG, terms=terms)
    whole = done(2, tmp_path / "whole", trained, tmp_path / "whole", plot)
    told = done(2, tmp_path / "run", torn, tmp_path / "run", plot, [3])
    assert [one[0] for one in told] == [one["state"] for one in whole]


class Reentrant(Network):
    """Computes its shared block again in backwards of its own: its gradient comes in several parts."""

    def forward(self, x_ND: Tensor) -> Tensor:
        hidden_ND = self.first(x_ND).tanh()
        for _ in range(3):
            for block in self.blocks:
                again = checkpoint if torch.is_grad_enabled() else lambda run, x, **_: run(x)
                hidden_ND = hidden_ND + again(block, hidden_ND, use_reentrant=True)
        value_N: Tensor = self.last(hidden_ND).squeeze(-1)
        return value_N


class Again(Tiny):
    def model(self) -> nn.Module:
        return Reentrant(self.plot.dropout).double()


def late(group: ProcessGroup, folder: Path, plot: Plot) -> list[Any]:
    """Train with and without overlap a model whose gradients come in parts."""
    after = Run(plot, folder / "after", ranks=group, task=Again(plot)).to_end()
    run = Run(plot, folder / "within", ranks=group, task=Again(plot))
    sums = overlapped(run)
    return [after.state(), run.to_end().state(), sums.overlaps]


@pytest.mark.nightly
def test_a_gradient_that_comes_after_its_sum_is_not_lost(tmp_path: Path) -> None:
    for after, within, overlaps in done(2, tmp_path, late, tmp_path, LONG):
        assert after == within
        assert not overlaps


def narrow(group: ProcessGroup, folder: Path, plot: Plot) -> list[Any]:
    """Train where one rank never has room for a buffer of the planned size."""
    run = Run(plot, folder, ranks=group)
    sums: GradientSums = run.trainer.whole._sums  # type: ignore[assignment]
    had, most = sums._has_buffers, 700
    if group.rank == 1:
        sums._has_buffers = lambda size: size <= most and had(size)  # type: ignore[method-assign]
    gradient_sums.LEAST_PIECE_BYTES = 64  # type: ignore[misc]
    return [run.to_end().state(), sums.piece_bytes]


@pytest.mark.nightly
def test_all_ranks_pack_in_pieces_for_which_the_fullest_has_room(tmp_path: Path) -> None:
    whole = done(2, tmp_path / "whole", trained, tmp_path / "whole", LONG)
    told = done(2, tmp_path / "run", narrow, tmp_path / "run", LONG)
    assert [one[0] for one in told] == [one["state"] for one in whole]
    assert told[0][1] == told[1][1] <= 700


def cramped(group: ProcessGroup, folder: Path, blocks: list[int]) -> list[Any]:
    """Train pairs while, on one rank, a block is refused as the embeddings of all ranks are gathered."""
    from tests.training.step.test_contrast import PLOT, made

    torch.set_num_threads(1)
    found, gathered = [], local_contrastive.gathered
    for block in blocks:
        refuse = Refuse()
        spare_words(group, refuse)

        def aimed(*words: Any, refuse: Refuse = refuse, block: int = block) -> Any:
            refuse.at, refuse.count = (block if group.rank == 1 else 0), 0
            try:
                return gathered(*words)
            finally:
                refuse.at = None

        local_contrastive.gathered = aimed
        run = made(PLOT, folder / str(block), ranks=group)
        warm(run)
        with LimitedDevice(through=refuse) as device:
            run.to_end()
            refused = device.refused
        found.append([run.state(), refused])
    return found


@pytest.mark.nightly
def test_memory_that_ends_while_embeddings_are_gathered_keeps_nobody_waiting(tmp_path: Path) -> None:
    limited.need()
    told = done(2, tmp_path, cramped, tmp_path, list(range(7)))
    states = [one[0] for rank in told for one in rank]
    assert all({**one, "seen": []} == {**states[0], "seen": []} for one in states)
    assert sum(one[1] for one in told[1]) >= 2


def test_no_gradient_is_kept_beyond_its_step_whatever_order_its_parts_went_in() -> None:
    large, unused = nn.Parameter(torch.ones(4, 10)), nn.Parameter(torch.ones(2))
    sums = GradientSums([large, unused], SingleRank(), "cpu", overlaps=True)
    sums._cut(100)  # the bucket of what nobody uses, which comes last, has the first rows of the large one, too
    sums.reserve()
    sums.expect({0})
    assert sums.begin_step(overlaps=True)
    with sums.within():
        large.sum().backward()
    sums.add_up()
    assert sums.is_done
    assert not sums._split


def test_a_sparse_gradient_is_refused_with_what_to_do() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    sums = GradientSums([table.weight], SingleRank(), "cpu", overlaps=False)
    with pytest.raises(ConfigError, match=r"\[4, 2\] is sparse(.|\n)*sparse=False"):
        sums.reserve()
