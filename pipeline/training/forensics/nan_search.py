"""Finding where a loss or gradient that is not finite comes from: the item, term, module, parameter and operation.

The search leaves the step as it was before.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from pipeline.device.out_of_memory import out_of_memory_error
from pipeline.memory.runtime.recovery import StepSnapshot, forget_failed_backward
from pipeline.training.checkpoints.keeper import plain_name
from pipeline.training.forensics.rerun import not_finite
from pipeline.training.items.batch import ItemBatch
from pipeline.units import first_few

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

    from pipeline.device.accelerator import RngState
    from pipeline.training.forensics.rerun import PartResult, RerunPart
    from pipeline.training.step.micro_batches import Piece
    from pipeline.training.step.step import Step

_NAN = re.compile(r"Function '(\w+?)(?:Backward\d*)?' returned nan values")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in')
_TORCH = str(Path(torch.__file__).parent)
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Suspect:
    """Items whose loss or gradients are not finite, and where that begins."""

    ids: tuple[str, ...]  # a single one: it is so by itself
    fields: tuple[str, ...] = ()  # of the batch that are not finite themselves
    terms: tuple[str, ...] = ()  # of the loss
    module: str = ""  # the first whose output is not finite; with none, it is the loss itself
    kind: str = ""  # of module
    was_given: bool = False  # the module's input was not finite already
    parameters: tuple[str, ...] = ()  # whose gradients are not finite though the loss is
    operation: str = ""  # the first whose derivative is NaN
    line: str = ""  # where it is called

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def words(self) -> str:
        """Describe it in a sentence for people."""
        parts = [f"{self.ids[0]} alone" if len(self.ids) == 1 else f"{len(self.ids)} items together, no single one"]
        if self.fields:
            parts.append(f"the batch itself is not finite: {first_few(self.fields, _SHOWN)}")
        if self.terms:
            parts += [f"the term {first_few(self.terms, _SHOWN)} of the loss", self._place()]
        if self.parameters:
            parts.append(f"the loss is finite, the gradients of {first_few(self.parameters, _SHOWN)} are not")
        if self.operation:
            parts.append(f"first in the derivative of {self.operation}{f' ({self.line})' if self.line else ''}")
        return "; ".join(parts)

    def _place(self) -> str:
        if not self.module:
            return "every module's output is finite: the problem starts in loss() itself"
        given = ", whose input was not finite" if self.was_given and not self.fields else ""
        return f"first in the output of {self.module} ({self.kind}){given}"


def suspects(
    step: Step, results: Iterable[PartResult], read: Callable[[RerunPart], Piece], *, backward: bool = False
) -> list[Suspect]:
    """Check the items of each part one by one, and together where none fails alone; `backward`: also gradients."""
    snapshot = StepSnapshot(step.model, device=step.device, scaler=step.scaler)
    all_suspects: list[Suspect] = []
    for result in results:
        piece = read(result.part)
        assert result.rng is not None  # it ran
        alone = [_looked_at(step, single, result.rng, snapshot, backward=backward) for single in piece.singles()]
        part_suspects = [suspect for suspect in alone if suspect is not None]
        if not part_suspects and len(piece) > 1:
            together = _looked_at(step, piece, result.rng, snapshot, backward=backward)
            part_suspects = [together] if together else []
        all_suspects += part_suspects
    snapshot.rewind()
    return all_suspects


def _looked_at(step: Step, piece: Piece, rng: RngState, snapshot: StepSnapshot, *, backward: bool) -> Suspect | None:
    """Run a piece with hooks on every module; None: all is finite, or it does not fit in memory."""
    suspect: list[Suspect | None] = []

    def again() -> None:
        step.release()
        snapshot.restore()
        rng.restore()

    def look(piece: Piece) -> None:
        again()
        suspect.append(_forward(step, piece) or (_backward(step, piece, again) if backward else None))

    if out_of_memory_error(look, piece) is not None:
        snapshot.rewind()
    again()
    return suspect[0] if suspect else None


def _forward(step: Step, piece: Piece) -> Suspect | None:
    """Check the forward pass and the loss."""
    batch = step.moved(piece.collated(step))
    with torch.no_grad(), step.cast(), _watched(step.model) as modules:
        terms = step.task.loss(step.model, batch)
    bad = tuple(name for name, (total, weight) in terms.items() if not (_is_finite(total) and _is_finite(weight)))
    if not bad:
        return None
    module, kind, was_given = modules[0] if modules else ("", "", False)
    return Suspect(piece.ids, _fields(batch), bad, module, kind, was_given)


def _backward(step: Step, piece: Piece, again: Any) -> Suspect | None:
    """Check the gradients, and find the first operation whose derivative is NaN."""
    again()
    _accumulate(step, piece)
    bad = tuple(not_finite(step))
    if not bad:
        return None
    again()
    operation, line = _operation(step, piece)
    return Suspect(piece.ids, parameters=bad, operation=operation, line=line)


def _accumulate(step: Step, piece: Piece) -> None:
    step.accumulate_alone(piece.collated(step))


def _operation(step: Step, piece: Piece) -> tuple[str, str]:
    """Return the first operation whose derivative is NaN, and the line that calls it; empty texts where none is."""
    with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(True, check_nan=True):
        warnings.simplefilter("always")
        try:
            _accumulate(step, piece)
        except RuntimeError as error:
            match = _NAN.search(str(error))
            if match is None:
                raise
            forget_failed_backward()
            return match[1], _line("\n".join(str(warning.message) for warning in caught))
    return "", ""


def _line(trace: str) -> str:
    """Return the innermost frame of a traceback that is not torch's own."""
    frames = [match for match in _FRAME.finditer(trace) if not match[1].startswith(_TORCH)]
    return f"{frames[-1][1]}:{frames[-1][2]}" if frames else ""


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[tuple[str, str, bool]]]:
    """Yield a list that fills with (name, class, input not finite) of modules with a bad output, innermost first."""
    modules: list[tuple[str, str, bool]] = []

    def hook(name: str) -> Any:
        def look(module: nn.Module, given: Any, output: Any) -> None:
            if not _is_finite(output):
                modules.append((plain_name(name) or "the model", type(module).__name__, not _is_finite(given)))

        return look

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    try:
        yield modules
    finally:
        for handle in handles:
            handle.remove()


def _is_finite(value: Any) -> bool:
    """Say whether all floating-point numbers in a nested value are finite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, float):
            yield torch.tensor(leaf)
        elif isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for leaf_field in fields(leaf):
                yield from _tensors(getattr(leaf, leaf_field.name))


def _fields(batch: Any, of: str = "") -> tuple[str, ...]:
    """Return the names of a batch's fields that are not finite, also within others; `batch` if it has none."""
    named = batch.fields if isinstance(batch, ItemBatch) else getattr(batch, "_asdict", lambda: batch)()
    if is_dataclass(named) and not isinstance(named, type):
        named = {field.name: getattr(named, field.name) for field in fields(named)}
    if isinstance(named, Mapping):
        return tuple(name for key, value in named.items() for name in _fields(value, f"{of}.{key}".removeprefix(".")))
    return () if _is_finite(batch) else (of or "batch",)
