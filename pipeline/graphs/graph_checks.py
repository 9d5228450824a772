"""Checks that a graph's record can be used: its arrays are complete and fit together, and its places are finite.

To check that a graph was built correctly, rebuild it (`cache validate --semantic`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.graphs.item_graph import ROLES, decode_graph, encode_graph
from pipeline.structures.parsing.aligned_errors import LARGEST_ERROR
from pipeline.structures.partners import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from pipeline.graphs.item_graph import Array, Edges, ItemGraph, PartnerGraph
    from pipeline.store.format.record import Record

OF_ROWS = {"type", "chain", "row", "number", "icode"}  # arrays of all residues, whether they are nodes or not
RESIDUE_NODES = OF_ROWS | {"pos", "side", "flags"}
ATOM_NODES, ATOM_RESIDUES = {"pos", "element", "name", "residue"}, OF_ROWS | {"name", "kind"}
OPTIONAL = {"plddt", "labelled", "bound"}


def wrong_graph(record: Record, recipe: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Yield the problems of a graph; a record that says why there is no graph has none."""
    if "reason" in record.meta:
        return
    graph = decode_graph(record.arrays, record.meta)
    for name in sorted(record.arrays.keys() - encode_graph(graph)[0].keys()):
        yield f"{name} does not belong in such a graph"
    roles = [part.role for part in graph.parts]
    if not roles or sorted(set(roles), key=ROLES.index) != roles:
        yield f"its partners are {', '.join(role.value for role in roles) or 'none'}"
        return
    if len(roles) < 2 and (graph.cross or "contact_pairs" in graph.labels):
        yield "it has edges or contacts between partners but only one partner"
        return
    counted, recorded = graph.sizes(), record.meta["sizes"]
    for name in counted.keys() | recorded.keys():
        if counted.get(name) != recorded.get(name):
            yield f"sizes.{name} is {recorded.get(name)}, expected {counted.get(name)}"
    if recipe and (kind := "atom" if graph.parts[0].residues else "residue") != recipe["nodes"]:
        yield f"its nodes are of the kind {kind}; the recipe says {recipe['nodes']}"
    for part in graph.parts:
        yield from _wrong_arrays(part)
        for name, edges_2E in part.edges.items():
            yield from _wrong_edges(f"{part.role.value}.edge.{name}", edges_2E, part.edge_fields, part, part)
    for name, edges_2E in graph.cross.items():
        yield from _wrong_edges(f"cross.{name}", edges_2E, graph.cross_fields, graph.parts[1], graph.parts[0])
    for name, values, count, what in _indices(graph):
        yield from _first_bad(name, (values < NO_ROW) | (values >= count), values, f"of {count} {what}")
    if "contact_pairs" in graph.labels:
        nearest_P = graph.labels["contact_nearest"]
        yield from _first_bad("label.contact_nearest", ~(nearest_P >= 0), nearest_P, "is not a distance")


def _wrong_arrays(part: PartnerGraph) -> Iterator[str]:
    """Yield arrays of a partner that are absent, foreign or of another length, and places that are no numbers."""
    tables = [("node", part.nodes, ATOM_NODES if part.residues else RESIDUE_NODES)]
    tables += [("residue", part.residues, ATOM_RESIDUES)] if part.residues else []
    for kind, table, wanted in tables:
        name = f"{part.role.value}.{kind}"
        for field in sorted(wanted ^ (table.keys() - OPTIONAL)):
            absent = f"there is no {name}.{field}"
            yield absent if field in wanted else f"{name}.{field} does not belong in such a graph"
        length = len(next(iter(table.values())))
        for field, array in table.items():
            if len(array) != length or not length:
                yield f"{name}.{field} is {list(array.shape)}, not [{length or 'at least 1'}, …]"
    pos = part.nodes["pos"]
    is_bad_N = ~np.isfinite(pos if pos.ndim == 2 else pos[:, 1]).all(1)
    yield from _first_bad(f"{part.role.value}.node.pos", is_bad_N, pos, "is not a position")
    yield from _first_bad(f"{part.role.value}.centre", ~np.isfinite(part.centre_3), part.centre_3, "is not a position")


def _indices(graph: ItemGraph) -> Iterator[tuple[str, Array, int, str]]:
    """Yield the arrays that point to something: name, values, how many there are to point to, and of what."""
    for part in graph.parts:
        role = part.role.value
        if part.residues:
            yield f"{role}.node.residue", part.nodes["residue"], len(part.row_R), "residues"
        yield f"{role} chain", (part.residues or part.nodes)["chain"], len(part.chains), "chains"
        yield f"{role} row", part.row_R, sum(map(len, part.texts)), "letters"
        for name, path_PX in part.paths.items():
            yield f"{role}.path.{name}", path_PX, part.size, "nodes"
    for part, node_P in zip(graph.parts, graph.labels.get("contact_pairs", np.empty((0, 2))).T, strict=False):
        yield "label.contact_pairs", node_P, part.size, f"{part.role.value} nodes"


def _wrong_edges(
    name: str, edges_2E: Edges, fields: Mapping[str, Array], source: PartnerGraph, target: PartnerGraph
) -> Iterator[str]:
    """Yield edges that end nowhere, occur twice, are out of order or join a node to itself, and impossible errors."""
    neighbour_E, node_E = edges_2E
    yield from _first_bad(f"{name}.neighbour", neighbour_E >= source.size, neighbour_E, f"of {source.size} nodes")
    if source is target:
        yield from _first_bad(f"{name}.neighbour", neighbour_E == node_E, neighbour_E, "is the node itself")
    if node_E.max(initial=-1) >= target.size:
        yield f"{name}.degree has more than {target.size} nodes"
    back_E = np.diff(node_E * max(source.size, 1) + neighbour_E, prepend=-1) <= 0
    yield from _first_bad(f"{name}.neighbour", back_E, neighbour_E, "is duplicate or out of order")
    for field, pae_E in fields.items():
        full_name = f"{name.rpartition('.')[0]}.{field}"
        if pae_E.shape != neighbour_E.shape:
            yield f"{full_name} is {list(pae_E.shape)}, and there are {len(neighbour_E)} edges"
        bad_E = ~(np.isnan(pae_E) | ((pae_E >= 0) & (pae_E <= LARGEST_ERROR)))
        yield from _first_bad(full_name, bad_E, pae_E, "is not an error in Å")


def _first_bad(name: str, bad: Any, values: Any, problem: str) -> Iterator[str]:
    """Yield a sentence on the first bad place: its value, the problem, and how many more there are."""
    if bad.any():
        at = np.unravel_index(int(bad.argmax()), bad.shape)
        more = f" (and {int(np.count_nonzero(bad)) - 1} more)" if np.count_nonzero(bad) > 1 else ""
        yield f"{name}[{', '.join(map(str, at))}] is {np.asarray(values[at]).tolist()}: {problem}{more}"
