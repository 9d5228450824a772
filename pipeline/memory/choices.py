"""The remedies in their order, and what may be tried: smaller micro-batches are part of every trial."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from pipeline.memory.footprint import Choice

if TYPE_CHECKING:
    from pipeline.memory.request import Request

WORTH = 1.05  # a later remedy must be so many times as fast


def choices(request: Request) -> list[Choice]:
    """Return what may be chosen; who needs only earlier remedies comes first.

    The order is that of counting, the first remedy changing fastest: none, checkpointing, precision, both, offload, …
    """
    shards = (1, request.ranks) if request.shards is None and request.ranks > 1 else (request.shards or 1,)
    options = product(shards, _either(request.offload), request.precisions, _either(request.checkpointing))
    return [
        Choice(precision, checkpointing=checkpointing, offload=offload, shards=parts)
        for parts, offload, precision, checkpointing in options
    ]


def _either(wanted: bool | None) -> tuple[bool, ...]:  # noqa: FBT001 - a setting of three values
    return (False, True) if wanted is None else (wanted,)


def remedies(choice: Choice, request: Request) -> tuple[str, ...]:
    """Return what a choice does beside smaller micro-batches, in words and in order."""
    said = (
        (choice.checkpointing, "checkpointing"),
        (choice.precision != request.precisions[0], f"precision {choice.precision}"),
        (choice.offload, "offload"),
        (choice.shards > 1, f"sharding over {choice.shards} ranks"),
    )
    return tuple(text for is_so, text in said if is_so)


def remedy_text(choice: Choice, request: Request) -> str:
    """Return the remedies of a choice as one text."""
    return " + ".join(("smaller micro-batches", *remedies(choice, request)))
