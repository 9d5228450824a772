"""Checks that a graph's record can be used: its arrays are complete and fit together, and its places are finite.

To check that a graph was built correctly, rebuild it (`cache validate --semantic`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.graphs.item_graph import NEAR_PAE, ROLES, decode_graph, encode_graph
from pipeline.records import Kind
from pipeline.structures.parsing.aligned_errors import LARGEST_ERROR
from pipeline.structures.partners import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from pipeline.graphs.item_graph import Array, Edges, ItemGraph, PartnerGraph
    from pipeline.store.format.record import Record

OF_ROWS = {"type", "chain", "row", "number", "icode"}  # what every residue has, whether it is a node or not
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
        yield f"its partners are {listed(roles)}"
        return
    counted, recorded = graph.sizes(), record.meta["sizes"]
    for name in counted.keys() | recorded.keys():
        if counted.get(name) != recorded.get(name):
            yield f"sizes.{name} is {recorded.get(name)}, expected {counted.get(name)}"
    if recipe and (kind := "atom" if graph.parts[0].residues else "residue") != recipe["nodes"]:
        yield f"its nodes are of the kind {kind}; the recipe says {recipe['nodes']}"
    for part in graph.parts:
        yield from _wrong_part(part)
    yield from _wrong_between(graph)


def _wrong_part(part: PartnerGraph) -> Iterator[str]:
    role = part.role.value
    wanted = ATOM_NODES if part.residues else RESIDUE_NODES
    yield from _wrong_table(f"{role}.node", part.nodes, wanted)
    if part.residues:
        yield from _wrong_table(f"{role}.residue", part.residues, ATOM_RESIDUES)
        yield from _out_of(f"{role}.node.residue", part.nodes["residue"], len(part.row_R), "residues")
    pos = part.nodes["pos"]
    yield from first_bad(
        f"{role}.node.pos", ~np.isfinite(pos if pos.ndim == 2 else pos[:, 1]).all(1), pos, "is not a position"
    )
    if not np.isfinite(part.centre_3).all():
        yield f"{role}.centre is {part.centre_3.tolist()}"
    yield from _out_of(f"{role} chain", (part.residues or part.nodes)["chain"], len(part.chains), "chains")
    letters = sum(len(chain.sequence) for chain in part.chains if chain.kind is Kind.PROTEIN)
    astray_R = (part.row_R < NO_ROW) | (part.row_R >= letters)
    yield from first_bad(f"{role} row", astray_R, part.row_R, f"of {letters} letters")
    for name, edges_2E in part.edges.items():
        yield from _wrong_edges(f"{role}.edge.{name}", edges_2E, part, part)
    for name, path_PX in part.paths.items():
        yield from _out_of(f"{role}.path.{name}", path_PX, part.size, "nodes")
    yield from _wrong_errors(f"{role}.edge.{NEAR_PAE}", part.edge_fields, part.edges)


def _wrong_table(name: str, table: Mapping[str, Array], wanted: set[str]) -> Iterator[str]:
    for field in sorted(wanted ^ (table.keys() - OPTIONAL)):
        yield f"there is no {name}.{field}" if field in wanted else f"{name}.{field} does not belong in such a graph"
    length = len(next(iter(table.values())))
    for field, array in table.items():
        if len(array) != length:
            yield f"{name}.{field} is {list(array.shape)}, not [{length}, …]"
    if not length:
        yield f"{name}: none found"


def _wrong_edges(name: str, edges_2E: Edges, source: PartnerGraph, target: PartnerGraph) -> Iterator[str]:
    """Yield edges that end nowhere, occur twice, are out of order, or join a node to itself."""
    yield from _out_of(f"{name}.neighbour", edges_2E[0], source.size, "nodes")
    if source is target:
        yield from first_bad(f"{name}.neighbour", edges_2E[0] == edges_2E[1], edges_2E[0], "is the node itself")
    if edges_2E[1].max(initial=-1) >= target.size:
        yield f"{name}.degree has more than {target.size} nodes"
    back_E = np.diff(edges_2E[1] * max(source.size, 1) + edges_2E[0], prepend=-1) <= 0
    yield from first_bad(f"{name}.neighbour", back_E, edges_2E[0], "is duplicate or out of order")


def _wrong_errors(name: str, fields: Mapping[str, Array], edges: Mapping[str, Edges]) -> Iterator[str]:
    """Yield predicted aligned errors that cannot be right; unknown ones are NaN."""
    if NEAR_PAE in fields:
        pae_E = fields[NEAR_PAE]
        if pae_E.shape != edges["near"].shape[1:]:
            yield f"{name} is {list(pae_E.shape)}, and there are {edges['near'].shape[1]} edges"
        bad_E = ~(np.isnan(pae_E) | ((pae_E >= 0) & (pae_E <= LARGEST_ERROR)))
        yield from first_bad(name, bad_E, pae_E, "is not an error in Å")


def _wrong_between(graph: ItemGraph) -> Iterator[str]:
    """Yield what is wrong with the edges and the contacts between partners."""
    if (graph.cross or graph.labels.keys() >= {"contact_pairs"}) and len(graph.parts) < 2:
        yield "it has edges or contacts between partners but only one partner"
        return
    for name, edges_2E in graph.cross.items():
        yield from _wrong_edges(f"cross.{name}", edges_2E, graph.parts[1], graph.parts[0])
    yield from _wrong_errors(f"cross.{NEAR_PAE}", graph.cross_fields, graph.cross)
    if "contact_pairs" in graph.labels:
        for part, node_P in zip(graph.parts, graph.labels["contact_pairs"].T, strict=False):
            yield from _out_of("label.contact_pairs", node_P, part.size, f"{part.role.value} nodes")
        nearest_P = graph.labels["contact_nearest"]
        yield from first_bad("label.contact_nearest", ~(nearest_P >= 0), nearest_P, "is not a distance")


def _out_of(name: str, values: Array, count: int, what: str) -> Iterator[str]:
    yield from first_bad(name, values >= count, values, f"of {count} {what}")


def first_bad(name: str, bad: Any, values: Any, problem: str) -> Iterator[str]:
    """Yield a sentence on the first bad place: its value, the problem, and how many more there are."""
    if bad.any():
        at = np.unravel_index(int(bad.argmax()), bad.shape)
        more = f" (and {int(np.count_nonzero(bad)) - 1} more)" if np.count_nonzero(bad) > 1 else ""
        yield f"{name}[{', '.join(map(str, at))}] is {np.asarray(values[at]).tolist()}: {problem}{more}"


def listed(values: Any) -> str:
    """Return values as text, separated by commas."""
    return ", ".join(str(getattr(value, "value", value)) for value in values) or "none"
