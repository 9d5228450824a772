"""The stages as a table: what each needs, what is missing of it, how it is done, how it is judged."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

from pipeline.config.schema_cluster import TrainResources
from pipeline.errors import ConfigError, DataError, JobFailed, PipelineError
from pipeline.records import Reason, Tell
from pipeline.runs.dataset import reader_items, worklist
from pipeline.runs.dataset.reader_items import is_reader
from pipeline.runs.dataset.worklist import Halve
from pipeline.runs.model import prepare
from pipeline.runs.workflow import (
    embed_stage,
    evaluate_stage,
    graph_stage,
    model_use,
    predict_stage,
    reader_stage,
    regenerate_stage,
    scan_stage,
    script_stage,
    train_stage,
    validate_stage,
)
from pipeline.store.cache_folder import RECIPES
from pipeline.structures.inventory import plain_recipe

if TYPE_CHECKING:
    from typing import Any

    from pipeline.config.schema import Config
    from pipeline.config.schema_cluster import StageResources
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.runs.dataset.worklist import Found


class Judged(Protocol):
    """What a stage has made, by the content of the store."""

    @property
    def items(self) -> int:
        """How many items were judged, accepted and rejected."""

    @property
    def accepted(self) -> int:
        """How many items can be used."""

    @property
    def undone(self) -> int:
        """How many items the store does not have everything of."""

    @property
    def first_undone(self) -> str:
        """The id of one of them."""

    @property
    def unnamed(self) -> int:
        """How many further items it does not have everything of, which the list of the run does not name."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""


Survey: TypeAlias = "Callable[[Project, RunFolder | None, int], Found]"
Work: TypeAlias = "Callable[[Project, RunFolder, int, Tell, tuple[int, int]], Generator[Reason | None, None, None]]"
Judge: TypeAlias = "Callable[[Project, RunFolder, float], Judged]"
Check: TypeAlias = "Callable[[Project, RunFolder, Any], list[str]]"


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the workflow."""

    name: str
    inspect: Callable[[Project], object]  # raise when what the stage reads cannot be used as it stands
    survey: Survey  # what is missing, in tasks; their number depends on how many can run at once
    mem_bytes: Callable[[Project], int]  # what `mem: auto` asks for
    gpu_bytes: Callable[[Project], int]  # what a card must have at least
    work: Work  # do one task, or one process's part of it, yielding what became of each thing
    recipe: Callable[[Project], Mapping[str, Any]]  # by which its records are made
    judge: Judge  # look at the content of the store, and say what the stage has made
    halve: Halve  # cut one task's share in two
    check: Check  # raise on what forbids going on, and return what deserves a warning
    kinds: tuple[str, ...]  # of records whose index is brought up to date afterwards
    needs: tuple[str, ...] = ()  # stages that must have run before
    of_sequences: bool = True  # whether it has anything to do for bare sequences
    of_entries: bool = True  # and for what a reader gives, which is no structure
    process_per_gpu: bool = False
    together: bool = False  # its processes are ranks of one task, on as many nodes as it has
    counts_items: bool = True  # else what it works through are parts of items
    wanted: Callable[[Config], bool] = lambda _config: True  # whether `all` means it too
    may_be_empty: bool = False  # no item at all is said, and no failure
    only_looks: bool = False  # it leaves the records of the cache as they are
    has_tasks: bool = True  # else it only judges what the stages before it have made

    def resources(self, config: Config) -> StageResources | TrainResources:
        """Return what the configuration gives a task of this stage."""
        name = self.name if self.has_tasks else scan_stage.NAME
        resources: StageResources | TrainResources = getattr(config.cluster, name)
        return resources

    def processes(self, project: Project) -> int:
        """Return how many processes a task consists of."""
        resources = self.resources(project.config)
        if isinstance(resources, TrainResources):
            return resources.nodes * script_stage.starts_on_node(project.config, self.name)
        return max(1, resources.gpus) if self.process_per_gpu else 1


def too_many(rejected: int, total: int, fraction: float) -> bool:
    """Say whether more items are rejected than a fraction allows; 29 of 100 is not more than 0.29."""
    return rejected > math.floor(fraction * total + 1e-6)


def with_setting(command: str, key: str, value: str) -> str:
    """Return a command with one setting more, in the place of what it said of that key."""
    return f"{re.sub(rf' --set {re.escape(key)}=[^ ]*', '', command)} --set {key}={value}"


def as_typed(error: PipelineError, typed: str) -> PipelineError:
    """Let a remedy that submits again begin with what was typed, so that nothing of it is lost."""
    head = re.match(r"pipeline submit --stage \w+((?: --set \S+=\S+)*)", error.remedy)
    if head is not None:
        for setting in re.findall(r" --set (\S+?)=(\S+)", head[1]):
            typed = with_setting(typed, *setting)
        error.remedy = typed + error.remedy[head.end() :]
    return error


@dataclass(frozen=True, slots=True)
class Trouble:
    """How tasks of a stage failed, and what helps."""

    lines: Sequence[str]
    waiting: int  # items that an earlier stage, which was not asked for, has still to do
    again: str  # the command that was typed
    remedy: str


def check(stage: Stage, project: Project, folder: RunFolder, judged: Judged, trouble: Trouble) -> list[str]:
    """Raise when what a stage has made forbids going on; return what deserves a warning."""
    data = project.config.data
    total, rejected = judged.items + judged.undone + judged.unnamed, judged.items - judged.accepted
    if too_many(rejected, total, data.max_rejected_fraction):
        rest = f"; {judged.undone:,} were not looked at any more" if judged.undone else ""
        what = (
            f"{rejected:,} of {total:,} items cannot be used, more than data.max_rejected_fraction"
            f" ({data.max_rejected_fraction:.1%}) allows{rest}"
        )
        enough = math.ceil(100 * rejected / total) / 100  # too_many() forgives what rounding does to it
        again = with_setting(trouble.again, "data.max_rejected_fraction", str(enough))
        raise DataError(what, where=str(data.path), remedy=f"less {folder.rejected}   or   {again}")
    if judged.undone:
        unscanned = f" ({trouble.waiting:,} of them were not scanned before)" if trouble.waiting else ""
        what = f"{judged.undone:,} of {total:,} items are not done, such as {judged.first_undone}{unscanned}"
        raise JobFailed("\n".join([what, *trouble.lines]), where=folder.name, remedy=trouble.remedy)
    if judged.accepted == 0 and (total or not stage.may_be_empty) and project.only.is_all:
        remedy = f"pipeline status {folder.name}   (every reason: {folder.rejected})"
        raise DataError(f"none of {total} items can be used", where=str(data.path), remedy=remedy)
    return stage.check(project, folder, judged)


P = ParamSpec("P")
T = TypeVar("T")
OfProject: TypeAlias = "Callable[Concatenate[Project, P], T]"


def _either(task: OfProject[P, T], script: OfProject[P, T]) -> OfProject[P, T]:
    """Return what does one thing for a task and another for a script, whichever a configuration names."""

    def do(project: Project, /, *rest: P.args, **named: P.kwargs) -> T:
        return (script if script_stage.is_script(project.config) else task)(project, *rest, **named)

    return do


def _of(structures: OfProject[P, T], entries: OfProject[P, T]) -> OfProject[P, T]:
    """Return what does one thing for structures and another for what a reader gives, whichever the data set is of."""

    def do(project: Project, /, *rest: P.args, **named: P.kwargs) -> T:
        return (entries if is_reader(project.config) else structures)(project, *rest, **named)

    return do


WORKFLOW = (
    Stage(
        name=scan_stage.NAME,
        inspect=_of(lambda project: next(worklist.list_items(project), None), reader_items.refuse_unreadable),
        survey=_of(scan_stage.survey, reader_stage.survey),
        mem_bytes=_of(scan_stage.mem_bytes, reader_stage.mem_bytes),
        gpu_bytes=lambda _project: 0,
        work=_of(scan_stage.work, reader_stage.work),
        recipe=_of(lambda project: plain_recipe(project.recipe), reader_stage.recipe),
        judge=_of(scan_stage.judge, reader_stage.judge),
        halve=lambda folder, shard: worklist.halve_lines(folder.todo(scan_stage.NAME), shard),
        check=_of(scan_stage.check, reader_stage.check),
        kinds=("scan", "files", "sets"),
    ),
    Stage(
        name=embed_stage.NAME,
        inspect=lambda project: project.encoding,
        survey=embed_stage.survey,
        mem_bytes=embed_stage.mem_bytes,
        gpu_bytes=embed_stage.gpu_bytes,
        work=embed_stage.work,
        recipe=lambda project: project.encoding.recipe.plain(project.encoding.recipe.wanted(0)),
        judge=embed_stage.judge,
        halve=worklist.halve_rows,
        check=embed_stage.check,
        kinds=("embed", "weights", "parity", "limits"),
        needs=(scan_stage.NAME,),
        of_entries=False,
        process_per_gpu=True,
        counts_items=False,
    ),
    Stage(
        name=graph_stage.NAME,
        inspect=graph_stage.inspect,
        survey=graph_stage.survey,
        mem_bytes=graph_stage.mem_bytes,
        gpu_bytes=lambda _project: 0,
        work=graph_stage.work,
        recipe=lambda project: project.graphs.recipe.plain(),
        judge=graph_stage.judge,
        halve=lambda folder, shard: worklist.halve_lines(folder.todo(graph_stage.NAME), shard),
        check=graph_stage.check,
        kinds=("graph", "sets"),
        needs=(scan_stage.NAME,),
        of_sequences=False,
        of_entries=False,
    ),
    Stage(
        name=train_stage.NAME,
        inspect=_either(train_stage.inspect, script_stage.inspect),
        survey=_either(train_stage.survey, script_stage.survey),
        mem_bytes=_either(train_stage.mem_bytes, script_stage.mem_bytes),
        gpu_bytes=_either(train_stage.gpu_bytes, script_stage.gpu_bytes),
        work=_either(train_stage.work, script_stage.work),
        recipe=_either(train_stage.recipe, script_stage.recipe),
        judge=_either(train_stage.judge, script_stage.judge),
        halve=worklist.halve_rows,
        check=_either(train_stage.check, script_stage.check),
        kinds=(),
        needs=(scan_stage.NAME, embed_stage.NAME, graph_stage.NAME),
        of_sequences=False,
        together=True,
        counts_items=False,
        wanted=prepare.with_task,
    ),
    Stage(
        name=evaluate_stage.NAME,
        inspect=evaluate_stage.inspect,
        survey=evaluate_stage.survey,
        mem_bytes=partial(model_use.mem_bytes, name=evaluate_stage.NAME),
        gpu_bytes=partial(model_use.gpu_bytes, name=evaluate_stage.NAME),
        work=evaluate_stage.work,
        recipe=train_stage.recipe,
        judge=evaluate_stage.judge,
        halve=worklist.halve_rows,
        check=evaluate_stage.check,
        kinds=(),
        needs=(scan_stage.NAME, embed_stage.NAME, graph_stage.NAME, train_stage.NAME),
        of_sequences=False,
        together=True,
        counts_items=False,  # what was rejected is known at the end
        wanted=evaluate_stage.wanted,
        may_be_empty=True,
    ),
    Stage(
        name=predict_stage.NAME,
        inspect=predict_stage.inspect,
        survey=predict_stage.survey,
        mem_bytes=partial(model_use.mem_bytes, name=predict_stage.NAME),
        gpu_bytes=partial(model_use.gpu_bytes, name=predict_stage.NAME),
        work=predict_stage.work,
        recipe=train_stage.recipe,
        judge=predict_stage.judge,
        halve=worklist.halve_rows,
        check=predict_stage.check,
        kinds=(),
        needs=(scan_stage.NAME, embed_stage.NAME, graph_stage.NAME, train_stage.NAME),
        of_sequences=False,
        together=True,
        counts_items=False,  # what was rejected is known at the end
        wanted=lambda _config: False,  # predictions are wanted of something
    ),
    Stage(
        name=validate_stage.NAME,
        inspect=validate_stage.inspect,
        survey=validate_stage.survey,
        mem_bytes=validate_stage.mem_bytes,
        gpu_bytes=lambda _project: 0,
        work=validate_stage.work,
        recipe=validate_stage.recipe,
        judge=validate_stage.judge,
        halve=lambda folder, shard: worklist.halve_lines(folder.todo(validate_stage.NAME), shard),
        check=validate_stage.check,
        kinds=(),
        counts_items=False,  # it works through files
        wanted=lambda _config: False,
        may_be_empty=True,
        only_looks=True,
    ),
    Stage(
        name=regenerate_stage.NAME,
        inspect=validate_stage.inspect,
        survey=regenerate_stage.survey,
        mem_bytes=scan_stage.mem_bytes,
        gpu_bytes=lambda _project: 0,
        work=regenerate_stage.work,
        recipe=lambda _project: {},
        judge=regenerate_stage.judge,
        halve=worklist.halve_rows,
        check=regenerate_stage.check,
        kinds=(),
        needs=(scan_stage.NAME, embed_stage.NAME, graph_stage.NAME),
        counts_items=False,  # but records
        wanted=lambda _config: False,
        may_be_empty=True,
        only_looks=True,
        has_tasks=False,
    ),
)
STAGES: Mapping[str, Stage] = {row.name: row for row in WORKFLOW}


def stage(name: str) -> Stage:
    """Return the row of that name."""
    if name in STAGES:
        return STAGES[name]
    known = ", ".join(STAGES)
    raise ConfigError(f"no stage {name!r} (there are: {known})", where="--stage", remedy="pipeline submit --help")


def kinds_of(names: Iterable[str]) -> set[str]:
    """Return which kinds of records some stages make."""
    return {kind for name in names for kind in stage(name).kinds}


def up_to(name: str, config: Config) -> list[str]:
    """Return a stage and those it needs, in order, without those that have nothing to do for what a reader gives."""
    row, by_reader = stage(name), is_reader(config)
    if by_reader and not row.of_entries:
        what = f"stage {name} is of structures: what a reader gives is read as it is"
        raise ConfigError(what, where="data.source is reader", remedy="pipeline submit --stage scan   (or train)")
    return [*(one for one in row.needs if STAGES[one].of_entries or not by_reader), name]


def regenerated(config: Config, kinds: Collection[str] | None) -> list[str]:
    """Return the stages that make records of these kinds anew, or of all, and say in the end what has become of them.

    The scan is always among them: it knows what the others make.
    """
    whole = kinds is None or RECIPES in kinds
    rows = [STAGES[name] for name in everything(config) if STAGES[name].kinds]
    made = [row.name for row in rows if whole or row.name == scan_stage.NAME or {*row.kinds} & {*(kinds or ())}]
    return [*made, regenerate_stage.NAME]


def everything(config: Config) -> list[str]:
    """Return the stages that have anything to do for a data set, in order."""
    return [row.name for row in WORKFLOW if _is_for(row, config) and row.wanted(config)]


def _is_for(row: Stage, config: Config) -> bool:
    """Tell whether a stage has anything to do for a data set of that kind."""
    if is_reader(config):
        return row.of_entries
    return row.of_sequences or config.data.source != "fasta"
