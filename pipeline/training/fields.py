"""What the names of a graph's arrays say: along which axis each lies, and what the numbers in it stand for.

A field of a batch has the name of the array, `receptor.node.pos`, but for edges: `receptor.edge.near` and `cross.near`
are pairs. An axis is what has as many rows in all its fields: `receptor.node`, `receptor.edge.near`, `label.contact`.

What a reader gives (`protocol.Reader`) is named more simply: `peaks.mz` lies along `peaks`, `precursor` is one an item.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from pipeline.graphs.graph import CROSS, DEGREE, EDGE, LABEL, NODE, PATH, RESIDUE
from pipeline.records import Role

EMBEDDING, ENCODED, PTR = "embedding", "encoded", "ptr"
RECEPTOR, LIGAND = Role.RECEPTOR.value, Role.LIGAND.value
CENTRE = "centre"  # what ends so is one vector an item
PAIRS = "pairs"  # a label that ends so holds nodes: of the receptor, of the ligand
OF_GRAPHS = frozenset(
    {*(role.value for role in Role), CROSS, LABEL, PTR}
)  # with which the names of a graph's arrays begin


class Form(Enum):
    """How an array becomes part of a batch."""

    ROWS = "rows"  # joined along its axis
    ITEM = "item"  # stacked: one vector an item
    DEGREE = "degree"  # how many edges each node has
    NEIGHBOUR = "neighbour"  # the other ends of the edges


@dataclass(frozen=True, slots=True)
class Field:
    """What the name of an array in a graph's record says."""

    name: str  # in a batch
    form: Form
    axis: str = ""
    points_to: tuple[str, ...] = ()  # axes whose rows the numbers are: one for all columns, or one for each


@lru_cache(maxsize=4096)
def parse(name: str) -> Field:
    """Take the name of an array apart."""
    first, *rest = name.split(".")
    if first not in OF_GRAPHS:
        return Field(name, Form.ROWS, first) if rest else Field(name, Form.ITEM)
    if rest[-1].endswith(CENTRE):
        return Field(name, Form.ITEM)
    if first == CROSS:
        return _edges(f"{CROSS}.{rest[0]}", rest[1], nodes_axis(RECEPTOR), nodes_axis(LIGAND))
    if first == LABEL:
        nodes = (nodes_axis(RECEPTOR), nodes_axis(LIGAND)) if rest[0].endswith(PAIRS) else ()
        return Field(name, Form.ROWS, f"{LABEL}.{rest[0].partition('_')[0]}", nodes)
    if rest[0] == EDGE:
        return _edges(f"{first}.{EDGE}.{rest[1]}", rest[2], nodes_axis(first), nodes_axis(first))
    if rest[0] == PATH:
        return Field(name, Form.ROWS, name, (nodes_axis(first),))
    return Field(name, Form.ROWS, f"{first}.{rest[0]}", (residues_axis(first),) if rest[1] == RESIDUE else ())


def nodes_axis(role: str) -> str:
    """Return the axis of a partner's nodes."""
    return f"{role}.{NODE}"


def residues_axis(role: str) -> str:
    """Return the axis of a partner's residues where its nodes are atoms."""
    return f"{role}.{RESIDUE}"


def _edges(name: str, last: str, heads: str, tails: str) -> Field:
    """Return what one of the two arrays is that edges are encoded as: their heads by number, their tails by name."""
    if last == DEGREE:
        return Field(name, Form.DEGREE, heads)
    return Field(name, Form.NEIGHBOUR, name, (tails, heads))
