"""What a graph is, and its encoding as the arrays and the JSON of a record.

Shapes: N nodes and R residues of a partner, E edges, P pairs of nodes of the two partners. Where nodes are residues, N
is R and `residues` is empty. An edge points from the neighbour (row 0) to the node whose neighbour it is (row 1); edges
are sorted by node, then by neighbour, and encoded as how many each node has and who they are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from pipeline.keys import tagged_key
from pipeline.records import Kind, Reason, Role
from pipeline.structures.atoms import UnusableInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"
Edges: TypeAlias = "NDArray[np.int64]"  # [2, E]

FORMAT = 1
ROLES = (Role.RECEPTOR, Role.LIGAND, Role.WHOLE)
NODE, RESIDUE, EDGE, PATH, LABEL, CROSS = "node", "residue", "edge", "path", "label", "cross"
DEGREE, NEIGHBOUR = "degree", "neighbour"


@dataclass(frozen=True, slots=True)
class ChainText:
    """A chain of a partner, and its sequence as it is encoded; empty where nothing is."""

    name: str
    kind: Kind
    sequence: str


@dataclass(frozen=True, slots=True)
class PartnerGraph:
    """One partner's graph."""

    role: Role
    chains: tuple[ChainText, ...]
    centre_3: NDArray[np.float64]  # where the origin of its coordinates lies in the file
    nodes: Mapping[str, Array]  # each [N, …]
    edges: Mapping[str, Edges]
    residues: Mapping[str, Array] = field(default_factory=dict)  # each [R, …], where nodes are atoms
    paths: Mapping[str, Array] = field(default_factory=dict)  # bonded nodes in a row: angle [·, 3], dihedral [·, 4]

    @property
    def size(self) -> int:
        """Count the nodes."""
        return len(self.nodes["pos"])

    @property
    def row_R(self) -> NDArray[np.int32]:
        """Return each residue's row in the joined embeddings of the partner's protein chains, or -1."""
        rows: NDArray[np.int32] = (self.residues or self.nodes)["row"]
        return rows

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the sequences of the protein chains, in order: what is encoded."""
        return tuple(chain.sequence for chain in self.chains if chain.kind is Kind.PROTEIN)


@dataclass(frozen=True, slots=True)
class ItemGraph:
    """One item's graph: its partners, what runs between them, and what is known of their interface."""

    parts: tuple[PartnerGraph, ...]
    cross: Mapping[str, Edges] = field(default_factory=dict)  # from the ligand (row 0) to the receptor
    labels: Mapping[str, Array] = field(default_factory=dict)  # each [P, …]

    def sizes(self) -> dict[str, int]:
        """Return what memory and time go by."""
        nodes = [part.size for part in self.parts]
        kinds = dict.fromkeys(name for part in self.parts for name in part.edges)
        edges = {name: sum(part.edges[name].shape[1] for part in self.parts if name in part.edges) for name in kinds}
        return {
            "nodes": sum(nodes),
            "edges": sum(edges.values()),
            **(edges if len(edges) > 1 else {}),
            "receptor": nodes[0],
            "ligand": nodes[1] if len(nodes) > 1 else 0,
            "pairs": nodes[0] * nodes[1] if len(nodes) > 1 else 0,
            "cross": sum(edges.shape[1] for edges in self.cross.values()),
            "residues": sum(len(part.row_R) for part in self.parts),
            "contacts": len(self.labels.get("contact_pairs", ())),
        }


def edge_lengths(source_N3: Array, target_N3: Array, edges_2E: Edges) -> NDArray[np.float32]:
    """Return the length of each edge, from differences of coordinates and nothing else."""
    apart_E3 = source_N3[edges_2E[0]] - target_N3[edges_2E[1]]
    lengths_E: NDArray[np.float32] = np.sqrt(np.einsum("ex,ex->e", apart_E3, apart_E3))
    return lengths_E


def encode_graph(graph: ItemGraph) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return a graph as the arrays and the JSON of a record."""
    arrays: dict[str, Array] = {}
    for part in graph.parts:
        role = part.role.value
        arrays[f"{role}.centre"] = part.centre_3
        for axis, named in ((NODE, part.nodes), (RESIDUE, part.residues)):
            arrays |= {f"{role}.{axis}.{name}": array for name, array in named.items()}
        arrays |= {f"{role}.{PATH}.{name}": _narrow(array) for name, array in part.paths.items()}
        for name, edges in part.edges.items():
            arrays |= _encode_edges(f"{role}.{EDGE}.{name}", edges, part.size)
    for name, edges in graph.cross.items():
        arrays |= _encode_edges(f"{CROSS}.{name}", edges, graph.parts[0].size)
    arrays |= {f"{LABEL}.{name}": array for name, array in graph.labels.items()}
    partners = [
        {"role": part.role.value, "chains": [[chain.name, chain.kind.value, chain.sequence] for chain in part.chains]}
        for part in graph.parts
    ]
    return arrays, {"format": FORMAT, "partners": partners, "sizes": graph.sizes()}


def decode_graph(arrays: Mapping[str, Array], meta: Mapping[str, Any]) -> ItemGraph:
    """Read back what `encode` made; a record that says why there is no graph raises Unusable."""
    if "reason" in meta:
        raise UnusableInput(Reason(meta["reason"]), meta["detail"])
    if meta["format"] != FORMAT:
        raise ValueError(f"a graph of format {meta['format']}, not {FORMAT}")
    parts = []
    for partner in meta["partners"]:
        mine = dict(_below(arrays, partner["role"]))
        chains = tuple(ChainText(name, Kind(kind), sequence) for name, kind, sequence in partner["chains"])
        part = PartnerGraph(
            role=Role(partner["role"]),
            chains=chains,
            centre_3=mine["centre"],
            nodes=dict(_below(mine, NODE)),
            edges=_decode_edges(dict(_below(mine, EDGE))),
            residues=dict(_below(mine, RESIDUE)),
            paths=dict(_below(mine, PATH)),
        )
        parts.append(part)
    return ItemGraph(tuple(parts), _decode_edges(dict(_below(arrays, CROSS))), dict(_below(arrays, LABEL)))


def _below(arrays: Mapping[str, Array], prefix: str) -> Iterator[tuple[str, Array]]:
    """Yield the arrays whose names begin with a prefix and a dot, under the rest of their names."""
    for name, array in arrays.items():
        first, _, rest = name.partition(".")
        if first == prefix:
            yield rest, array


def _encode_edges(name: str, edges_2E: Edges, nodes: int) -> dict[str, Array]:
    """Return edges as the number of each node's and their other ends."""
    degree_N = np.bincount(edges_2E[1], minlength=nodes)
    return {f"{name}.{DEGREE}": _narrow(degree_N), f"{name}.{NEIGHBOUR}": _narrow(edges_2E[0])}


def _decode_edges(arrays: Mapping[str, Array]) -> dict[str, Edges]:
    """Return edges as pairs again."""
    found: dict[str, Edges] = {}
    for name in dict.fromkeys(name.partition(".")[0] for name in arrays):
        degree_N, neighbour_E = arrays[f"{name}.{DEGREE}"], arrays[f"{name}.{NEIGHBOUR}"]
        edges_2E = np.empty((2, len(neighbour_E)), np.int64)
        edges_2E[0] = neighbour_E
        edges_2E[1] = np.repeat(np.arange(len(degree_N)), degree_N)
        found[name] = edges_2E
    return found


def _narrow(numbers: Array) -> Array:
    """Return counts or places in the fewest bytes."""
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))


GRAPH_VERSION = 1  # raise it when the same recipe gives another graph


@dataclass(frozen=True, slots=True)
class GraphRecipe:
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
