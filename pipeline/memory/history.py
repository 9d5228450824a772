"""Remembers measured steps and tasks, and derives from them the next plan's requests.

Records are lines of JSON, in a file for each user, read from the newest back. A look-up reads the last MOST_BYTES of a
file: older records no longer count. Lines that are torn, foreign or out of bounds are skipped.

How much memory a task requests:

- Which tasks count: of this recipe on this cluster; else of this recipe elsewhere (how memory is counted depends on
  the cluster, so never less than planned); else of other recipes of the stage (another encoder may need ten times as
  much: never less than planned, never more than twice that); else the plan.
- Of which age: the NEWEST tasks count, because inputs, versions and nodes change.
- How much: the 99th percentile, so that one outlier in hundreds of tasks costs one retry and not everyone's memory
  (up to 99 tasks it is the largest), and a MARGIN, because peaks are sampled: the truth lies above them.
- Going below the plan takes ENOUGH tasks that ran for SAMPLED_S: of shorter ones a sampler with Slurm's usual
  interval of 30 s may have seen only the start.
- A task that died of memory needed more than the larger of its limit and its sampled peak (a job killed at 200 MiB
  showed 119 MiB). It is settled by a later attempt at it, or a later task at least as large, that lived with a
  higher limit and whose peak is known; then what it died at counts as one need among others. Until then at least
  GROWTH times as much is requested.
- Never less than FLOOR_BYTES, in whole STEP_BYTES, so that equal tasks make equal requests.

The caller limits the answer to the largest node.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from heapq import merge, nlargest
from importlib import metadata
from itertools import chain, islice
from math import ceil
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pipeline.codec import rebuilt
from pipeline.files import shared_bits
from pipeline.memory.hardware.gpus import known_name
from pipeline.store.format.disk import Disk
from pipeline.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn

Record = TypeVar("Record")

MOST_BYTES = 64 << 20  # a line has about 300 bytes
_LARGEST = float(1 << 62)  # more than any byte count


class Records(Generic[Record]):
    """Records of one kind, in a file for each user: flat dataclasses with fields `run` and `at`."""

    def __init__(self, path: Path, kind: type[Record]) -> None:
        """Take FOLDER/tasks.jsonl, or the like; the user with id UID writes FOLDER/tasks-UID.jsonl."""
        self._path, self._kind = path, kind
        self._own = path.with_stem(f"{path.stem}-{os.getuid()}")
        self._names = [field.name for field in fields(kind)]  # type: ignore[arg-type]

    def record(self, run: str, records: Iterable[Record]) -> bool:
        """Append records and sync them to disk; return False if the file cannot be written."""
        lines = b"".join(measurement_line(run, record) for record in records)
        try:
            if lines:
                self._append(b"\n" + lines)  # the leading newline ends a line that a full disk has cut
        except OSError:
            return False
        return True

    def _append(self, lines: bytes) -> None:
        Disk().make_folder(self._path.parent)
        descriptor = os.open(self._own, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with suppress(OSError):  # where there are no locks, NFS may lose lines that two nodes append at once
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if (bits := shared_bits(self._path.parent)) and not os.fstat(descriptor).st_size:
                os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) | bits)
            while lines:
                lines = lines[os.write(descriptor, lines) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def newest(self, **having: str) -> Iterator[Record]:
        """Yield the records with these field values, the newest first."""
        paths = list[Path]()
        with suppress(OSError):
            paths += self._path.parent.glob(f"{self._path.stem}-*.jsonl")
        yield from merge(*(self._in_file(path, having) for path in paths), key=attrgetter("at"), reverse=True)

    def _in_file(self, path: Path, having: Mapping[str, str]) -> Iterator[Record]:
        texts = [json.dumps(text).encode() for text in having.values()]
        for line in _last_lines(path):
            record = self._record_of(line) if all(text in line for text in texts) else None  # parsing takes long
            if record is not None and all(getattr(record, name) == text for name, text in having.items()):
                yield record

    def _record_of(self, line: bytes) -> Record | None:
        """Return the record of a line; None if it is torn, foreign or out of bounds."""
        try:
            data = json.loads(line)
            record = rebuilt(self._kind, {name: data[name] for name in self._names})
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        numbers = (value for value in asdict(record).values() if isinstance(value, int | float))  # type: ignore[call-overload]
        return record if all(0 <= number <= _LARGEST for number in numbers) else None  # NaN is not, either


def _last_lines(path: Path) -> Iterator[bytes]:
    """Yield the whole lines at the end of a file, the last first; none of one that cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - MOST_BYTES)
        file.seek(start)
        # The last line has no end yet; the first of a part of the file has perhaps no beginning.
        yield from file.read().split(b"\n")[-2 : 0 if start else None : -1]


def measurement_line(run: str, record: Any) -> bytes:
    """Return a record of a run as a line of JSON."""
    return json.dumps(asdict(record) | {"run": run}, separators=(",", ":")).encode() + b"\n"


DIED_GROWTH = 1.25  # a failed step's memory times this counts as its need until a step succeeds (assumed)
NEWEST = 200  # measurements that count, of steps or of tasks
CPU = "cpu"
_NO_MEMORY = frozenset({"learning_rate", "weight_decay"})  # options that change no byte


@dataclass(frozen=True, slots=True)
class Peak:
    """The measured worst bucket of a plan; if it ran out of memory, the peak is the available memory."""

    model: str  # its fingerprint
    card: str  # as the plan calls it
    gpu: str  # as `devices` calls what the driver named; `cpu` where there is none
    torch: str
    driver: str
    allocator: str  # its settings
    sizes: str  # of the micro-batch
    predicted_bytes: int
    measured_bytes: int
    died: bool
    outside_bytes: int  # on the card but not torch's: contexts of all processes
    predicted_s: float  # of a step
    step_s: float  # 0: not measured
    at: float
    run: str = ""

    @property
    def ratio(self) -> float:
        """Return measured over predicted bytes, a lower bound where the step died."""
        return self.measured_bytes / self.predicted_bytes if self.predicted_bytes else 0.0


class PeakHistory(Records[Peak]):
    """The measured peaks, for this version of torch."""

    def __init__(self, path: Path, torch: str | None = None) -> None:
        super().__init__(path, Peak)
        self._torch = torch or torch_version()

    def of(self, model: str, card: str) -> list[Peak]:
        """Return the measured peaks of a model on a card, newest first."""
        gpu = known_name(card)
        records = self.newest(model=model, torch=self._torch)
        return list(islice((peak for peak in records if card == peak.card or gpu == peak.gpu), NEWEST))

    def ratios(self, model: str, card: str) -> tuple[float, ...]:
        """Return measured/predicted bytes of a model on a card, newest first, to correct a prediction.

        A step that died needs more than was available: until one with a higher ratio lived, its ratio counts times
        DIED_GROWTH. One that died with less than was predicted says nothing new.
        """
        peaks = [peak for peak in self.of(model, card) if peak.predicted_bytes]
        lived = max((peak.ratio for peak in peaks if not peak.died), default=0.0)
        telling = (peak for peak in peaks if not (peak.died and peak.ratio <= max(lived, 1.0)))
        return tuple(peak.ratio * (DIED_GROWTH if peak.died else 1.0) for peak in telling)

    def seconds(self, model: str, card: str) -> tuple[float, ...]:
        """Return measured/predicted seconds of a step of a model on a card, newest first."""
        return tuple(
            peak.step_s / peak.predicted_s for peak in self.of(model, card) if peak.step_s and peak.predicted_s
        )


def ratios_of_all(peaks: PeakHistory, model: str, cards: Sequence[str]) -> tuple[float, ...]:
    """Return the ratios for a plan that holds on several cards: () while one of them was never measured."""
    ratios_by_card = [peaks.ratios(model, card) for card in cards]
    return tuple(chain.from_iterable(ratios_by_card)) if all(ratios_by_card) else ()


def fingerprint(model: nn.Module, *options: Any) -> str:
    """Return a digest of what determines a model's memory: its tensors, its modules with their numbers, the options.

    Options are dataclasses. The model may be on fake tensors or on the meta device.
    """
    digest = hashlib.blake2b(digest_size=16)
    for line in _memory_lines(model, options):
        digest.update(line.encode(errors="backslashreplace") + b"\n")
    return digest.hexdigest()


def _memory_lines(model: nn.Module, options: Iterable[Any]) -> Iterator[str]:
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            yield f"{kind} {name} {tuple(tensor.shape)} {tensor.dtype}"
    for name, module in model.named_modules():  # with numbers such as attention heads, which no parameter shows
        numbers = {key: value for key, value in sorted(vars(module).items()) if isinstance(value, int | float)}
        numbers.pop("training", None)
        yield f"module {name} {type(module).__qualname__} {numbers}"
    for option in options:
        for field in fields(option):
            if field.name not in _NO_MEMORY:
                yield f"option {field.name} {getattr(option, field.name)!r}"


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Return the sizes of a micro-batch as they are remembered."""
    return " ".join(f"{name}={size}" for name, size in sorted(sizes.items()))


def torch_version() -> str:
    """Return the version of torch that is installed, without importing it; what it was built for is left out."""
    return metadata.version("torch").partition("+")[0]


ENOUGH = 5
PERCENTILE = 99
MARGIN_PERCENT = 20
GROWTH = 1.5
SAMPLED_S = 30.0
FLOOR_BYTES = 256 * MIB
STEP_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class Measured:
    """An attempt at a task that succeeded or ran out of host memory; None marks unmeasured values."""

    stage: str
    recipe: str  # hex
    cluster: str
    attempt: int
    task: int
    items: int  # what this attempt finished; 0 says nothing of its pace
    size: int  # its largest item, in the stage's unit of cost; 0 is unknown
    cpus: int
    asked_bytes: int | None
    peak_bytes: int | None
    gpu_peak_bytes: int | None
    killed: bool  # died of host memory: it needed more than the larger of what it asked for and its peak
    elapsed_s: float
    cpu_s: float
    node: str
    at: float  # when it ended: by run, task, attempt and this a task recorded twice counts once
    run: str = ""

    @property
    def least_bytes(self) -> int:
        """Return the least that it needed; 0 if not measured."""
        return max(self.peak_bytes or 0, (self.asked_bytes or 0) if self.killed else 0)

    @property
    def lived(self) -> bool:
        """Tell whether it succeeded and its peak is known."""
        return not self.killed and bool(self.peak_bytes)


@dataclass(frozen=True, slots=True)
class SuggestionBounds:
    """How far past tasks of a kind may change the plan, and how messages call them."""

    whose: str = ""
    trusted: bool = True  # enough of it may ask for less than was planned
    at_most: float = float("inf")  # times what was planned


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The memory to request, and why."""

    mem_bytes: int
    why: str
    tasks: int  # how many it rests on


def planned(planned_bytes: int) -> Suggestion:
    """Return the plan, as a request."""
    return Suggestion(_request(planned_bytes), "estimated (no earlier runs)", 0)


def suggest(past: Iterable[Measured], bounds: SuggestionBounds, *, planned_bytes: int) -> Suggestion | None:
    """Return the request that past tasks suggest; None where none was measured."""
    pool = _newest(task for task in past if task.least_bytes)
    if not pool:
        return None
    mem_bytes, why = _need(pool, bounds.whose)
    if mem_bytes > bounds.at_most * planned_bytes:
        mem_bytes, why = int(bounds.at_most * planned_bytes), f"{why}; at most {bounds.at_most:g} times the estimate"
    sampled = sum(task.lived and task.elapsed_s >= SAMPLED_S for task in pool)
    if mem_bytes < planned_bytes and not (bounds.trusted and sampled >= ENOUGH):
        mem_bytes, why = planned_bytes, f"{why}; too few measurements to go below the estimate"
    if mem_bytes < FLOOR_BYTES:
        why = f"{why}; never below {format_bytes(FLOOR_BYTES)}"
    return Suggestion(_request(mem_bytes), why, _tasks(pool))


def pace(past: Iterable[Measured]) -> float | None:
    """Return the median of items per second, of the newest tasks that ended well."""
    done = _newest(task for task in past if not task.killed and task.items > 0 and task.elapsed_s > 0)
    return median(task.items / task.elapsed_s for task in done) if done else None


def _newest(past: Iterable[Measured]) -> list[Measured]:
    return nlargest(NEWEST, past, key=_order)


def _order(task: Measured) -> tuple[float | str, ...]:
    own = (task.killed, task.least_bytes, task.asked_bytes or 0, task.size, task.elapsed_s)
    return task.at, task.run, task.task, task.attempt, *own  # the rest only for one that was recorded twice


def _need(pool: Sequence[Measured], whose: str) -> tuple[int, str]:
    """Return the need and its reason: the larger of what surviving tasks used and what killed ones must get."""
    living = [task for task in pool if task.lived]
    deaths = {task for task in pool if task.killed and not any(_outlives(other, task) for other in living)}
    known = [task for task in pool if task not in deaths]
    needs: list[tuple[int, str]] = []
    if known:
        used = sorted(task.least_bytes for task in known)
        at_percentile = used[ceil(len(used) * PERCENTILE / 100) - 1]
        why = f"{PERCENTILE}th percentile {format_bytes(at_percentile)} + {MARGIN_PERCENT}%"
        needs.append((at_percentile * (100 + MARGIN_PERCENT) // 100, f"from {_counted(known)}{whose}: {why}"))
    if deaths:
        limit = max(death.least_bytes for death in deaths)
        upto = "" if all(death.least_bytes == limit for death in deaths) else "up to "
        why = f"died at {upto}{format_bytes(limit)}: at least {GROWTH:g} times that"
        needs.append((ceil(limit * GROWTH), f"{_counted(deaths)}{whose} {why}"))
    return max(needs)


def _outlives(task: Measured, death: Measured) -> bool:
    """Tell whether a successful task shows how much a killed one needed."""
    if (task.run, task.task) == (death.run, death.task):  # else it ran without what did not fit
        return task.attempt > death.attempt and (task.asked_bytes is None or task.asked_bytes >= death.least_bytes)
    if task.asked_bytes is not None and task.asked_bytes <= death.least_bytes:
        return False
    return task.at > death.at and task.size >= death.size > 0


def _request(mem_bytes: int) -> int:
    return ceil(max(mem_bytes, FLOOR_BYTES) / STEP_BYTES) * STEP_BYTES


def _tasks(pool: Iterable[Measured]) -> int:
    return len({(task.run, task.task) for task in pool})


def _counted(pool: Iterable[Measured]) -> str:
    return "1 task" if _tasks(pool) == 1 else f"{_tasks(pool)} tasks"


_LOOKED_AT = 5 * NEWEST  # some are recorded twice, and some show nothing
_BOUNDS = {  # by whether tasks are of the same recipe and on the same cluster, the most telling first
    (True, True): SuggestionBounds(),
    (True, False): SuggestionBounds(" on other clusters", trusted=False),
    (False, True): SuggestionBounds(" of other recipes", trusted=False, at_most=2),
    (False, False): SuggestionBounds(" of other recipes on other clusters", trusted=False, at_most=2),
}


class Profiles(Records[Measured]):
    """The measured needs of tasks: of attempts that succeeded or ran out of memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, Measured)

    def suggest(self, stage: str, recipe: str, cluster: str, *, planned_bytes: int) -> Suggestion:
        """Return how much memory to request."""
        for (same_recipe, same_cluster), bounds in _BOUNDS.items():
            having = {"stage": stage} | ({"recipe": recipe} if same_recipe else {})
            found = (
                task
                for task in self.newest(**having)
                if (task.recipe == recipe) is same_recipe and (task.cluster == cluster) is same_cluster
            )
            suggestion = suggest(_distinct(found), bounds, planned_bytes=planned_bytes)
            if suggestion is not None:
                return suggestion
        return planned(planned_bytes)

    def pace(self, stage: str, recipe: str, cluster: str) -> float | None:
        """Return the items per second of a task of this recipe here; None where none was measured."""
        return pace(_distinct(self.newest(stage=stage, recipe=recipe, cluster=cluster)))


def _distinct(found: Iterable[Measured]) -> list[Measured]:
    """Return the newest attempts; of one that was recorded twice, the larger."""
    newest = sorted(islice(found, _LOOKED_AT), key=_order)
    return list({_order(task)[:4]: task for task in newest}.values())
