"""The graph of an item, its recipe, and its encoding as the arrays and the JSON of a record.

Shapes: N nodes and R residues of a partner, E edges, P pairs of nodes of the two partners. Where nodes are residues, N
is R and `residues` is empty. An edge points from the neighbour (row 0) to the node whose neighbour it is (row 1); edges
are sorted by node, then by neighbour, and encoded as each node's degree and neighbours.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import lru_cache
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
NEAR_PAE = "near.pae"  # a field of edges: the error of the neighbour's place, aligned on the node, in Å
DEGREE, NEIGHBOUR = "degree", "neighbour"


@dataclass(frozen=True, slots=True)
class ChainText:
    """A chain of a partner with the sequence that the encoder embeds; empty if none is."""

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
    edge_fields: Mapping[str, Array] = field(default_factory=dict)  # each [E, …], by the kind of edge: near.pae

    @property
    def size(self) -> int:
        """Return the number of nodes."""
        return len(self.nodes["pos"])

    @property
    def row_R(self) -> NDArray[np.int32]:
        """Return each residue's row in the joined embeddings of the partner's protein chains, or -1."""
        return (self.residues or self.nodes)["row"]

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the sequences of the protein chains, in order: those that are embedded."""
        return tuple(chain.sequence for chain in self.chains if chain.kind is Kind.PROTEIN)


@dataclass(frozen=True, slots=True)
class ItemGraph:
    """One item's graph: its partners, the edges between them, and labels of their interface."""

    parts: tuple[PartnerGraph, ...]
    cross: Mapping[str, Edges] = field(default_factory=dict)  # from the ligand (row 0) to the receptor
    labels: Mapping[str, Array] = field(default_factory=dict)  # each [P, …]
    cross_fields: Mapping[str, Array] = field(default_factory=dict)  # as edge_fields are

    def sizes(self) -> dict[str, int]:
        """Return the sizes that memory and time depend on."""
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
    """Return the length of each edge."""
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
        arrays |= {f"{role}.{EDGE}.{name}": array for name, array in part.edge_fields.items()}
    for name, edges in graph.cross.items():
        arrays |= _encode_edges(f"{CROSS}.{name}", edges, graph.parts[0].size)
    arrays |= {f"{CROSS}.{name}": array for name, array in graph.cross_fields.items()}
    arrays |= {f"{LABEL}.{name}": array for name, array in graph.labels.items()}
    partners = [
        {"role": part.role.value, "chains": [[chain.name, chain.kind.value, chain.sequence] for chain in part.chains]}
        for part in graph.parts
    ]
    return arrays, {"format": FORMAT, "partners": partners, "sizes": graph.sizes()}


def decode_graph(arrays: Mapping[str, Array], meta: Mapping[str, Any]) -> ItemGraph:
    """Return the graph of a record from `encode_graph`; raise UnusableInput if it holds a reason instead."""
    if "reason" in meta:
        raise UnusableInput(Reason(meta["reason"]), meta["detail"])
    if meta["format"] != FORMAT:
        raise ValueError(f"a graph of format {meta['format']}, not {FORMAT}")
    parts = []
    for partner in meta["partners"]:
        own_arrays = dict(_below(arrays, partner["role"]))
        chains = tuple(ChainText(name, Kind(kind), sequence) for name, kind, sequence in partner["chains"])
        part = PartnerGraph(
            role=Role(partner["role"]),
            chains=chains,
            centre_3=own_arrays["centre"],
            nodes=dict(_below(own_arrays, NODE)),
            edges=_decode_edges(dict(_below(own_arrays, EDGE))),
            residues=dict(_below(own_arrays, RESIDUE)),
            paths=dict(_below(own_arrays, PATH)),
            edge_fields=_edge_fields(dict(_below(own_arrays, EDGE))),
        )
        parts.append(part)
    cross, labels = dict(_below(arrays, CROSS)), dict(_below(arrays, LABEL))
    return ItemGraph(tuple(parts), _decode_edges(cross), labels, _edge_fields(cross))


def _below(arrays: Mapping[str, Array], prefix: str) -> Iterator[tuple[str, Array]]:
    """Yield the arrays named PREFIX.NAME, as NAME."""
    for name, array in arrays.items():
        first, _, remainder = name.partition(".")
        if first == prefix:
            yield remainder, array


def _encode_edges(name: str, edges_2E: Edges, nodes: int) -> dict[str, Array]:
    """Return edges as each node's degree, and all neighbours."""
    degree_N = np.bincount(edges_2E[1], minlength=nodes)
    return {f"{name}.{DEGREE}": _narrow(degree_N), f"{name}.{NEIGHBOUR}": _narrow(edges_2E[0])}


def _decode_edges(arrays: Mapping[str, Array]) -> dict[str, Edges]:
    """Return edges as pairs, by kind."""
    edges: dict[str, Edges] = {}
    for name in dict.fromkeys(name.partition(".")[0] for name in arrays):
        degree_N, neighbour_E = arrays[f"{name}.{DEGREE}"], arrays[f"{name}.{NEIGHBOUR}"]
        edges_2E = np.empty((2, len(neighbour_E)), np.int64)
        edges_2E[0] = neighbour_E
        edges_2E[1] = np.repeat(np.arange(len(degree_N)), degree_N)
        edges[name] = edges_2E
    return edges


def _edge_fields(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return what edges have besides their ends."""
    return {name: array for name, array in arrays.items() if not name.endswith((f".{DEGREE}", f".{NEIGHBOUR}"))}


def _narrow(numbers: Array) -> Array:
    """Return non-negative integers in the smallest dtype."""
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))


GRAPH_VERSION = 1  # raise it when the same recipe gives another graph


@dataclass(frozen=True, slots=True)
class GraphRecipe:
    """The settings of graphs; distances in Å, None and 0 turn a kind of edge off."""

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
        """Return the settings that matter for this kind of nodes, as JSON data."""
        return _plain(self)

    def key(self, inventory: bytes) -> bytes:
        """Return the key of an item's graph; the inventory's key stands for the files and how they are read."""
        return tagged_key("graph", _plain(self), inventory.hex())


@lru_cache(maxsize=16)
def _plain(recipe: GraphRecipe) -> dict[str, Any]:
    irrelevant = ("neighbours", "radius") if recipe.nodes == "atom" else ("atom_radius", "hops", "hydrogens")
    chosen = {name: value for name, value in asdict(recipe).items() if name not in irrelevant}
    return {"version": [GRAPH_VERSION, FORMAT], **chosen}
