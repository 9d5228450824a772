"""The inventory of an item: partners, chains, sequences and sizes, from the bytes of its files."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np

from pipeline.keys import content_digest, tagged_key
from pipeline.records import ChainSummary, Inventory, Item, Kind, Part, Partner, Reason, Role
from pipeline.structures.atoms import UnusableInput, name_text
from pipeline.structures.parsing.aligned_errors import ENDINGS, errors_of, pae_candidates
from pipeline.structures.parsing.amber import coordinate_candidates
from pipeline.structures.parsing.read_structure import FileReading, parse_structure
from pipeline.structures.parsing.structure_files import MOLECULES, File, format_of, item_paths, parser_of
from pipeline.structures.partners import bound_rows, check_apart, choose_chains, full_sequence
from pipeline.structures.policy import POLICY_VERSION, Policy, Structure, apply_policy, check_chain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.structures.policy import Chain

INVENTORY_VERSION = 1
LOW_PLDDT = "low_plddt"  # the note that counts residues below structures.min_plddt
NO_PAE = "no_pae"  # the note of a partner without a file of predicted aligned errors
LigandChoice: TypeAlias = Literal["as_named", "swapped", "smaller", "larger"]
Known = TypeVar("Known")


@dataclass(frozen=True, slots=True)
class ScanRecipe:
    """Every choice that can change an inventory."""

    reading: FileReading = field(default_factory=FileReading)
    policy: Policy = field(default_factory=Policy)
    max_residues: int = 10_000
    max_file_bytes: int = 64 << 20
    ligand: LigandChoice = "as_named"

    def paths(self, item: Item) -> list[str]:
        """Return the paths of all files that an item's inventory and graph are made of."""
        return item_paths(item, pae=self.policy.pae != "none")


def item_key(item: Item, recipe: ScanRecipe, digests: Mapping[str, str]) -> bytes:
    """Return the key of an item's inventory, from the digests of its files, the chains it names, and the recipe."""
    return tagged_key("scan", plain_recipe(recipe), item_subject(item, digests))


def item_subject(item: Item, digests: Mapping[str, str]) -> Any:
    """Return the input of an inventory as JSON data: files and chains; the recipe has the choices."""
    if item.sequence is not None:
        return item.sequence
    has_errors = any(path.endswith(ENDINGS) for path in digests)

    def described(part: Part, *, pae: bool = False) -> list[Any]:
        beside = _errors(part.path, digests).values() if pae else ()
        own = (part.role, *_own(part.path, digests), *beside, *_format(part.path))
        return [*own, part.chains, part.optional, part.model]

    chosen = (*item.parts, *item.bound)
    files, contents = [part.path for part in chosen], [_own(part.path, digests) for part in chosen]
    first_of_file = [files.index(path) for path in files]
    # Parts of one file must have different chains; parts of two files with equal bytes need not.
    copies = {} if first_of_file == [contents.index(own) for own in contents] else {"files": first_of_file}
    parts = [described(part, pae=has_errors) for part in item.parts]
    return {"parts": parts, "bound": [described(part) for part in item.bound], **copies}


def _own(path: str, known: Mapping[str, Known]) -> list[Known]:
    """Return the values known for a part's file and, if it is a topology, for the one with its coordinates."""
    return [known[file] for file in (path, *coordinate_candidates(path)) if file == path or file in known]


def _errors(path: str, known: Mapping[str, Known]) -> dict[str, Known]:
    """Return the known file of predicted aligned errors of a structure, with its value; empty if none is known."""
    return {file: known[file] for file in [file for file in pae_candidates(path) if file in known][:1]}


@lru_cache(maxsize=16)
def plain_recipe(recipe: ScanRecipe) -> dict[str, Any]:
    """Return the choices that can change an inventory, as JSON data; the limit of file size cannot."""
    return {
        "version": [INVENTORY_VERSION, POLICY_VERSION],
        "reading": recipe.reading.plain(),
        "policy": recipe.policy.plain(),
        "max_residues": recipe.max_residues,
        **({} if recipe.ligand == "as_named" else {"ligand": recipe.ligand}),
    }


def _format(path: str) -> tuple[str, str]:
    """Return a file's format and its parser; for an unknown format its suffix and nothing."""
    try:
        form = format_of(Path(path))
    except UnusableInput:
        return Path(path).suffix, ""
    return form, parser_of(form)


@dataclass(frozen=True, slots=True)
class ComplexSide:
    """The structure of one partner: its chains, in the order in which the item names them."""

    digest: str
    structure: Structure
    chains: tuple[Chain, ...]
    part: Part  # that names it

    @property
    def atoms(self) -> int:
        return sum(int(self.structure.atoms_R[chain.first : chain.last].sum()) for chain in self.chains)

    def residues(self) -> NDArray[np.int64]:
        """Return the indices of this partner's residues in the structure, chain by chain."""
        return np.concatenate([np.arange(chain.first, chain.last) for chain in self.chains])


@dataclass(frozen=True, slots=True)
class Complex:
    """An item that was read: its sides, the bound sides of its labels, and the maps between their residues."""

    partners: Mapping[Role, Partner]
    sides: Mapping[Role, ComplexSide]
    bound: Mapping[Role, ComplexSide]  # empty where the input itself is bound
    maps: Mapping[str, NDArray[np.int32]]  # rows.ROLE: into full sequences; bound.ROLE: into the bound side, -1 nowhere


def examine_item(item: Item, files: Mapping[str, File], recipe: ScanRecipe) -> tuple[Inventory, Complex | None]:
    """Return the inventory of an item, and its structures if it has any and they are usable."""
    try:
        if item.sequence is None:
            return _take_structures(item, files, recipe)
        length = len(item.sequence)
        _check_size(length, recipe)
        chain = ChainSummary(name="", kind=Kind.PROTEIN, sequence=item.sequence, residues=length, nodes=0, atoms=0)
        return Inventory(partners=(Partner(role=Role.WHOLE, content="", chains=(chain,)),)), None
    except UnusableInput as problem:
        return Inventory(reason=problem.reason, detail=problem.detail), None


def _take_structures(item: Item, files: Mapping[str, File], recipe: ScanRecipe) -> tuple[Inventory, Complex]:
    """Return the inventory of a complex, and the complex with its maps to SEQRES and to bound structures."""
    structures: dict[tuple[str, int | None], Structure] = {}
    sides = _sides(item.parts, files, recipe, structures)
    bound = _sides(item.bound, files, _as_experiments(recipe), structures)  # which are experiments, as a rule
    for known in (sides, bound):
        _check_size(sum(chain.last - chain.first for side in known.values() for chain in side.chains), recipe)
    if _is_swapped(bound if len(bound) == len(PAIR) else sides, recipe.ligand):
        sides, bound = _swapped(sides), _swapped(bound)
    maps: dict[str, NDArray[np.int32]] = {}
    partners = {}
    for role, side in sides.items():
        sequences = [chain.sequence for chain in side.chains]
        if recipe.reading.seqres:
            pairs = [full_sequence(side.structure, chain, recipe.policy) for chain in side.chains]
            sequences = [sequence for sequence, _ in pairs]
            maps[f"rows.{role.value}"] = np.concatenate([rows for _, rows in pairs])
        if role in bound:
            maps[f"bound.{role.value}"] = _bound_rows(side, bound[role])
        partners[role] = _partner(role, side, sequences)
    labels = (_partner(role, side, [chain.sequence for chain in side.chains]) for role, side in bound.items())
    inventory = Inventory(partners=tuple(partners.values()), bound=tuple(labels))
    _check_nodes(inventory.partners, recipe)
    return inventory, Complex(partners, sides, bound, maps)


PAIR = (Role.RECEPTOR, Role.LIGAND)


def _is_swapped(sides: Mapping[Role, ComplexSide], choice: LigandChoice) -> bool:
    """Return whether receptor and ligand change places; two partners of equal size do not."""
    if choice == "as_named" or sides.keys() != set(PAIR):
        return False
    receptor, ligand = (sides[role].atoms for role in PAIR)
    return choice == "swapped" or (receptor < ligand if choice == "smaller" else receptor > ligand)


def _swapped(sides: Mapping[Role, ComplexSide]) -> dict[Role, ComplexSide]:
    """Return receptor and ligand in each other's place."""
    return {role: sides[other] for role, other in zip(PAIR, reversed(PAIR), strict=True) if other in sides}


def _sides(
    parts: Sequence[Part],
    files: Mapping[str, File],
    recipe: ScanRecipe,
    structures: dict[tuple[str, int | None], Structure],
) -> dict[Role, ComplexSide]:
    """Return the chains of each side; a file that holds both sides is parsed once."""
    sides: dict[Role, ComplexSide] = {}
    taken: dict[Role, set[tuple[str, str]]] = {}
    for part in parts:
        own = _own(part.path, files)
        if (part.path, part.model) not in structures:
            structure = _structure(part, own, recipe)
            structures[part.path, part.model] = _with_errors(structure, part.path, files, recipe)
        structure = structures[part.path, part.model]
        elsewhere = [name for other in parts if other.path == part.path and other is not part for name in other.chains]
        for role, chains in choose_chains(structure, part, elsewhere).items():
            for chain in chains:
                check_chain(structure, chain, recipe.policy)
            sides[role] = ComplexSide(_content(own), structure, chains, part)
            taken.setdefault(role, set()).update((part.path, chain.name) for chain in chains)
    check_apart(taken)
    return sides


def _structure(part: Part, own: Sequence[File], recipe: ScanRecipe) -> Structure:
    """Parse one file by the recipe; a model named with the item wins over the configured one.

    A small molecule in a file of its own is always kept, whatever the policy says of those in other files.
    """
    reading = recipe.reading if part.model is None else replace(recipe.reading, model=part.model)
    form = format_of(Path(part.path))
    table = parse_structure(
        own[0].data, form, reading, recipe.max_residues, beside=own[1].data if len(own) > 1 else b""
    )
    if form in MOLECULES:
        return apply_policy(table, replace(_as_experiments(recipe).policy, ligands="keep"))
    return apply_policy(table, recipe.policy)


def _with_errors(structure: Structure, path: str, files: Mapping[str, File], recipe: ScanRecipe) -> Structure:
    """Add the predicted aligned errors of a file, if the policy wants them."""
    if recipe.policy.pae == "none":
        return structure
    for beside, file in _errors(path, files).items():
        return replace(structure, pae_RR=errors_of(structure, Path(beside).name, file.data))
    if recipe.policy.pae == "required" and format_of(Path(path)) not in MOLECULES:
        names = [Path(beside).name for beside in pae_candidates(path) if not beside.endswith(".gz")]
        looked_for = ", ".join(names) or "not supported for this format"
        what = f"no predicted aligned errors next to {Path(path).name}: looked for {looked_for}"
        raise UnusableInput(Reason.NO_PAE, f"{what}; structures.pae: beside also accepts files without them")
    return replace(structure, pae_RR=np.empty((0, 0), np.float32))


def _as_experiments(recipe: ScanRecipe) -> ScanRecipe:
    """Return the recipe for files that are no predictions."""
    return replace(recipe, policy=replace(recipe.policy, plddt="none", min_plddt=None, pae="none"))


def _content(own: Sequence[File]) -> str:
    """Return the digest of a file, or a joint one of a topology and its coordinates."""
    digests = [file.digest for file in own]
    return digests[0] if len(digests) == 1 else content_digest("".join(digests).encode()).hex()


def _bound_rows(side: ComplexSide, bound: ComplexSide) -> NDArray[np.int32]:
    """Return for each residue the corresponding one of the bound side, or -1.

    Polymers correspond by sequence; a molecule corresponds to the one of its name, where each side has only one.
    """
    polymers, molecules = _by_kind(side)
    theirs, their_molecules = _by_kind(bound)
    rows = [np.empty(0, np.int32)]
    if polymers:
        rows.append(bound_rows([chain.sequence for chain in polymers], [chain.sequence for chain in theirs]))
    counts, first = Counter(their_molecules), sum(len(chain.sequence) for chain in theirs)
    places = {name: first + at for at, name in enumerate(their_molecules) if counts[name] == 1}
    mine = Counter(molecules)
    molecule_rows = [places.get(name, -1) if mine[name] == 1 else -1 for name in molecules]
    if not polymers and not any(place >= 0 for place in molecule_rows):
        what = f"none of {', '.join(mine)} has a unique name in both the unbound and the bound structure"
        raise UnusableInput(Reason.SEQUENCE_MISMATCH, what)
    return np.concatenate([*rows, np.array(molecule_rows, np.int32)])


def _by_kind(side: ComplexSide) -> tuple[list[Chain], list[str]]:
    """Return the polymers of a side, and the residue name of each molecule; sides have molecules last."""
    polymers = [chain for chain in side.chains if chain.kind is not Kind.OTHER]
    molecules = [chain.first for chain in side.chains[len(polymers) :]]
    return polymers, [name_text(name) for name in side.structure.name_R[molecules]]


def _partner(role: Role, side: ComplexSide, sequences: Sequence[str]) -> Partner:
    """Summarise one side."""
    structure, chains = side.structure, side.chains

    def total(some_R: NDArray[Any]) -> int:
        return sum(int(some_R[chain.first : chain.last].sum()) for chain in chains)

    left_out = tuple(entry for chain in chains for entry in _left_out(structure, chain))
    notes = {**structure.notes, "modified": total(structure.modified_R), "incomplete": len(left_out)}
    notes[LOW_PLDDT] = 0 if structure.low_R is None else total(structure.low_R)
    notes[NO_PAE] = int(structure.pae_RR is not None and not structure.pae_RR.size)
    summaries = []
    for chain, sequence in zip(chains, sequences, strict=True):
        atoms = int(structure.atoms_R[chain.first : chain.last].sum())
        summaries.append(ChainSummary(chain.name, chain.kind, sequence, chain.last - chain.first, chain.nodes, atoms))
    noted = {note: count for note, count in notes.items() if count}
    return Partner(role, side.digest, tuple(summaries), noted, left_out)


def _left_out(structure: Structure, chain: Chain) -> Iterator[tuple[str, str, str, str]]:
    """Yield the residues of a polymer that are no nodes: chain, name, number and the atoms that were observed."""
    if chain.kind is Kind.OTHER or chain.nodes == chain.last - chain.first:
        return
    for residue in (chain.first + np.flatnonzero(~structure.node_R[chain.first : chain.last])).tolist():
        atoms = structure.name_A[structure.residue_A == residue]
        number = f"{structure.number_R[residue]}{chr(structure.icode_R[residue]).strip(chr(0) + ' ')}"
        yield chain.name, name_text(structure.name_R[residue]), number, " ".join(map(name_text, atoms))


def _check_nodes(partners: Sequence[Partner], recipe: ScanRecipe) -> None:
    """Refuse a side without any graph node, unless it consists of small molecules, which have none."""
    for partner in partners:
        is_molecules = partner.chains and all(chain.kind is Kind.OTHER for chain in partner.chains)
        if partner.nodes == 0 and not is_molecules:
            wanted = "N, CA and C" if recipe.policy.require == "backbone" else "CA"
            side = "file" if partner.role is Role.WHOLE else partner.role.value
            if partner.notes.get(LOW_PLDDT) and recipe.policy.low_plddt == "drop":
                wanted += f" and a pLDDT of {recipe.policy.min_plddt:g}"
            what = f"no residue of the {side} has {wanted}"
            hint = "; structures.require: ca is less strict" if recipe.policy.require == "backbone" else ""
            raise UnusableInput(Reason.INCOMPLETE_RESIDUES, what + hint)


def _check_size(residues: int, recipe: ScanRecipe) -> None:
    if residues > recipe.max_residues:
        what = f"{residues:,} residues; structures.max_residues is {recipe.max_residues:,}"
        raise UnusableInput(Reason.TOO_MANY_RESIDUES, what)
