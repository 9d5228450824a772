"""Median stopping: who falls behind the median of the others at the same epoch, and that it is kept in a file."""

from __future__ import annotations

import json
import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pipeline.training.loop.metrics_log import FEWEST, MedianStop, Pruned, falls_behind
from pipeline.training.prepared import ModelFolder

Figures = dict[int, float]
curves = st.dictionaries(st.integers(1, 6), st.floats(-10, 10), max_size=6)


def flat(value: float, epochs: int = 5) -> Figures:
    return dict.fromkeys(range(1, epochs + 1), value)


ONE, THREE = [flat(1.0)] * 3, [flat(1.0), flat(2.0), flat(3.0)]
NAN = {1: math.nan, 2: math.nan}
CASES: list[
    tuple[str, Figures, list[Figures], int, bool, float | None]
] = [  # grace, lower is better, what it is behind
    ("the worse half ends", flat(2.5), THREE, 1, True, 2.0),
    ("the median goes on", flat(2.0), THREE, 1, True, None),
    ("higher is better", flat(1.5), THREE, 1, False, 2.0),
    ("the better half", flat(2.5), THREE, 1, False, None),
    ("within the grace", flat(9.0, 3), ONE, 4, True, None),
    ("after the grace", flat(9.0, 4), ONE, 4, True, 1.0),
    ("too few others", flat(9.0), ONE[: FEWEST - 1], 1, True, None),
    ("no figure of its own", {}, ONE, 1, True, None),
    ("others were as bad at that epoch", flat(5.0, 2), [{**flat(5.0, 2), 3: 0.1}] * 3, 1, True, None),
    ("others ended before", flat(5.0, 3), [flat(0.1, 2)] * 3, 1, True, None),
    ("its best counts", {1: 0.5, 2: 4.0}, ONE, 1, True, None),
    ("its last is its best", {1: 4.0, 2: 0.5}, ONE, 1, True, None),
    ("its best where higher is better", {1: 4.0, 2: 0.5}, ONE, 1, False, None),
    ("no number is the worst", NAN, ONE, 1, True, 1.0),
    ("no number is the worst where higher is better", NAN, ONE, 1, False, 1.0),
    ("others without a number", flat(9.0, 1), [{1: math.nan}] * 3, 1, True, None),
]


def test_who_falls_behind_the_median_of_the_others_at_the_same_epoch_ends() -> None:
    for what, own, others, grace, lower, behind in CASES:
        assert falls_behind(own, others, grace=grace, lower=lower) == behind, what


@given(curves, st.lists(curves, max_size=6), st.integers(1, 6))
def test_lower_and_higher_mirror_each_other(own: Figures, others: list[Figures], grace: int) -> None:
    turned = [{epoch: -value for epoch, value in figures.items()} for figures in (own, *others)]
    low = falls_behind(own, others, grace=grace, lower=True)
    high = falls_behind(turned[0], turned[1:], grace=grace, lower=False)
    assert (low is None) == (high is None)
    assert low is None or high is None or low == -high


def epoch_line(epoch: int, loss: float | None) -> str:
    zero = dict.fromkeys(
        ("step", "steps", "learning_rate", "items", "items_per_s", "allocated_bytes", "reserved_bytes",
         "peak_bytes", "ooms", "micro_batches", "rejected", "cropped", "wall_s"), 1,
    )  # fmt: skip
    batch = {"least": 1, "mean": 1, "most": 1}
    return json.dumps({**zero, "epoch": epoch, "loss": {}, "batch": batch, "validation": {"loss": loss}}) + "\n"


def test_what_is_decided_is_a_file_that_holds_until_training_goes_on_beyond_it(tmp_path: Path) -> None:
    folders = [ModelFolder(tmp_path / f"model-{number}") for number in range(4)]
    for folder, losses in zip(folders, ([9.0, None], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]), strict=True):
        folder.path.mkdir()
        lines = [epoch_line(epoch, loss) for epoch, loss in enumerate(losses, 1)]
        (folder.path / "epochs.jsonl").write_text("".join(lines) + '{"torn')
    mine, *others = folders
    pruning = MedianStop(mine, others, "loss", lower=True, grace=2)
    assert Pruned.read(mine, 2) is None
    why = pruning.decide(2)
    assert "median of the others at epoch 2, 2" in why
    assert pruning.decide(1) == why  # its last checkpoint may be older than its figures
    assert Pruned.read(mine, 3) is None
    told = Pruned.read(mine, 2)
    assert told is not None
    assert told.epoch == 2
    assert MedianStop(others[0], [mine, *others[1:]], "loss", lower=True, grace=2).decide(2) == ""
    for torn in ("{", "[]", "{}", '{"epoch": "2"}'):
        mine.pruned.write_text(torn)
        assert Pruned.read(mine, 2) is None
