"""Probes: a short job on each kind of GPU runs the worst bucket of a plan through the real training step.

A probe is a job of one task, which runs `python -m pipeline.planning.probe FOLDER`. It records its measurement itself,
so that later plans use it even if no process waits for it. A job without a measurement is judged like any attempt.
"""

from __future__ import annotations

import atexit
import gc
import os
import secrets
import shutil
import sys
import time
import traceback
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pipeline.cluster.job_spec import PROBE, Job, Request, TaskState
from pipeline.cluster.verdict import Cause, Word, judge_attempt
from pipeline.codec import read_if_whole, read_plain, write_plain
from pipeline.command_line import Command, quoted
from pipeline.config.load import dump_resolved, read_resolved
from pipeline.config.masking import without_secrets
from pipeline.device.kinds import CPU
from pipeline.errors import ConfigError, JobFailed, PipelineError, SubmissionRefused
from pipeline.journal.run_folder import PRIVATE, SHARED, RunFolder, writing_run
from pipeline.journal.run_logs import end_of
from pipeline.memory.footprint import Category, MemoryChoice
from pipeline.memory.hardware.caching_allocator import allocator_settings
from pipeline.memory.hardware.host_memory import STATED, TrainingJob, train_need
from pipeline.memory.history import Peak, PeakHistory, fingerprint, ratios_of_all, sizes_text, torch_version
from pipeline.memory.outlook import Probed, ProbeOutcome
from pipeline.memory.planning.step_estimates import micro_s, reserve, update_s
from pipeline.memory.runtime.meters import BeforeModel, StepGauge
from pipeline.planning.offers import site_card
from pipeline.planning.rank_setup import device_here
from pipeline.planning.training_work import Work
from pipeline.project.container_image import folders_inside, image_of, with_digest
from pipeline.project.project import asked_bytes
from pipeline.project.run_code import freeze, module_command
from pipeline.protocol import Example
from pipeline.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipeline.cluster.job_spec import Executor, JobId, TaskStatus
    from pipeline.config.schema import Config
    from pipeline.memory.footprint import Oracle
    from pipeline.memory.planning.memory_plan import CardSpec, MemoryPlan

MODULE = "pipeline.planning.probe"
STEPS = 4  # the first makes the optimizer's state, the second runs with it, two more measure the time
ENOUGH_S = 120.0  # no third step begins after this
UNSAVED = "the measurement could not be saved for later plans"
FOLDER = ".probes"
TIME_S = 900  # generous: imports take long on a slow disk
LOOK_S = 60.0
LOG_LINES = 25
SEEN_AGAIN_S = 0.2
AGAIN = Command.of("plan train --probe")


@dataclass(frozen=True, slots=True)
class Errand:
    """What a probe runs, and the prediction for it."""

    peak: Peak  # as predicted; nothing is measured yet
    device: str
    choice: MemoryChoice
    sizes: Mapping[str, int]
    micros: int  # micro-batches of a step
    mem_bytes: int  # the limit of the job
    beside: Path | None  # a folder of modules


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe measured."""

    peak: Peak
    notes: tuple[str, ...]


class ProbeFolder(RunFolder):
    """The files of one probe: of a run's it has the code, the configuration and the logs."""

    @property
    def errand(self) -> Path:
        return self.path / "errand.json"

    @property
    def start(self) -> Path:
        """The memory in use before the step."""
        return self.path / "start.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"


def probe(
    config: Config,
    work: Work,
    plan: MemoryPlan,
    oracle: Oracle,
    cards: Sequence[CardSpec],
    executor: Executor,
    say: Callable[[str], None],
    *,
    beside: Path | None = None,
) -> tuple[Probed, ...]:
    """Run the worst bucket of a plan on each card; return the measurements. `beside` is the task's folder.

    Measurements are remembered: `measured_ratios` returns them for the next plan.
    """
    refuse_unprobed(work, plan)
    found: dict[str, Probed] = {}
    jobs: dict[JobId, tuple[ProbeFolder, Job, Errand]] = {}
    for card in cards:
        errand, request = errand_of(config, work, plan, oracle, card, executor, beside)
        try:
            folder, job = draft_probe(config, errand, request)
            try:
                jobs[job_id := executor.submit(job)] = folder, job, errand
            except SubmissionRefused:
                shutil.rmtree(folder.path, ignore_errors=True)
                raise
        except SubmissionRefused as error:
            refused = SubmissionRefused(error.what, where=f"probe of {card.name}", remedy=error.next)
            found[card.name] = _unmeasured(errand, ProbeOutcome.REFUSED, refused)
            say(f"probe of {card.name}: not submitted: {error.what}")
        else:
            say(f"probe of {card.name}: job {job_id}")
    _wait(executor, {job_id: errand.peak.card for job_id, (_, _, errand) in jobs.items()}, say)
    for status in executor.status(jobs):
        folder, job, errand = jobs[status.job]
        result = found[errand.peak.card] = _outcome_of(folder, errand, status, config.cache.visibility_s)
        say(f"probe of {result.card}: {result.outcome.value}{f': {result.why}' if result.why else ''}")
    return tuple(found[card.name] for card in cards)


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
    card: CardSpec,
    executor: Executor,
    beside: Path | None = None,
) -> tuple[Errand, Request]:
    """Return the errand of a card's probe, and the request of its job."""
    worst = plan.worst
    standing, micro = oracle.standing(plan.choice), oracle.micro(plan.choice, worst.sizes)
    micros = 2 if plan.cuts.steps_most > 1 else 1  # later steps are like the second
    predicted_bytes = int(worst.live.value)
    if card.caching:
        predicted_bytes = reserve(standing, [[micro] * micros] * STEPS, [plan.allocator.settings]).bytes
    step_s = micros * micro_s(micro, standing, plan.choice, card) + update_s(standing, plan.choice, card, 1)
    model_bytes = sum(part.bytes for part in standing.parts if part.category is Category.PARAMETERS)
    request = _request(config, work, card, executor, model_bytes + micro.host_bytes)
    peak = Peak(
        model=model_name(work, plan.choice),
        card=card.name,
        gpu="",
        torch="",
        driver="",
        allocator=plan.allocator.settings,
        sizes=f"{micros} x {sizes_text(worst.sizes)}",
        predicted_bytes=predicted_bytes,
        measured_bytes=0,
        died=False,
        outside_bytes=0,
        predicted_s=step_s,
        step_s=0.0,
        at=0.0,
    )
    return Errand(
        peak=peak,
        device=work.device,
        choice=plan.choice,
        sizes=dict(worst.sizes),
        micros=micros,
        mem_bytes=request.mem_bytes or 0,
        beside=beside and beside.absolute(),
    ), request


def _request(config: Config, work: Work, card: CardSpec, executor: Executor, host_bytes: int) -> Request:
    """Return the request of a probe's job: the configured memory, else all that the plan may use, within limits."""
    resources, site, on_card = config.cluster.train, site_card(config, card), work.device != CPU
    needed = train_need(TrainingJob(gpu=on_card, model_bytes=host_bytes if on_card else 0), STATED).total_bytes
    mem_bytes = asked_bytes(resources, needed if on_card else card.memory_bytes + needed)
    request = replace(Request.of(resources), nodes=1, ranks=0, gpus=int(on_card))
    request = request.on_card(site) if site else request
    limits, time_s = executor.limits_of(request), min(int(resources.time), TIME_S)
    return replace(
        request, mem_bytes=min(mem_bytes, limits.mem_bytes or mem_bytes), time_s=min(time_s, limits.time_s or time_s)
    )


def draft_probe(config: Config, errand: Errand, request: Request) -> tuple[ProbeFolder, Job]:
    """Return the job of a probe and its folder, with the code and the configuration frozen."""
    runs, now = config.cluster.runs, datetime.now(tz=UTC)
    folder = ProbeFolder(runs / FOLDER / f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}-{PROBE}")
    try:
        with writing_run(folder.path):
            folder.path.parent.mkdir(parents=True, exist_ok=True)
            folder.path.mkdir(mode=PRIVATE if config.cluster.private else SHARED)
            folder.logs.mkdir()
            folder.code.write_text(str(freeze(runs)))
            folder.config.write_text(dump_resolved(with_digest(config)))
            write_plain(folder.errand, errand)
    except JobFailed as error:
        remedy = AGAIN.with_settings(("cluster.runs", "FOLDER"))
        raise SubmissionRefused(error.what, where=error.where, remedy=remedy) from error
    return folder, Job(
        name=PROBE,
        argv=(*module_command(MODULE, folder), str(folder.path)),
        tasks=range(1),
        log_dir=str(folder.logs),
        request=request,
        env=allocator_settings(errand.peak.allocator, os.environ),
        tag=folder.name,
        sees=folders_inside(config, errand.beside),
    )


def _wait(executor: Executor, cards: dict[JobId, str], say: Callable[[str], None]) -> None:
    """Wait until the probes' jobs have ended; report their states."""
    waiting = list(cards)
    try:
        while waiting:
            for change in executor.step(LOOK_S):
                if change.job in waiting and not change.state.ended:
                    say(f"probe of {cards[change.job]}: {change.state.value.lower()}")
            open_tasks = (task for task in executor.status(waiting) if not task.state.ended)
            waiting = [task.job for task in open_tasks if task.state is not TaskState.UNKNOWN]
    except KeyboardInterrupt:
        if executor.outlives and waiting:
            names = " ".join(waiting)
            say(f"the probes continue, and the next plan uses their results; to cancel them: scancel {names}")
        raise


def _outcome_of(folder: ProbeFolder, errand: Errand, status: TaskStatus, visibility_s: float) -> Probed:
    """Return the result of a probe from its file, which may appear late, else from the end of its job."""
    log, card, why = status.stderr, errand.peak.card, ""
    result = wait_for(
        lambda: read_if_whole(folder.result, ProbeResult), visibility_s if status.state.ok else 0.0, SEEN_AGAIN_S
    )
    if result is None:
        log_end = end_of(log, LOG_LINES) or ""
        verdict = judge_attempt(status, Word(started=True), log_end, asked_bytes=errand.mem_bytes)
        why = verdict.reason or status.state.value
        if verdict.cause in (Cause.HOST_OOM, Cause.GPU_OOM):
            result, why = record_death(folder, verdict.peak_bytes or 0), f"{why}, before the step began"
    if result is None:
        error = JobFailed(f"the probe of {card} failed: {why}", where=log, remedy=f"cat {quoted(log)}")
        return replace(_unmeasured(errand, ProbeOutcome.FAILED, error), why=why, log=log)
    peak = result.peak
    return Probed(
        card=card,
        outcome=ProbeOutcome.DIED if peak.died else ProbeOutcome.MEASURED,
        predicted_bytes=peak.predicted_bytes,
        measured_bytes=peak.measured_bytes,
        predicted_s=peak.predicted_s,
        step_s=peak.step_s,
        log=log,
        why=_why_it_died(peak, errand) if peak.died else "",
        notes=result.notes,
    )


def _why_it_died(peak: Peak, errand: Errand) -> str:
    if peak.measured_bytes >= peak.predicted_bytes:
        return f"it needs more than {peak.measured_bytes:,} bytes, predicted {peak.predicted_bytes:,}"
    had = f"it had {peak.measured_bytes:,} bytes, less than the predicted {peak.predicted_bytes:,}"
    return had if errand.device != CPU else f"{had}: raise cluster.train.mem (now {errand.mem_bytes:,})"


def _unmeasured(errand: Errand, outcome: ProbeOutcome, error: PipelineError) -> Probed:
    """Return a probe that measured nothing."""
    peak = errand.peak
    return Probed(peak.card, outcome, peak.predicted_bytes, 0, peak.predicted_s, 0.0, "", error.what, (), error)


# In the job


def main(argv: Sequence[str]) -> int:
    """Run a probe; return 0 also where it ran out of memory, which is a result."""
    atexit.register(gc.freeze)  # saves half a second of garbage collection over torch at exit
    try:
        run_probe(ProbeFolder(Path(argv[0])))
    except BaseException:  # noqa: BLE001 - whatever a task raises is what the plan has to say
        print(without_secrets(traceback.format_exc()), file=sys.stderr)  # noqa: T201 - its stderr is its log
        return 1
    return 0


def run_probe(folder: ProbeFolder) -> ProbeResult:
    """Run the steps of a probe and record their memory and time."""
    errand = read_plain(folder.errand, Errand)
    work = Work.of(read_resolved(folder.config), beside=errand.beside)
    device = device_here(int(errand.device != CPU))
    gauge = StepGauge(device, errand.mem_bytes)
    write_plain(folder.start, gauge.before)
    try:
        step_s = median(step_seconds(work, errand, device, gauge)[1:])
    except Exception as error:
        at_most = gauge.died_at(error)
        if at_most is None:
            raise
        sys.stderr.write(f"{error}\n")
        return record_result(folder, gauge.before, measured_bytes=at_most, died=True)
    found = gauge.read()
    measured = {"measured_bytes": found.bytes, "outside_bytes": found.outside_bytes, "step_s": step_s}
    return record_result(folder, gauge.before, found.notes, **measured)


def step_seconds(work: Work, errand: Errand, device: str, gauge: StepGauge) -> list[float]:
    """Run the steps; return the seconds of each."""
    step = work.step(errand.choice, device=device)
    batch = work.example(errand.sizes)
    taken: list[float] = []
    while len(taken) < STEPS and (len(taken) < 2 or sum(taken) < ENOUGH_S):
        began = time.perf_counter()
        step.run([batch] * errand.micros)
        gauge.wait()
        taken.append(time.perf_counter() - began)
    return taken


def record_death(folder: ProbeFolder, peak_bytes: int) -> ProbeResult | None:
    """Record that a step was killed for its memory; return None if it had not begun."""
    start = read_if_whole(folder.start, BeforeModel)
    if start is None:
        return None
    had = max(start.available_bytes, peak_bytes - start.taken_bytes)
    return record_result(folder, start, measured_bytes=had, outside_bytes=start.taken_bytes, died=True)


def record_result(folder: ProbeFolder, start: BeforeModel, notes: tuple[str, ...] = (), **measured: Any) -> ProbeResult:
    """Add a measurement to the history of earlier ones, and write it for the command that waits."""
    config = read_resolved(folder.config)
    expected = read_plain(folder.errand, Errand).peak
    torch, at = torch_of(config), time.time()
    peak = replace(expected, gpu=start.gpu, driver=start.driver, torch=torch, at=at, **measured)
    is_saved = peaks_of(config).record(folder.name, [peak])
    result = ProbeResult(peak, notes if is_saved else (*notes, UNSAVED))
    write_plain(folder.result, result)
    return result


def peaks_of(config: Config) -> PeakHistory:
    """Return the measurements of earlier training steps."""
    return PeakHistory(config.cluster.runs / ".profiles" / "peaks.jsonl", torch_of(config))


def torch_of(config: Config) -> str:
    """Return the identity of the workers' torch: its version, or the image that holds it."""
    return image_of(config) or torch_version()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
