"""A topology and a restart file of AMBER, as ParmEd writes them: two strands of RNA, a ligand, an ion and waters."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@cache
def complex_files() -> tuple[bytes, bytes]:
    """Return the topology and the coordinates of the complex."""
    return (FOLDER / "rna.prmtop").read_bytes(), (FOLDER / "rna.inpcrd").read_bytes()


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
