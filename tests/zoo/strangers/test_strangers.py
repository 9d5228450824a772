"""Model families as people write them: what is planned for them, held to a step that is really taken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.memory.footprint import Provenance, margin_of
from tests.limited import device
from tests.zoo.strangers import FAMILIES, planned, real

TOLD = 0.98  # of the real peak, at least, where it is called traced
NAMES_A_LINE = re.compile(r"(architectures|ways|derivatives)\.py:\d+ `")
DRAWS = "its way depends on random numbers that are not torch's"


@pytest.fixture(autouse=True)
def _possible(one_thread: None) -> None:
    device.need()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, in jvp
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_planned_no_lower_than_it_takes_or_why_it_is_not_traced_is_told(name: str, tmp_path: Path) -> None:
    micro, planned_bytes = planned(name, tmp_path / "traces")
    real_bytes = real(name)
    if micro.origin is Provenance.TRACED:
        assert planned_bytes >= TOLD * real_bytes
    else:
        assert planned_bytes * margin_of(micro.origin, caching=False).factor >= real_bytes
        assert any(NAMES_A_LINE.search(note) or DRAWS in note for note in micro.notes)
