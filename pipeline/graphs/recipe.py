"""What a graph is made from besides the structure: every choice that can change an edge, a number or a label."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from pipeline.graphs.graph import FORMAT
from pipeline.keys import tagged_key

if TYPE_CHECKING:
    from typing import Any

GRAPH_VERSION = 1  # raise it when the same recipe gives another graph


@dataclass(frozen=True, slots=True)
class Recipe:
    """Every choice; distances in Å, None and 0 stand for none."""

    nodes: Literal["residue", "atom"] = "residue"
    neighbours: int = 20
    radius: float | None = None
    cross_neighbours: int = 0
    cross_radius: float | None = None
    contacts: float | None = 5.0
    atom_radius: float | None = 5.0
    hops: int = 3
    hydrogens: bool = False

    def plain(self) -> dict[str, Any]:
        """Return the choices that count for these nodes, as JSON data."""
        of_others = ("neighbours", "radius") if self.nodes == "atom" else ("atom_radius", "hops", "hydrogens")
        chosen = {name: value for name, value in asdict(self).items() if name not in of_others}
        return {"version": [GRAPH_VERSION, FORMAT], **chosen}

    def key(self, inventory: bytes) -> bytes:
        """Return the key of the graph of an item, which is known by the key of its inventory.

        That key holds what the files are and how they are read.
        """
        return tagged_key("graph", self.plain(), inventory.hex())
