"""Writes PDB lines by hand, column by column, so that a test can put anything wrong in them."""

from __future__ import annotations

BACKBONE = ("N", "CA", "C", "O")


def atom(
    name: str,
    resname: str,
    chain: str,
    number: int,
    *,
    icode: str = " ",
    altloc: str = " ",
    occupancy: float = 1.0,
    xyz: tuple[float, float, float] = (0.0, 0.0, 0.0),
    element: str = "",
    record: str = "ATOM",
) -> str:
    """Return one ATOM or HETATM line."""
    x, y, z = xyz
    label = f" {name:<3}" if len(name) < 4 else name
    return (
        f"{record:<6}{1:>5} {label}{altloc}{resname:>3} {chain}{number:>4}{icode}   "
        f"{x:8.3f}{y:8.3f}{z:8.3f}{occupancy:6.2f}{20.0:6.2f}          {element or name[0]:>2}\n"
    )


def residue(resname: str, chain: str, number: int, atoms: tuple[str, ...] = BACKBONE, **fields: object) -> str:
    """Return the lines of one residue."""
    return "".join(
        atom(name, resname, chain, number, xyz=(number % 1000 * 3.8, index, 0.0), **fields)
        for index, name in enumerate(atoms)
    )


def chain(name: str, *resnames: str, first: int = 1) -> str:
    """Return a chain with its TER."""
    return "".join(residue(resname, name, first + index) for index, resname in enumerate(resnames)) + "TER\n"
