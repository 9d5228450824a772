"""Items read for graphs: from PDB text and from real files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.records import Inventory, Item, Part, Role
from pipeline.structures.inventory import Complex, ComplexSide, ScanRecipe, examine_item
from pipeline.structures.parsing.structure_files import File, read_file
from pipeline.structures.policy import Policy

LIMIT = 64 << 20
KEEP = ScanRecipe(policy=Policy(ligands="keep"))


def examined(
    data: bytes, *parts: Part, bound: tuple[Part, ...] = (), recipe: ScanRecipe = KEEP, suffix: str = "pdb"
) -> tuple[Inventory, Complex | None]:
    """Return the inventory and the complex of parts of one file; without parts, the whole of it."""
    name = f"c.{suffix}"
    parts = tuple(replace(part, path=name) for part in parts) or (Part(Role.WHOLE, name),)
    item = Item("c", parts=parts, bound=tuple(replace(part, path=name) for part in bound))
    return examine_item(item, {name: File(data, "00")}, recipe)


def complex_of(lines: str, *parts: Part, recipe: ScanRecipe = KEEP) -> Complex:
    """Return the complex in PDB text."""
    inventory, read = examined((lines + "END\n").encode(), *parts, recipe=recipe)
    assert read is not None, inventory
    return read


def complex_in(path: Path, *parts: Part, recipe: ScanRecipe = KEEP) -> Complex:
    """Return the complex in a file."""
    suffix = "".join(path.suffixes).removesuffix(".gz").lstrip(".")
    inventory, read = examined(read_file(path, LIMIT), *parts, recipe=recipe, suffix=suffix)
    assert read is not None, inventory
    return read


def side(role: Role, *chains: str) -> Part:
    """Return a part of the one file."""
    return Part(role, "", chains)


def moved(read: Complex, rotation_33: NDArray[np.float64], shift_3: NDArray[np.float64]) -> Complex:
    """Return the complex elsewhere."""

    def move(one: ComplexSide) -> ComplexSide:
        return replace(one, structure=replace(one.structure, pos_A3=one.structure.pos_A3 @ rotation_33.T + shift_3))

    return replace(read, sides={role: move(one) for role, one in read.sides.items()})
