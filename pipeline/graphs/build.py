"""From an item as it was read to its graph, by a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.graphs import atom, residue

if TYPE_CHECKING:
    from pipeline.graphs.graph import Graph
    from pipeline.graphs.recipe import Recipe
    from pipeline.structures.inventory import Complex


def build(read: Complex, recipe: Recipe) -> Graph:
    """Return the graph of an item; raise Unusable where it cannot have one."""
    if recipe.nodes == "atom":
        return atom.build(read, recipe)
    return residue.build(read, recipe)
