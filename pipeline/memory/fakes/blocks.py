"""What the blocks of a trace are for, and by which names they are told and added up."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pipeline.memory.fakes.recorder import SCRATCH
from pipeline.memory.footprint import Category, Part

if TYPE_CHECKING:
    from collections import Counter

    from pipeline.memory.fakes.recorder import Block

UNREGISTERED = "kept by the model, not registered"


def kind_of(block: Block, backward: int) -> tuple[Category, str]:
    """Return what a block is for: what forward leaves for backward, or what is soon gone."""
    if block.born < 0:
        return Category.BUFFERS, UNREGISTERED
    if block.phase == SCRATCH:
        return Category.SCRATCH, ""
    if block.phase == "inputs":
        return Category.INPUTS, ""
    if block.phase == "forward" and (block.died < 0 or block.died > backward):
        if block.module:
            return Category.ACTIVATIONS, family(block.module)
        return Category.LOSS, " and ".join(block.terms)
    return Category.TEMPORARIES, block.phase


def outermost(name: str) -> str:
    """Return the block that a parameter is of: layers.3, or the module where nothing is counted."""
    counted = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", name)
    return counted[0] if counted else name.partition(".")[0]


def family(name: str) -> str:
    """Return what repeated blocks have alike in their names: layers.*.attention."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def as_parts(sums: Counter[tuple[Category, str]]) -> tuple[Part, ...]:
    """Return sums of bytes by what they are for, in the order of a plan."""
    order = list(Category)
    parts = [Part(category, name, size) for (category, name), size in sums.items() if size]
    return tuple(sorted(parts, key=lambda part: (order.index(part.category), -part.bytes, part.name)))
