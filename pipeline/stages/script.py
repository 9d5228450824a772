"""Stage train with a user's own script (`train.command`) in place of a task.

It is one task, which runs at every submission: only the script knows, from {output}, what it did before. Exit code 0 is
success. A script cannot be traced, so the memory and micro-batches of its first attempt come from earlier runs of the
same command, or are defaults; later attempts adapt.

The script runs in its own folder and is not frozen: an edit takes effect at the next attempt. `script.command` explains
the command and its environment; `script.script_process` how its end is judged.
"""

from __future__ import annotations

import os
import resource
import shlex
import signal
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cluster.verdict import GO_ON, SIGNALLED, Cause
from pipeline.dataset.worklist import Shard, StageSurvey
from pipeline.errors import ConfigError, PlanInfeasible
from pipeline.journal.run_folder import RunFolder, writing_run
from pipeline.journal.run_status import StageStatus, StatusReader
from pipeline.memory.runtime.meters import peak_of
from pipeline.planning.prepare import training_name
from pipeline.project.project import asked_bytes
from pipeline.records import RankPlace
from pipeline.script.command import (
    Script,
    Values,
    batches,
    parse_command,
    process_words,
    refuse_blind,
    refuse_other_batch,
    reserved_port,
    script_environment,
)
from pipeline.script.peers import LOOK_EVERY_S, REASON_WITHIN_S, Peers
from pipeline.script.script_process import STEP, run_script
from pipeline.stage_names import StageName
from pipeline.stages.stage import Stage
from pipeline.stages.train import RECORDS
from pipeline.stages.trained import Trained
from pipeline.training.ranks import LOST
from pipeline.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipeline.config.schema import Config
    from pipeline.project.project import Project
    from pipeline.records import TaskContext
    from pipeline.script.script_process import ScriptOutcome
    from pipeline.stages.stage import Outcomes

STATED_BYTES = 8 << 30  # default for a process: torch on a GPU with data workers seldom takes more
STATED = "default: a script's memory is unknown until it has run (set cluster.train.mem)"
FIGURE = "script."  # prefix of its figures, to keep them apart from ours
PROGRESS = FIGURE + STEP
BATCH_NAMES = frozenset({"micro_batch", "accumulation", "effective_batch"})
EXPANDABLE = "expandable_segments:True"
LINES_SHOWN, LINE_MOST = 6, 300
OUT_OF_MEMORY = frozenset({Cause.GPU_OOM, Cause.HOST_OOM})


class ScriptStage(Stage):
    """A user's own script as a training: one task, which runs at every submission."""

    name = StageName.TRAIN
    needs = RECORDS
    is_script = True
    of_sequences = False
    together = True
    counts_items = False
    unit = "task"

    def inspect(self, project: Project) -> None:
        """Refuse a command that cannot be run, or that would change the batch size of a step."""
        first_words(project)

    def survey(self, project: Project, folder: RunFolder | None, at_once: int) -> StageSurvey:  # noqa: ARG002 - one task
        counts = {"items": 1, "refused": 0, "unusable": 0, "cached": 0, "missing": 1, "waiting": 0}
        return StageSurvey(counts, (Shard(0, 1, 1),), cost=1.0)

    def mem_bytes(self, project: Project) -> int:
        """Return the memory of a node: as configured, else a default for each process."""
        resources = project.config.cluster.train
        return asked_bytes(resources, STATED_BYTES * resources.ranks_per_node)

    def recipe(self, project: Project) -> Mapping[str, Any]:
        """Return the choices under which measurements of its jobs are kept."""
        train, resources = project.config.train, project.config.cluster.train
        return {
            "command": train.command,
            "batch": train.effective_batch,
            "micro_batch": train.micro_batch,
            "processes": resources.ranks_per_node,
        }

    def starts_on_node(self, config: Config) -> int:
        return starts_on_node(config)

    def work(self, project: Project, folder: RunFolder, task: int, context: TaskContext) -> Outcomes:  # noqa: ARG002
        """Run the script, or one of its processes, to its end; raise Ended if it is not done."""
        config, place = project.config, context.place
        script = script_of(config)
        micro, accumulation = batches_of(config, context.shrink)
        with writing_run(folder.meetings):
            folder.meetings.mkdir(exist_ok=True)
        with reserved_port() as port, Peers(place, folder.meetings, port) as peers:
            values = replace(
                values_of(config, place, micro, accumulation, folder),
                attempt=context.attempt,
                master_address=peers.address,
                master_port=peers.port,
            )
            with writing_run(values.output, "train.models"):
                values.output.mkdir(parents=True, exist_ok=True)
            if number := context.ending():
                context.report.ended_by = number
                return
            before = newest_change(values.output)
            outcome = _run(project, script, values, context, peers.has_lost)
            _settle(outcome, peers, context.ending, saved=newest_change(values.output) != before)
        yield None

    def judge(self, project: Project, folder: RunFolder, patience_s: float) -> Scripted:  # noqa: ARG002
        """Return the result of the script, by its exit code in the ledger."""
        stage, config = stage_of(folder), project.config
        task = stage.task(0)
        done = task.good or task.word.finished
        judged = Scripted(folder=str(output_of(config)), command=config.train.command or "", attempts=len(task.ended))
        judged.items, judged.undone, judged.first_undone = int(done), int(not done), "" if done else "the script"
        judged.ooms = sum(attempt.cause in OUT_OF_MEMORY for attempt in task.ended)
        for figures in stage.figures.values():
            named = {name.removeprefix(FIGURE): value for name, value in figures.items() if name.startswith(FIGURE)}
            judged.figures |= named
        judged.steps = int(judged.figures.get(STEP, 0))
        with suppress(ConfigError, PlanInfeasible):
            judged.micro_batch = batches_of(config, task.last.ask.shrink if task.last else 0)[0]
        return judged


def script_of(config: Config) -> Script:
    """Return the command of a configuration."""
    return parse_command(config.train.command or "")


def starts_on_node(config: Config) -> int:
    """Return how many processes to start on each node: one if the command starts the others."""
    return 1 if script_of(config).launches else config.cluster.train.ranks_per_node


def first_words(project: Project) -> list[str]:
    """Return the command line of the first process of a first attempt."""
    config = project.config
    micro, accumulation = batches_of(config, 0)
    values = values_of(config, RankPlace(0, 1), micro, accumulation, RunFolder(config.cluster.runs / "RUN"))
    return process_words(script_of(config), values)


def batches_of(config: Config, shrink: int) -> tuple[int, int]:
    """Return micro_batch and accumulation of an attempt; the whole batch where the command names neither."""
    script, train = script_of(config), config.train
    refuse_blind(script, shrink)
    if not script.names & BATCH_NAMES:
        return train.effective_batch, 1
    return batches(train.effective_batch, config.cluster.train.world, train.micro_batch, shrink)


def values_of(config: Config, place: RankPlace, micro_batch: int, accumulation: int, folder: RunFolder) -> Values:
    """Return the values of the placeholders, in one process of the first attempt."""
    train, resources = config.train, config.cluster.train
    starts, processes = starts_on_node(config), resources.ranks_per_node
    node = place.rank // starts
    return Values(
        effective_batch=train.effective_batch,
        micro_batch=micro_batch,
        accumulation=accumulation,
        ranks=resources.world,
        rank=place.rank if starts == processes else node * processes,
        local_rank=place.local_rank,
        processes=processes,
        gpus=resources.gpus,
        nodes=resources.nodes,
        node=node,
        precision="fp32" if train.precision == "auto" else train.precision,
        seed=train.seed,
        epochs=train.epochs,
        run=folder.path,
        output=output_of(config),
        config=folder.config,
    )


def output_of(config: Config) -> Path:
    """Return the folder of checkpoints: the same for all attempts and runs of the same command and settings."""
    train = config.train
    decisive = train.model_dump(mode="json", include={"command", "effective_batch", "seed", "precision"})
    return train.models / training_name("script", decisive)


class Ended(Exception):
    """A script ended without being done; holds the exit code of its task and the message for the ledger."""

    def __init__(
        self, code: int, what: str = "", trouble: str = "", *, step: int = 0, further: bool = True, quiet: bool = False
    ) -> None:
        super().__init__(what)
        self.code, self.what, self.trouble = code, what, trouble
        self.step = step  # the last step that it reported; 0: none
        self.further = further  # whether it made progress, as far as we can see
        self.for_others = ""  # why this process failed, which ends the others
        self.quiet = quiet  # another process caused this end and reports it

    @classmethod
    def of(cls, outcome: ScriptOutcome, *, saved: bool) -> Ended:
        """Return the exception for an outcome, with the last lines of output if the reason is unknown."""
        what, further = outcome.what, saved or outcome.handled_signal is not None or outcome.step > 0
        if outcome.goes_on and not further:  # without progress it could ask to be restarted for ever
            what += "; it was not asked to stop, saved nothing in {output} and reported no step"
        elif outcome.handled_signal is not None and not (outcome.goes_on or outcome.step):
            what += '; its progress is unknown: print lines such as pipeline: {"step": 3}'
        if not (outcome.reason or outcome.goes_on) and len(outcome.last_lines) > 1:
            what += "".join(f"\n    | {line[:LINE_MOST]}" for line in outcome.last_lines[-LINES_SHOWN:])
        ended = cls(outcome.code, what, outcome.trouble, step=outcome.step, further=further)
        is_asked = outcome.handled_signal is not None and not outcome.trouble
        ended.for_others = "" if is_asked or outcome.goes_on or outcome.finished else outcome.what
        return ended


def _run(
    project: Project, script: Script, values: Values, context: TaskContext, is_lost: Callable[[], bool]
) -> ScriptOutcome:
    """Run the script; its figures go to the ledger."""
    train, resources = project.config.train, project.config.cluster.train

    def note_figures(figures: Mapping[str, float]) -> None:
        context.report.figures.update({FIGURE + name: value for name, value in figures.items()})
        context.on(())

    allocator = EXPANDABLE if train.allocator == "expandable" else ""
    outcome = run_script(
        process_words(script, values),
        environment=script_environment(script, values, os.environ, threads=resources.cpus, allocator=allocator),
        cwd=project.beside or Path.cwd(),
        on_figures=note_figures,
        mem_bytes=context.mem_bytes,
        is_lost=is_lost,
    )
    # Memory is requested by node: assume that its other processes take as much.
    own_bytes = peak_of(resource.getrusage(resource.RUSAGE_SELF))
    context.report.figures["host_peak_bytes"] = (outcome.peak_rss_bytes + own_bytes) * starts_on_node(project.config)
    return outcome


def stage_of(folder: RunFolder) -> StageStatus:
    """Return the status of the stage from the ledger."""
    return StatusReader(folder).read().stages.get(StageName.TRAIN) or StageStatus(StageName.TRAIN)


def newest_change(folder: Path) -> int:
    """Return the newest modification time of the files in a folder tree; 0 without files."""
    times = [0]
    for path in folder.rglob("*"):
        with suppress(OSError):  # it was removed meanwhile
            times.append(path.stat().st_mtime_ns)
    return max(times)


def _settle(outcome: ScriptOutcome, peers: Peers, ending: Callable[[], int], *, saved: bool) -> None:
    """Wait until all processes are done; raise Ended if this one or another is not."""
    own = Ended.of(outcome, saved=saved)
    if own.for_others and not own.trouble and peers.place.world > 1:
        wait_for(peers.has_lost, REASON_WITHIN_S, LOOK_EVERY_S)  # perhaps this one failed because another did
    is_done = outcome.finished and (peers.place.world == 1 or peers.are_all_done(ending))
    if peers.has_lost() and not own.trouble:
        raise Ended(LOST, "another process of the script failed", quiet=True)
    if outcome.finished and ending() == signal.SIGTERM:
        raise Ended(SIGNALLED + signal.SIGTERM, "asked to stop while others continue", step=own.step, quiet=True)
    if outcome.finished and not is_done:
        raise Ended(GO_ON, "other processes of the script are still working", step=own.step, further=True)
    if not outcome.finished:
        raise own


@dataclass(slots=True)
class Scripted(Trained):
    """The result of a script."""

    command: str = ""
    attempts: int = 0
    micro_batch: int = 0
    figures: dict[str, float] = field(default_factory=dict)  # its last ones


def outline(project: Project, mem_bytes: int, mem_why: str, most_bytes: int | None = None) -> dict[str, Any]:
    """Return the plan of the script as JSON data, as far as it is known before it has run.

    The memory is that of the first attempt, with the reason; the limit is the largest node.
    """
    config = project.config
    smaller, why_none = _smaller(config)  # the micro-batches of later attempts; why none follow
    micro, accumulation = batches_of(config, 0)
    return {
        "stage": StageName.TRAIN,
        "script": True,
        "words": first_words(project),
        "processes": config.cluster.train.world,
        "effective_batch": config.train.effective_batch,
        "micro_batch": micro,
        "accumulation": accumulation,
        "smaller": smaller,
        "why_none": why_none,
        "mem_bytes": mem_bytes,
        "mem_why": mem_why,
        "most_bytes": most_bytes,
        "output": str(output_of(config)),
    }


def outline_lines(plan: Mapping[str, Any]) -> list[str]:
    """Return the plan of a script as lines of text."""
    of = "1 process" if plan["processes"] == 1 else f"each of {plan['processes']} processes"
    batch = f"micro-batches of {plan['micro_batch']}, {plan['accumulation']} a step, in {of}"
    smaller = f"micro-batches of {', then '.join(map(str, plan['smaller']))}" if plan["smaller"] else plan["why_none"]
    most = f", up to {_mib(plan['most_bytes'])}" if plan["most_bytes"] else ""
    return [
        "train: a script (not traced); it runs whenever submitted, and exit code 0 means success",
        f"  runs: {shlex.join(plan['words'])}",
        f"  first: {batch} (effective batch {plan['effective_batch']}); {_mib(plan['mem_bytes'])} of memory",
        f"  memory: {plan['mem_why']}",
        f"  on GPU out of memory: {smaller}",
        f"  on host out of memory: twice the memory{most}{', then smaller micro-batches' if plan['smaller'] else ''}",
        f"  output: {plan['output']}",
    ]


def _smaller(config: Config) -> tuple[tuple[int, ...], str]:
    """Return the micro-batches of the attempts after GPU memory ran out, and why none follows the last."""
    script, tried = script_of(config), list[int]()
    while True:
        try:
            micro, accumulation = batches_of(config, len(tried) + 1)
            refuse_other_batch(script, micro, accumulation)
        except (ConfigError, PlanInfeasible) as error:
            return tuple(tried), f"the run ends: {error.what}"
        tried.append(micro)


def _mib(count: int) -> str:
    return f"{count >> 20:,} MiB"
