"""Measured peaks of training steps beside their predictions, which correct later plans.

A record (`record_files`) is of a model with its options (`fingerprint`), a card and a version of torch; where one of
these differs, the ratio says nothing certain.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, is_dataclass
from importlib import metadata
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from pipeline.memory.hardware.gpus import known_name
from pipeline.memory.history.record_files import RecordFiles

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import nn

DIED_GROWTH = 1.25  # times what a step died at is taken as its need until one lived: assumed, a step beyond what failed
NEWEST = 200  # measurements that count
CPU = "cpu"
_NO_MEMORY = frozenset({"learning_rate", "weight_decay"})  # options that change no byte


@dataclass(frozen=True, slots=True)
class Peak:
    """The measured worst bucket of a plan; if it ran out of memory, the peak is what was available."""

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
    step_s: float  # 0: nobody measured it
    at: float

    @property
    def ratio(self) -> float:
        """Return measured over predicted bytes, a lower bound where the step died."""
        return self.measured_bytes / self.predicted_bytes if self.predicted_bytes else 0.0


class PeakHistory:
    """The measured peaks in one folder, for this version of torch."""

    def __init__(self, folder: Path, torch: str | None = None) -> None:
        self._files = RecordFiles(folder / "records", Peak)
        self._torch = torch_version() if torch is None else torch

    def record(self, run: str, writer: str, peaks: Iterable[Peak]) -> bool:
        """Store measurements; return False where the folder cannot be written."""
        return self._files.append(run, writer, peaks)

    def of(self, model: str, card: str) -> list[Peak]:
        """Return the measured peaks of a model on a card, newest first."""
        gpu = known_name(card)
        records = self._files.newest({"model": model, "torch": self._torch})
        on_card = (record for record in records if card == record[1].card or gpu == record[1].gpu)
        distinct = {
            (peak.at, run, peak.card, peak.sizes, peak.allocator): peak for run, peak in islice(on_card, NEWEST)
        }
        return [distinct[key] for key in sorted(distinct, reverse=True)]

    def ratios(self, model: str, card: str) -> tuple[float, ...]:
        """Return measured/predicted bytes of a model on a card, newest first."""
        return ratios(self.of(model, card))

    def seconds(self, model: str, card: str) -> tuple[float, ...]:
        """Return measured/predicted seconds of a step of a model on a card, newest first."""
        return tuple(
            peak.step_s / peak.predicted_s for peak in self.of(model, card) if peak.step_s and peak.predicted_s
        )


def ratios(peaks: Sequence[Peak]) -> tuple[float, ...]:
    """Return measured/predicted of peaks, to correct a prediction.

    A step that died needs more than was available: until one with a higher ratio lived, its ratio counts times
    DIED_GROWTH. One that died with less than was predicted says nothing new.
    """
    lived = max((peak.ratio for peak in peaks if not peak.died), default=0.0)
    telling = (peak for peak in peaks if peak.predicted_bytes and not (peak.died and peak.ratio <= max(lived, 1.0)))
    return tuple(peak.ratio * (DIED_GROWTH if peak.died else 1.0) for peak in telling)


def ratios_of_all(peaks: PeakHistory, model: str, cards: Sequence[str]) -> tuple[float, ...]:
    """Return the ratios for a plan that holds on several cards: () while one of them was never measured."""
    ratios_by_card = [peaks.ratios(model, card) for card in cards]
    return tuple(chain.from_iterable(ratios_by_card)) if all(ratios_by_card) else ()


def fingerprint(model: nn.Module, *options: Any) -> str:
    """Return a digest of what determines a model's memory: its tensors, its modules with their numbers, the options.

    Options are dataclasses. The model may be on fake tensors or on the meta device.
    """
    digest = hashlib.blake2b(digest_size=16)
    for line in (*_tensors(model), *_modules(model), *_options(options)):
        digest.update(line.encode(errors="backslashreplace") + b"\n")
    return digest.hexdigest()


def _tensors(model: nn.Module) -> Iterator[str]:
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            yield f"{kind} {name} {tuple(tensor.shape)} {tensor.dtype}"


def _modules(model: nn.Module) -> Iterator[str]:
    """Yield module classes with their numeric attributes, such as attention heads, which no parameter shows."""
    for name, module in model.named_modules():
        numbers = {key: value for key, value in sorted(vars(module).items()) if isinstance(value, int | float)}
        numbers.pop("training", None)
        yield f"module {name} {type(module).__qualname__} {numbers}"


def _options(options: Iterable[Any]) -> Iterator[str]:
    for option in options:
        assert is_dataclass(option)
        for field in fields(option):
            if field.name not in _NO_MEMORY:
                yield f"option {field.name} {getattr(option, field.name)!r}"


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Return the sizes of a micro-batch as they are remembered."""
    return " ".join(f"{name}={size}" for name, size in sorted(sizes.items()))


def torch_version() -> str:
    """Return the version of torch that is installed, without importing it; what it was built for is left out."""
    return metadata.version("torch").partition("+")[0]
