"""From atoms to residues: every choice a structure file leaves open is made here, and named.

A residue's identity is its ordinal in the chain, because numbers wrap, repeat and carry insertion codes.
Shapes: A atoms, R residues, C chains.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import gemmi
import numpy as np

from pipeline.records import Kind, Reason
from pipeline.structures.atoms import AtomTable, Unusable, text, word

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

POLICY_VERSION = 1
POLYMER, WATER = 1, 4
BACKBONE = ("N", "CA", "C", "O", "CB")
NUCLEOTIDE_ANCHOR = "C1'"
# Groups that end a chain without being a residue of it.
CAPS = frozenset({"ACE", "NH2", "NME", "NMA", "FOR", "FMT", "ETA", "MYR", "BOC", "0QE", "CH2"})
CAP_WORDS = np.array([word(name) for name in sorted(CAPS)], dtype=np.uint64)
KINDS = {
    gemmi.ResidueKind.AA: Kind.PROTEIN,
    gemmi.ResidueKind.AAD: Kind.PROTEIN,
    gemmi.ResidueKind.PAA: Kind.PROTEIN,
    gemmi.ResidueKind.MAA: Kind.PROTEIN,
    gemmi.ResidueKind.RNA: Kind.RNA,
    gemmi.ResidueKind.DNA: Kind.DNA,
}
KIND_CODES = (Kind.PROTEIN, Kind.DNA, Kind.RNA)
UNKNOWN_KIND = len(KIND_CODES)
UNKNOWN_LETTER = {Kind.PROTEIN: "X", Kind.DNA: "N", Kind.RNA: "N"}


@dataclass(frozen=True, slots=True)
class Policy:
    """The choices; every one is part of the recipe."""

    altlocs: Literal["highest", "first"] = "highest"
    model: int = 1
    modified: Literal["parent", "unknown", "reject"] = "parent"
    require: Literal["ca", "backbone"] = "backbone"
    incomplete: Literal["drop", "reject"] = "drop"


@dataclass(frozen=True, slots=True)
class Chain:
    """A polymer chain: residues `first` to `last` (excluded) of its structure."""

    name: str
    kind: Kind
    first: int
    last: int
    sequence: str  # one letter per observed residue
    nodes: int  # residues that have the atoms a node needs
    seqres: str | None = None  # the full sequence, when it was asked for


@dataclass(frozen=True, slots=True)
class Structure:
    """One model of a file, one conformer, polymer residues only; atoms of a residue are contiguous."""

    chains: tuple[Chain, ...]
    number_R: NDArray[np.int32]
    icode_R: NDArray[np.int8]
    name_R: NDArray[np.uint64]
    node_R: NDArray[np.bool_]
    label_seq_R: NDArray[np.int32] | None
    backbone_R5: NDArray[np.int64]  # atom index of N, CA, C, O, CB; -1 where missing
    pos_A3: NDArray[np.float64]
    name_A: NDArray[np.uint64]
    element_A: NDArray[np.uint8]
    residue_A: NDArray[np.int64]
    all_chains: tuple[str, ...]  # every chain of the file, also those that hold no polymer
    notes: Mapping[str, int]  # what the policy met: altlocs, modified, incomplete, waters, ligands


def apply(table: AtomTable, policy: Policy) -> Structure:
    """Return the residues of a file under a policy."""
    sites = _sites(table)
    in_model_S = _model_mask(table.model_A[sites.first_S], policy.model)
    entity_S = table.entity_A[sites.first_S]
    polymer_S = in_model_S & (entity_S == POLYMER) & ~np.isin(table.resname_A[sites.first_S], CAP_WORDS)
    if not polymer_S.any():
        raise Unusable(Reason.NO_POLYMER, "no protein, RNA or DNA residue in the file")
    others_S = in_model_S & (entity_S != POLYMER)
    waters = int((others_S & (entity_S == WATER)).sum())
    notes = {"waters": waters, "ligands": int(others_S.sum()) - waters}
    chosen = _in_chain_order(table, sites.take(np.flatnonzero(polymer_S)))
    kept_A, residue_A, notes["altlocs"] = _one_conformer(table, chosen, policy)
    return _structure(table, policy, kept_A, residue_A, notes)


@dataclass(frozen=True, slots=True)
class _Sites:
    """Runs of atoms with one chain, number, insertion code and residue name, in file order; S of them."""

    first_S: NDArray[np.int64]
    length_S: NDArray[np.int64]

    def take(self, chosen: NDArray[np.int64]) -> _Sites:
        """Return some of them, in the order given."""
        return _Sites(self.first_S[chosen], self.length_S[chosen])

    def rows(self) -> NDArray[np.int64]:
        """Return the atoms of all sites, site by site."""
        shift_S = self.first_S - np.cumsum(self.length_S) + self.length_S
        rows: NDArray[np.int64] = np.repeat(shift_S, self.length_S)
        rows += np.arange(len(rows))
        return rows


def _sites(table: AtomTable) -> _Sites:
    """Return every site of a file."""
    columns = (table.number_A, table.resname_A, table.chain_A, table.icode_A, table.model_A)
    first_S = np.flatnonzero(_changes(*columns))
    return _Sites(first_S, np.diff(first_S, append=len(table.number_A)))


def _in_chain_order(table: AtomTable, sites: _Sites) -> _Sites:
    """Bring chains together in the order in which they first appear, so that a chain in two pieces is one chain."""
    chain_S = table.chain_A[sites.first_S]
    starts = np.flatnonzero(_changes(chain_S))
    ordinals: dict[int, int] = {}
    run_ordinals = [ordinals.setdefault(code, len(ordinals)) for code in chain_S[starts].tolist()]
    if len(ordinals) == len(run_ordinals):
        return sites
    ordinal_S = np.repeat(np.array(run_ordinals), np.diff(starts, append=len(chain_S)))
    return sites.take(np.argsort(ordinal_S, kind="stable"))


def _structure(
    table: AtomTable,
    policy: Policy,
    kept_A: NDArray[np.int64],
    residue_A: NDArray[np.int64],
    notes: dict[str, int],
) -> Structure:
    """Name residues and chains once the atoms are settled."""
    name_A, pos_A3 = table.name_A[kept_A], table.pos_A3[kept_A]
    if not np.isfinite(pos_A3).all():
        raise Unusable(Reason.PARSE_ERROR, "a coordinate is not a finite number")
    first_R = kept_A[np.flatnonzero(_changes(residue_A))]  # a residue's first atom speaks for it
    letters_R, kind_R, modified_R = _letters(table.resname_A[first_R], table.parents)
    backbone_R5 = np.stack([_find(name_A, residue_A, atom, len(first_R)) for atom in BACKBONE], axis=1)
    anchor_R = _find(name_A, residue_A, NUCLEOTIDE_ANCHOR, len(first_R))
    needed = slice(0, 3) if policy.require == "backbone" else slice(1, 2)
    node_R = (backbone_R5[:, needed] >= 0).all(axis=1) | (anchor_R >= 0)
    notes |= {"modified": int(modified_R.sum()), "incomplete": int((~node_R).sum())}
    _refuse(policy, notes)
    if policy.modified == "unknown":
        letters_R = np.where(modified_R, 0, letters_R).astype(np.uint8)
    return Structure(
        chains=_chains(table, table.chain_A[first_R], kind_R, letters_R, node_R),
        number_R=table.number_A[first_R],
        icode_R=table.icode_A[first_R],
        name_R=table.resname_A[first_R],
        node_R=node_R,
        label_seq_R=None if table.label_seq_A is None else table.label_seq_A[first_R],
        backbone_R5=backbone_R5,
        pos_A3=pos_A3,
        name_A=name_A,
        element_A=table.element_A[kept_A],
        residue_A=residue_A,
        all_chains=_all_chains(table),
        notes=notes,
    )


def _all_chains(table: AtomTable) -> tuple[str, ...]:
    """Name every chain of the file, polymer or not, so that a message can list them."""
    starts = np.flatnonzero(_changes(table.chain_A))
    return tuple(dict.fromkeys(table.chain_name(code) for code in table.chain_A[starts]))


def _refuse(policy: Policy, notes: Mapping[str, int]) -> None:
    """Reject the file where the policy says so."""
    if policy.modified == "reject" and notes["modified"]:
        raise Unusable(
            Reason.MODIFIED_RESIDUES, f"{notes['modified']} modified residues; structures.modified is reject"
        )
    if policy.incomplete == "reject" and notes["incomplete"]:
        what = f"{notes['incomplete']} residues lack backbone atoms; structures.incomplete is reject"
        raise Unusable(Reason.INCOMPLETE_RESIDUES, what)


def _model_mask(model_S: NDArray[np.int32], model: int) -> NDArray[np.bool_]:
    """Select the model-th model of the file, counted from 1 whatever its number is."""
    ordinal_S = np.cumsum(_changes(model_S))
    if model > ordinal_S[-1]:
        raise Unusable(Reason.MISSING_MODEL, f"the file has {ordinal_S[-1]} models, number {model} was asked for")
    mask: NDArray[np.bool_] = ordinal_S == model
    return mask


def _changes(*columns: NDArray[Any]) -> NDArray[np.bool_]:
    """Mark each row that differs from the row before it; the first row always."""
    changed = np.zeros(len(columns[0]), dtype=np.bool_)
    changed[:1] = True
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return changed


def _one_conformer(table: AtomTable, sites: _Sites, policy: Policy) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return the atoms kept, the residue of each, and how many residues had alternatives."""
    rows_A = sites.rows()
    residue_A = np.repeat(_residue_of_site(table, sites), sites.length_S)
    name_A, altloc_A = table.name_A[rows_A], table.altloc_A[rows_A]
    if not altloc_A.any() and _all_distinct(name_A, residue_A):
        return rows_A, residue_A, 0
    order_A, alternatives = np.arange(len(rows_A)), 0
    if altloc_A.any():
        chosen_R, alternatives = _choose_labels(altloc_A, table.occupancy_A[rows_A], residue_A, policy)
        order_A = _by_preference(altloc_A, table.resname_A[rows_A], residue_A, chosen_R)
    names, code_A = np.unique(name_A, return_inverse=True)
    _, first = np.unique((residue_A * len(names) + code_A)[order_A], return_index=True)
    kept = np.sort(order_A[first])
    return rows_A[kept], residue_A[kept], alternatives


def _residue_of_site(table: AtomTable, sites: _Sites) -> NDArray[np.int64]:
    """Return the residue of each site; two names at one place are one residue when both are labelled alternatives."""
    first_S, last_S = sites.first_S, sites.first_S + sites.length_S - 1
    new_S = _changes(table.number_A[first_S], table.icode_A[first_S], table.chain_A[first_S])
    unlabelled_S = table.altloc_A[first_S] == 0
    unlabelled_S[1:] |= table.altloc_A[last_S[:-1]] == 0
    residue_S: NDArray[np.int64] = np.cumsum(new_S | unlabelled_S) - 1
    return residue_S


def _all_distinct(name_A: NDArray[np.uint64], residue_A: NDArray[np.int64]) -> bool:
    """Say whether no residue holds an atom name twice, by one sort; it cannot for names beyond 4 bytes."""
    if (name_A >> np.uint64(32)).any():
        return False
    pairs = np.sort((residue_A.astype(np.uint64) << np.uint64(32)) | name_A)
    return bool((pairs[1:] != pairs[:-1]).all())


def _choose_labels(
    altloc_A: NDArray[np.int8], occupancy_A: NDArray[np.float32], residue_A: NDArray[np.int64], policy: Policy
) -> tuple[NDArray[np.int64], int]:
    """Choose one label per residue, so that no residue is a patchwork, and count the residues that had several.

    It is the label of highest summed occupancy (ties: the lowest letter), or the first in the file.
    """
    labelled = np.flatnonzero(altloc_A)
    site = residue_A[labelled] * 256 + altloc_A[labelled].view(np.uint8)
    options, first_seen, inverse = np.unique(site, return_index=True, return_inverse=True)
    if policy.altlocs == "highest":
        cost = -np.bincount(inverse, weights=occupancy_A[labelled]).round(3)
    else:
        cost = first_seen.astype(np.float64)
    ranked = options[np.lexsort((options, cost, options // 256))]
    residues, winner = np.unique(ranked // 256, return_index=True)
    chosen_R = np.zeros(int(residue_A[-1]) + 1, dtype=np.int64)
    chosen_R[residues] = ranked[winner] % 256
    return chosen_R, len(residues)


def _by_preference(
    altloc_A: NDArray[np.int8], resname_A: NDArray[np.uint64], residue_A: NDArray[np.int64], chosen_R: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Order atoms so that the chosen conformer comes first; leave out residue names that lost.

    An atom that only another label has still follows, so that a choice never leaves a residue incomplete.
    """
    label_A = altloc_A.view(np.uint8)
    preferred_A = (label_A == 0) | (label_A == chosen_R[residue_A])
    name_R = np.zeros(len(chosen_R), dtype=np.uint64)
    chosen = np.flatnonzero(label_A == chosen_R[residue_A])[::-1]
    name_R[residue_A[chosen]] = resname_A[chosen]
    candidates = np.flatnonzero(resname_A == name_R[residue_A])
    order: NDArray[np.int64] = candidates[np.argsort(~preferred_A[candidates], kind="stable")]
    return order


def _find(name_A: NDArray[np.uint64], residue_A: NDArray[np.int64], atom: str, residues: int) -> NDArray[np.int64]:
    """Return the index of the atom of that name in each residue, -1 where it is missing."""
    index_R = np.full(residues, -1, dtype=np.int64)
    found = np.flatnonzero(name_A == word(atom))
    index_R[residue_A[found]] = found
    return index_R


@lru_cache(maxsize=4096)
def _residue_type(name: int, parent: int) -> tuple[int, str, bool]:
    """Return the kind, the one-letter code and whether it is modified; a parent named by the file wins over none."""
    info = gemmi.find_tabulated_residue(text(name))
    kind = KINDS.get(info.kind)
    if kind is None or info.one_letter_code == " ":
        known = gemmi.find_tabulated_residue(text(parent))
        if not parent or known.kind not in KINDS:
            return UNKNOWN_KIND, "", True
        return KIND_CODES.index(KINDS[known.kind]), known.one_letter_code.upper(), True
    return KIND_CODES.index(kind), info.one_letter_code.upper(), info.one_letter_code.islower()


def letter(name: str, parents: Mapping[str, str], kind: Kind) -> str:
    """Return the one-letter code of a residue name, X or N where none is known."""
    return _residue_type(word(name), word(parents.get(name, "")))[1] or UNKNOWN_LETTER[kind]


def _letters(
    name_R: NDArray[np.uint64], parents: Mapping[str, str]
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_]]:
    """Return one-letter codes (0 where unknown), kinds and modified flags, looked up once per distinct name."""
    names, inverse = np.unique(name_R, return_inverse=True)
    known = {word(name): word(parent) for name, parent in parents.items()}
    types = [_residue_type(name, known.get(name, 0)) for name in names.tolist()]
    letters = np.array([ord(code or "\0") for _, code, _ in types], dtype=np.uint8)
    kinds = np.array([kind for kind, _, _ in types], dtype=np.int64)
    modified = np.array([changed for _, _, changed in types], dtype=np.bool_)
    return letters[inverse], kinds[inverse], modified[inverse]


def _chains(
    table: AtomTable,
    chain_R: NDArray[np.uint64],
    kind_R: NDArray[np.int64],
    letters_R: NDArray[np.uint8],
    node_R: NDArray[np.bool_],
) -> tuple[Chain, ...]:
    """Cut the residues into chains; a chain is of the kind that most of its residues are."""
    starts = np.flatnonzero(_changes(chain_R)).tolist()
    chains = []
    for first, last in zip(starts, [*starts[1:], len(chain_R)], strict=True):
        name = table.chain_name(chain_R[first])
        kind = KIND_CODES[int(np.argmax(np.bincount(kind_R[first:last], minlength=UNKNOWN_KIND + 1)[:UNKNOWN_KIND]))]
        sequence = letters_R[first:last].tobytes().decode("ascii").replace("\0", UNKNOWN_LETTER[kind])
        full = table.seqres.get(name)
        seqres = None if full is None else "".join(letter(one, table.parents, kind) for one in full)
        nodes = int(np.count_nonzero(node_R[first:last]))
        chains.append(Chain(name, kind, first, last, sequence, nodes, seqres))
    return tuple(chains)
