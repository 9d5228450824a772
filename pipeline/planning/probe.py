"""Probing: a job of minutes on each card runs the worst bucket of a plan through the real step, before any queueing.

Each job records its measurement itself (`probe_job`), so that it corrects later plans also if nobody waited for it.
"""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cluster.job_spec import PROBE, JobSpec, TaskState
from pipeline.cluster.verdict import Cause, Word, judge_attempt
from pipeline.command_line import Command, quoted
from pipeline.config.load import dump_resolved
from pipeline.device.kinds import CPU
from pipeline.errors import ConfigError, JobFailed, PipelineError, SubmissionRefused
from pipeline.journal import run_folder
from pipeline.journal.run_logs import end_of
from pipeline.memory.footprint import Category
from pipeline.memory.hardware.caching_allocator import allocator_settings
from pipeline.memory.hardware.host_memory import STATED, TrainingJob, train_need
from pipeline.memory.history import fingerprint, ratios_of_all
from pipeline.memory.planning.step_estimates import SETTINGS, micro_s, reserve, update_s
from pipeline.planning.probe_job import (
    DIED,
    FAILED,
    MODULE,
    STEPS,
    Errand,
    ProbeFolder,
    ProbeResult,
    conclude,
    death,
    peaks_of,
    read_errand,
    result_of,
    write_json,
)
from pipeline.project.container_image import folders_inside, with_digest
from pipeline.project.project import asked_bytes
from pipeline.project.run_code import freeze, module_command
from pipeline.protocol import Example
from pipeline.report.plan_facts import Probed, ProbeOutcome
from pipeline.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeline.cluster.job_spec import Executor, JobId, TaskStatus
    from pipeline.config.schema import Config
    from pipeline.config.schema_cluster import CardSection as SiteCard
    from pipeline.memory.footprint import MemoryChoice, Oracle
    from pipeline.memory.planning.memory_plan import CardSpec, MemoryPlan
    from pipeline.planning.training_work import Work

FOLDER = ".probes"
TIME_S = 900  # a probe takes less: what imports and builds takes long on a slow disk
LOOK_S = 60.0
LOG_LINES = 25
SEEN_AGAIN_S = 0.2
AGAIN = Command.of("plan train --probe")


@dataclass(frozen=True)
class ProbedCard:
    """A card as the plan has it, and how a job asks for it."""

    card: CardSpec
    gres: str = ""
    partition: str = ""
    constraint: str = ""

    @classmethod
    def of(cls, card: CardSpec, site: SiteCard | None = None) -> ProbedCard:
        """Return a card with what a job asks of this site to get it."""
        if site is None:
            return cls(card)
        return cls(card, site.gres or "", site.partition or "", site.feature or "")


@dataclass(frozen=True)
class _ProbeJob:
    """A probe that is under way."""

    number: int  # of the card, in the order in which they were named
    folder: ProbeFolder
    errand: Errand
    id: JobId
    log: str  # where it writes what went wrong


def probe(
    config: Config,
    work: Work,
    plan: MemoryPlan,
    oracle: Oracle,
    places: Sequence[ProbedCard],
    executor: Executor,
    tell: Callable[[str], None],
    *,
    beside: Path | None = None,
) -> tuple[Probed, ...]:
    """Run the worst bucket of a plan on each card and return what it took; `beside` is a folder of the task's modules.

    What is measured is remembered, and `measured_ratios` then has it for the next plan.
    """
    refuse_unprobed(work, plan)
    results: dict[int, Probed] = {}
    jobs: list[_ProbeJob] = []
    for number, place in enumerate(places):
        errand = errand_of(config, work, plan, oracle, place, executor, beside)
        try:
            jobs.append(_submitted(number, config, errand, place, plan, executor))
        except SubmissionRefused as error:
            results[number] = _unmeasured(errand, ProbeOutcome.REFUSED, error)
            tell(f"probe of {errand.card}: not submitted: {error.what}")
        else:
            tell(f"probe of {errand.card}: job {jobs[-1].id}")
    for job, status in _wait_for_all(jobs, executor, tell):
        result = results[job.number] = _outcome_of(job, status, config)
        tell(f"probe of {result.card}: {result.outcome.value}{f': {result.why}' if result.why else ''}")
    return tuple(results[number] for number in range(len(places)))


def refuse_unprobed(work: Work, plan: MemoryPlan) -> None:
    """Refuse plans that a single process without data cannot probe."""
    if not isinstance(work.task, Example):
        what = "the task has no example(sizes): a probe has no batch to run"
        raise ConfigError(what, where="train.task", remedy="add one, or plan without --probe")
    if plan.choice.shards > 1:
        what = f"this plan spreads the model over {plan.choice.shards} GPUs; a probe is one process on one"
        raise ConfigError(what, where="train.sharding", remedy=Command.of("plan", then="   (without --probe)"))


def model_name(work: Work, choice: MemoryChoice) -> str:
    """Return the name under which measurements of a model with these options are remembered."""
    return fingerprint(work.model(), work.settings, choice)


def measured_ratios(config: Config, work: Work, choice: MemoryChoice, cards: Sequence[str]) -> tuple[float, ...]:
    """Return measured/predicted bytes of such a plan on all these cards, for `PlanRequest.ratios`."""
    return ratios_of_all(peaks_of(config), model_name(work, choice), cards)


def measured_pace(config: Config, work: Work, choice: MemoryChoice, cards: Sequence[str]) -> float | None:
    """Return measured/predicted seconds of such a plan on the slowest card; None: a card was not measured."""
    peaks, model = peaks_of(config), model_name(work, choice)
    newest = [seconds[0] for card in cards if (seconds := peaks.seconds(model, card))]
    return max(newest) if len(newest) == len(cards) and newest else None


def errand_of(
    config: Config,
    work: Work,
    plan: MemoryPlan,
    oracle: Oracle,
    place: ProbedCard,
    executor: Executor,
    beside: Path | None = None,
) -> Errand:
    """Return what a probe of a card is to run, and what is predicted of it."""
    worst = plan.worst
    standing, micro = oracle.standing(plan.choice), oracle.micro(plan.choice, worst.sizes)
    micros = 2 if plan.cuts.steps_most > 1 else 1  # every further one is like the second
    predicted_bytes = int(worst.live.value)
    if place.card.caching:
        planned = [settings for settings in SETTINGS if settings.text == plan.allocator.settings]
        predicted_bytes = reserve(standing, [[micro] * micros] * STEPS, planned or SETTINGS).bytes
    pieces_s = micros * micro_s(micro, standing, plan.choice, place.card)
    step_s = pieces_s + update_s(standing, plan.choice, place.card, 1)
    model_bytes = sum(part.bytes for part in standing.parts if part.category is Category.PARAMETERS)
    mem_bytes, time_s = _limits(config, work, place, executor, model_bytes + micro.host_bytes)
    return Errand(
        card=place.card.name,
        device=work.device,
        model=model_name(work, plan.choice),
        choice=asdict(plan.choice),
        sizes=dict(worst.sizes),
        micros=micros,
        allocator=plan.allocator.settings,
        predicted_bytes=predicted_bytes,
        predicted_s=step_s,
        mem_bytes=mem_bytes,
        time_s=time_s,
        beside=str(beside.absolute()) if beside else "",
    )


def _limits(config: Config, work: Work, place: ProbedCard, executor: Executor, host_bytes: int) -> tuple[int, int]:
    """Return the memory and time of a probe's job: as configured, else all that the plan may use, within limits."""
    resources = config.cluster.train
    on_card = work.device != CPU
    beside = train_need(TrainingJob(gpu=on_card, model_bytes=host_bytes if on_card else 0), STATED).total_bytes
    planned = beside if on_card else place.card.memory_bytes + beside
    partition = place.partition or resources.partition or ""
    limits = executor.limits_of(partition, resources.cpus, _gpus(work))
    mem_bytes, time_s = asked_bytes(resources, planned), min(int(resources.time), TIME_S)
    return min(mem_bytes, limits.mem_bytes or mem_bytes), min(time_s, limits.time_s or time_s)


def _gpus(work: Work | Errand) -> int:
    return 0 if work.device == CPU else 1


def _submitted(
    number: int, config: Config, errand: Errand, place: ProbedCard, plan: MemoryPlan, executor: Executor
) -> _ProbeJob:
    """Write the files of a probe and submit its job; a refused one leaves nothing behind."""
    folder = draft_probe(config, errand)
    resources = config.cluster.train
    spec = JobSpec(
        name=PROBE,
        argv=(*module_command(MODULE, folder), str(folder.path)),
        tasks=range(1),
        log_dir=str(folder.logs),
        cpus=resources.cpus,
        gpus=_gpus(errand),
        mem_bytes=errand.mem_bytes,
        time_s=errand.time_s,
        env=allocator_settings(plan.allocator.settings, os.environ),
        tag=folder.name,
        partition=place.partition or resources.partition or "",
        constraint="&".join(filter(None, [resources.constraint or "", place.constraint])),
        card=place.gres,
        sees=folders_inside(config, Path(errand.beside) if errand.beside else None),
    )
    try:
        submitted = executor.submit(spec)
        return _ProbeJob(number, folder, errand, submitted, spec.log_paths(submitted, 0)[1])
    except SubmissionRefused as error:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise SubmissionRefused(error.what, where=f"probe of {errand.card}", remedy=error.next) from error


def draft_probe(config: Config, errand: Errand) -> ProbeFolder:
    """Make the folder of a probe, with the code and the configuration frozen."""
    runs, now = config.cluster.runs, datetime.now(tz=UTC)
    folder = ProbeFolder(runs / FOLDER / f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}-{PROBE}")
    try:
        with run_folder.writing_run(folder.path):
            folder.path.parent.mkdir(parents=True, exist_ok=True)
            folder.path.mkdir(mode=run_folder.PRIVATE if config.cluster.private else run_folder.SHARED)
            folder.logs.mkdir()
            folder.code.write_text(str(freeze(runs)))
            folder.config.write_text(dump_resolved(with_digest(config)))
            write_json(folder.errand, errand)
    except JobFailed as error:
        raise SubmissionRefused(
            error.what, where=error.where, remedy=AGAIN.with_settings(("cluster.runs", "FOLDER"))
        ) from error
    return folder


def _wait_for_all(
    jobs: Sequence[_ProbeJob], executor: Executor, tell: Callable[[str], None]
) -> list[tuple[_ProbeJob, TaskStatus | None]]:
    """Wait until every probe has written a result or its job has ended; return each with its job's status."""
    waiting: dict[JobId, _ProbeJob] = {job.id: job for job in jobs}
    done: list[tuple[_ProbeJob, TaskStatus | None]] = []
    try:
        while waiting:
            for change in executor.step(LOOK_S):
                if change.job in waiting and not change.state.ended:
                    tell(f"probe of {waiting[change.job].errand.card}: {change.state.value.lower()}")
            for job in list(waiting.values()):
                status = next(iter(executor.status([job.id])), None)
                is_over = status is not None and (status.state.ended or status.state is TaskState.UNKNOWN)
                if is_over or result_of(job.folder) is not None:
                    done.append((waiting.pop(job.id), status))
    except KeyboardInterrupt:
        if executor.outlives and waiting:
            names = " ".join(waiting)
            tell(f"the probes continue, and the next plan uses their results; to cancel them: scancel {names}")
        raise
    return done


def _outcome_of(job: _ProbeJob, status: TaskStatus | None, config: Config) -> Probed:
    """Return what a probe measured: by its result file, which may appear late, else by how its job ended."""
    patience_s = config.cache.visibility_s if status is not None and status.state.ok else 0.0
    result = wait_for(lambda: result_of(job.folder), patience_s, SEEN_AGAIN_S) or _result_by_job_end(job, status)
    errand = job.errand
    if result.state == FAILED:
        what = f"the probe of {errand.card} failed: {result.why}"
        error = JobFailed(what, where=job.log, remedy=f"cat {quoted(job.log)}")
        return replace(_unmeasured(errand, ProbeOutcome.FAILED, error), why=result.why, log=job.log)
    died = result.state == DIED
    unheard = () if result.remembered else ("the measurement could not be saved for later plans",)
    return Probed(
        card=errand.card,
        outcome=ProbeOutcome.DIED if died else ProbeOutcome.MEASURED,
        predicted_bytes=errand.predicted_bytes,
        measured_bytes=result.bytes,
        predicted_s=errand.predicted_s,
        step_s=result.step_s,
        log=job.log,
        why=_why_it_died(result, errand) if died else "",
        notes=(*result.notes, *unheard),
    )


def _why_it_died(result: ProbeResult, errand: Errand) -> str:
    if result.bytes >= errand.predicted_bytes:
        return f"it needs more than {result.bytes:,} bytes, predicted {errand.predicted_bytes:,}"
    had = f"it had {result.bytes:,} bytes, less than the predicted {errand.predicted_bytes:,}"
    return had if errand.device != CPU else f"{had}: raise cluster.train.mem (now {errand.mem_bytes:,})"


def _unmeasured(errand: Errand, outcome: ProbeOutcome, error: PipelineError) -> Probed:
    """Return a probe that measured nothing."""
    return Probed(errand.card, outcome, errand.predicted_bytes, 0, errand.predicted_s, 0.0, "", error.what, (), error)


def _result_by_job_end(job: _ProbeJob, status: TaskStatus | None) -> ProbeResult:
    """Return the result of a probe that wrote none, by its job's end; out of memory is remembered even so."""
    if status is None:
        return ProbeResult(FAILED, why="the final state of its job is unknown")
    verdict = judge_attempt(status, Word(), end_of(job.log, LOG_LINES) or "", asked_bytes=job.errand.mem_bytes)
    if verdict.cause not in (Cause.HOST_OOM, Cause.GPU_OOM):
        return ProbeResult(FAILED, why=verdict.reason or status.state.value)
    config, errand = read_errand(job.folder)
    conclude(job.folder, config, errand, death(job.folder, errand, verdict.peak_bytes or 0))
    result = result_of(job.folder)
    assert result is not None
    return result
