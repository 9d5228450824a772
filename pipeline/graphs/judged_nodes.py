"""Can these be the nodes of a partner? What the builders promise of them, looked for in a graph.

Every function yields what is wrong as a sentence that names the array, the place in it and the value.
Shapes: N nodes and R residues of a partner, C its chains, M nodes whose CB was made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.graphs import atom, backbone
from pipeline.graphs.wrongs import falls, first
from pipeline.records import Kind
from pipeline.structures.policy import FARTHEST
from pipeline.structures.sequences import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from pipeline.graphs.graph import Array, Part

    Floats = NDArray[np.float64]

# float32 keeps 1e-5 Å of a coordinate, and files of more than three decimals are rounded here to find neighbours again.
SLACK = 2e-3  # Å
CENTRE_SLACK = 1e-3  # Å; a centre is rounded to three decimals
FLAGS = int(backbone.VIRTUAL_CB | backbone.INCOMPLETE | backbone.MODIFIED)
ELEMENTS = 119  # gemmi counts deuterium behind the elements


def places(part: Part) -> Floats:
    """Return where nodes are from the centre: the CA of a residue, an atom."""
    pos = part.nodes["pos"]
    places_N3: Floats = (pos if pos.ndim == 2 else pos[:, 1]).astype(np.float64)
    return places_N3


def in_file(part: Part) -> Floats:
    """Return where nodes are in the file, in three decimals."""
    in_file_N3: Floats = (places(part) + part.centre_3).round(3)
    return in_file_N3


def centred(part: Part) -> Iterator[str]:
    """Yield what is wrong with where nodes are, as far as that holds for residues and atoms."""
    role, ca_N3 = part.role.value, places(part)
    finite_N = np.isfinite(ca_N3).all(axis=1)
    if not finite_N.all() or not np.isfinite(part.centre_3).all():
        yield from first(f"{role}.node.pos", ~finite_N, ca_N3, "is no place")
        if not np.isfinite(part.centre_3).all():
            yield f"{role}.centre is {part.centre_3.tolist()}"
        return
    if not (np.abs(ca_N3 + part.centre_3) < FARTHEST + 1).all():
        yield f"a node of the {role} is beyond {FARTHEST:,.0f} Å"
    off_3 = ca_N3.mean(axis=0)
    if (np.abs(off_3) > CENTRE_SLACK + np.spacing(np.float32(np.abs(ca_N3).max()))).any():
        yield f"{role}.node.pos: the mean of all places is {off_3.round(4).tolist()}, not the centre"


def residue_nodes(part: Part) -> Iterator[str]:
    """Yield what is wrong with the nodes of a residue graph."""
    role, nodes = part.role.value, part.nodes
    finite_N4 = np.logical_and.reduce(np.isfinite(nodes["pos"]), axis=2)
    if not finite_N4.all():
        yield from first(
            f"{role}.node.pos", np.isnan(nodes["pos"]).all(axis=2) == finite_N4, nodes["pos"], "is half a place"
        )
        lone_N = ~finite_N4[:, 3] & finite_N4[:, 0] & finite_N4[:, 2]
        yield from first(f"{role}.node.pos", lone_N, nodes["pos"], "has no CB, which could be had from N, CA and C")
    finite_N = np.isfinite(nodes["side"]).all(axis=1)
    yield from first(f"{role}.node.side", ~finite_N & finite_N4[:, 3], nodes["side"], "is not finite")
    yield from first(f"{role}.node.type", nodes["type"] >= len(backbone.LETTERS), nodes["type"], "is no letter")
    yield from first(f"{role}.node.flags", nodes["flags"] > FLAGS, nodes["flags"], "is no set of flags")
    yield from _virtual(part)
    yield from _in_chains(part, nodes["chain"], f"{role}.node")
    is_protein_C = np.array([chain.kind is Kind.PROTEIN for chain in part.chains])
    if nodes["chain"].max() < len(is_protein_C):
        yield from first(f"{role}.node.chain", ~is_protein_C[nodes["chain"]], nodes["chain"], "is no protein")
        yield from _rows(part, nodes["chain"], nodes["type"], f"{role}.node")
        absent = np.setdiff1d(np.flatnonzero(is_protein_C), nodes["chain"])
        for chain in absent.tolist():
            yield f"chain {part.chains[chain].name} of the {role} has no nodes"


def _virtual(part: Part) -> Iterator[str]:
    """Yield where a CB that was made is not where the main chain puts it."""
    pos_N43 = part.nodes["pos"]
    made = np.flatnonzero(part.nodes["flags"] & backbone.VIRTUAL_CB)
    n_3M, ca_3M, c_3M, cb_3M = pos_N43[made].astype(np.float64).transpose(1, 2, 0)
    off_M = np.abs(backbone.virtual_cb(n_3M, ca_3M, c_3M) - cb_3M).max(axis=0, initial=0)
    bad = np.zeros(part.size, np.bool_)
    bad[made[off_M > SLACK]] = True
    yield from first(f"{part.role.value}.node.pos", bad, pos_N43, "has a made CB that does not follow from N, CA and C")


def atom_nodes(part: Part) -> Iterator[str]:
    """Yield what is wrong with the nodes and the residues of an atom graph."""
    role, nodes, residues = part.role.value, part.nodes, part.residues
    count = len(residues["type"])
    yield from first(f"{role}.node.element", nodes["element"] > ELEMENTS, nodes["element"], "is no element")
    yield from _names(f"{role}.node.name", nodes["name"])
    yield from _names(f"{role}.residue.name", residues["name"])
    yield from first(f"{role}.node.residue", nodes["residue"] >= count, nodes["residue"], f"of {count} residues")
    yield from first(f"{role}.node.residue", falls(nodes["residue"]), nodes["residue"], "is out of order")
    yield from first(f"{role}.residue.type", residues["type"] > atom.OTHER_TYPE, residues["type"], "is no type")
    yield from _in_chains(part, residues["chain"], f"{role}.residue")
    if count and residues["chain"].max() < len(part.chains):
        kind_C = np.array([atom.KINDS.index(chain.kind) for chain in part.chains])
        unlike_R = residues["kind"] != kind_C[residues["chain"]]
        yield from first(f"{role}.residue.kind", unlike_R, residues["kind"], "is not that of its chain")
        yield from _rows(part, residues["chain"], residues["type"], f"{role}.residue")


def _names(name: str, text_NX: Array) -> Iterator[str]:
    """Yield the first name that is none: letters, then nothing."""
    ends_NX = text_NX == 0
    bad_N = ends_NX[:, 0] | (ends_NX[:, :-1] & ~ends_NX[:, 1:]).any(axis=1)
    yield from first(name, bad_N, text_NX, "is no name")


def _in_chains(part: Part, chain_R: Array, name: str) -> Iterator[str]:
    """Yield what is wrong with the chain of each residue."""
    count = len(part.chains)
    yield from first(f"{name}.chain", chain_R >= count, chain_R, f"of {count} chains")
    yield from first(f"{name}.chain", falls(chain_R), chain_R, "is out of order")


def _rows(part: Part, chain_R: Array, type_R: Array, name: str) -> Iterator[str]:
    """Yield residues whose row in the joined embeddings is not of their chain, or of another letter."""
    is_protein_C = np.array([chain.kind is Kind.PROTEIN for chain in part.chains])
    length_C = np.array([len(chain.sequence) * (chain.kind is Kind.PROTEIN) for chain in part.chains])
    end_C, row_R, own_R = np.cumsum(length_C), part.row_R.astype(np.int64), is_protein_C[chain_R]
    astray_R = (row_R < (end_C - length_C)[chain_R]) | (row_R >= end_C[chain_R])
    astray_R = np.where(own_R, astray_R, row_R != NO_ROW)
    yield from first(f"{name}.row", astray_R, row_R, "is not within the sequence of its chain")
    own = np.flatnonzero(own_R & ~astray_R)
    back = np.zeros(len(row_R), np.bool_)
    back[own[1:]] = np.diff(row_R[own]) <= 0
    yield from first(f"{name}.row", back, row_R, "does not rise")
    letters = np.frombuffer("".join(part.texts).encode("latin-1", "replace"), np.uint8)
    unlike = np.zeros(len(row_R), np.bool_)
    unlike[own] = backbone.TYPE_OF_LETTER[letters[row_R[own]]] != type_R[own]
    yield from first(f"{name}.type", unlike, type_R, "is not the letter of the sequence at its row")
    other_R = np.array([chain.kind is Kind.OTHER for chain in part.chains])[chain_R]
    if part.residues:
        yield from first(f"{name}.type", other_R & (type_R != atom.OTHER_TYPE), type_R, "is that of no small molecule")


def bound(part: Part) -> Iterator[str]:
    """Yield places in the bound structure that are not where they should be."""
    if "bound" not in part.nodes:
        return
    bound_N3, labelled_N = part.nodes["bound"], part.nodes["labelled"]
    has_N = np.isfinite(bound_N3).all(axis=1)
    odd_N = np.where(labelled_N, ~has_N, ~np.isnan(bound_N3).all(axis=1))
    yield from first(f"{part.role.value}.node.bound", odd_N, bound_N3, "is not what `labelled` says")
