"""Tasks that share the rows of a prediction: each row is one task's, and one of them writes what all gave."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.training.evaluating.evaluator import ApplyResult
from pipeline.training.evaluating.results import _of_all_tasks
from pipeline.training.prepared import RowShare, cut_rows


@given(st.data(), st.integers(1, 40), st.integers(1, 5), st.integers(1, 9))
def test_every_row_is_of_one_task_and_an_items_rows_stay_together(
    data: st.DataObject, items: int, step: int, tasks: int
) -> None:
    rows = items * step
    done = data.draw(st.sets(st.integers(0, rows - 1), max_size=rows - 1))
    shares = cut_rows(np.array(sorted(done), np.int64), rows, step, tasks)
    assert [row for first, stop in shares for row in range(first, stop)] == list(range(rows))
    assert all(first % step == 0 for first, _ in shares)
    left = [sum(row not in done for row in range(first, stop)) for first, stop in shares]
    assert 1 <= len(shares) <= tasks
    assert max(left) <= (rows - len(done)) / len(shares) + 2 * step or len(shares) == 1


def finished(folder: Path, task: int, run: str = "run") -> ApplyResult | None:
    """Return what a task that has done its rows is to write."""
    said: list[str] = []
    job: Any = SimpleNamespace(share=RowShare(0, 1, task, 3, run), say=said.append)
    rejected, examples = {"parse_error": task}, {"parse_error": f"item {task}"}
    evaluation: Any = None
    chosen: Any = None
    return _of_all_tasks(job, ApplyResult(evaluation, chosen, folder, "of", rejected, examples))


def test_the_last_of_the_tasks_writes_what_all_of_them_gave(tmp_path: Path) -> None:
    assert finished(tmp_path, 2) is None
    assert finished(tmp_path, 1) is None
    whole = finished(tmp_path, 0)
    assert whole is not None
    assert whole.rejected == {"parse_error": 3}
    assert whole.examples == {"parse_error": "item 0"}
