"""What one item holds: partners, chains, sequences and sizes, from the bytes of its files."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.keys import recipe_key
from pipeline.records import ChainSummary, Inventory, Item, Kind, Part, Partner, Reason, Role
from pipeline.structures.atoms import Unusable
from pipeline.structures.partners import check_apart, choose
from pipeline.structures.policy import POLICY_VERSION, Policy, Structure
from pipeline.structures.policy import apply as apply_policy
from pipeline.structures.read import PARSER, Reading, format_of, parse
from pipeline.structures.sequences import bound_rows, seqres_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.structures.policy import Chain

INVENTORY_VERSION = 1


@dataclass(frozen=True, slots=True)
class Recipe:
    """Every choice that can change an inventory."""

    reading: Reading = field(default_factory=Reading)
    policy: Policy = field(default_factory=Policy)
    max_residues: int = 10_000
    max_file_bytes: int = 512 << 20


@dataclass(frozen=True, slots=True)
class File:
    """The bytes of a structure file and the digest by which they are known."""

    data: bytes
    digest: str


def item_key(item: Item, recipe: Recipe, digests: Mapping[str, str]) -> bytes:
    """Return the key of an item's inventory: what its files hold, which chains are meant, and the recipe."""
    if item.sequence is not None:
        return recipe_key("scan", {"version": INVENTORY_VERSION, "sequence": item.sequence, "max": recipe.max_residues})

    def parts(some: Sequence[Part]) -> list[list[Any]]:
        return [[part.role, digests[part.path], _format(part), part.chains, part.model] for part in some]

    return recipe_key(
        "scan",
        {
            "version": [INVENTORY_VERSION, POLICY_VERSION, PARSER],
            "reading": asdict(recipe.reading),
            "policy": asdict(recipe.policy),
            "max_residues": recipe.max_residues,
            "parts": parts(item.parts),
            "bound": parts(item.bound),
        },
    )


def _format(part: Part) -> str:
    """Return a part's format; a file of unknown format has its suffix, and is rejected when it is read."""
    try:
        return format_of(Path(part.path))
    except Unusable:
        return Path(part.path).suffix


def take(item: Item, files: Mapping[str, File], recipe: Recipe) -> tuple[Inventory, dict[str, NDArray[np.int32]]]:
    """Return the inventory of an item and its residue maps; what cannot be used becomes a reason."""
    try:
        if item.sequence is not None:
            return _take_sequence(item.sequence, recipe), {}
        return _take_structures(item, files, recipe)
    except Unusable as problem:
        return Inventory(reason=problem.reason, detail=problem.detail), {}


def _take_sequence(sequence: str, recipe: Recipe) -> Inventory:
    """Return the inventory of a bare sequence."""
    _check_size(len(sequence), recipe)
    chain = ChainSummary(name="", kind=Kind.PROTEIN, sequence=sequence, residues=len(sequence), nodes=0, atoms=0)
    return Inventory(partners=(Partner(role=Role.WHOLE, content="", chains=(chain,)),))


def _take_structures(
    item: Item, files: Mapping[str, File], recipe: Recipe
) -> tuple[Inventory, dict[str, NDArray[np.int32]]]:
    """Return the inventory of a complex, and its maps to SEQRES and to bound structures."""
    structures: dict[tuple[str, int | None], Structure] = {}
    sides = _sides(item.parts, files, recipe, structures)
    bound = _sides(item.bound, files, recipe, structures)
    maps: dict[str, NDArray[np.int32]] = {}
    for role, (_, structure, chains) in sides.items():
        if recipe.reading.seqres:
            maps[f"rows.{role.value}"] = np.concatenate([seqres_rows(structure, chain) for chain in chains])
        if role in bound:
            mine, theirs = ([chain.sequence for chain in some] for some in (chains, bound[role][2]))
            maps[f"bound.{role.value}"] = bound_rows(mine, theirs)
    inventory = Inventory(
        partners=tuple(_partner(role, *side, recipe) for role, side in sides.items()),
        bound=tuple(_partner(role, *side, recipe) for role, side in bound.items()),
    )
    _check_size(sum(partner.residues for partner in inventory.partners), recipe)
    return inventory, maps


def _sides(
    parts: Sequence[Part],
    files: Mapping[str, File],
    recipe: Recipe,
    structures: dict[tuple[str, int | None], Structure],
) -> dict[Role, tuple[str, Structure, tuple[Chain, ...]]]:
    """Return digest, structure and chains of each side; a file with both sides is parsed once."""
    sides: dict[Role, tuple[str, Structure, tuple[Chain, ...]]] = {}
    taken: dict[Role, set[tuple[str, str]]] = {}
    for part in parts:
        file = files[part.path]
        if (part.path, part.model) not in structures:
            structures[part.path, part.model] = _structure(part, file.data, recipe)
        structure = structures[part.path, part.model]
        for role, chains in choose(structure, part.role, part.chains).items():
            sides[role] = (file.digest, structure, chains)
            taken.setdefault(role, set()).update((part.path, chain.name) for chain in chains)
    check_apart(taken)
    return sides


def _structure(part: Part, data: bytes, recipe: Recipe) -> Structure:
    """Parse one file under the recipe; a model named with the item wins over the configured one."""
    policy = recipe.policy
    if part.model is not None:
        policy = Policy(**{**asdict(policy), "model": part.model})
    return apply_policy(parse(data, format_of(Path(part.path)), recipe.reading), policy)


def _partner(role: Role, digest: str, structure: Structure, chains: Sequence[Chain], recipe: Recipe) -> Partner:
    """Summarise one side."""
    atoms_R = np.bincount(structure.residue_A, minlength=len(structure.number_R))
    return Partner(
        role=role,
        content=digest,
        chains=tuple(
            ChainSummary(
                name=chain.name,
                kind=chain.kind,
                sequence=(chain.seqres or chain.sequence) if recipe.reading.seqres else chain.sequence,
                residues=chain.last - chain.first,
                nodes=chain.nodes,
                atoms=int(atoms_R[chain.first : chain.last].sum()),
            )
            for chain in chains
        ),
        notes={note: count for note, count in structure.notes.items() if count},
    )


def _check_size(residues: int, recipe: Recipe) -> None:
    """Refuse an item that is larger than any that was meant."""
    if residues > recipe.max_residues:
        what = f"{residues:,} residues; structures.max_residues is {recipe.max_residues:,}"
        raise Unusable(Reason.TOO_MANY_RESIDUES, what)
