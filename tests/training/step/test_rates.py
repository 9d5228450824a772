"""Learning rates are a function of the step alone."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.config.schema_train import ScheduleSection
from pipeline.training.step.optimizers import factor, set_rate


def test_a_constant_rate_is_constant_once_it_has_grown() -> None:
    assert [factor(ScheduleSection(), step, 5) for step in range(5)] == [1.0] * 5
    shares = [factor(ScheduleSection(warmup=4), step, 9) for step in range(6)]
    assert shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


@pytest.mark.parametrize(
    ("kind", "middle"), [("linear", 0.55), ("cosine", 0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)]
)
def test_a_falling_rate_ends_at_its_least(kind: str, middle: float) -> None:
    schedule = ScheduleSection.model_validate({"kind": kind, "least": 0.1})
    assert factor(schedule, 0, 11) == 1.0
    assert factor(schedule, 5, 11) == pytest.approx(middle)
    assert factor(schedule, 10, 11) == pytest.approx(0.1)
    assert factor(schedule, 99, 11) == pytest.approx(0.1)


def test_every_group_gets_its_share_of_its_own_rate_however_often() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": [second], "lr": 0.1}])
    for share in (0.5, 0.25, 1.0, 0.25):
        assert set_rate(optimizer, share) == 0.5 * share
        assert [group["lr"] for group in optimizer.param_groups] == [0.5 * share, 0.1 * share]
