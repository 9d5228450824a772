"""Builds the graph of an item by a recipe, and the record that is stored: the graph, or why there is none."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pipeline.graphs.item_graph import encode_graph
from pipeline.records import Reason
from pipeline.structures.atoms import UnusableInput

if TYPE_CHECKING:
    from typing import Any

    from pipeline.graphs.item_graph import Array, GraphRecipe, ItemGraph
    from pipeline.structures.inventory import Complex

log = logging.getLogger(__name__)


def build_graph(read: Complex, recipe: GraphRecipe) -> ItemGraph:
    """Return the graph of an item; raise UnusableInput if it cannot have one."""
    from pipeline.graphs import (  # scipy is half of the start of a command, and few make graphs
        atom_graph,
        residue_graph,
    )

    if recipe.nodes == "atom":
        return atom_graph.build_atom_graph(read, recipe)
    return residue_graph.build_residue_graph(read, recipe)


def encoded_graph(read: Complex, recipe: GraphRecipe) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the arrays and JSON of an item's record: its graph, or the reason why it has none."""
    try:
        return encode_graph(build_graph(read, recipe))
    except UnusableInput as problem:
        return {}, {"reason": problem.reason.value, "detail": problem.detail}
    except (MemoryError, ImportError, OSError):  # of this machine, and not of the item
        raise
    except Exception as error:  # a bug of ours must cost this item, not the run
        log.exception("a graph could not be built")
        return {}, {"reason": Reason.GRAPH_FAILED.value, "detail": f"{type(error).__name__}: {error}"[:200]}
