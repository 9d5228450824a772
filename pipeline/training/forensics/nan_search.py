"""Where a loss or a gradient that is not finite comes from: which item alone, which term, module, parameter, operation.

Everything is afterwards as it was before.
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

from pipeline.memory.runtime.out_of_memory import out_of_memory_error
from pipeline.memory.runtime.recovery import StepSnapshot, forget_failed_backward
from pipeline.training.checkpoints.training_state import plain_name
from pipeline.training.forensics.rerun import not_finite
from pipeline.training.items.batch import ItemBatch
from pipeline.training.random_state import set_rng_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor, nn

    from pipeline.training.forensics.rerun import PartResult, RerunPart
    from pipeline.training.step.micro_batches import Piece
    from pipeline.training.step.step import Step

_NAN = re.compile(r"Function '(\w+?)(?:Backward\d*)?' returned nan values")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in')
_TORCH = str(Path(torch.__file__).parent)
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Suspect:
    """Items that have a loss or gradients that are not finite, and where that begins."""

    ids: tuple[str, ...]  # one: it is so alone
    fields: tuple[str, ...] = ()  # of the batch that are not finite already
    terms: tuple[str, ...] = ()  # of the loss
    module: str = ""  # the first whose output is not finite; with none, it is the loss itself
    kind: str = ""  # of module
    was_given: bool = False  # the module's own input is not finite
    parameters: tuple[str, ...] = ()  # whose gradients are not finite though the loss is
    operation: str = ""  # whose derivative is the first that is no number
    line: str = ""  # where that is called

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def words(self) -> str:
        """Say it for people."""
        who = f"{self.ids[0]} alone" if len(self.ids) == 1 else f"{len(self.ids)} items together, none of them alone"
        said = [who]
        if self.fields:
            said.append(f"the batch itself is not finite: {_listed(self.fields)}")
        if self.terms:
            said.append(f"the term {_listed(self.terms)} of the loss")
            said.append(self._place())
        if self.parameters:
            said.append(f"the loss is finite, the gradients of {_listed(self.parameters)} are not")
        if self.operation:
            said.append(f"first in the derivative of {self.operation}{f' ({self.line})' if self.line else ''}")
        return "; ".join(one for one in said if one)

    def _place(self) -> str:
        if not self.module:
            return "every module's output is finite: it begins in loss() itself"
        given = ", which was given such numbers" if self.was_given and not self.fields else ""
        return f"first in the output of {self.module} ({self.kind}){given}"


def suspects(
    step: Step, results: Iterable[PartResult], read: Callable[[RerunPart], Piece], *, backward: bool = False
) -> list[Suspect]:
    """Look at the items of parts one by one, and together where none is to blame alone; `backward`: at gradients."""
    snapshot = StepSnapshot(step.model, device=step.device, scaler=step.scaler)
    found: list[Suspect] = []
    for result in results:
        piece = read(result.part)
        alone = [_looked_at(step, one, result.rng, snapshot, backward=backward) for one in piece.singles()]
        some = [one for one in alone if one is not None]
        if not some and len(piece) > 1:
            together = _looked_at(step, piece, result.rng, snapshot, backward=backward)
            some = [together] if together else []
        found += some
    snapshot.rewind()
    return found


def _looked_at(
    step: Step, piece: Piece, rng: Mapping[str, Tensor], snapshot: StepSnapshot, *, backward: bool
) -> Suspect | None:
    """Run some items with an eye on every module; None: all is finite, or does not fit."""
    found: list[Suspect | None] = []

    def again() -> None:
        step.release()
        snapshot.restore()
        set_rng_state(rng, step.device)

    def look(one: Piece) -> None:
        again()
        found.append(_forward(step, one) or (_backward(step, one, again) if backward else None))

    if out_of_memory_error(look, piece) is not None:
        snapshot.rewind()
    again()
    return found[0] if found else None


def _forward(step: Step, piece: Piece) -> Suspect | None:
    """Look for what is not finite on the way to the loss."""
    batch = step.moved(piece.collated(step.task))
    with torch.no_grad(), step.cast(), _watched(step.model) as seen:
        terms = step.task.loss(step.model, batch)
    bad = tuple(name for name, (total, weight) in terms.items() if not (_is_finite(total) and _is_finite(weight)))
    if not bad:
        return None
    module, kind, was_given = seen[0] if seen else ("", "", False)
    return Suspect(piece.ids, _fields(batch), bad, module, kind, was_given)


def _backward(step: Step, piece: Piece, again: Any) -> Suspect | None:
    """Look for gradients that are not finite, and the operation that they begin with."""
    again()
    _accumulate(step, piece)
    bad = tuple(not_finite(step))
    if not bad:
        return None
    again()
    operation, line = _operation(step, piece)
    return Suspect(piece.ids, parameters=bad, operation=operation, line=line)


def _accumulate(step: Step, piece: Piece) -> None:
    """Add the gradients of some items' own loss."""
    step.accumulate_alone(piece.collated(step.task))


def _operation(step: Step, piece: Piece) -> tuple[str, str]:
    """Return the first operation whose derivative is no number, and where it is called; nothing where all are."""
    with warnings.catch_warnings(record=True) as heard, torch.autograd.set_detect_anomaly(True, check_nan=True):
        warnings.simplefilter("always")
        try:
            _accumulate(step, piece)
        except RuntimeError as error:
            match = _NAN.search(str(error))
            if match is None:
                raise
            forget_failed_backward()
            return match[1], _line("\n".join(str(one.message) for one in heard))
    return "", ""


def _line(trace: str) -> str:
    """Return the place in a trace that is nearest to the operation and not torch's own."""
    frames = [match for match in _FRAME.finditer(trace) if not match[1].startswith(_TORCH)]
    return f"{frames[-1][1]}:{frames[-1][2]}" if frames else ""


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[tuple[str, str, bool]]]:
    """Note the modules whose output is not finite, in the order in which they end: the innermost first."""
    seen: list[tuple[str, str, bool]] = []

    def hook(name: str) -> Any:
        def look(module: nn.Module, given: Any, output: Any) -> None:
            if not _is_finite(output):
                seen.append((plain_name(name) or "the model", type(module).__name__, not _is_finite(given)))

        return look

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _is_finite(value: Any) -> bool:
    """Say whether all floating point numbers of something are finite, whatever holds them."""
    return all(bool(torch.isfinite(one).all()) for one in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, float):
            yield torch.tensor(leaf)
        elif isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for one in fields(leaf):
                yield from _tensors(getattr(leaf, one.name))


def _fields(batch: Any) -> tuple[str, ...]:
    """Return which fields of a batch are not finite; where nobody can name them, `batch`."""
    named = getattr(batch, "_asdict", lambda: batch)()
    if isinstance(batch, ItemBatch):
        named = batch.fields
    if is_dataclass(named) and not isinstance(named, type):
        named = {one.name: getattr(named, one.name) for one in fields(named)}
    if isinstance(named, Mapping):
        return tuple(str(name) for name, value in named.items() if not _is_finite(value))
    return () if _is_finite(batch) else ("batch",)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
