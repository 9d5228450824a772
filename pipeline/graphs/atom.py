"""Atom graphs: a node at each atom."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.graphs.graph import Graph
    from pipeline.graphs.recipe import Recipe
    from pipeline.structures.inventory import Complex


def build(read: Complex, recipe: Recipe) -> Graph:
    """Return the atom graph of an item; raise Unusable where it cannot have one."""
    raise NotImplementedError
