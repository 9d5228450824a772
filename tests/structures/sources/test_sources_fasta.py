"""FASTA files: every sequence is read or rejected where it stands."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from pipeline.errors import DataError
from pipeline.records import Item, Reason, Rejection
from pipeline.structures.sources.data_source import MAX_LETTERS
from tests.structures.sources.source_files import ids, only_rejection, read, write


def test_fasta_sequences_are_joined_and_cleaned(tmp_path: Path) -> None:
    text = "\n>sp|P1/2|X first protein\r\nMKV L\r\nAA\r\n\r\nG*\r\n>b\nACDJBZXUO\n> c d\nM"
    entries = read("fasta", write(tmp_path / "x.fasta.gz", text))
    found = [(entry.id, entry.sequence, entry.origin) for entry in entries if isinstance(entry, Item)]
    assert found == [
        ("sp|P1/2|X", "MKVLAAG", "x.fasta.gz:2"),
        ("b", "ACDJBZXUO", "x.fasta.gz:7"),
        ("c", "M", "x.fasta.gz:9"),
    ]


BAD_SEQUENCES = {
    "empty": (">x\n\n", Reason.BAD_SEQUENCE, "empty"),
    "only a stop": (">x\n*\n", Reason.BAD_SEQUENCE, "empty"),
    "stop within": (">x\nMK*V\n", Reason.BAD_SEQUENCE, "'*' at position 3"),
    "gap": (">x\nM-K\n", Reason.BAD_SEQUENCE, "'-' at position 2"),
    "digit on the second line": (">x\nMK V\n1K\n", Reason.BAD_SEQUENCE, "'1' at position 4"),
    "letter that grows in upper case": (">x\nM\u00dfK\n", Reason.BAD_SEQUENCE, "at position 2"),
    "lower case, which may be masked": (
        ">x\nMKv\n",
        Reason.BAD_SEQUENCE,
        "'v' at position 3 is no residue letter; write",
    ),
    "look-alike": (">x\nMK\u0410\n", Reason.BAD_SEQUENCE, "at position 3"),
    "NUL": (">x\nM\0\n", Reason.BAD_SEQUENCE, r"\x00"),
    "no label": (">\nMKV\n", Reason.BAD_ID, "is empty"),
    "blank label": (">  \nMKV\n", Reason.BAD_ID, "is empty"),
    "control character in the label": (">a\x1bb\nMKV\n", Reason.BAD_ID, "U+001B"),
    "far too long": (f">x\n{'MKV' * MAX_LETTERS}\n", Reason.TOO_MANY_RESIDUES, "300,000 letters"),
}


@pytest.mark.parametrize(("text", "reason", "detail"), BAD_SEQUENCES.values(), ids=BAD_SEQUENCES)
def test_bad_sequence_is_rejected_and_the_next_one_read(tmp_path: Path, text: str, reason: Reason, detail: str) -> None:
    bad, good = read("fasta", write(tmp_path / "x.fasta", f"{text}>good\nMKV\n"))
    assert isinstance(bad, Rejection)
    assert (bad.reason, bad.origin) == (reason, "x.fasta:1")
    assert detail in bad.detail
    assert isinstance(good, Item)


def test_repeated_fasta_labels_are_duplicates(tmp_path: Path) -> None:
    entries = read("fasta", write(tmp_path / "x.fa", ">a\nMKV\n>a other\nAAA\n"))
    assert ids(entries) == ["a"]
    assert "x.fa:1 has this id already" in str(entries[1])


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"MKV\n>x\nMKV\n", "text before the first"),
        (b"", "empty"),
        (b"\n \n", "finds nothing here"),
        (b">x\rMKV\r", "carriage"),
    ],
)
def test_a_file_that_is_no_fasta_is_an_error(tmp_path: Path, data: bytes, what: str) -> None:
    (tmp_path / "x.fasta").write_bytes(data)
    with pytest.raises(DataError, match=what):
        read("fasta", tmp_path / "x.fasta")


def test_an_endless_record_is_counted_and_not_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "x.fasta", b">x\n" + (b"MKVLAAGIVG" * 10 + b"\n") * 20_000)
    tracemalloc.start()
    bad = only_rejection(read("fasta", path))
    _held, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert bad.reason is Reason.TOO_MANY_RESIDUES
    assert peak_bytes < 600_000
