"""Hyperparameter search (`train.sweep.search`): chooses the settings of the next trial from the earlier results.

The choice depends only on `train.seed`, the space and the earlier trials. Trial n waits for the trials up to
n - at_once and learns from them; later ones count as running, even if they have ended. So neither kills nor the order
in which trainings end change the trials, and a search that is submitted again finds its models. Pruning is the
exception: it depends on the progress of the other trainings.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.codec import plain
from pipeline.command_line import install_extra
from pipeline.config.schema import PATHS
from pipeline.errors import ConfigError
from pipeline.journal.run_status import State, Trial
from pipeline.planning.points import (
    Point,
    bare,
    config_at,
    named,
    refuse_script,
    refuse_unswept,
    refused,
    short_names,
    value_as_written,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

    from pipeline.config.schema import Config
    from pipeline.config.schema_train import SweepSection

SPACE = "train.sweep.space"
STARTUP = 5  # random trials before the first that learns from results
DRAWS = 100  # draws until one is new
HOPELESS = 5  # stop the search if its first trials all fail
DIGITS = 4  # digits of a chosen number; more would make long names


def load_optuna() -> ModuleType:
    """Return optuna; raise ConfigError where it is not installed."""
    try:
        import optuna
    except ImportError as error:
        what = f"optuna is not installed ({error})"
        raise ConfigError(what, where="train.sweep.search", remedy=install_extra("search")) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def refuse_unsearchable(config: Config) -> None:
    """Raise for an impossible search: without optuna, or with a space that includes invalid settings."""
    load_optuna()
    refuse_script(config)
    space = config.train.sweep.space
    refuse_unswept(space)
    if "train.epochs" in space and config.train.schedule.kind == "constant":
        raise refused("under a constant schedule more epochs are the same training, only longer", SPACE)
    for key, values in space.items():
        for value in values if isinstance(values, tuple) else (values["low"], values["high"]):
            if tuple(key.split(".")) in PATHS and not str(value).startswith("/"):
                raise refused(f"{key}: {value}: write paths from /", SPACE)
            config_at(bare(config), {key: value}, f"{key}={value}")


def is_due(sweep: SweepSection, asked: Sequence[Trial]) -> bool:
    """Tell whether the next trial is due: trials are left, and those that it learns from have ended."""
    known = _known(sweep, asked)
    is_hopeless = len(known) >= HOPELESS and all(trial.state is State.FAILED for trial in known)
    return len(asked) < sweep.trials and not is_hopeless and all(trial.state is not State.RUNNING for trial in known)


def _known(sweep: SweepSection, asked: Sequence[Trial]) -> Sequence[Trial]:
    """Return the trials that the next one learns from."""
    return asked[: max(0, len(asked) + 1 - sweep.at_once)]


def next_settings(config: Config, asked: Sequence[Trial]) -> dict[str, Any] | None:
    """Return the settings of the next trial; None if the space is exhausted."""
    train, optuna = config.train, load_optuna()
    space = {key: _distribution(optuna, values) for key, values in train.sweep.space.items()}
    known = len(_known(train.sweep, asked))
    before = [
        _trial(optuna, config, space, trial if number < known else None, trial.settings)
        for number, trial in enumerate(asked)
    ]
    taken = [trial.settings for trial in asked]
    for draw in range(DRAWS):
        seed = int(np.random.SeedSequence([train.seed, len(asked), draw]).generate_state(1)[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # optuna warns that it is experimental
            sampler = optuna.samplers.RandomSampler(seed)
            if draw == 0:
                sampler = optuna.samplers.TPESampler(
                    seed=seed, n_startup_trials=STARTUP, multivariate=True, constant_liar=True
                )
            way = "minimize" if train.validation.lower_is_better else "maximize"
            study = optuna.create_study(sampler=sampler, direction=way)
            study.add_trials(before)
            chosen = study.ask(space).params
        settings = {key: _value(train.sweep.space[key], chosen[key]) for key in space}
        if settings not in taken:
            return settings
    return None


def _distribution(optuna: ModuleType, values: Any) -> Any:
    """Return optuna's distribution: a range, or the indices of choices."""
    if isinstance(values, tuple):
        return optuna.distributions.CategoricalDistribution(range(len(values)))
    is_whole = isinstance(values["low"], int) and isinstance(values["high"], int)
    form = optuna.distributions.IntDistribution if is_whole else optuna.distributions.FloatDistribution
    return form(values["low"], values["high"], log=values.get("log", False))


def _value(values: Any, drawn: Any) -> Any:
    """Return the value of a setting for the number that optuna drew, as JSON data."""
    if isinstance(values, tuple):
        return plain(values[drawn])
    return min(max(float(f"{drawn:.{DIGITS}g}"), values["low"]), values["high"]) if isinstance(drawn, float) else drawn


def _drawn(values: Any, value: Any) -> Any:
    """Return the number that optuna drew for a value."""
    return plain(values).index(value) if isinstance(values, tuple) else value


def _trial(
    optuna: ModuleType, config: Config, space: Mapping[str, Any], ended: Trial | None, settings: Mapping[str, Any]
) -> Any:
    """Return a trial as optuna's: running, or ended; a trial without a value has failed."""
    states, state, about = optuna.trial.TrialState, optuna.trial.TrialState.RUNNING, dict[str, Any]()
    if ended is not None and ended.value is None:
        state = states.FAIL
    elif ended is not None and ended.state is State.PRUNED:
        state, about = states.PRUNED, {"intermediate_values": {ended.epochs: ended.value}}
    elif ended is not None:
        state, about = states.COMPLETE, {"value": ended.value}
    params = {key: _drawn(config.train.sweep.space[key], settings[key]) for key in space}
    return optuna.trial.create_trial(state=state, params=params, distributions=dict(space), **about)


def name_of_trial(settings: Mapping[str, Any]) -> str:
    """Return the name of a trial's point."""
    return named(settings, short_names(settings), value_as_written)


def point_of_trial(config: Config, settings: Mapping[str, Any]) -> Point:
    """Return the point of a trial; raise ConfigError if its settings conflict."""
    name = name_of_trial(settings)
    return Point(name, settings, config_at(bare(config), settings, name))


def first_trials(config: Config) -> tuple[Mapping[str, Any], ...]:
    """Return the settings of the first trials, which wait for no result."""
    sweep, asked = config.train.sweep, list[Trial]()
    while len(asked) < sweep.at_once and is_due(sweep, asked):
        if (settings := next_settings(config, asked)) is None:
            break
        asked.append(Trial(len(asked), name_of_trial(settings), settings))
    return tuple(trial.settings for trial in asked)
