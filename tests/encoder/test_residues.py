"""Every observed residue of a protein has one row, and that row is of the letter that the residue is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.encoder.residues import NO_ROW, partner_texts, rows, texts
from pipeline.keys import content_digest
from pipeline.records import ChainSummary, Inventory, Item, Kind, Part, Partner, Role
from pipeline.structures.inventory import File, Recipe, take
from pipeline.structures.read import Reading, read_file

CONTEXTS = ("chain", "partner")


def chain(name: str, sequence: str, kind: Kind = Kind.PROTEIN, residues: int | None = None) -> ChainSummary:
    count = len(sequence) if residues is None else residues
    return ChainSummary(name, kind, sequence, residues=count, nodes=count, atoms=count)


def partner(*chains: ChainSummary, role: Role = Role.RECEPTOR) -> Partner:
    return Partner(role, "content", chains)


HEAVY_AND_LIGHT = partner(chain("H", "MKV"), chain("R", "ACGU", Kind.RNA), chain("L", "GG"))


def test_a_partner_is_its_chains_or_their_letters_joined() -> None:
    assert partner_texts(HEAVY_AND_LIGHT, "chain") == ["MKV", "GG"]
    assert partner_texts(HEAVY_AND_LIGHT, "partner") == ["MKVGG"]


def test_rows_count_through_the_joined_chains_and_nucleic_acids_have_none() -> None:
    text_R, row_R = rows(HEAVY_AND_LIGHT, None, "partner")
    assert text_R.tolist() == [0, 0, 0, NO_ROW, NO_ROW, NO_ROW, NO_ROW, 0, 0]
    assert row_R.tolist() == [0, 1, 2, NO_ROW, NO_ROW, NO_ROW, NO_ROW, 3, 4]
    text_R, row_R = rows(HEAVY_AND_LIGHT, None, "chain")
    assert text_R.tolist() == [0, 0, 0, NO_ROW, NO_ROW, NO_ROW, NO_ROW, 1, 1]
    assert row_R.tolist() == [0, 1, 2, NO_ROW, NO_ROW, NO_ROW, NO_ROW, 0, 1]


def test_the_same_sequence_is_encoded_once() -> None:
    homodimer = Inventory(partners=(partner(chain("A", "MKV")), partner(chain("B", "MKV"), role=Role.LIGAND)))
    assert texts(homodimer, "chain") == ["MKV"]


@pytest.mark.parametrize("context", CONTEXTS)
def test_nothing_is_encoded_of_what_is_no_protein(context: str) -> None:
    assert texts(Inventory(partners=(partner(chain("R", "ACGU", Kind.RNA)),)), context) == []


@pytest.mark.parametrize(
    "seqres_R", [[0, 1], [0, 2, 1], [0, 1, 9], [-1, 0, 1], [0, 0, 1]],
    ids=["too short", "not in order", "beyond the end", "before the beginning", "one row for two residues"],
)  # fmt: skip
def test_a_map_that_does_not_fit_is_refused(seqres_R: list[int]) -> None:
    one = partner(chain("A", "MKVGG", residues=3))
    with pytest.raises(ValueError, match="chain A: its map into the full sequence does not fit"):
        rows(one, np.array(seqres_R, np.int32), "chain")


def test_without_a_map_residues_and_letters_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="chain A: 3 residues, 5 letters"):
        rows(partner(chain("A", "MKVGG", residues=3)), None, "chain")


@pytest.mark.shared
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("seqres", [False, True], ids=["observed", "seqres"])
def test_in_real_structures_the_row_of_a_residue_has_its_letter(
    shared_structures: Path, context: str, *, seqres: bool
) -> None:
    checked = 0
    for path in sorted([*shared_structures.glob("varied/*"), *shared_structures.glob("complexes/*.pdb")]):
        data = read_file(path, max_bytes=64 << 20)
        file = File(data, content_digest(data).hex())
        item = Item(path.stem, parts=(Part(Role.WHOLE, str(path)),))
        observed, _ = take(item, {str(path): file}, Recipe())
        found, maps = take(item, {str(path): file}, Recipe(Reading(seqres=seqres)))
        if observed.reason or found.reason:
            continue
        for seen, full in zip(observed.partners, found.partners, strict=True):
            text_R, row_R = rows(full, maps.get(f"rows.{full.role.value}"), context)
            encoded = partner_texts(full, context)
            letters = [encoded[text][row] if text != NO_ROW else "" for text, row in zip(text_R, row_R, strict=True)]
            wanted = [letter if one.kind is Kind.PROTEIN else "" for one in seen.chains for letter in one.sequence]
            assert letters == wanted, path.name
            checked += len(letters)
    assert checked > (400 if seqres else 5000)  # few of these files have SEQRES
