"""What a probe's job executes: `python -m pipeline.planning.probe_job FOLDER` runs the worst bucket for a few steps.

The step runs in a child process, so that the parent can report it when the kernel kills the step for its memory. The
job itself records what it measured: whoever waited for it may be gone.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.cluster.machine import count_oom_kills
from pipeline.command_line import Command
from pipeline.config.load import read_resolved
from pipeline.config.masking import without_secrets
from pipeline.device.kinds import CPU
from pipeline.errors import ConfigError
from pipeline.files import read_json, write_whole
from pipeline.journal.run_folder import RunFolder
from pipeline.memory.footprint import MemoryChoice
from pipeline.memory.history import Peak, PeakHistory, sizes_text, torch_version
from pipeline.memory.runtime.meters import BeforeModel, StepGauge, peak_of
from pipeline.planning.rank_setup import device_here
from pipeline.planning.training_work import Work
from pipeline.project.container_image import image_of
from pipeline.project.run_code import module_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.config.schema import Config

MODULE = "pipeline.planning.probe_job"
STEPS = 4  # the first makes the optimizer's state, the second is the first that has it, two more for the time
ENOUGH_S = 120.0  # after which no further step begins, once there were two
LARGE_SHARE = 0.5  # of its limit a killed step had reached at least, where no counter tells why it was killed
STEP = "--step"  # the word by which the child knows that it is one
MEASURED, DIED, FAILED = "measured", "died", "failed"

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Errand:
    """What a probe is to run, and what is predicted of it."""

    card: str
    device: str
    model: str  # its fingerprint
    choice: Mapping[str, Any]
    sizes: Mapping[str, int]
    micros: int  # micro-batches of a step
    allocator: str
    predicted_bytes: int
    predicted_s: float
    mem_bytes: int  # the limit of the job
    time_s: int
    beside: str  # a folder of modules


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe measured, or why it measured nothing."""

    state: str  # measured, died (of memory), failed
    bytes: int = 0  # of one that died: what it could have at most
    live_bytes: int = 0
    outside_bytes: int = 0
    step_s: float = 0.0
    why: str = ""
    notes: tuple[str, ...] = ()
    remembered: bool = False


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


def main(argv: Sequence[str]) -> int:
    """Run a probe; return 0 also where it ran out of memory, which is a result."""
    atexit.register(gc.freeze)  # at its end torch is not looked through once more, for half a second
    folder = ProbeFolder(Path(argv[0]))
    if argv[1:] == [STEP]:
        return run_step_process(folder)
    kills = count_oom_kills()
    command = [*module_command(MODULE, folder), str(folder.path), STEP]
    child = os.posix_spawn(sys.executable, command, os.environ)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the time is nearly over: the child ends of it
    _, status, used = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else killed(folder, -code, peak_of(used), counted=count_oom_kills() > kills)


def run_step_process(folder: ProbeFolder) -> int:
    """Run the step in this process and write its result; return an exit code."""
    try:
        config, errand = read_errand(folder)
        result = measure_step(errand, config, folder)
    except BaseException as error:  # noqa: BLE001 - whatever a task raises is what the plan has to say
        print(without_secrets(traceback.format_exc()), file=sys.stderr)  # noqa: T201 - its stderr is its log
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        write_json(folder.result, ProbeResult(FAILED, why=why))
        return 1
    return conclude(folder, config, errand, result)


def killed(folder: ProbeFolder, number: int, peak_bytes: int, *, counted: bool) -> int:
    """Record a killed step: as out of memory if the kernel counted that or the step was near its limit."""
    config, errand = read_errand(folder)
    if number == signal.SIGKILL and (counted or peak_bytes >= LARGE_SHARE * errand.mem_bytes):
        return conclude(folder, config, errand, death(folder, errand, peak_bytes))
    why = "its time was over" if number == signal.SIGUSR2 else f"killed by {signal.Signals(number).name}"
    return conclude(folder, config, errand, ProbeResult(FAILED, why=why))


def conclude(folder: ProbeFolder, config: Config, errand: Errand, result: ProbeResult) -> int:
    """Write a probe's result for whoever waits, and for later plans; return an exit code."""
    result = result if result.state == FAILED else remember_result(folder, config, errand, result)
    write_json(folder.result, result)
    return 1 if result.state == FAILED else 0


def measure_step(errand: Errand, config: Config, folder: ProbeFolder) -> ProbeResult:
    """Run the steps of a probe and measure their memory and time."""
    work = Work.of(config, beside=Path(errand.beside) if errand.beside else None)
    errand = replace(errand, device=device_here(int(errand.device != CPU)))
    gauge = StepGauge(errand.device, errand.mem_bytes)
    write_json(folder.start, gauge.before)
    try:
        step_s = median(step_seconds(work, errand, gauge)[1:])
    except Exception as error:
        at_most = gauge.died_at(error)
        if at_most is None:
            raise
        sys.stderr.write(f"{error}\n")
        return ProbeResult(DIED, at_most, why=str(error).partition("\n")[0])
    reading = gauge.read()
    return ProbeResult(MEASURED, reading.bytes, reading.live_bytes, reading.outside_bytes, step_s, notes=reading.notes)


def step_seconds(work: Work, errand: Errand, gauge: StepGauge) -> list[float]:
    """Run the steps; return the seconds of each."""
    step = work.step(MemoryChoice(**errand.choice), device=errand.device)
    batch = work.example(errand.sizes)
    taken: list[float] = []
    while len(taken) < STEPS and (len(taken) < 2 or sum(taken) < ENOUGH_S):
        began = time.perf_counter()
        step.run([batch] * errand.micros)
        gauge.wait()
        taken.append(time.perf_counter() - began)
    return taken


def death(folder: ProbeFolder, errand: Errand, peak_bytes: int = 0) -> ProbeResult:
    """Return the result of a step that was killed for its memory."""
    start = start_of(folder)
    taken = start.taken_bytes if start else 0
    available = start.available_bytes if start else errand.mem_bytes
    return ProbeResult(DIED, max(available, peak_bytes - taken), outside_bytes=taken, why="killed for its memory")


def remember_result(folder: ProbeFolder, config: Config, errand: Errand, result: ProbeResult) -> ProbeResult:
    """Add a measurement to the history of earlier ones; return it, with whether that could be done."""
    start = start_of(folder)
    if start is None:  # it died before the step began: that says nothing of the step
        return ProbeResult(FAILED, why=f"{result.why}, before the step began")
    peak = Peak(
        model=errand.model,
        card=errand.card,
        gpu=start.gpu,
        torch=torch_of(config),
        driver=start.driver,
        allocator=errand.allocator,
        sizes=f"{errand.micros} x {sizes_text(errand.sizes)}",
        predicted_bytes=errand.predicted_bytes,
        measured_bytes=result.bytes,
        died=result.state == DIED,
        outside_bytes=result.outside_bytes,
        predicted_s=errand.predicted_s,
        step_s=result.step_s,
        at=time.time(),
    )
    return replace(result, remembered=record_peak(config, folder.name, peak))


def peaks_of(config: Config) -> PeakHistory:
    """Return the measurements of earlier training steps."""
    return PeakHistory(config.cluster.runs / ".profiles" / "peaks.jsonl", torch_of(config))


def torch_of(config: Config) -> str:
    """Return what tells the torch of workers from others: its version, or the image that holds it."""
    return image_of(config) or torch_version()


def record_peak(config: Config, run: str, peak: Peak) -> bool:
    """Add a measurement to the history; return whether that could be done."""
    return peaks_of(config).record(run, [peak])


def read_errand(folder: ProbeFolder) -> tuple[Config, Errand]:
    """Return the configuration and the order of a probe."""
    config = read_resolved(folder.config)
    errand = read_value(folder.errand, Errand)
    if errand is None:
        what = "it describes no probe, or one of another version"
        raise ConfigError(what, where=str(folder.errand), remedy=Command.of("plan train --probe"))
    return config, errand


def start_of(folder: ProbeFolder) -> BeforeModel | None:
    """Return the memory in use before the step; None: it never began."""
    return read_value(folder.start, BeforeModel)


def result_of(folder: ProbeFolder) -> ProbeResult | None:
    """Return the result of a probe; None: there is none yet."""
    return read_value(folder.result, ProbeResult)


def read_value(path: Path, kind: type[Value]) -> Value | None:
    """Return a value as it was written; None while there is none."""
    try:
        return kind(**(read_json(path) or {}))
    except TypeError:
        return None


def write_json(path: Path, value: Any) -> None:
    """Write a value in one go: a reader finds all of it or nothing."""
    write_whole(path, json.dumps(asdict(value), indent=1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
