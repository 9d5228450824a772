"""Where every parser meets: one table of atoms, names as 8-byte words, nothing interpreted yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from pipeline.records import Reason

NAME_BYTES = 8
BLANK_CHAIN = "_"  # what people type for a chain that has no name


class Unusable(Exception):
    """An input cannot be used; this becomes a `Rejection` where the item is known."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail


def word(name: str) -> int:
    """Return a name of at most 8 bytes as the integer that name columns hold."""
    padded = name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
    return int.from_bytes(padded, "little")


def text(code: int | np.uint64) -> str:
    """Return the name that a word stands for."""
    return int(code).to_bytes(NAME_BYTES, "little").rstrip(b"\0").decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Links:
    """The pairs of atoms that a file itself says are bonded, L of them."""

    atoms_L2: NDArray[np.int64]
    covalent_L: NDArray[np.bool_]  # whether it says of what kind the bond is; CONECT does not
    is_complete: bool = False  # whether these are all the bonds there are

    def take(self, chosen: NDArray[np.bool_]) -> Links:
        """Return some of them."""
        return Links(self.atoms_L2[chosen], self.covalent_L[chosen], self.is_complete)


def no_links() -> Links:
    """Return what a file that tells of no bonds says."""
    return Links(np.empty((0, 2), np.int64), np.empty(0, np.bool_))


@dataclass(frozen=True, slots=True)
class AtomTable:
    """Every atom of one model in file order; A is the number of atoms."""

    pos_A3: NDArray[np.float64]
    name_A: NDArray[np.uint64]
    resname_A: NDArray[np.uint64]
    chain_A: NDArray[np.uint64]
    number_A: NDArray[np.int32]
    icode_A: NDArray[np.int8]
    altloc_A: NDArray[np.int8]
    occupancy_A: NDArray[np.float32]
    element_A: NDArray[np.uint8]
    entity_A: NDArray[np.uint8]  # gemmi's EntityType: 1 polymer, 2 non-polymer, 3 branched, 4 water
    hetero_A: NDArray[np.int8]  # ord("H") for HETATM, ord("A") for ATOM
    label_seq_A: NDArray[np.int32] | None = None  # 1-based position in SEQRES, 0 where unknown
    seqres: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # chain → residue names, "SER,PRO" where mixed
    parents: Mapping[str, str] = field(default_factory=dict)  # modified residue → standard one, as the file says
    aliases: Mapping[str, str] = field(default_factory=dict)  # stand-ins for chain names of more than 7 bytes
    links: Callable[[], Links] = no_links  # between its rows; looked up when asked for, which no scan does
    notes: Mapping[str, int] = field(default_factory=dict)  # what its parser says of the whole file

    def chain_name(self, code: int | np.uint64) -> str:
        """Return a chain's name as people type it."""
        name = text(code)
        return self.aliases.get(name, name) or BLANK_CHAIN
