"""Model families as people write them: what is planned for them, held to a step that is really taken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.errors import PlanInfeasible
from pipeline.memory.footprint import Provenance, margin_of
from tests.testkit.limited import device
from tests.zoo.strangers import FAMILIES, planned, real

TOLD = 0.98  # of the real peak, at least, where it is called traced
NAMES_A_LINE = re.compile(r"(architectures|ways|derivatives)\.py:\d+")
NOT_PLANNED = {"sparse table": "the gradients of table.weight are sparse"}
LONG = (
    "momentum queue",
    "growing places",
    "growing keys",
    "attention kept",
    "state space",
    "gru, packed",
    "invariant points",
)
DRAWS = "its way depends on random numbers that are not torch's"
MEASURED = "small real steps took"  # more than traced: a library's own kernels, of which every machine has others


@pytest.fixture(autouse=True)
def _possible(one_thread: None) -> None:
    device.need()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, in jvp
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] if name in LONG else [])
        for name in FAMILIES
        if name not in NOT_PLANNED
    ],
)
def test_a_family_is_planned_no_lower_than_it_takes_or_why_it_is_not_traced_is_told(name: str, tmp_path: Path) -> None:
    micro, planned_bytes = planned(name, tmp_path / "traces")
    real_bytes = real(name)
    if micro.origin is Provenance.TRACED:
        assert planned_bytes >= TOLD * real_bytes
    else:
        assert planned_bytes * margin_of(micro.origin, caching=False).factor >= real_bytes
        told = [DRAWS in note or MEASURED in note or NAMES_A_LINE.search(note) for note in micro.notes]
        assert any(told), micro.notes


@pytest.mark.parametrize("name", NOT_PLANNED)
def test_a_family_that_cannot_be_planned_is_refused_by_the_name_of_what_stands_in_the_way(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanInfeasible, match=NOT_PLANNED[name]):
        planned(name, tmp_path / "traces")
