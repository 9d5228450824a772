"""Whole trainings of several processes: the same steps as one, the same decisions on all."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.errors import ConfigError
from pipeline.training.loop.metrics_log import read_epochs
from pipeline.training.ranks import LOST
from pipeline.training.ranks.process_group import ProcessGroup
from tests.training.checkpoints.saved import spoil
from tests.training.loop.loops import (
    Plot,
    Run,
    Tiny,
    signals_after,
)
from tests.training.ranks.crews import Crew, crew

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared

ADAM = {"optimizer": "adamw", "ema": 0.9, "clip": 1.0, "weight_decay": 0.1, "epochs": 2}
LONG = Plot(train={**ADAM, "checkpoints": {"every": 2}}, items=14, budget=60)


State = Mapping[str, list[float]]


# Killed and resumed


def trained(group: ProcessGroup, folder: Path, plot: Plot, killed_after: int | None, victim: int) -> State:
    """Train to the end, or up to the step after which one rank is killed."""
    run = Run(plot, folder, ranks=group)
    for done in run.trainer.run():
        if done == killed_after and group.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
    return run.state()


@pytest.mark.nightly
@pytest.mark.parametrize("behind", [False, True])
def test_four_ranks_of_which_any_is_killed_at_random_end_with_the_same_bits(tmp_path: Path, *, behind: bool) -> None:
    checkpoints = {"every": 1, "asynchronous": behind}
    train = {**ADAM, "effective_batch": 5, "checkpoints": checkpoints, "validation": {"split": "val"}}
    plot = Plot(train=train, items=14, budget=60, dropout=0.3, terms="several", validated=4)
    whole = crew(tmp_path / "whole", 4, trained, tmp_path / "run", plot, None, 0).results()
    draw = random.Random(5 + behind)
    kills = [draw.randint(0, 2) for _ in range(3)]
    for number, later in enumerate(kills):
        step = sum(kills[:number]) + later  # in the worst case, a checkpoint in the background was lost each time
        victim = draw.randrange(4)
        codes = crew(tmp_path / f"killed {number}", 4, trained, tmp_path / "killed", plot, step, victim).wait()
        assert codes == [-signal.SIGKILL if rank == victim else LOST for rank in range(4)]
    assert crew(tmp_path / "rest", 4, trained, tmp_path / "killed", plot, None, 0).results() == whole


# What all must decide alike


def ended(group: ProcessGroup, folder: Path, plot: Plot) -> None:
    """Train to what is expected to be an error."""
    Run(plot, folder, ranks=group).to_end()


def ending(tmp_path: Path, plot: Plot, where: str = "run") -> tuple[list[int | None], Crew]:
    made = crew(tmp_path / "crew", 2, ended, tmp_path / where, plot)
    return made.wait(), made


def test_terms_of_other_names_on_another_rank_are_weighed_and_have_means_of_their_own(tmp_path: Path) -> None:
    assert ending(tmp_path, Plot(terms="uneven"))[0] == [0, 0]
    assert set(read_epochs(tmp_path / "run" / "model")[0].loss) == {"of0", "of1"}


class Sparse(Tiny):
    """Has a parameter with sparse gradients."""

    def model(self) -> nn.Module:
        model = super().model()
        model.table = nn.Embedding(4, 1, sparse=True).double()
        return model

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Any:
        ((name, (total, weight)),) = super().loss(model, batch).items()
        return {name: (total + model.get_submodule("table")(torch.tensor([1])).sum(), weight)}


def sparse(group: ProcessGroup, folder: Path) -> None:
    Run(Plot(), folder, ranks=group, task=Sparse(Plot())).to_end()


def test_a_sparse_gradient_is_refused_with_what_to_do(tmp_path: Path) -> None:
    made = crew(tmp_path / "crew", 2, sparse, tmp_path / "run")
    assert set(made.wait()) <= {ConfigError.exit_code, LOST}
    assert all("sparse=False" in made.err(rank) for rank in range(2))


@pytest.mark.nightly
def test_checkpoints_of_which_none_is_whole_end_all_ranks_at_once(tmp_path: Path) -> None:
    Run(LONG, tmp_path / "run", ending=signals_after(2)).to_end()
    for one in (tmp_path / "run/model/checkpoints").glob("step-*"):
        spoil(one / "state.safetensors", bytearray.clear)
    codes, made = ending(tmp_path, LONG)
    assert codes == [7, 7]
    assert "none of the" in made.err(0)
    assert "none of the" in made.err(1)
