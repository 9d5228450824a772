"""The best of N trials of a search, against random points of a grid and against random points, on a made-up loss.

    python benchmarks/search.py [--rounds 100] [--trials 24] [--at-once 4] [--save]

A round is a seed. The loss has one optimum, a setting that hardly matters, one whose best value depends on another, and
noise as between seeds of a training. The supervisor's own code asks for trials; only the trainings are left out.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.measure import Row, options, publish, say
from pipeline.config.schema import Config
from pipeline.journal.run_status import State, Trial
from pipeline.planning.search import next_settings

NOISE = 0.01
SPACE: dict[str, Any] = {
    "train.learning_rate": {"low": 1e-5, "high": 1e-1, "log": True},
    "train.weight_decay": {"low": 1e-6, "high": 1e-1, "log": True},
    "train.options.dropout": {"low": 0.0, "high": 0.6},
    "train.options.width": (8, 16, 32, 64, 128),
}
GRID: dict[str, list[Any]] = {
    "train.learning_rate": [1e-5, 1e-4, 1e-3, 1e-2, 1e-1],
    "train.weight_decay": [1e-6, 1e-4, 1e-2],
    "train.options.dropout": [0.0, 0.2, 0.4, 0.6],
    "train.options.width": [8, 16, 32, 64, 128],
}


def loss(settings: dict[str, Any], noise: np.random.Generator) -> float:
    """Return the loss of a training with these settings: wider models want a lower learning rate."""
    rate, decay, dropout, width = (settings[key] for key in SPACE)
    doublings = math.log2(width / 64)
    best_rate = -2.7 - 0.25 * doublings
    away = 0.15 * (math.log10(rate) - best_rate) ** 2 + 0.04 * doublings**2 + 1.5 * (dropout - 0.15) ** 2
    return 0.5 + away + 0.002 * abs(math.log10(decay) + 4) + NOISE * abs(float(noise.normal()))


def searched(seed: int, trials: int, at_once: int) -> float:
    """Return the lowest loss that a search finds."""
    sweep = {"search": "optuna", "space": SPACE, "trials": trials, "at_once": at_once}
    data, train = {"path": Path("data")}, {"task": "made.up:Task", "seed": seed, "sweep": sweep}
    config, noise = Config.model_validate({"data": data, "train": train}), np.random.default_rng(seed)
    asked: list[Trial] = []
    for number in range(trials):
        settings = next_settings(config, asked)
        assert settings is not None
        asked.append(Trial(number, "", settings, state=State.DONE, value=loss(settings, noise)))
    return min(trial.value or 0.0 for trial in asked)


def drawn(seed: int, trials: int, grid: dict[str, list[Any]] | None) -> float:
    """Return the lowest loss of random points: of a grid, or of the whole space."""
    rng, noise = np.random.default_rng([seed, 1]), np.random.default_rng(seed)

    def value(key: str) -> Any:
        ends = SPACE[key]
        if grid or isinstance(ends, tuple):
            choices = grid[key] if grid else ends
            return choices[int(rng.integers(len(choices)))]
        if ends.get("log"):
            return math.exp(rng.uniform(math.log(ends["low"]), math.log(ends["high"])))
        return rng.uniform(ends["low"], ends["high"])

    return min(loss({key: value(key) for key in SPACE}, noise) for _ in range(trials))


def main() -> int:
    """Compare the medians over all seeds, and how many random points come as far."""
    typed = options(
        str(__doc__), 100,
        trials={"type": int, "default": 24}, at_once={"type": int, "default": 4},
    )  # fmt: skip
    seeds = range(typed.rounds)
    ours = [searched(seed, typed.trials, typed.at_once) for seed in seeds]
    others = {
        name: statistics.median(drawn(seed, typed.trials, grid) for seed in seeds)
        for name, grid in (("grid", GRID), ("random", None))
    }
    median = statistics.median(ours)
    say(f"search {median:.4f} ({min(ours):.4f} to {max(ours):.4f}), {others}")
    more = next(
        (times for times in range(1, 33)
         if statistics.median(drawn(seed, times * typed.trials, None) for seed in seeds) <= median),
        33,
    )  # fmt: skip
    excess = {name: (value - 0.5) / (median - 0.5) for name, value in others.items()}
    row = Row(
        "search",
        f"best of {typed.trials} trials, {typed.at_once} at once, median of {typed.rounds} seeds: how far above the"
        " lowest loss; how many random points come as far",
        "random points of a grid; random points",
        "≥ 1.5×, 1.5× farther; ≥ 2×",
        f"{excess['grid']:.1f}×, {excess['random']:.1f}× farther; {more}×",
        "search.py",
        "" if min(excess.values()) >= 1.5 and more >= 2 else "The search is no better.",
    )
    return publish([row], save=typed.save)


if __name__ == "__main__":
    sys.exit(main())
