"""What a probe's job executes: `python -m pipeline.planning.probe_job FOLDER` runs the worst bucket for a few steps.

The job records what it measured for later plans, so a probe counts even if nothing waits for it.
"""

from __future__ import annotations

import atexit
import gc
import json
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pipeline.config.load import read_resolved
from pipeline.config.masking import without_secrets
from pipeline.device.kinds import CPU
from pipeline.files import read_json, write_whole
from pipeline.journal.run_folder import RunFolder
from pipeline.memory.footprint import MemoryChoice
from pipeline.memory.history import Peak, PeakHistory, torch_version
from pipeline.memory.runtime.meters import BeforeModel, StepGauge
from pipeline.planning.rank_setup import device_here
from pipeline.planning.training_work import Work
from pipeline.project.container_image import image_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.config.schema import Config

MODULE = "pipeline.planning.probe_job"
STEPS = 4  # the first makes the optimizer's state, the second is the first that has it, two more for the time
ENOUGH_S = 120.0  # after which no further step begins, once there were two
UNSAVED = "the measurement could not be saved for later plans"


@dataclass(frozen=True, slots=True)
class Errand:
    """What a probe is to run, and what is predicted of it."""

    peak: Peak  # as predicted; nothing is measured yet
    device: str
    choice: Mapping[str, Any]
    sizes: Mapping[str, int]
    micros: int  # micro-batches of a step
    mem_bytes: int  # the limit of the job
    beside: str  # a folder of modules


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


def main(argv: Sequence[str]) -> int:
    """Run a probe; return 0 also where it ran out of memory, which is a result."""
    atexit.register(gc.freeze)  # at its end torch is not looked through once more, for half a second
    try:
        run_probe(ProbeFolder(Path(argv[0])))
    except BaseException:  # noqa: BLE001 - whatever a task raises is what the plan has to say
        print(without_secrets(traceback.format_exc()), file=sys.stderr)  # noqa: T201 - its stderr is its log
        return 1
    return 0


def run_probe(folder: ProbeFolder) -> ProbeResult:
    """Run the steps of a probe and record their memory and time."""
    errand = errand_in(folder)
    work = Work.of(read_resolved(folder.config), beside=Path(errand.beside) if errand.beside else None)
    device = device_here(int(errand.device != CPU))
    gauge = StepGauge(device, errand.mem_bytes)
    write_json(folder.start, asdict(gauge.before))
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
    step = work.step(MemoryChoice(**errand.choice), device=device)
    batch = work.example(errand.sizes)
    taken: list[float] = []
    while len(taken) < STEPS and (len(taken) < 2 or sum(taken) < ENOUGH_S):
        began = time.perf_counter()
        step.run([batch] * errand.micros)
        gauge.wait()
        taken.append(time.perf_counter() - began)
    return taken


def record_death(folder: ProbeFolder, peak_bytes: int) -> ProbeResult | None:
    """Record a step that was killed for its memory; None if it had not begun, which says nothing of the step."""
    data = read_json(folder.start)
    if data is None:
        return None
    start = BeforeModel(**data)
    had = max(start.available_bytes, peak_bytes - start.taken_bytes)
    return record_result(folder, start, measured_bytes=had, outside_bytes=start.taken_bytes, died=True)


def record_result(folder: ProbeFolder, start: BeforeModel, notes: tuple[str, ...] = (), **measured: Any) -> ProbeResult:
    """Add a measurement to the history of earlier ones, and write it for the command that waits."""
    config = read_resolved(folder.config)
    peak = replace(
        errand_in(folder).peak,
        gpu=start.gpu,
        driver=start.driver,
        torch=torch_of(config),
        at=time.time(),
        **measured,
    )
    result = ProbeResult(peak, notes if record_peak(config, folder.name, peak) else (*notes, UNSAVED))
    write_json(folder.result, asdict(result))
    return result


def peaks_of(config: Config) -> PeakHistory:
    """Return the measurements of earlier training steps."""
    return PeakHistory(config.cluster.runs / ".profiles" / "peaks.jsonl", torch_of(config))


def torch_of(config: Config) -> str:
    """Return what tells the torch of workers from others: its version, or the image that holds it."""
    return image_of(config) or torch_version()


def record_peak(config: Config, run: str, peak: Peak) -> bool:
    """Add a measurement to the history; return whether that could be done."""
    return peaks_of(config).record(run, [peak])


def errand_in(folder: ProbeFolder) -> Errand:
    """Return what a probe is to run."""
    data = json.loads(folder.errand.read_text())
    return Errand(**data | {"peak": Peak(**data["peak"])})


def result_of(folder: ProbeFolder) -> ProbeResult | None:
    """Return what a probe measured; None: nothing yet."""
    data = read_json(folder.result)
    return None if data is None else ProbeResult(Peak(**data["peak"]), tuple(data["notes"]))


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write in one go: a reader finds all of it or nothing."""
    write_whole(path, json.dumps(data, indent=1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
