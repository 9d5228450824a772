"""The page of a run: what is known of it is gathered, shown by `report.html`, and laid into the run's folder.

It is a picture of the ledger, made anew whenever somebody asks and by the supervisor while the run goes on; nothing
depends on it. Whatever cannot be told becomes a note on the page.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.load import from_resolved
from pipeline.errors import ConfigError, PipelineError
from pipeline.journal.active_runs import run_as_shown
from pipeline.journal.ledger import LedgerReader
from pipeline.journal.run_status import RunStatus
from pipeline.runs.views.page_facts import (
    WorkOverTime,
    bounded,
    failures_over_time,
    paces,
    rejection_facts,
    run_facts,
    running_over_time,
    span_of,
    stage_facts,
    trouble_facts,
)
from pipeline.training.loop.metrics_log import STEP, read_epochs, read_figures
from pipeline.training.prepared import ModelFolder, Prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import StageStatus
    from pipeline.records import Event
    from pipeline.training.loop.metrics_log import Epoch

log = logging.getLogger(__name__)

EVERY_S = 30.0
COST_SHARE = 20  # a page that takes long to make is made as much less often
KINDS_SHOWN = 30


class Page:
    """The page of one run, made from what its reader hears."""

    def __init__(self, folder: RunFolder, config: Config) -> None:
        self.folder, self.config, self.pace = folder, config, WorkOverTime()
        self._next = time.monotonic() + EVERY_S

    def take(self, event: Event) -> None:
        """Take one event into account; the status is told of it by whoever reads it."""
        self.pace.take(event)

    def facts(self, status: RunStatus, told: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return everything that the page says; `told` is what the queue says besides."""
        now, notes = time.time(), list[str]()
        begun, end = span_of(status, now)

        def asked(what: str, answer: Callable[[], Any]) -> Any:
            try:
                return answer()
            except (PipelineError, OSError, ValueError, KeyError, TypeError) as error:
                notes.append(f"{what}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                return None

        stages = [stage_facts(stage, now) | _of_queue(told, stage.name) for stage in status.in_order()]
        return {
            "run": run_facts(self.folder, status, now) | _of_run(told),
            "stages": stages,
            "time": {
                "from": begun,
                "to": end,
                "at_once": running_over_time(status, begun, end),
                "failures": failures_over_time(status, begun, end),
                "pace": paces(self.pace.stages, end),
            },
            "troubles": trouble_facts(status),
            "rejections": asked("rejections", lambda: rejection_facts(self.folder, status)),
            "training": asked("training", lambda: self._training(status)),
            "efficiency": asked("efficiency", lambda: self._efficiency(status)) or [],
            "cache": asked("cache", self._cache),
            "notes": notes,
        }

    def _training(self, status: RunStatus) -> dict[str, Any] | None:
        if "train" not in (*status.planned, *status.stages):
            return None
        return training_facts(self.folder, self.config, status.stages.get("train"))

    def _efficiency(self, status: RunStatus) -> list[dict[str, Any]]:
        from pipeline.runs.views.efficiency import stage_uses

        return [one.to_json() for one in stage_uses(self.folder, status)]

    def _cache(self) -> dict[str, Any]:
        from pipeline.runs.upkeep.cache_use import holdings

        told = holdings(self.config).to_json()
        told["kinds"] = told["kinds"][:KINDS_SHOWN]
        found: dict[str, Any] = bounded({name: value for name, value in told.items() if name != "users"})
        return found

    def html(self, status: RunStatus, told: Mapping[str, Any] | None = None) -> str:
        """Return the page as text."""
        from pipeline.report.html.html_page import page

        return page(self.facts(status, told))

    def refresh(self, status: RunStatus, *, at_once: bool = False) -> None:
        """Lay the page into the run's folder if it is due; that it cannot be made is no reason for a run to fail."""
        begun = time.monotonic()
        if not at_once and begun < self._next:
            return
        try:
            write_page(self.folder.report, self.html(status))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a picture, the run goes on
            log.warning("%s is not up to date: %s: %s", self.folder.report, type(error).__name__, error)
        took = time.monotonic() - begun
        self._next = begun + took + max(EVERY_S, COST_SHARE * took)


def of_run(folder: RunFolder) -> Page:
    """Return the page of a run, with the configuration under which it began."""
    return Page(folder, from_resolved(folder.config.read_text(), str(folder.config)))


def renew(folder: RunFolder) -> None:
    """Lay a new page into the folder of a run that no supervisor looks after any more, if that can be done."""
    try:
        page, status = of_run(folder), RunStatus(folder.name)
        _hear(LedgerReader(folder), page, status)
    except (PipelineError, OSError) as error:
        log.warning("%s is not up to date: %s", folder.report, error)
        return
    page.refresh(status, at_once=True)


def page_now(folder: RunFolder) -> tuple[Page, RunStatus, dict[str, Any]]:
    """Return the page of a run, how the run stands, and what the queue says of it."""
    page, status, reader = of_run(folder), RunStatus(folder.name), LedgerReader(folder)
    _hear(reader, page, status)
    told = run_as_shown(folder, status, socket.gethostname(), lambda: _hear(reader, page, status))
    return page, status, told


def _hear(reader: LedgerReader, page: Page, status: RunStatus) -> None:
    """Take the news of a ledger into account."""
    for event in reader.fresh():
        status.apply(event)
        page.take(event)


def write_page(path: Path, text: str) -> None:
    """Write a page aside and move it into place; it names files and people, so it is the user's alone."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "w", encoding="utf-8", errors="backslashreplace") as out:
            out.write(text)
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink()


def write_page_where_asked(path: Path, text: str) -> None:
    """Write a page where somebody wants it."""
    try:
        write_page(path, text)
    except OSError as error:
        what, there = f"the page cannot be written: {error.strerror or error}", path.parent.exists()
        remedy = "pipeline report --html FILE   (where you may write)" if there else f"mkdir -p {path.parent}"
        raise ConfigError(what, where=str(path), remedy=remedy) from error


def _of_queue(told: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """Return what the queue says of a stage."""
    stages = told["stages"] if told else ()
    return {"waits_for": bounded(next((one["waits_for"] for one in stages if one["name"] == name), []))}


def _of_run(told: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return who looks after the run, by the queue."""
    return {name: bounded(told[name]) if told else "" for name in ("supervisor", "trouble")}


TRAIN = "train"
POINTS = 500  # of a curve
SERIES = 16  # curves of a kind: terms of a loss, metrics
EPOCH_ROWS = 100
BUNDLES = 50
# As `training.bundles` names them, which cannot be imported without torch: a supervisor has no room for that.
_BUNDLE = re.compile(r"step-(?P<step>\d{8,})-(?P<kind>[a-z]+)-rank-(?P<rank>\d+)(?:-\d+)?")


def training_facts(folder: RunFolder, config: Config, stage: StageStatus | None) -> dict[str, Any] | None:
    """Return what is known of the training of a run; None where it has none that tells."""
    prepared = training_plan_of(folder)
    if prepared is None:
        return None
    made = ModelFolder(config.train.models / prepared.name)
    epochs = read_epochs(made.path)
    on_gpu = bool(stage and any(job.gpus for job in stage.jobs.values())) or bool(config.cluster.train.gpus)
    settings = config.train.validation
    return {
        "model": prepared.name,
        "folder": str(made.path),
        "monitor": settings.monitor,
        "lower_is_better": settings.lower_is_better,
        "on_gpu": on_gpu,
        "planned": _planned(prepared),
        "epochs": [_epoch(one) for one in thinned(epochs, POINTS)],
        "rows": [_epoch(one) for one in epochs[-EPOCH_ROWS:]],
        "known_epochs": len(epochs),
        "losses": _names(one.loss for one in epochs),
        "metrics": _names(one.validation for one in epochs),
        "steps": _steps(read_figures(made.path)),
        "bundles": bundles_in(made.bundles),
    }


def training_plan_of(folder: RunFolder) -> Prepared | None:
    """Return the plan that a run's training follows, if it has one that this version can read."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return Prepared.from_json(json.loads(folder.plan(TRAIN).read_text()))
    return None


def _planned(prepared: Prepared) -> dict[str, Any]:
    """Return what was decided before: of each stretch of epochs the memory, and up to which epoch it goes."""
    stretches, last = [], 0
    for one in prepared.stretches:
        last += one.epochs
        told = {name: getattr(one, name) for name in ("name", "live_bytes", "reserved_bytes", "budget_bytes")}
        stretches.append({"until": last, **told})
    return {
        "epochs": prepared.epochs,
        "stretches": stretches,
        "limit_bytes": prepared.limit_bytes,
        "margin": prepared.margin,
        "mem_bytes": prepared.mem_bytes,
        "mem_why": prepared.mem_why,
        "ranks": prepared.ranks,
        "precision": prepared.precision,
        "remedies": list(prepared.remedies),
        "skipped": len(prepared.skipped),
        "step_s": prepared.step_s,
    }


def _epoch(one: Epoch) -> dict[str, Any]:
    """Return what a row and the curves show of an epoch."""
    told = one.to_json()
    for name in ("loss", "validation"):
        told[name] = dict(list(told[name].items())[:SERIES])
    return told


def _names(told: Iterator[Mapping[str, Any]] | Any) -> list[str]:
    """Return the names that occur, in the order in which they came."""
    return list(dict.fromkeys(chain.from_iterable(told)))


def _steps(figures: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return each figure that was noted every few steps as a curve."""
    names = [name for name in _names(figures) if name != STEP][: 2 * SERIES]
    curves = {name: [(one[STEP], one[name]) for one in figures if one.get(name) is not None] for name in names}
    return {name: thinned(curve, POINTS) for name, curve in curves.items() if curve}


def thinned(values: Sequence[Any], most: int) -> list[Any]:
    """Return evenly spaced ones of many values; the first and the last are among them."""
    if len(values) <= most:
        return list(values)
    return [values[place * (len(values) - 1) // (most - 1)] for place in range(most)]


def bundles_in(folder: Path) -> dict[str, Any]:
    """Return the steps that left what it takes to run them again, by what went wrong."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    found = [match for match in map(_BUNDLE.fullmatch, names) if match]
    rows = [
        {"step": int(one["step"]), "kind": one["kind"], "rank": int(one["rank"]), "path": str(folder / one[0])}
        for one in found[-BUNDLES:]
    ]
    return {"rows": rows, "more": len(found) - len(rows)}
