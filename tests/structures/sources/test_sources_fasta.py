"""FASTA files: every sequence is read or rejected where it stands."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from pipeline.errors import DataError
from pipeline.records import Item, Reason
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
    ">x\n\n": Reason.BAD_SEQUENCE,
    ">x\n*\n": Reason.BAD_SEQUENCE,
    ">x\nMK*V\n": Reason.BAD_SEQUENCE,
    ">x\nM-K\n": Reason.BAD_SEQUENCE,
    ">x\nMK V\n1K\n": Reason.BAD_SEQUENCE,
    ">x\nM\u00dfK\n": Reason.BAD_SEQUENCE,  # in upper case, two letters
    ">x\nMKv\n": Reason.BAD_SEQUENCE,  # lower case may be masked
    ">x\nMK\u0410\n": Reason.BAD_SEQUENCE,  # a look-alike
    ">x\nM\0\n": Reason.BAD_SEQUENCE,
    ">\nMKV\n": Reason.BAD_ID,
    ">  \nMKV\n": Reason.BAD_ID,
    ">a\x1bb\nMKV\n": Reason.BAD_ID,
    f">x\n{'MKV' * MAX_LETTERS}\n": Reason.TOO_MANY_RESIDUES,
}


def test_bad_sequence_is_rejected_and_the_next_one_read(tmp_path: Path) -> None:
    for text, reason in BAD_SEQUENCES.items():
        bad, good = read("fasta", write(tmp_path / "x.fasta", f"{text}>good\nMKV\n"))
        assert (bad.reason, bad.origin, bool(bad.detail)) == (reason, "x.fasta:1", True), text[:20]
        assert isinstance(good, Item)


def test_repeated_fasta_labels_are_duplicates(tmp_path: Path) -> None:
    entries = read("fasta", write(tmp_path / "x.fa", ">a\nMKV\n>a other\nAAA\n"))
    assert ids(entries) == ["a"]
    assert "x.fa:1 already has this id" in str(entries[1])


def test_a_file_that_is_no_fasta_is_an_error(tmp_path: Path) -> None:
    for data in (b"MKV\n>x\nMKV\n", b"", b"\n \n", b">x\rMKV\r"):
        (tmp_path / "x.fasta").write_bytes(data)
        with pytest.raises(DataError):
            read("fasta", tmp_path / "x.fasta")


def test_an_endless_record_is_counted_and_not_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "x.fasta", b">x\n" + (b"MKVLAAGIVG" * 10 + b"\n") * 20_000)
    tracemalloc.start()
    bad = only_rejection(read("fasta", path))
    _held, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert bad.reason is Reason.TOO_MANY_RESIDUES
    assert peak_bytes < 600_000
