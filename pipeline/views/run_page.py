"""The HTML report of a run: what its ledger and its model's folder say, given to one template.

A part that cannot be read becomes a note in the report.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from functools import reduce
from itertools import islice
from operator import getitem
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.command_line import quoted
from pipeline.config.load import read_resolved
from pipeline.config.masking import without_secrets_in
from pipeline.config.schema import LEAVES, value_at
from pipeline.errors import ConfigError, PipelineError
from pipeline.files import what_is_no_file, write_whole
from pipeline.journal.budget import spending_of_run
from pipeline.journal.run_view import view
from pipeline.report.html.html_page import render
from pipeline.views import page_charts, page_text
from pipeline.views.compared_models import compared_data, comparison, models_of_run
from pipeline.views.efficiency import stage_uses
from pipeline.views.run_times import times_of
from pipeline.views.training_curves import TRAIN, training_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import StageStatus
    from pipeline.journal.run_view import RunView
    from pipeline.views.compared_models import Comparison

_T = TypeVar("_T")
REJECTIONS = 200


def page_now(folder: RunFolder) -> tuple[str, RunView]:
    """Return the HTML report of a run as it is now, and the state of the run."""
    run = view(folder, deep=True)
    return render("page.html", **page_data(folder, run)), run


def page_data(folder: RunFolder, run: RunView) -> dict[str, Any]:
    """Return everything that the HTML report of a run shows, by the names that its template uses."""
    config, status, notes = read_resolved(folder.config), run.status, list[str]()

    def or_note(name: str, read: Callable[[], _T]) -> _T | None:
        try:
            return read()
        except (PipelineError, OSError, ValueError, KeyError, TypeError) as error:
            notes.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            return None

    stages, now = status.in_order(), time.time()
    times = times_of(status, now)
    training = or_note("training", lambda: training_of(folder, config, status.stages.get(TRAIN)))
    compared = or_note("points", lambda: _points(folder, config))
    uses = or_note("efficiency", lambda: stage_uses(folder, status)) or []
    failures = [(stage, attempt) for stage in stages for attempt in stage.failures]
    causes = Counter((stage.name, attempt.cause.value) for stage, attempt in failures)
    return {
        "run": run,
        "status": status,
        "stages": stages,
        "folder": folder.path,
        "made_at": now,
        "again": or_note("command", lambda: folder.again.read_text().strip()) or "",
        "times": times,
        "failures": failures,
        "causes": [(*what, count) for what, count in causes.most_common()],
        "survivors": sum(stage.task(attempt.task).good for stage, attempt in failures),
        "open_tasks": sum(bool(task.ended) and task.open for stage in stages for task in stage.work.values()),
        "rejected": list(rejected_by_reason(stages)),
        "rejections": or_note("rejections", lambda: first_rejections(folder.rejected)) or ([], 0),
        "rejections_file": folder.rejected,
        "training": training,
        "uses": uses,
        "account": or_note("budget", spending_of_run(folder).account),
        "settings": changed_settings(config),
        "charts": page_charts,
        "text": page_text,
        "notes": notes,
        **(compared_data(compared) if compared else {"compared": None}),
    }


def _points(folder: RunFolder, config: Config) -> Comparison | None:
    models = models_of_run(folder) if config.train.sweep.points else []
    return comparison(models) if models else None


def changed_settings(config: Config) -> dict[str, str]:
    """Return the settings that differ from their defaults, secrets masked."""
    plain = config.model_dump(mode="json")
    changed = {".".join(key): key for key, info in LEAVES.items() if value_at(config, key) != info.default}
    return {name: f"{without_secrets_in(reduce(getitem, key, plain), name)}" for name, key in changed.items()}


def rejected_by_reason(stages: Sequence[StageStatus]) -> Iterator[tuple[str, str, int, str]]:
    """Yield reason, stage, items and an example: of each census that differs from the one before, or so far."""
    before: Mapping[str, int] = {}
    for stage in stages:
        if not stage.census:
            yield from ((f"{reason} (so far)", stage.name, items, "") for reason, items in stage.reasons.most_common())
        elif (rejected := stage.census.get("rejected")) and rejected != before:
            examples, before = stage.census.get("examples", {}), rejected
            yield from ((reason, stage.name, items, examples.get(reason, "")) for reason, items in rejected.items())


def first_rejections(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the first items of a list of rejections, and how many more it has."""
    if not file.exists():
        return [], 0
    with file.open("rb") as lines:
        first = [json.loads(line) for line in islice(lines, REJECTIONS)]
        return first, sum(block.count(b"\n") for block in iter(lambda: lines.read(1 << 20), b""))


def write_page(path: Path, text: str) -> None:
    """Write a report to a path that the user named, readable as the umask says."""
    try:
        if other := what_is_no_file(path):
            raise OSError(f"is {other}, expected a file")
        write_whole(path, text.encode(errors="backslashreplace"))
    except OSError as error:
        what, there = f"cannot write the HTML report: {error.strerror or error}", path.parent.exists()
        remedy = "name a file that you may write to" if there else f"mkdir -p {quoted(path.parent)}"
        raise ConfigError(what, where=str(path), remedy=remedy) from error
