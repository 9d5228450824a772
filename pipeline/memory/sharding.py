"""What spreading a model over ranks leaves on each, by a formula: nothing of it is traced.

FSDP2 keeps of every parameter, gradient and optimizer state one part in `shards`, gathers a block's parameters before
it computes with them and, while it does, those of the next one; its gradients are whole until they have been reduced
(torch.distributed.fsdp.fully_shard). Buffers stay whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pipeline.memory.footprint import Category, Origin, Part, Tape

if TYPE_CHECKING:
    from pipeline.memory.footprint import Micro, Standing

GATHERED = 2  # blocks whose parameters are whole at once: the one that computes and the one fetched ahead
_SPREAD = {Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER, Category.EMA}
_NOTE = "sharded by a formula: nobody traced it"
_OWN = 1 << 40  # a block number that no tape of a model has


def sharded_standing(standing: Standing, shards: int) -> Standing:
    """Return what of a model's state is left on one of several ranks."""
    parts = tuple(_share(part, shards) for part in standing.parts)
    setup = _spread(standing.setup, shards, only_shared=False)
    whole = sum(part.bytes for part in parts) - setup.left_bytes
    return replace(
        standing,
        setup=_then(setup, whole) if whole > 0 else setup,
        first_update=_spread(standing.first_update, shards, only_shared=False),
        update=_spread(standing.update, shards, only_shared=False),
        parts=parts,
        origin=Origin.ASSUMED,
        notes=(*standing.notes, f"{_NOTE}, over {shards} ranks"),
    )


def sharded_micro(micro: Micro, standing: Standing, shards: int) -> Micro:
    """Return what a micro-batch takes where the model (whose whole state is given) is spread."""
    gathered = gathered_bytes(standing)
    parts = (*(_share(part, shards) for part in micro.parts), Part(Category.PARAMETERS, "gathered blocks", gathered))
    return replace(
        micro,
        first=_around(_spread(micro.first, shards), gathered),
        again=_around(_spread(micro.again, shards), gathered),
        parts=parts,
        origin=Origin.ASSUMED,
        notes=(*micro.notes, _NOTE),
    )


def gathered_bytes(standing: Standing) -> int:
    """Return what the largest block takes while it is whole: parameters, those fetched ahead, and gradients."""
    every = sum(part.bytes for part in standing.parts if part.category is Category.PARAMETERS)
    return (GATHERED + 1) * (standing.largest_block_bytes or every)


def _share(part: Part, shards: int) -> Part:
    return replace(part, bytes=-(-part.bytes // shards)) if part.category in _SPREAD else part


def _spread(tape: Tape, shards: int, *, only_shared: bool = True) -> Tape:
    """Return a tape whose blocks, or only those it shares with other tapes, are one part in `shards`."""
    part_E = np.sign(tape.bytes_E) * -(-np.abs(tape.bytes_E) // shards)
    if not only_shared:
        return Tape(tape.block_E, part_E)
    return Tape(tape.block_E, np.where(tape.block_E < 0, part_E, tape.bytes_E))


def _around(tape: Tape, extra: int) -> Tape:
    """Return a tape during which one more block is live."""
    return Tape(np.concatenate(([_OWN], tape.block_E, [_OWN])), np.concatenate(([extra], tape.bytes_E, [-extra])))


def _then(tape: Tape, extra: int) -> Tape:
    """Return a tape with one more block at its end."""
    return Tape(np.append(tape.block_E, _OWN), np.append(tape.bytes_E, extra))
