"""How a stage that falls short is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.command_line import Command
from pipeline.errors import DataError, JobFailed
from pipeline.stages.stage import Judged
from pipeline.stages.table import STAGES, StageTrouble, refuse_or_warn


def test_work_that_is_not_done_fails_the_job_and_too_many_rejections_blame_the_data() -> None:
    def judged(stage: str, found: Judged, **more: int) -> None:
        data = SimpleNamespace(max_rejected_fraction=0.05, path="x")
        project: Any = SimpleNamespace(config=SimpleNamespace(data=data))
        folder: Any = SimpleNamespace(name="run", rejected="rejected.jsonl")
        trouble = StageTrouble([], 0, Command.submit(stage), Command.submit(stage), **more)
        refuse_or_warn(STAGES[stage], project, folder, found, trouble)

    for stage in ("train", "scan"):
        with pytest.raises(JobFailed, match="11 of 12"):
            judged(stage, Judged(items=1, undone=11, first_undone="it"))
    with pytest.raises(DataError, match="3 of 12"):  # whatever its tasks had kept by then
        judged("graph", Judged(2, {"no_contacts": 1}, undone=10), rejected=3)
