"""Every observed residue of a protein has one row, and that row is of the letter that the residue is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.keys import content_digest
from pipeline.records import ChainSummary, Item, Kind, Part, Partner, Role
from pipeline.structures.inventory import ScanRecipe, examine_item
from pipeline.structures.parsing.read_structure import FileReading
from pipeline.structures.parsing.structure_files import File, read_file
from pipeline.structures.partners import NO_ROW, joined_embedding_rows


def chain(name: str, sequence: str, kind: Kind = Kind.PROTEIN, residues: int | None = None) -> ChainSummary:
    count = len(sequence) if residues is None else residues
    return ChainSummary(name, kind, sequence, residues=count, nodes=count, atoms=count)


def partner(*chains: ChainSummary) -> Partner:
    return Partner(Role.RECEPTOR, "content", chains)


def test_rows_count_through_the_joined_chains_and_nucleic_acids_have_none() -> None:
    heavy_and_light = partner(chain("H", "MKV"), chain("R", "ACGU", Kind.RNA), chain("L", "GG"))
    assert joined_embedding_rows(heavy_and_light, None).tolist() == [0, 1, 2, NO_ROW, NO_ROW, NO_ROW, NO_ROW, 3, 4]


@pytest.mark.parametrize(
    "seqres_R", [[0, 1], [0, 2, 1], [0, 1, 9], [-1, 0, 1], [0, 0, 1]],
    ids=["too short", "not in order", "beyond the end", "before the beginning", "one row for two residues"],
)  # fmt: skip
def test_a_map_that_does_not_fit_is_refused(seqres_R: list[int]) -> None:
    one = partner(chain("A", "MKVGG", residues=3))
    with pytest.raises(ValueError, match="chain A: its map into the full sequence is inconsistent"):
        joined_embedding_rows(one, np.array(seqres_R, np.int32))


def test_without_a_map_residues_and_letters_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="chain A: 3 residues, 5 letters"):
        joined_embedding_rows(partner(chain("A", "MKVGG", residues=3)), None)


@pytest.mark.parametrize("seqres", [False, True], ids=["observed", "seqres"])
def test_in_real_structures_the_row_of_a_residue_has_its_letter(structures: Path, *, seqres: bool) -> None:
    checked = 0
    for path in sorted([*structures.glob("varied/*"), *structures.glob("complexes/*.pdb")]):
        data = read_file(path, max_bytes=64 << 20)
        file = File(data, content_digest(data).hex())
        item = Item(path.stem, parts=(Part(Role.WHOLE, str(path)),))
        observed, _ = examine_item(item, {str(path): file}, ScanRecipe())
        found, read = examine_item(item, {str(path): file}, ScanRecipe(FileReading(seqres=seqres)))
        if observed.reason or found.reason:
            continue
        for seen, full in zip(observed.partners, found.partners, strict=True):
            encoded = "".join(one.sequence for one in full.chains if one.kind is Kind.PROTEIN)
            letters = [
                encoded[row] if row != NO_ROW else ""
                for row in joined_embedding_rows(full, read.maps.get(f"rows.{full.role.value}"))
            ]
            wanted = [letter if one.kind is Kind.PROTEIN else "" for one in seen.chains for letter in one.sequence]
            assert letters == wanted, path.name
            checked += len(letters)
    assert checked > (400 if seqres else 1500)  # few of these files have SEQRES
