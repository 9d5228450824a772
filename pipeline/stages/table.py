"""The table of stages: all stages, those that a configuration needs, and whether a run may continue after one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline.command_line import Command, quoted
from pipeline.dataset.reader_items import is_reader
from pipeline.errors import CacheDamaged, ConfigError, DataError, JobFailed, PipelineError
from pipeline.stage_names import StageName
from pipeline.stages.apply import EvaluateStage, PredictStage
from pipeline.stages.embed import EmbedStage
from pipeline.stages.graph import GraphStage
from pipeline.stages.regenerate import RegenerateStage
from pipeline.stages.scan import ReaderScanStage, ScanStage
from pipeline.stages.script import ScriptStage
from pipeline.stages.train import TrainStage
from pipeline.stages.validate import ValidateStage
from pipeline.store.cache_folder import RECIPES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.stages.stage import Judged, Stage

WORKFLOW: tuple[Stage, ...] = (
    ScanStage(),
    EmbedStage(),
    GraphStage(),
    TrainStage(),
    EvaluateStage(),
    PredictStage(),
    ValidateStage(),
    RegenerateStage(),
)
ALL = "all"  # means: all stages
STAGES: Mapping[str, Stage] = {row.name: row for row in WORKFLOW}  # under most configurations


def known_stage(name: str) -> Stage:
    """Return the stage of that name as in the table; raise ConfigError for an unknown name."""
    if name in STAGES:
        return STAGES[name]
    known = ", ".join(STAGES)
    raise ConfigError(f"unknown stage {name!r} (known: {known})", where="--stage", remedy=Command.of("submit --help"))


def stage(name: str, config: Config) -> Stage:
    """Return the stage of that name, in the variant for the configured data set and code."""
    if name == StageName.SCAN and is_reader(config):
        return ReaderScanStage()
    is_script = name == StageName.TRAIN and config.train.command is not None
    return ScriptStage() if is_script else known_stage(name)


def up_to(name: str, config: Config) -> list[str]:
    """Return a stage (or all) and those it needs, in order; for a reader's items without stages of structures."""
    if name == ALL:
        return everything(config)
    row, by_reader = known_stage(name), is_reader(config)
    if by_reader and not row.of_entries:
        what = f"stage {name} applies to structures, not to a reader's items"
        raise ConfigError(what, where="data.source is reader", remedy=Command.submit("scan", then="   (or train)"))
    return [*(needed for needed in row.needed(config) if STAGES[needed].of_entries or not by_reader), name]


def regenerated(config: Config, kinds: Collection[str] | None) -> list[str]:
    """Return the stages that rebuild records of these kinds (None: all), and the one that reports on them.

    The scan is always among them, because the others depend on it.
    """
    whole = kinds is None or RECIPES in kinds
    rows = [STAGES[name] for name in everything(config) if STAGES[name].kinds]
    made = [row.name for row in rows if whole or row.name == StageName.SCAN or {*row.kinds} & {*(kinds or ())}]
    return [*made, StageName.REGENERATE]


def everything(config: Config) -> list[str]:
    """Return the stages of `submit all` under a configuration, in order."""
    names: list[str] = [row.name for row in WORKFLOW if row.is_for(config) and row.wanted(config)]
    if config.train.predict.for_training and {StageName.PREDICT, StageName.TRAIN} <= {*names}:
        names.remove(StageName.PREDICT)
        names.insert(names.index(StageName.TRAIN), StageName.PREDICT)
    return names


def untrained(name: str, config: Config) -> str:
    """Say where `submit all` stops without a `train.task`; empty if it trains or the data cannot be trained on."""
    if name != ALL or StageName.TRAIN in everything(config) or not STAGES[StageName.TRAIN].is_for(config):
        return ""
    return f"train.task is not set: stopping after {everything(config)[-1]}"


def too_many(rejected: int, total: int, fraction: float) -> bool:
    """Tell whether more items are rejected than a fraction allows; 29 of 100 is not more than 0.29."""
    return rejected > math.floor(fraction * total + 1e-6)


def with_typed_command(error: PipelineError, typed: Command) -> PipelineError:
    """Add the options of the typed command to a remedy that submits again."""
    if error.command is not None and error.command.stage:
        command = typed.with_settings(*error.command.settings, then=error.command.then)
        error.next = replace(command, before=error.command.before)
    return error


@dataclass(frozen=True, slots=True)
class StageTrouble:
    """The failed tasks of a stage, the reasons, and the command that helps."""

    lines: Sequence[str]
    waiting: int  # items that an earlier stage, not in this run, must do first
    again: Command  # as typed
    remedy: Command | str
    rejected: int = 0  # items, by the tasks' reports: a stopped task has not stored them all
    is_damage: bool = False  # of the cache


def refuse_or_warn(
    stage: Stage, project: Project, folder: RunFolder, judged: Judged, trouble: StageTrouble
) -> list[str]:
    """Raise if the run cannot continue with the result of a stage; return its warnings."""
    data = project.config.data
    total, kept = judged.items + judged.undone + judged.unnamed, judged.items - judged.accepted
    rejected = max(kept, min(trouble.rejected, kept + judged.undone))
    if too_many(rejected, total, data.max_rejected_fraction):
        unseen = kept + judged.undone - rejected
        not_seen = f"; {unseen:,} were not checked" if unseen else ""
        what = (
            f"{rejected:,} of {total:,} {stage.unit}s cannot be used, more than data.max_rejected_fraction"
            f" ({data.max_rejected_fraction:.1%}) allows{not_seen}"
        )
        enough = math.ceil(100 * rejected / total) / 100  # too_many() tolerates the rounding
        again = trouble.again.with_settings(("data.max_rejected_fraction", str(enough)))
        less = f"less {quoted(folder.rejected)}"
        more = replace(again, before=f"{less}   or   ")
        raise DataError(what, where=str(data.path), remedy=more if rejected < total else less)
    if judged.undone:
        unscanned = f" ({trouble.waiting:,} of them were not scanned before)" if trouble.waiting else ""
        what = f"{judged.undone:,} of {total:,} {stage.unit}s are not done, such as {judged.first_undone}{unscanned}"
        kind = CacheDamaged if trouble.is_damage else JobFailed
        lines = [what, *trouble.lines] if stage.counts_items or not trouble.lines else trouble.lines
        raise kind("\n".join(lines).lstrip(), where=folder.name, remedy=trouble.remedy)
    if judged.accepted == 0 and (total or not stage.may_be_empty) and project.only.is_all:
        remedy = Command.of("status", folder.name, then=f"   (all reasons: {folder.rejected})")
        raise DataError(f"none of {total} {stage.unit}s can be used", where=str(data.path), remedy=remedy)
    return stage.check(project, folder, judged)
