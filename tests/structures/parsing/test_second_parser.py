"""A second parser reads real files as we do."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.structures.parsing.read_structure import FileReading, parse_structure
from pipeline.structures.parsing.structure_files import HAS_BIOTITE, format_of, read_file
from pipeline.structures.policy import Policy, apply_policy
from tests.graphs.complexes import LIMIT
from tests.structures.second_parser import disagreements, read_second

pytestmark = pytest.mark.skipif(
    not HAS_BIOTITE, reason="no second parser is installed: pip install 'protein-training-pipeline[bcif]'"
)


def test_nothing_real_is_read_otherwise(structures: Path) -> None:
    compared = 0
    for path in sorted(structures.glob("*/*.gz")):
        if path.name not in ("1aki.bcif.gz", "HEM.cif.gz"):
            form, data = format_of(path), read_file(path, LIMIT)
            structure = apply_policy(parse_structure(data, form, FileReading()), Policy())
            atoms = read_second(data, form)
            found = [what for chain in structure.chains for what in disagreements(atoms, structure, chain)]
            assert not found, (path.name, found[:3])
            compared += 1
    assert compared == 20 + 9
