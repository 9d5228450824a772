"""The frozen values that flow through the pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Reason(str, Enum):
    """Why an item was left out; the value is what reports show and `jq` matches."""

    BAD_ID = "bad_id"
    DUPLICATE_ID = "duplicate_id"
    BAD_ROW = "bad_row"
    MISSING_FILE = "missing_file"
    UNREADABLE_FILE = "unreadable_file"
    EMPTY_FILE = "empty_file"
    TRUNCATED_FILE = "truncated_file"
    FILE_TOO_LARGE = "file_too_large"
    UNKNOWN_FORMAT = "unknown_format"
    PARSE_ERROR = "parse_error"
    NO_ATOMS = "no_atoms"
    MISSING_MODEL = "missing_model"
    MISSING_ASSEMBLY = "missing_assembly"
    MISSING_CHAIN = "missing_chain"
    CHAIN_WITHOUT_POLYMER = "chain_without_polymer"
    AMBIGUOUS_PARTNERS = "ambiguous_partners"
    SHARED_CHAIN = "shared_chain"
    NO_POLYMER = "no_polymer"
    INCOMPLETE_RESIDUES = "incomplete_residues"
    SEQUENCE_MISMATCH = "sequence_mismatch"
    TOO_MANY_RESIDUES = "too_many_residues"
    BAD_SEQUENCE = "bad_sequence"


@dataclass(frozen=True, slots=True)
class Rejection:
    """An item that was left out, and why: data, not an exception."""

    id: str
    reason: Reason
    detail: str
    origin: str = ""


class Role(str, Enum):
    """What a part of an item is to the complex."""

    RECEPTOR = "receptor"
    LIGAND = "ligand"
    COMPLEX = "complex"  # one file whose chains are divided into partners when it is read


@dataclass(frozen=True, slots=True)
class Part:
    """Chains of one structure file; no chains named means every polymer chain."""

    role: Role
    path: str
    chains: tuple[str, ...] = ()
    model: int | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """One complex (or one sequence) of the data set, before anything of it was read."""

    id: str
    parts: tuple[Part, ...] = ()
    bound: tuple[Part, ...] = ()  # where labels come from when `parts` are unbound structures
    sequence: str | None = None  # a FASTA entry has this and no parts
    split: str = ""
    cluster: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""  # file and line that named it, for messages
