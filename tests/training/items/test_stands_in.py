"""The loader where a `DataLoader` stood: what would go wrong in silence is refused, with what to do instead."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest

from pipeline.errors import ConfigError
from pipeline.training.items.item_source import ItemArrays
from pipeline.training.items.loader import Loader
from pipeline.training.sampling.epoch_order import SamplerSettings
from pipeline.training.sampling.sampler import Sampler


class Numbers:
    """Items of one number."""

    def read(self, numbers: list[int]) -> Iterator[ItemArrays]:
        for number in numbers:
            yield ItemArrays(number, str(number), {"x": np.array(number)}, {"partners": [], "sizes": {}})


def loader(settings: SamplerSettings, ranks: int = 1) -> Loader:
    sampler = Sampler({"nodes": np.arange(1, 11)}, settings, place=lambda: (0, ranks))
    return Loader(Numbers(), None, sampler)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (SamplerSettings(batch=4), "micro-batches"),  # its padding cuts steps
        (SamplerSettings(batch=4, padding=None, budget={"nodes": 20}), "micro-batches"),
        (SamplerSettings(batch=3, padding=None), "of 1 items leaves some ranks without items"),
        (SamplerSettings(batch=1, padding=None), "of 1 items leaves some ranks without items"),
    ],
)
def test_steps_for_which_another_rank_would_wait_are_refused(settings: SamplerSettings, what: str) -> None:
    assert sum(1 for _ in loader(settings)) >= 3
    with pytest.raises(ConfigError, match=what) as refused:
        next(iter(loader(settings, ranks=2)))
    assert "SamplerSettings(" in refused.value.remedy


def test_what_takes_a_data_loader_apart_is_refused_with_what_to_do_instead() -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from accelerate import skip_first_batches
    mine = loader(SamplerSettings(batch=5, padding=None))
    with pytest.raises(AttributeError, match=r"load_state_dict"):
        skip_first_batches(mine, 1)
    assert not hasattr(mine, "dataset")
