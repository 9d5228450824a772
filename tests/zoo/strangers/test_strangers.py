"""Model families as people write them: their plans, held to a step that is really taken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.errors import PlanInfeasible
from pipeline.memory.footprint import MemoryChoice, MicroFootprint, Provenance, live_peak_bytes, margin_of
from pipeline.planning.training_work import Work, target_of
from pipeline.training.step.optimizers import StepSettings
from tests.memory.tracing.traced import true_peak
from tests.testkit.limited import device
from tests.zoo.strangers import FAMILIES, LEAST, ROWS

REASON = re.compile(r"(architectures|ways|derivatives)\.py:\d+|random numbers|real steps")
REFUSED = {"sparse table": "table.weight"}
LONG = ("momentum queue", "growing places", "attention kept", "function of its own")
CHOICE = MemoryChoice()
TAKEN = ("early exit", "guard against nan")  # whose dearest way, which is planned, is the one that a step takes


def family(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.nightly if name in LONG else ())


@pytest.fixture(autouse=True)
def _possible(one_thread: None) -> None:
    device.need()


def planned(name: str, folder: Path) -> tuple[MicroFootprint, int]:
    """Return the plan of a micro-batch, and the live peak of a step of two, without a margin."""
    work = Work(FAMILIES[name](), StepSettings(way="foreach"), device="cpu")
    oracle = work.oracle(LEAST, target_of(None), padded=False, kept=folder)
    micro, standing = oracle.micro(CHOICE, ROWS), oracle.standing(CHOICE)
    return micro, live_peak_bytes(standing, micro, accumulate=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, in jvp
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", [family(name) for name in FAMILIES if name not in REFUSED])
def test_a_family_is_planned_as_it_takes_or_higher_and_the_plan_says_why(name: str, tmp_path: Path) -> None:
    micro, planned_bytes = planned(name, tmp_path / "traces")
    real_bytes = true_peak(FAMILIES[name](), ROWS, 2)
    if micro.origin is Provenance.TRACED:
        assert 0.98 * real_bytes <= planned_bytes <= 1.01 * real_bytes
    else:
        assert planned_bytes * margin_of(micro.origin, caching=False).factor >= real_bytes
        assert any(REASON.search(note) for note in micro.notes), micro.notes
    if name in TAKEN:
        assert planned_bytes == pytest.approx(real_bytes, rel=0.01)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_planned_is_refused_with_what_stands_in_the_way(name: str, tmp_path: Path) -> None:
    with pytest.raises(PlanInfeasible, match=REFUSED[name]):
        planned(name, tmp_path / "traces")
