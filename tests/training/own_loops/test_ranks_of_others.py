"""A loop of somebody's own over ranks: memory ends wherever it may, and the gradients are those of one process."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.training.own_loops import governed as governed_module
from pipeline.training.own_loops.governed import Governed, broadcast_parameters, ddp_wrappers
from pipeline.training.ranks import Ranks
from pipeline.training.ranks.process_group import ProcessGroup
from tests.training.ranks.crews import crew

pytestmark = pytest.mark.timeout(300)
ROWS = (7, 1, 12, 5, 9, 3, 3, 8, 4, 6)  # of each item
LIMIT_S = 120.0
SHARES = {2: [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]], 4: [[0, 1, 2], [3, 4, 5, 6, 7], [8, 9], []]}
STEPS = 2


class Loop:
    """A model, an optimizer, items of uneven size, and a loss that may run out of memory in its n-th call."""

    def __init__(self, *, seed: int = 0) -> None:
        torch.manual_seed(0)
        self.items = [torch.randn(rows, 8, dtype=torch.float64) for rows in ROWS]
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(torch.float64)
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.optimizer = torch.optim.SGD([*self.model.parameters(), self.unused], 0.1, momentum=0.9, weight_decay=0.1)
        self.calls, self.fails_at, self.in_backward = 0, -1, False

    def loss_of(self, items: list[Tensor]) -> tuple[Tensor, float]:
        self.calls += 1
        fails = self.calls == self.fails_at
        if fails and not self.in_backward:
            raise torch.OutOfMemoryError("CUDA out of memory: in forward")
        rows = torch.cat(items)
        hidden = self.model[:2](rows)
        if fails:
            hidden.register_hook(_raise)  # the last layer has its gradient already
        return self.model[2](hidden).square().sum(), float(len(rows))

    def share(self, rank: int, world: int) -> list[Tensor]:
        return [self.items[place] for place in SHARES[world][rank]]

    @property
    def weights(self) -> list[float]:
        return [*torch.cat([one.detach().flatten() for one in (*self.model.parameters(), self.unused)]).tolist()]


def _raise(_: Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory: in backward")


def undisturbed() -> list[float]:
    """Return the weights after the same steps of one process that has all items at once."""
    loop = Loop()
    for _ in range(STEPS):
        loop.optimizer.zero_grad()
        total, weight = loop.loss_of(loop.items)
        (total / weight).backward()
        loop.optimizer.step()
    return loop.weights


def over(ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Governed:
    """Return a governed loop over these ranks, in place of those that torch's own group has."""
    governed_module.ranks_of = lambda device: ranks
    return Governed(model, optimizer, **options)


def disturbed(group: ProcessGroup, who: int) -> list[list[float]]:
    """Run out of memory on one rank: in each of its micro-batches, in forward and in backward; return all weights."""
    gc.freeze()
    found = []
    for in_backward in (False, True):
        fails_at = 0
        while True:
            fails_at += 1
            loop = Loop(seed=0 if group.rank == 0 else 7)  # others begin apart, and are given the first's
            governed = over(group, loop.model, loop.optimizer, budget=3)
            loop.in_backward, loop.fails_at = in_backward, fails_at if group.rank == who else -1
            loop.calls = 0
            for _ in range(STEPS):
                governed.step(loop.share(group.rank, group.world), loop.loss_of)
            found.append(loop.weights)
            if not any(said["failed"] for said in group.exchange({"failed": loop.calls >= loop.fails_at > 0})):
                break
    return found


@pytest.mark.parametrize(("world", "who"), [(2, 1), (4, 1)])
def test_an_oom_in_any_micro_batch_of_a_rank_leaves_the_step_of_one_process(
    world: int, who: int, tmp_path: Path
) -> None:
    ranks = crew(tmp_path / "ranks", world, disturbed, who).results()
    expected = torch.tensor(undisturbed(), dtype=torch.float64)
    for found in ranks:
        assert len(found) >= 10  # the budget cuts a share into several, and each failed once
        torch.testing.assert_close(
            torch.tensor(found, dtype=torch.float64), expected.expand(len(found), -1), rtol=0, atol=1e-10
        )
    assert all(found == ranks[0] for found in ranks), "ranks have drifted apart"


def hopeless(group: ProcessGroup, how: str) -> list[str]:
    """Fail on the second rank in a way that no splitting mends; return what each rank is told."""
    loop = Loop()
    governed = over(group, loop.model, loop.optimizer, too_large="skip" if how == "skip" else "error")

    def loss_of(items: list[Tensor]) -> tuple[Tensor, float]:
        if group.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory") if how != "bug" else KeyError("no such field")
        return loop.loss_of(items)

    try:
        governed.step(loop.share(group.rank, 2), loss_of)
    except Exception as error:  # noqa: BLE001 - its kind is what is looked at
        return [type(error).__name__, str(error)]
    return ["", str(len([event for event in governed.events if event.what == "skipped"])), *map(str, loop.weights)]


@pytest.mark.parametrize(
    ("how", "own"), [("large", ["PlanInfeasible", "does not fit alone"]), ("bug", ["KeyError", "no such field"])]
)
def test_a_rank_that_cannot_go_on_ends_all_with_its_reason(how: str, own: list[str], tmp_path: Path) -> None:
    (kind, said), (own_kind, own_said) = crew(tmp_path / "ranks", 2, hopeless, how).results()
    assert own_kind == own[0]
    assert own[1] in own_said
    assert kind == "RankLost"
    assert "rank 1 of 2" in said
    assert own[1] in said


def test_a_rank_whose_items_are_all_left_out_still_takes_the_step_of_the_others(tmp_path: Path) -> None:
    ranks = crew(tmp_path / "ranks", 2, hopeless, "skip").results()
    loop = Loop()
    total, weight = loop.loss_of(loop.share(0, 2))
    (total / weight).backward()
    loop.optimizer.step()
    for rank, skipped in ((0, "0"), (1, str(len(SHARES[2][1])))):
        kind, count, *weights = ranks[rank]
        assert (kind, count) == ("", skipped)
        assert [*map(float, weights)] == pytest.approx(loop.weights, abs=1e-10)


def learns(group: ProcessGroup) -> list[Any]:
    """Train on two ranks whose devices are of unequal memory; return the budgets, the events and the weights."""
    loop = Loop()
    governed = over(group, loop.model, loop.optimizer, cost=len)
    most = 15 if group.rank == 1 else 30

    def loss_of(items: list[Tensor]) -> tuple[Tensor, float]:
        if sum(map(len, items)) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loop.loss_of(items)

    budgets = []
    for _ in range(4):
        governed.step(loop.share(group.rank, 2), loss_of)
        budgets.append(governed.governor.budget)
    late = [event.what for event in governed.events if event.step >= 2]
    said = [event.detail for event in governed.events if event.what == "budget"]
    return [budgets, late, said, governed.state_dict()["learned"]["budget"]]


def test_ranks_of_unequal_memory_agree_on_the_least_budget(tmp_path: Path) -> None:
    (big, late, said, saved), (small, _, own, also) = crew(tmp_path / "ranks", 2, learns).results()
    assert big == small
    assert big[-1] <= 15
    assert saved == also == big[-1]
    assert late == [], "what was learned holds"
    assert said[-1].startswith("rank 1: out of memory")
    assert own[-1].startswith("out of memory")


class FSDPModule(nn.Linear):
    """Called as torch's class is."""


def test_a_model_whose_parameters_are_shared_out_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="gathers parameters"):
        ddp_wrappers(nn.Sequential(FSDPModule(2, 2)))


def test_statistics_that_ranks_exchange_within_a_pass_are_refused_with_what_to_do() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2)))
    with pytest.raises(ConfigError, match=r"exchanges statistics(.|\n)*leave out convert_sync_batchnorm"):
        broadcast_parameters(model, Ranks())


def unlike(group: ProcessGroup) -> str:
    model = nn.Linear(2, 2 + group.rank)
    try:
        over(group, model, torch.optim.SGD(model.parameters(), 0.1))
    except ConfigError as error:
        return str(error)
    return ""


def test_models_that_differ_are_refused_on_all_ranks(tmp_path: Path) -> None:
    assert all("the same model" in said for said in crew(tmp_path / "ranks", 2, unlike).results())


# As others start them

SCRIPT = """\
import json, sys

import torch
from torch.nn.parallel import DistributedDataParallel

from pipeline.api import Governed
from tests.training.own_loops.test_ranks_of_others import Loop, STEPS

how, out, fails_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
loop = Loop()
model = loop.model
if how == "ddp":
    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(model)
    loop.model = model.module
governed = Governed(model, loop.optimizer, budget=3)
rank, world = governed.ranks.rank, governed.ranks.world
loop.fails_at = fails_at if rank == 1 else -1
if how == "ddp":
    inner = model.module
    loop.model = lambda rows: model(rows)  # through the wrapper
    loop.loss_of = lambda items, of=loop: through(of, items)


def through(loop, items):
    loop.calls += 1
    if loop.calls == loop.fails_at:
        raise torch.OutOfMemoryError("CUDA out of memory")
    rows = torch.cat(items)
    return model(rows).square().sum(), float(len(rows))


for _ in range(STEPS):
    governed.step(loop.share(rank, world), loop.loss_of)
loop.model = model.module if how == "ddp" else model
print(json.dumps(loop.weights), file=open(f"{out}/{rank}.json", "w"))
assert loop.calls >= loop.fails_at
"""


def torchrun(world: int, *words: object, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    return subprocess.run(
        [*command, *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["plain", "ddp"])
def test_under_torchrun_a_script_makes_the_steps_of_one_process_through_an_oom(how: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = torchrun(2, script, how, tmp_path, 2)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        weights = json.loads((tmp_path / f"{rank}.json").read_text())
        assert weights == pytest.approx(undisturbed(), abs=1e-10)


ENDS = """\
import sys

import torch.distributed as dist

from pipeline.training.ranks.process_group import end_after_gloo

end_after_gloo()
dist.init_process_group("gloo")
sys.setswitchinterval(1000.0)  # whoever has the interpreter keeps it: gloo's threads wait for it to the end
for _ in range(3):
    dist.all_gather_object([None, None], dist.get_rank())
"""


@pytest.mark.nightly
def test_a_process_does_not_end_before_gloo_has_put_its_tensors_away(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDS)
    for _ in range(3):  # without: one in three is aborted
        done = torchrun(2, script)
        assert done.returncode == 0, done.stdout + done.stderr
