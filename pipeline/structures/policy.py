"""From atoms to residues and chains: a named policy makes every choice that a structure file leaves open.

A residue's identity is its ordinal in the chain, because numbers wrap, repeat and carry insertion codes.
Shapes: A atoms, R residues, C chains.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

import gemmi
import numpy as np

from pipeline.records import Kind, Reason
from pipeline.structures.atoms import (
    EVERY,
    AtomTable,
    Links,
    UnusableInput,
    changes,
    name_text,
    name_word,
    no_links,
    one_conformer,
    sites_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from pipeline.structures.atoms import Rows, Sites

POLICY_VERSION = 4
POLYMER, WATER = 1, 4
HETATM = ord("H")
CARBON = 6
HIGHEST_PLDDT = 100.0
FARTHEST = 1e5  # Å from the origin: ten times as far as PDB files reach
BACKBONE = ("N", "CA", "C", "O", "CB")
NUCLEOTIDE_ANCHORS = ("C1'", "C1*")  # the second is how old files write it
CA_WORD = name_word("CA")
LINKING_WORDS = np.array([CA_WORD, *map(name_word, NUCLEOTIDE_ANCHORS)], dtype=np.uint64)
# Names that molecular dynamics gives to protonation states, which the dictionaries do not know.
SYNONYMS = {
    **dict.fromkeys(("HSD", "HSE", "HSP", "HIE", "HID", "HIP"), "HIS"),
    **dict.fromkeys(("CYX", "CYM", "CYS2"), "CYS"),
    "ASH": "ASP",
    "GLH": "GLU",
    "LYN": "LYS",
    "TYM": "TYR",
    "ARN": "ARG",
}
# Waters by names that molecular dynamics gives, which gemmi takes for ligands.
MORE_WATERS = np.array([name_word(name) for name in ("SOL", "SOLV", "TIP", "TIP3", "TIP4", "SPC")], dtype=np.uint64)
# Atoms by one of which a residue of an unknown name is part of a chain, not an ion or a solvent among its ATOM records.
CHAIN_WORDS = np.array([*map(name_word, ("N", "C", "P")), *LINKING_WORDS], dtype=np.uint64)
# Nucleotides as CHARMM calls them; of DNA where they lack the O2'.
CHARMM_BASES = {"ADE": "A", "CYT": "C", "GUA": "G", "URA": "U", "THY": "DT"}
CHARMM_WORDS = frozenset(map(name_word, CHARMM_BASES))
# Groups that end a chain without being a residue of it.
CAPS = frozenset({"ACE", "NH2", "NME", "NMA", "FOR", "FMT", "ETA", "MYR", "BOC", "0QE"})
KINDS = {
    gemmi.ResidueKind.AA: Kind.PROTEIN,
    gemmi.ResidueKind.AAD: Kind.PROTEIN,
    gemmi.ResidueKind.PAA: Kind.PROTEIN,
    gemmi.ResidueKind.MAA: Kind.PROTEIN,
    gemmi.ResidueKind.RNA: Kind.RNA,
    gemmi.ResidueKind.DNA: Kind.DNA,
}
KIND_CODES = (Kind.PROTEIN, Kind.DNA, Kind.RNA)
PROTEIN, UNKNOWN_KIND = 0, len(KIND_CODES)
UNKNOWN_LETTER = {Kind.PROTEIN: "X", Kind.DNA: "N", Kind.RNA: "N"}


@dataclass(frozen=True, slots=True)
class Policy:
    """The choices about residues; each is part of the recipe."""

    altlocs: Literal["highest", "first"] = "highest"
    modified: Literal["parent", "unknown", "reject"] = "parent"
    require: Literal["ca", "backbone"] = "ca"
    incomplete: Literal["drop", "reject"] = "drop"
    ligands: Literal["drop", "keep"] = "drop"
    plddt: Literal["none", "marked", "every"] = "none"
    min_plddt: float | None = None
    low_plddt: Literal["drop", "mask"] = "drop"
    pae: Literal["none", "beside", "required"] = "none"

    def plain(self) -> dict[str, Any]:
        """Return the choices as JSON data; those of predictions only where they are read, so that other keys stay."""
        chosen = asdict(self)
        irrelevant = {"plddt", "min_plddt", "low_plddt"} if self.plddt == "none" else set()
        irrelevant |= {"pae"} if self.pae == "none" else set()
        return {name: value for name, value in chosen.items() if name not in irrelevant}


@dataclass(frozen=True, slots=True)
class Chain:
    """A polymer chain, or one small molecule or ion: residues `first` to `last` (excluded) of its structure.

    The name of a molecule is CHAIN:RESIDUE:NUMBER, such as A:GTP:301; its sequence is empty.
    """

    name: str
    kind: Kind
    first: int
    last: int
    sequence: str  # one letter per observed residue
    nodes: int  # residues that have the atoms a node needs
    seqres: tuple[str, ...] | None = None  # residue names of the full sequence, when it was asked for


@dataclass(frozen=True, slots=True)
class Structure:
    """One model of a file, one conformer: the residues of its polymers, then the molecules that are kept.

    Atoms of a residue are contiguous.
    """

    chains: tuple[Chain, ...]
    number_R: NDArray[np.int32]
    icode_R: NDArray[np.int8]
    name_R: NDArray[np.uint64]
    node_R: NDArray[np.bool_]
    modified_R: NDArray[np.bool_]
    label_seq_R: NDArray[np.int32] | None
    atoms_R: NDArray[np.int64]  # how many each has
    backbone_R5: NDArray[np.int64]  # atom index of N, CA, C, O, CB; -1 where missing
    pos_A3: NDArray[np.float64]
    name_A: NDArray[np.uint64]
    element_A: NDArray[np.uint8]
    residue_A: NDArray[np.int64]
    all_chains: tuple[str, ...]  # every chain of the file, also those that hold no polymer
    parents: Mapping[str, str]  # modified residue → standard one, as the file says
    notes: Mapping[str, int]  # counts of the whole file: altlocs, waters, ligands
    links: Callable[[], Links] = no_links  # between its atoms; looked up when asked for
    plddt_R: NDArray[np.float32] | None = None  # where B-factors are taken for it: the mean of a residue's atoms
    low_R: NDArray[np.bool_] | None = None  # residues of polymers below structures.min_plddt
    drops_low: bool = False  # whether those are left out
    pae_RR: NDArray[np.float32] | None = None  # of polymers, where PAE is asked for; empty where no file has it

    @property
    def hidden_R(self) -> NDArray[np.bool_]:
        """The residues that are left out for their pLDDT, whatever atoms they have."""
        return self.low_R if self.drops_low and self.low_R is not None else np.zeros(len(self.node_R), np.bool_)


def apply_policy(table: AtomTable, policy: Policy) -> Structure:
    """Return the residues of a file under a policy."""
    sites = sites_of(table)
    types = _types(table, sites)
    polymer_S = _polymer(table, sites, types)
    other = np.flatnonzero(~polymer_S)
    is_water = table.entity_A[sites.first_S[other]] == WATER
    if len(other):
        is_water |= np.isin(table.resname_A[sites.first_S[other]], MORE_WATERS)
    waters = int(is_water.sum())
    left_out = table.notes.get("waters", 0)  # by a parser that only counts them
    notes = {**table.notes, "waters": waters + left_out, "ligands": len(other) - waters}
    molecules = other[~is_water] if policy.ligands == "keep" else other[:0]
    if not polymer_S.any() and not len(molecules):
        also = " and no small molecule" if policy.ligands == "keep" else ""
        raise UnusableInput(Reason.NO_POLYMER, f"no protein, RNA or DNA residue{also} in the file")
    chosen = _in_chain_order(table, sites if polymer_S.all() else sites.take(np.flatnonzero(polymer_S)))
    own_A = None
    if len(molecules):
        chosen = chosen.then(_in_chain_order(table, sites.take(molecules)))
        own_A = np.repeat(np.arange(len(chosen.first_S)) >= len(chosen.first_S) - len(molecules), chosen.length_S)
    rows_A = EVERY if chosen is sites else chosen.rows()
    kept_A, residue_A, notes["altlocs"] = one_conformer(table, chosen, rows_A, policy.altlocs, own_A)
    first_R, polymers = sites.first_S, len(sites.first_S)
    if kept_A is not EVERY or residue_A[-1] != polymers - 1:  # in most files each site is a residue
        first_R = np.flatnonzero(changes(residue_A))  # a residue's name and number are those of its first atom
        first_R = first_R if isinstance(kept_A, slice) else kept_A[first_R]
        site_R = np.searchsorted(sites.first_S, first_R, side="right") - 1
        types = types[site_R]
        polymers = int(np.count_nonzero(polymer_S[site_R])) if len(molecules) else len(first_R)
    return _structure(table, policy, kept_A, residue_A, first_R, types, polymers, notes)


def _polymer(table: AtomTable, sites: Sites, types: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the sites that are residues of a polymer.

    gemmi relies on TER records and on the order of residues, and both can be misleading. Here an ATOM record with the
    name of an amino acid or nucleotide is a residue, wherever a TER record is. A residue of an unknown name is one only
    if it has an atom that links it into a chain: any such atom in ATOM records, CA or C1' in HETATM records.
    """
    is_atom_S = table.hetero_A[sites.first_S] != HETATM
    unknown_S = types["kind"] == UNKNOWN_KIND
    by_gemmi_S = table.entity_A[sites.first_S] == POLYMER
    polymer_S: NDArray[np.bool_] = (by_gemmi_S | (is_atom_S & ~unknown_S)) & ~types["is_cap"]
    if (polymer_S & unknown_S).any():
        links_A = np.isin(table.name_A, LINKING_WORDS) & (table.element_A == CARBON)
        chains_A = links_A | np.isin(table.name_A, CHAIN_WORDS)
        linked_S, chained_S = (np.logical_or.reduceat(some_A, sites.first_S) for some_A in (links_A, chains_A))
        polymer_S &= ~unknown_S | np.where(is_atom_S, chained_S, linked_S)
    return polymer_S


def _usual_names(table: AtomTable, sites: Sites, name_S: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the name of each site, of a nucleotide as CHARMM calls it the usual one."""
    charmm = np.flatnonzero(np.isin(name_S, [*CHARMM_WORDS]))
    c1_S, o2_S = (np.logical_or.reduceat(table.name_A == name_word(atom), sites.first_S) for atom in ("C1'", "O2'"))
    usual_S: NDArray[np.uint64] = name_S.copy()
    for site in charmm[c1_S[charmm]].tolist():
        base = CHARMM_BASES[name_text(name_S[site])]
        usual_S[site] = name_word(base if o2_S[site] or base.startswith("D") else f"D{base}")
    return usual_S


# What a residue is by its name; the letter is 0 where it is unknown.
RESIDUE_TYPE = np.dtype([("letter", "u1"), ("kind", "i8"), ("modified", "?"), ("is_cap", "?")])


def _types(table: AtomTable, sites: Sites) -> NDArray[Any]:
    """Return the `RESIDUE_TYPE` of each site, looked up once per distinct name."""
    name_S = table.resname_A[sites.first_S]
    name_T = np.unique(name_S)
    if not CHARMM_WORDS.isdisjoint(name_T.tolist()):
        name_S = _usual_names(table, sites, name_S)
        name_T = np.unique(name_S)
    known = ((name_word(name), name_word(parent)) for name, parent in table.parents.items())
    return _types_of(tuple(name_T.tolist()), tuple(known))[np.searchsorted(name_T, name_S)]


@lru_cache(maxsize=64)  # most files have the same twenty names
def _types_of(names: tuple[int, ...], parents: tuple[tuple[int, int], ...]) -> NDArray[Any]:
    parent_of = dict(parents)
    types = [_residue_type(name, parent_of.get(name, 0)) for name in names]
    return np.array([(ord(code or "\0"), kind, modified, cap) for kind, code, modified, cap in types], RESIDUE_TYPE)


def _in_chain_order(table: AtomTable, sites: Sites) -> Sites:
    """Sort sites by chain, in the order in which chains first appear, so that a chain in two pieces is one chain."""
    chain_S = table.chain_A[sites.first_S]
    starts = np.flatnonzero(changes(chain_S))
    ordinals: dict[int, int] = {}
    run_ordinals = [ordinals.setdefault(code, len(ordinals)) for code in chain_S[starts].tolist()]
    if len(ordinals) == len(run_ordinals):
        return sites
    ordinal_S = np.repeat(np.array(run_ordinals), np.diff(starts, append=len(chain_S)))
    return sites.take(np.argsort(ordinal_S, kind="stable"))


def _structure(
    table: AtomTable,
    policy: Policy,
    kept_A: Rows,
    residue_A: NDArray[np.int64],
    first_R: NDArray[np.int64],
    types_R: NDArray[Any],
    polymers: int,
    notes: dict[str, int],
) -> Structure:
    """Assemble residues and chains from the kept atoms; the residues after the first `polymers` are molecules."""
    name_A = np.ascontiguousarray(table.name_A[kept_A])
    pos_A3 = np.asarray(table.pos_A3[kept_A], order="A")  # rows or columns, as the parser has them
    element_A = np.ascontiguousarray(table.element_A[kept_A])
    if not (np.abs(pos_A3) < FARTHEST).all():  # false for NaN, too
        finite = bool(np.isfinite(pos_A3).all())
        what = f"a coordinate is beyond {FARTHEST:,.0f} Å" if finite else "a coordinate is not a finite number"
        raise UnusableInput(Reason.PARSE_ERROR, what)
    backbone_R5 = np.stack([_find(name_A, residue_A, atom, len(first_R)) for atom in BACKBONE], axis=1)
    ca_R = backbone_R5[:, BACKBONE.index("CA")]
    ca_R[(ca_R >= 0) & (element_A[ca_R] != CARBON)] = -1  # that is calcium
    needed = slice(0, 3) if policy.require == "backbone" else slice(1, 2)
    node_R = np.logical_and.reduce(backbone_R5[:, needed] >= 0, axis=1)
    kind_R, modified_R, letter_R = (np.ascontiguousarray(types_R[name]) for name in ("kind", "modified", "letter"))
    if (kind_R != PROTEIN).any():
        for anchor in NUCLEOTIDE_ANCHORS:
            node_R |= _find(name_A, residue_A, anchor, len(first_R)) >= 0
    if polymers < len(first_R):
        backbone_R5[polymers:], node_R[polymers:], modified_R[polymers:] = -1, False, False
    plddt_R = _plddt(table, policy, kept_A, residue_A)
    low_R, drops_low = None, policy.low_plddt == "drop"
    if plddt_R is not None and policy.min_plddt is not None:
        low_R = plddt_R < np.float32(policy.min_plddt)
        low_R[polymers:] = False
        node_R &= ~(low_R & drops_low)
    if policy.modified == "unknown":
        letter_R = np.where(modified_R, 0, letter_R).astype(np.uint8)
    return Structure(
        chains=_chains(table, first_R, polymers, kind_R, letter_R, node_R),
        number_R=table.number_A[first_R],
        icode_R=table.icode_A[first_R],
        name_R=table.resname_A[first_R],
        node_R=node_R,
        modified_R=modified_R,
        label_seq_R=None if table.label_seq_A is None else table.label_seq_A[first_R],
        atoms_R=np.bincount(residue_A, minlength=len(first_R)),
        backbone_R5=backbone_R5,
        pos_A3=pos_A3,
        name_A=name_A,
        element_A=element_A,
        residue_A=residue_A,
        all_chains=tuple(dict.fromkeys(map(table.chain_name, table.chain_A[changes(table.chain_A)]))),
        parents=table.parents,
        notes=notes,
        plddt_R=plddt_R,
        low_R=low_R,
        drops_low=drops_low and low_R is not None,
        links=partial(_kept_links, table, kept_A),
    )


def check_chain(structure: Structure, chain: Chain, policy: Policy) -> None:
    """Refuse a chain that the policy rejects; it is called only for chains that an item uses."""
    if "reject" not in (policy.modified, policy.incomplete) or chain.kind is Kind.OTHER:
        return
    here = slice(chain.first, chain.last)
    modified = int(structure.modified_R[here].sum())
    incomplete = int((~(structure.node_R | structure.hidden_R)[here]).sum())
    if policy.modified == "reject" and modified:
        what = f"{modified} modified residues in chain {chain.name}; structures.modified is reject"
        raise UnusableInput(Reason.MODIFIED_RESIDUES, what)
    if policy.incomplete == "reject" and incomplete:
        what = f"{incomplete} residues of chain {chain.name} lack backbone atoms; structures.incomplete is reject"
        raise UnusableInput(Reason.INCOMPLETE_RESIDUES, what)


def _plddt(table: AtomTable, policy: Policy, kept_A: Rows, residue_A: NDArray[np.int64]) -> NDArray[np.float32] | None:
    """Return the pLDDT of each residue, if it is asked for; refuse B-factors that are none."""
    if policy.plddt == "none":
        return None
    if table.b_iso_A is None:
        raise UnusableInput(Reason.NO_PLDDT, "files of this format have no B-factors, which structures.plddt needs")
    if policy.plddt == "marked" and not table.is_predicted:
        what = "the file is not marked as predicted: its B-factors may be experimental"
        raise UnusableInput(
            Reason.NO_PLDDT, f"{what}; structures.plddt: every treats the B-factors of any file as pLDDT"
        )
    b_iso_A = table.b_iso_A[kept_A].astype(np.float64)
    lowest, highest = float(b_iso_A.min()), float(b_iso_A.max())
    if not (lowest >= 0 and highest <= HIGHEST_PLDDT):
        what = f"B-factors from {lowest:g} to {highest:g} are not pLDDT values, which range from 0 to 100"
        raise UnusableInput(Reason.NO_PLDDT, what)
    if highest <= 1:
        what = f"B-factors are at most {highest:g}, but pLDDT goes to 100: multiply them by 100 if they are fractions"
        raise UnusableInput(Reason.NO_PLDDT, what)
    mean_R = np.bincount(residue_A, weights=b_iso_A) / np.maximum(np.bincount(residue_A), 1)
    return mean_R.round(2).astype(np.float32)


def _find(name_A: NDArray[np.uint64], residue_A: NDArray[np.int64], atom: str, residues: int) -> NDArray[np.int64]:
    """Return the index of the atom of that name in each residue, -1 where it is missing."""
    index_R = np.full(residues, -1, dtype=np.int64)
    rows = np.flatnonzero(name_A == name_word(atom))
    index_R[residue_A[rows]] = rows
    return index_R


def is_standard(name: str) -> bool:
    """Say whether a name is that of an amino acid or nucleotide, which molecular dynamics may spell its own way."""
    info = gemmi.find_tabulated_residue(SYNONYMS.get(name, name))
    return info.kind in KINDS and info.is_standard()


@lru_cache(maxsize=4096)
def _residue_type(name: int, parent: int) -> tuple[int, str, bool, bool]:
    """Return kind, one-letter code, whether it is modified, and whether it is a cap; unknown names go by the parent."""
    is_cap = name_text(name) in CAPS
    for candidate, modified in (
        (name_text(name), False),
        (SYNONYMS.get(name_text(name), ""), False),
        (name_text(parent), True),
    ):
        info = gemmi.find_tabulated_residue(candidate)
        if info.kind in KINDS and info.one_letter_code != " ":
            letter = info.one_letter_code
            return KIND_CODES.index(KINDS[info.kind]), letter.upper(), modified or letter.islower(), is_cap
    return UNKNOWN_KIND, "", True, is_cap


def letter(name: str, structure: Structure, kind: Kind, policy: Policy) -> str:
    """Return the one-letter code of a residue that was not observed."""
    _, code, modified, _ = _residue_type(name_word(name), name_word(structure.parents.get(name, "")))
    return UNKNOWN_LETTER[kind] if not code or (modified and policy.modified == "unknown") else code


def _chains(
    table: AtomTable,
    first_R: NDArray[np.int64],
    polymers: int,
    kind_R: NDArray[np.int64],
    letters_R: NDArray[np.uint8],
    node_R: NDArray[np.bool_],
) -> tuple[Chain, ...]:
    """Cut the residues of polymers into chains, each of the kind that most of its residues are; add the molecules.

    Each molecule is a chain of its own, so that a side can be any of them.
    """
    chain_R = table.chain_A[first_R]
    starts = np.flatnonzero(changes(chain_R[:polymers])).tolist()
    chains = []
    for first, last in zip(starts, [*starts, polymers][1:], strict=True):
        name = table.chain_name(chain_R[first])
        kind = KIND_CODES[int(np.argmax(np.bincount(kind_R[first:last], minlength=UNKNOWN_KIND + 1)[:UNKNOWN_KIND]))]
        # a one-letter code means something else in the other kind of polymer
        own_R = (kind_R[first:last] == PROTEIN) == (kind is Kind.PROTEIN)
        letters = np.where(own_R, letters_R[first:last], 0).astype(np.uint8).tobytes().decode("ascii")
        sequence = letters.replace("\0", UNKNOWN_LETTER[kind])
        nodes = int(np.count_nonzero(node_R[first:last]))
        chains.append(Chain(name, kind, first, last, sequence, nodes, table.seqres.get(name)))
    for residue, row in enumerate(first_R[polymers:].tolist(), start=polymers):
        number = f"{table.number_A[row]}{chr(table.icode_A[row])}".strip("\0 ")
        name = f"{table.chain_name(chain_R[residue])}:{name_text(table.resname_A[row])}:{number}"
        chains.append(Chain(name, Kind.OTHER, residue, residue + 1, "", 0))
    return tuple(chains)


def _kept_links(table: AtomTable, kept_A: Rows) -> Links:
    """Return the bonds that the file lists between the kept atoms."""
    links = table.links()
    if isinstance(kept_A, slice):
        return links
    place_A = np.full(len(table.name_A), -1)
    place_A[kept_A] = np.arange(len(kept_A))
    here = replace(links, atoms_L2=place_A[links.atoms_L2])
    return here.take(here.atoms_L2.min(axis=1) >= 0)
