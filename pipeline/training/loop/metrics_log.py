"""Metrics of a training: a line for each epoch and every few steps, as JSON lines in the model's folder.

A resumed training first cuts off lines of later steps, so no step appears twice; a torn last line is ignored. Only rank
0 writes. TensorBoard and Weights & Biases receive the same numbers, where configured. A tracker never ends a training:
its first failure becomes a warning, and it is not used again.

A sweep ends trainings early by the same metrics (`MedianStop`).
"""

from __future__ import annotations

import json
import logging
import math
import netrc
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from itertools import takewhile
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from pipeline.codec import read_if_whole
from pipeline.command_line import install_extra
from pipeline.files import json_object, read_json, write_whole
from pipeline.training.loss_terms import means
from pipeline.training.state import EpochCounts
from pipeline.training.step_clock import READ, shown_shares
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pipeline.training.prepared import ModelFolder
    from pipeline.training.state import EpochTotals

    Tracker: TypeAlias = "TensorBoard | Wandb"  # shows metrics over the steps

log = logging.getLogger(__name__)

EPOCHS, FIGURES = "epochs.jsonl", "figures.jsonl"
STEP, VALIDATION = "step", "validation/"  # the latter begins the names of a validation's metrics


@dataclass(frozen=True, slots=True)
class MetricRange:
    """The least, mean and largest value of something over an epoch."""

    least: float
    mean: float
    most: float

    def words(self) -> str:
        """Format it for people."""
        if self.least == self.most:
            return f"{self.least:,g} exactly"
        return f"{self.least:,g} to {self.most:,g}, {self.mean:,.4g} on average"


@dataclass(slots=True, kw_only=True)
class Epoch(EpochCounts):
    """The metrics of an epoch, counted from 1, over all ranks; memory is that of the rank that took most."""

    step: int  # optimizer steps since training began
    loss: Mapping[str, float | None]  # each term's mean; None: not finite
    learning_rate: float
    batch: MetricRange  # items in an optimizer step
    items_per_s: float
    allocated_bytes: int  # at the end of the epoch
    reserved_bytes: int
    peak_bytes: int
    planned_bytes: int = 0  # for the peak; 0: unknown
    validation: Mapping[str, float | None] = field(default_factory=dict)

    @classmethod
    def of(cls, totals: EpochTotals, **more: Any) -> Epoch:
        """Return the metrics of an epoch with these totals."""
        counts = {entry.name: getattr(totals, entry.name) for entry in fields(EpochCounts)}
        batch = MetricRange(totals.fewest, totals.items / max(1, totals.steps), totals.most)
        items_per_s = totals.items / totals.wall_s if totals.wall_s else 0.0
        more |= {"epoch": totals.epoch + 1, "loss": means(totals.terms), "batch": batch, "items_per_s": items_per_s}
        return cls(**{**counts, **more})

    @property
    def wait_share(self) -> float:
        """The share of the time that steps waited for data."""
        return self.seconds.get(READ, 0.0) / self.wall_s if self.wall_s else 0.0

    def to_json(self) -> dict[str, Any]:
        return dict(finite(asdict(self)))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Epoch:
        """Read JSON data; fields of later versions are ignored."""
        known = {field.name: data[field.name] for field in fields(cls) if field.name in data}
        return cls(**known | {"batch": MetricRange(**data["batch"])})

    def words(self) -> str:
        """Format it for people, in a line."""
        terms = {"loss": next(iter(self.loss.values()))} if len(self.loss) == 1 else self.loss
        parts = [f"epoch {self.epoch}", *(f"{name} {_number(value)}" for name, value in terms.items())]
        parts += [f"val {name} {_number(value)}" for name, value in self.validation.items()]
        held = {"allocated": self.allocated_bytes, "reserved": self.reserved_bytes, "peak": self.peak_bytes}
        parts.append(" / ".join(f"{name} {format_bytes(size)}" for name, size in held.items()))
        parts += [f"batch {self.batch.words()}", f"{self.items_per_s:,.3g} items/s"]
        parts.append(", ".join(shown_shares(self.seconds)))
        events = {"out of memory": self.ooms, **{f"by {remedy}": items for remedy, items in self.remedied.items()}}
        events |= {"rejected": self.rejected, "cropped": self.cropped, "skipped steps": self.left_out_steps}
        return "  ".join([*filter(None, parts), *(f"{count:,} {name}" for name, count in events.items() if count)])

    def scalars(self) -> dict[str, float]:
        """Return its numbers by name, for trackers."""
        numbers = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        plain = {f"epoch/{name}": value for name, value in numbers.items() if isinstance(value, int | float)}
        del plain["epoch/epoch"], plain["epoch/step"]
        plain["epoch/wait_share"] = self.wait_share
        plain |= {f"epoch/batch_{name}": value for name, value in asdict(self.batch).items()}
        plain |= {f"epoch/by_{remedy}": items for remedy, items in self.remedied.items()}
        plain |= {f"seconds/{name}": spent_s for name, spent_s in self.seconds.items()}
        plain |= {f"loss/{name}": value for name, value in self.loss.items() if value is not None}
        plain |= {f"{VALIDATION}{name}": value for name, value in self.validation.items() if value is not None}
        return {name: float(value) for name, value in plain.items()}


class MetricsLog:
    """Writes a training's metrics into its folder, and passes them to trackers by name."""

    def __init__(self, folder: Path, *, step: int = 0, trackers: Mapping[str, Tracker] | None = None) -> None:
        """Continue after a step: lines of later ones are cut off."""
        folder.mkdir(parents=True, exist_ok=True)
        self._trackers = dict(trackers or {})
        self._epochs, self._figures = _StepLines(folder / EPOCHS, step), _StepLines(folder / FIGURES, step)

    def epoch(self, epoch: Epoch) -> None:
        self._epochs.append(epoch.to_json())
        self._track(lambda tracker: tracker.scalars(epoch.step, epoch.scalars()))

    def log(self, step: int, figures: Mapping[str, float | None]) -> None:
        self._figures.append(finite({STEP: step, **figures}))
        known = {name: float(value) for name, value in figures.items() if value is not None}
        self._track(lambda tracker: tracker.scalars(step, known))

    def close(self) -> None:
        self._epochs.close()
        self._figures.close()
        self._track(lambda tracker: tracker.close())
        self._trackers.clear()

    def _track(self, call: Callable[[Tracker], None]) -> None:
        """Call each tracker; one that fails is not used again."""
        for name, tracker in list(self._trackers.items()):
            with failure_as_warning(name):
                call(tracker)
                continue
            del self._trackers[name]


class _StepLines:
    """An append-only file of JSON lines; a full disk costs lines, not the training."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        lines = takewhile(lambda read: read[0][STEP] <= step, _read(path))
        os.ftruncate(self._file, max((end for _, end in lines), default=0))

    def append(self, data: Mapping[str, Any]) -> None:
        """Append a whole line, or nothing."""
        line = json.dumps(data, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        before, problem = os.fstat(self._file).st_size, "the disk is full"
        try:
            written = os.write(self._file, line)
        except OSError as error:
            written, problem = 0, str(error.strerror)
        if written < len(line):
            log.warning("%s: a line of metrics was not written: %s", self._path, problem)
            os.ftruncate(self._file, before)

    def close(self) -> None:
        os.close(self._file)


def read_epochs(folder: Path) -> list[Epoch]:
    """Return the logged metrics of each epoch, in order; the last, where an epoch was continued."""
    epochs = [Epoch.from_json(line) for line, _ in _read(folder / EPOCHS)]
    return list({epoch.epoch: epoch for epoch in epochs}.values())


def read_figures(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics logged every few steps, each with its `step`."""
    return [line for line, _ in _read(folder / FIGURES)]


def finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, which JSON can express."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def _read(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each whole line with the offset of its end; stops at the first damaged one."""
    end = 0
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            end += len(line)
            data = json_object(line.decode(errors="replace"))
            if not line.endswith(b"\n") or not isinstance(data.get(STEP), int):
                return
            yield data, end


def _number(value: float | None) -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.3g}"


TENSORBOARD, WANDB = "tensorboard", "wandb"
FLUSH_S = 10  # a killed process loses at most this much
LOGIN_S = 60  # a node without network delays the training by at most this much
TRACKED = "trackers.json"
PROJECT = "pipeline"
SERVICE = "https://api.wandb.ai"


def open_trackers(
    names: Sequence[str], folder: Path, *, step: int = 0, name: str = "", config: Mapping[str, Any] | None = None
) -> dict[str, Tracker]:
    """Return the named trackers that work, to continue after a step; `name` and `config` describe the run to people."""
    trackers: dict[str, Tracker] = {}
    for tracker in names:
        with failure_as_warning(tracker):
            is_board = tracker == TENSORBOARD
            trackers[tracker] = TensorBoard(folder, step) if is_board else Wandb(folder, name, config or {})
    return trackers


@contextmanager
def failure_as_warning(tracker: str) -> Iterator[None]:
    """Turn any error of a tracker into a warning."""
    try:
        yield
    except ImportError as error:
        log.warning("%s receives no metrics: %s; %s", tracker, error, install_extra(tracker))
    except Exception as error:  # noqa: BLE001 - a service that shows curves is no reason to lose a training
        log.warning("%s receives no more metrics: %s: %s", tracker, type(error).__name__, error)


class TensorBoard:
    """Event files in the model's folder, for `tensorboard --logdir`."""

    def __init__(self, folder: Path, step: int) -> None:
        """Open the files, hiding what an earlier process wrote of later steps."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / TENSORBOARD), purge_step=step + 1, flush_secs=FLUSH_S)

    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases: the same one, however often training is resumed.

    Without an account on this machine it is kept in the folder, for `wandb sync`; WANDB_MODE overrides that.
    """

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        run, sent = tracked_run(folder)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=str(folder),
            id=run,
            name=name or folder.name,
            config=dict(config),
            resume="allow",
            mode=None if "WANDB_MODE" in os.environ or _has_account() else "offline",
            settings=wandb.Settings(silent=True, console="off", init_timeout=LOGIN_S),
        )
        self._sent = max(sent, self._run.step - 1)  # W&B accepts each step once

    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the metrics of a step, unless W&B already has it from before a resume."""
        if step > self._sent:
            self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


def tracked_run(folder: Path) -> tuple[str, int]:
    """Return the id of a folder's W&B run, and the last step that it was ever sent.

    Call it before `MetricsLog` cuts off lines; the result of earlier calls is kept in a file.
    """
    known = read_json(folder / TRACKED)
    known = known if isinstance(known, dict) else {}
    logged = [line[STEP] for name in (EPOCHS, FIGURES) for line, _ in _read(folder / name)] if known else []
    run, sent = known.get(WANDB) or secrets.token_hex(8), max([known.get(STEP, 0), *logged])
    write_whole(folder / TRACKED, json.dumps({WANDB: run, STEP: sent}))
    return run, sent


def _has_account() -> bool:
    """Tell whether this machine has a W&B key; without one, wandb would prompt for it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", SERVICE)).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


# Median stopping: a training of a sweep ends early if it is worse than the median of the others at the same epoch.
# Its decision is a file in the model's folder, so it survives any restart. A plain training of the model ignores it.

FEWEST = 3  # others, for a median


def falls_behind(
    own: Mapping[int, float], others: Sequence[Mapping[int, float]], *, grace: int, lower: bool
) -> float | None:
    """Return the median of the others' best values up to the newest epoch if the best of `own` is worse; else None.

    Values are by epoch, counted from 1. Only others that were validated at that very epoch count. The rule does not
    apply within the first `grace` epochs, nor with fewer than three others. A value that is not finite is the worst.
    """
    epoch = max(own, default=0)
    if epoch < grace:
        return None
    reached = [_best(figures, epoch, lower=lower) for figures in others if epoch in figures]
    if len(reached) < FEWEST:
        return None
    middle, mine = median(reached), _best(own, epoch, lower=lower)
    return middle if (mine > middle if lower else mine < middle) else None


def _best(figures: Mapping[int, float], epoch: int, *, lower: bool) -> float:
    worst = math.inf if lower else -math.inf
    known = [figure if math.isfinite(figure) else worst for at, figure in figures.items() if at <= epoch]
    return min(known) if lower else max(known)


def figures_by_epoch(folder: ModelFolder, monitor: str) -> dict[int, float]:
    """Return the values of a metric by epoch; NaN for those that were not finite."""
    epochs = [epoch for epoch in read_epochs(folder.path) if monitor in epoch.validation]
    values = {epoch.epoch: epoch.validation[monitor] for epoch in epochs}
    return {epoch: math.nan if value is None else value for epoch, value in values.items()}


@dataclass(frozen=True)
class Pruned:
    """Where and why a sweep ended a training."""

    epoch: int  # the last one
    why: str

    @classmethod
    def read(cls, folder: ModelFolder, epochs: int) -> Pruned | None:
        """Return the decision; None if there is none, or the training has continued beyond it."""
        pruned = read_if_whole(folder.pruned, cls)
        return pruned if pruned is not None and pruned.epoch >= epochs else None


@dataclass(frozen=True)
class MedianStop:
    """The rule for one training among the others of its sweep."""

    folder: ModelFolder
    others: Sequence[ModelFolder]
    monitor: str
    lower: bool
    grace: int

    def decide(self, epochs: int) -> str:
        """Return why the training ends after so many epochs, and record it; empty if it continues."""
        if (pruned := Pruned.read(self.folder, epochs)) is not None:
            return pruned.why
        own = figures_by_epoch(self.folder, self.monitor)
        others = [figures_by_epoch(other, self.monitor) for other in self.others]
        middle = falls_behind(own, others, grace=self.grace, lower=self.lower)
        if middle is None:
            return ""
        epoch = max(own)
        best = _best(own, epoch, lower=self.lower)
        why = f"{self.monitor} {best:.4g} is worse than the median of the others at epoch {epoch}, {middle:.4g}"
        write_whole(self.folder.pruned, json.dumps({"epoch": epoch, "why": why}))
        return why
