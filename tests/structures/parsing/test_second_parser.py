"""What a second parser reads otherwise is told; what only a policy decides otherwise is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.structures.parsing.read_structure import FileReading, parse_structure
from pipeline.structures.parsing.structure_files import HAS_BIOTITE, format_of, read_file
from pipeline.structures.policy import Policy, Structure, apply_policy
from pipeline.structures.synthetic import complex_pdb
from tests.graphs.complexes import LIMIT
from tests.structures.second_parser import NotComparable, disagreements, read_second

pytestmark = pytest.mark.skipif(
    not HAS_BIOTITE, reason="no second parser is installed: pip install 'protein-training-pipeline[bcif]'"
)
MADE = complex_pdb(3, 12, 10)


def ours(data: bytes, form: str = "pdb", reading: FileReading = FileReading()) -> Structure:  # noqa: B008 - it is frozen
    return apply_policy(parse_structure(data, form, reading), Policy())


def told(structure: Structure, data: bytes, form: str = "pdb") -> list[str]:
    """Return every disagreement about a file's chains."""
    atoms = read_second(data, form, FileReading())
    return [what for chain in structure.chains for what in disagreements(atoms, structure, chain)]


def edited(change: object) -> bytes:
    """Return the made file with the lines of residue A 5 changed."""
    lines = MADE.decode().splitlines()
    return "\n".join(change(line) if line[21:26] == "A   5" else line for line in lines).encode() + b"\n"


def test_what_a_file_holds_otherwise_is_reported_once() -> None:
    moved = edited(lambda line: line[:30] + f"{float(line[30:38]) + 0.5:8.3f}" + line[38:])
    (what,) = told(ours(MADE), moved)
    assert "0.500" in what
    without = b"\n".join(line for line in MADE.splitlines() if line[21:26] != b"A   5")
    assert len(told(ours(MADE), without)) == len(told(ours(without), MADE)) == 1
    (what,) = told(ours(edited(lambda line: line.replace(" CA ", " CX "))), MADE)
    assert "a CA to biotite, and none to us" in what
    name = next(line[17:20] for line in MADE.decode().splitlines() if line[21:26] == "A   5")
    other = "TRP" if name != "TRP" else "PHE"
    renamed = edited(lambda line: line[:17] + other + line[20:])
    assert name in told(ours(MADE), renamed)[0]
    structure = ours(MADE)
    chain = replace(structure.chains[0], sequence="O" * 12)
    assert next(disagreements(read_second(MADE, "pdb", FileReading()), structure, chain))


def test_a_residue_with_alternatives_is_compared_by_name_alone() -> None:
    both = edited(
        lambda line: f"{line[:16]}A{line[17:]}\n{line[:16]}B{line[17:30]}{float(line[30:38]) + 0.7:8.3f}{line[38:]}"
    )
    assert told(ours(both), both) == []


def test_what_cannot_be_compared_is_not_accused() -> None:
    after = b"MODEL        1\n" + MADE.replace(b"END\n", b"") + b"\nENDMDL\nATOM   9999  CA  ALA C   1\n"
    for data, form, reading in (
        (MADE, "pdb", FileReading(assembly="1")),
        (MADE, "pdb", FileReading(chain_names="label")),
        (b"", "bcif", FileReading()),
        (b"ATOM  nonsense\n", "pdb", FileReading()),
        (after, "pdb", FileReading()),
    ):
        with pytest.raises(NotComparable):
            read_second(data, form, reading)


def test_nothing_real_is_read_otherwise(structures: Path) -> None:
    compared = 0
    for path in sorted(structures.glob("*/*.gz")):
        if path.name not in ("1aki.bcif.gz", "HEM.cif.gz"):
            form, data = format_of(path), read_file(path, LIMIT)
            structure, atoms = ours(data, form), read_second(data, form, FileReading())
            found = [what for chain in structure.chains for what in disagreements(atoms, structure, chain)]
            assert not found, (path.name, found[:3])
            compared += 1
    assert compared == 20 + 9
