"""A search as its ledger tells of it: its status, and its charts in the report."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.schema_train import SweepSection
from pipeline.journal.run_status import StatusReader
from pipeline.records import EventKind
from pipeline.report.run_text import trials
from pipeline.views.search_charts import search_charts
from tests.journal.ledgers import Told

SPACE = {"train.learning_rate": {"low": 1e-4, "high": 1e-1, "log": True}, "train.clip": (None, 0.5)}
VALUES = (3.0, 2.0, None, 2.5, 1.0)  # of a failed trial: none


def test_a_search_has_its_best_trial_and_a_chart_of_all_and_of_each_setting(tmp_path: Path) -> None:
    told = Told(tmp_path, "train", 0)
    search = {"trials": 9, "monitor": "loss", "lower": True}
    told.supervisor.emit(EventKind.STAGE_SUBMITTED, stage="train", tasks=0, search=search)
    for number, value in enumerate(VALUES):
        state = "failed" if value is None else "pruned" if number == 3 else "done"
        settings = {"train.learning_rate": 10.0 ** -(number % 4 + 1), "train.clip": (None, 0.5)[number % 2]}
        trial = {"stage": "train", "number": number, "name": f"trial {number}", "settings": settings}
        for _ in range(2):  # two visits ask for it, and it counts once
            told.supervisor.emit(EventKind.TRIAL_ASKED, **trial, counts={"items": 4, "missing": 4}, job={})
        told.supervisor.emit(EventKind.TRIAL_ENDED, **trial, state=state, value=value, epochs=2)
    told.supervisor.emit(EventKind.TRIAL_ASKED, **{**trial, "number": 5}, counts={}, job={})
    stage = StatusReader(told.folder).read().stages["train"]
    assert (stage.items, len(stage.asked)) == (4 * len(VALUES), len(VALUES) + 1)
    assert stage.best_trial is not None
    assert (stage.best_trial.number, stage.best_trial.value) == (4, 1.0)
    assert list(trials(stage)) == ["5/9 trials", "best loss 1"]

    charts = search_charts(stage, SweepSection(search="optuna", space=SPACE))
    assert len(charts) == 1 + len(SPACE)
    dots, pruned, best = charts[0].lines
    assert [point for point, _ in dots.dots] == [(0.0, 3.0), (1.0, 2.0), (4.0, 1.0)]
    assert [point for point, _ in pruned.dots] == [(3.0, 2.5)]
    assert best.points[-1] == (4.0, 1.0)
    assert [label for _, label in charts[2].x.ticks] == ["null", "0.5"]
