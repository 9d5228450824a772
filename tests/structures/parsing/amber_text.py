"""Topologies and restart files of AMBER, written by ParmEd: two strands of RNA, a ligand, an ion and waters."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import parmed
from parmed.amber import AmberParm

NUCLEOTIDE = {"P": 15, "O5'": 8, "C5'": 6, "C4'": 6, "C1'": 6, "N9": 7, "C3'": 6, "O3'": 8, "H1'": 1}
BONDS = "P-O5' O5'-C5' C5'-C4' C4'-C1' C1'-N9 C4'-C3' C3'-O3' C1'-H1'"
STRANDS = (("A5", "RG", "U3"), ("C5", "G3"))
LIGAND = {"C1": 6, "N1": 7, "CL1": 17, "H1": 1}
WATER = {"O": 8, "H1": 1, "H2": 1}


class Builder:
    """Puts residues one behind the other, along a line that no bond leaves by more than 3 Å."""

    def __init__(self) -> None:
        self.structure: Any = parmed.Structure()
        self.kind = parmed.AtomType("X", 1, 12.0)
        self.kind.set_lj_params(0.1, 1.5)
        self.stiff = parmed.BondType(300, 1.4)
        self.structure.bond_types.append(self.stiff)

    def residue(self, name: str, elements: dict[str, int], bonds: str) -> dict[str, Any]:
        number, made = len(self.structure.residues) + 1, {}
        for atom, element in elements.items():
            mass = parmed.periodic_table.Mass[parmed.periodic_table.Element[element]]
            made[atom] = parmed.Atom(name=atom, atomic_number=element, mass=mass, type="X")
            made[atom].atom_type = self.kind
            self.structure.add_atom(made[atom], name, number)
        for left, right in (pair.split("-") for pair in bonds.split()):
            self.bond(made[left], made[right])
        return made

    def bond(self, left: Any, right: Any) -> None:
        self.structure.bonds.append(parmed.Bond(left, right, type=self.stiff))

    def save(self, path: Path) -> None:
        self.structure.bond_types.claim()
        size = len(self.structure.atoms)
        self.structure.coordinates = np.stack([np.arange(size) * 0.4, np.arange(size) % 3, np.arange(size) % 2], axis=1)
        made = AmberParm.from_structure(self.structure)
        made.save(str(path), overwrite=True)
        made.save(str(path.with_suffix(".rst7")), overwrite=True)
        path.with_suffix(".rst7").rename(path.with_suffix(".inpcrd"))


@cache
def complex_files() -> tuple[bytes, bytes]:
    """Return the topology and the coordinates of the complex."""
    one = Builder()
    for strand in STRANDS:
        before = None
        for name in strand:
            made = one.residue(name, NUCLEOTIDE, BONDS)
            if before:
                one.bond(before["O3'"], made["P"])
            before = made
    one.residue("LIG", LIGAND, "C1-N1 N1-CL1 C1-H1")
    one.residue("Na+", {"Na+": 11}, "")
    for _ in range(2):
        one.residue("WAT", WATER, "O-H1 O-H2 H1-H2")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.prmtop"
        one.save(path)
        return path.read_bytes(), path.with_suffix(".inpcrd").read_bytes()


def write_complex(folder: Path, ending: str = ".inpcrd") -> Path:
    """Write both files, and return where the topology is."""
    topology, coordinates = complex_files()
    path = folder / "x.prmtop"
    path.write_bytes(topology)
    path.with_suffix(ending).write_bytes(coordinates)
    return path


def edited(flag: str, change: Any) -> bytes:
    """Return the topology with the body of one of its lists changed; nothing leaves the list out."""
    head, *parts = complex_files()[0].decode().split("%FLAG ")
    name = {one.split()[0]: at for at, one in enumerate(parts)}[flag]
    title, form, body = parts[name].split("\n", 2)
    parts[name] = "" if change is None else f"%FLAG {title}\n{form}\n{change(body)}"
    return "".join([head, *(one if at == name else "%FLAG " + one for at, one in enumerate(parts))]).encode()
