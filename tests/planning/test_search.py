"""A search: which settings its next trial gets, by its seed, its space and the trials before it."""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import pytest

from benchmarks.search import GRID, drawn, searched
from pipeline.config.load import read_config
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.journal.run_status import State, Trial
from pipeline.planning.search import HOPELESS, first_trials, is_due, next_settings, refuse_unsearchable

BASE = ("data.path=/data", "train.task=some.task:Task", "train.sweep.search=optuna")
SPACE = {
    "train.learning_rate": {"low": 1e-5, "high": 1e-1, "log": True},
    "train.options.width": {"low": 4, "high": 64},
    "train.frozen": [[], ["a", "b"]],
    "train.clip": [None, 0.5],
}


def config_of(space: dict[str, Any], *sets: str) -> Config:
    return read_config(None, [*BASE, f"train.sweep.space={json.dumps(space)}", *sets]).config


def search(config: Config, trials: int, worth: dict[int, float] | None = None) -> list[dict[str, Any]]:
    """Return what is asked; some trials get a value of their own, and one in five is pruned or fails."""
    asked: list[Trial] = []
    for number in range(trials):
        settings = next_settings(config, asked)
        if settings is None:
            break
        value = (worth or {}).get(number, 1 + number % 3)
        state = (State.PRUNED, State.DONE, State.FAILED, State.DONE, State.DONE)[number % 5]
        trial = Trial(number, "", settings, None, state, None if state is State.FAILED else value, epochs=1)
        asked.append(trial)
    return [dict(trial.settings) for trial in asked]


def test_a_search_asks_the_same_again_and_no_point_twice() -> None:
    asked = search(config_of(SPACE), 16)
    assert search(config_of(SPACE), 16) == asked
    assert search(config_of(SPACE, "train.seed=1"), 16) != asked
    assert len({json.dumps(settings) for settings in asked}) == 16
    assert all(1e-5 <= settings["train.learning_rate"] <= 1e-1 for settings in asked)
    assert all(settings["train.frozen"] in ([], ["a", "b"]) for settings in asked)
    assert all(type(settings["train.options.width"]) is int for settings in asked)


def test_a_trial_learns_from_those_that_must_have_ended_and_no_others() -> None:
    config = config_of(SPACE, "train.sweep.at_once=3")
    asked = search(config, 12)
    assert search(config, 12, {9: 0.0, 10: 0.0}) == asked  # trial 11 learns from trial 8 and those before
    assert search(config, 12, {8: -9.0})[-1] != asked[-1]
    assert list(first_trials(config)) == asked[:3]


def test_a_trial_waits_for_those_that_it_learns_from() -> None:
    sweep = config_of(SPACE, "train.sweep.at_once=2", "train.sweep.trials=4").train.sweep

    def due(*states: State) -> bool:
        return is_due(sweep, [Trial(number, "", {}, state=state) for number, state in enumerate(states)])

    assert due()
    assert due(State.RUNNING)
    assert not due(State.RUNNING, State.DONE)
    assert due(State.DONE, State.RUNNING)
    assert not due(*[State.DONE] * 4)


def test_a_search_of_which_every_trial_fails_ends() -> None:
    sweep = config_of(SPACE, "train.sweep.at_once=1").train.sweep
    failed = [Trial(number, "", {}, state=State.FAILED) for number in range(HOPELESS)]
    assert is_due(sweep, failed[1:])
    assert not is_due(sweep, failed)
    assert is_due(sweep, [Trial(0, "", {}, state=State.DONE, value=1.0), *failed])


def test_a_search_ends_where_its_space_has_no_other_point() -> None:
    asked = search(config_of({"train.options.width": [8, 16], "train.clip": [None, 0.5, 1.0]}), 20)
    assert len(asked) == 6


@pytest.mark.parametrize(
    ("space", "sets"),
    [
        ({}, ()),
        ({"train.learning_rate": {"low": 1e-2, "high": 1e-5}}, ()),
        ({"train.learning_rate": {"low": 0, "high": 1, "log": True}}, ()),
        ({"train.learning_rate": [1e-3]}, ()),
        ({"train.learning_rate": {"low": -1.0, "high": 1.0}}, ()),
        ({"train.optimizer": ["adam", "adamm"]}, ()),
        ({"train.log_every": [1, 2]}, ()),
        ({"train.epochs": [1, 2]}, ()),
        ({"train.pretrained": ["a.pt", "b.pt"]}, ()),
        ({"graph.neighbours": [8, 16]}, ()),
        (SPACE, ("train.sweep.points=[{train.seed: 1}]",)),
        (SPACE, ("train.task=null", "train.command=python train.py")),
    ],
)
def test_wrong_spaces_are_refused(space: dict[str, Any], sets: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        refuse_unsearchable(config_of(space, *sets))


def test_without_optuna_a_search_is_refused_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError) as refused:
        refuse_unsearchable(config_of(SPACE))
    assert "[search]" in str(refused.value.next)


def test_a_search_comes_closer_than_as_many_points_of_a_grid_or_at_random() -> None:
    seeds = range(11)
    found = statistics.median(searched(seed, 24, 4) for seed in seeds)
    for grid in (GRID, None):
        others = statistics.median(drawn(seed, 24, grid) for seed in seeds)
        assert found - 0.5 < (others - 0.5) / 1.3
