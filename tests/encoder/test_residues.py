"""What of an item is encoded."""

from __future__ import annotations

import pytest

from pipeline.encoder.embedding_recipe import partner_texts, texts
from pipeline.records import ChainSummary, Inventory, Kind, Partner, Role

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


def test_the_same_sequence_is_encoded_once() -> None:
    homodimer = Inventory(partners=(partner(chain("A", "MKV")), partner(chain("B", "MKV"), role=Role.LIGAND)))
    assert texts(homodimer, "chain") == ["MKV"]


@pytest.mark.parametrize("context", CONTEXTS)
def test_nothing_is_encoded_of_what_is_no_protein(context: str) -> None:
    assert texts(Inventory(partners=(partner(chain("R", "ACGU", Kind.RNA)),)), context) == []
