"""The numbers of a data set, and what leaks between its splits."""

from __future__ import annotations

import pytest

from pipeline.errors import DataError
from pipeline.records import ChainSummary, Inventory, Item, Kind, Partner, Reason, Rejection, Role
from pipeline.stages.census import MOST_SPLITS, Census, CensusTally


def inventory(*sequences: str) -> Inventory:
    chains = tuple(
        ChainSummary(str(n), Kind.PROTEIN, one, len(one), len(one), 5 * len(one)) for n, one in enumerate(sequences)
    )
    return Inventory(partners=(Partner(Role.RECEPTOR, "00", chains[:-1]), Partner(Role.LIGAND, "00", chains[-1:])))


def census_of(*rows: tuple[str, str, str, Inventory]) -> Census:
    tally = CensusTally()
    for name, split, cluster, found in rows:
        tally.accept(Item(name, split=split, cluster=cluster), found)
    return tally.census()


def test_sizes_are_those_of_the_accepted_items() -> None:
    census = census_of(("a", "", "", inventory("AAAA", "CC")), ("b", "", "", inventory("AAAAAA", "CCCC")))
    assert census.sizes["pairs"] == {"median": 16.0, "p95": pytest.approx(23.2), "max": 24}
    assert (census.accepted, census.sequences, census.longest) == (2, 4, 6)


def test_a_partner_leaks_whatever_the_order_of_its_chains() -> None:
    census = census_of(
        ("a", "train", "", inventory("HHH", "LLL", "X")), ("b", "test", "", inventory("LLL", "HHH", "Y"))
    )
    assert [(leak.what, leak.splits, leak.items) for leak in census.leaks] == [("sequence", ("train", "test"), (0, 1))]


def test_the_same_in_one_split_or_without_a_split_is_no_leak() -> None:
    same = inventory("HHH", "X")
    assert census_of(("a", "train", "c", same), ("b", "train", "c", same), ("d", "", "c", same)).leaks == ()


def test_clusters_and_ids_leak_too() -> None:
    tally = CensusTally()
    tally.accept(Item("a", split="train", cluster="k"), inventory("AAA", "B"))
    tally.accept(Item("b", split="test", cluster="k"), inventory("CCC", "D"))
    tally.reject(Rejection("a", Reason.DUPLICATE_ID, "twice", "m.csv:4", "test"))
    assert {leak.what for leak in tally.census().leaks} == {"id", "cluster"}


def test_leaks_are_counted_and_the_first_few_named() -> None:
    rows = [
        (f"{n}{split}", split, "", inventory("A" * (n + 1), split.upper()))
        for n in range(40)
        for split in ("train", "test")
    ]
    leaks = [leak for leak in census_of(*rows).leaks if leak.what == "sequence"]
    assert [leak.total for leak in leaks] == [40, 40, 40]


def test_a_column_that_cannot_be_the_split_is_said_to_be_wrong() -> None:
    rows = [(str(number), f"s{number}", "", inventory("A", "C")) for number in range(MOST_SPLITS + 1)]
    with pytest.raises(DataError, match="really the split"):
        census_of(*rows)
