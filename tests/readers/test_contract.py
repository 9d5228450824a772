"""What every reader must do, whatever the form of its file; what is particular to one has a file of its own."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pipeline.dataset.reader_items import EntriesTaken, take_entries
from pipeline.errors import ConfigError, DataError
from pipeline.readers import made
from pipeline.readers.captions import Captions
from pipeline.readers.pairs import Pairs
from pipeline.readers.peptide_spectra import PeptideSpectra
from pipeline.readers.spectra import Spectra
from pipeline.readers.spectrum_triplets import SpectrumTriplets
from pipeline.records import Entry, Reason, Rejection
from pipeline.training.items.item_source import arrays_digest, as_arrays
from tests.readers.compared import (
    assert_same,
    columns_file,
    hdf5_file,
    mgf_text,
    msp_text,
    mzml_file,
    mzml_text,
    read_twice,
)

Spoil = Mapping[str, tuple[str, str]]  # what is wrong → a pattern in the text of an entry, and what takes its place


@cache
def image_files() -> dict[str, bytes]:
    photo, huge = io.BytesIO(), io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(photo, "JPEG")
    Image.new("1", (30_000, 3_000)).save(huge, "PNG")  # 90 million pixels in a small file
    good = photo.getvalue()
    files = {"good": good, "cut": good[: len(good) // 2], "empty": b"", "text": b"no image\n" * 9}
    return {**files, "huge": huge.getvalue()}


def images(folder: Path) -> None:
    """Write the images that captions name, most of which are none."""
    (folder / "folder.jpg").mkdir(exist_ok=True)
    for name, content in image_files().items():
        (folder / f"{name}.jpg").write_bytes(content)


@dataclass(frozen=True)
class TextKind:
    """A file of entries that are text."""

    name: str
    reader: Callable[[Path], Any]
    entry: Callable[[int], str]
    spoil: Spoil
    head: str = ""
    tail: str = ""
    prepare: Callable[[Path], None] = field(default=lambda folder: None)
    id: str = "e1"  # of entry 1, in its text

    def write(self, folder: Path, numbers: list[int], changes: Mapping[int, tuple[str, str]] | None = None) -> Any:
        """Write entries, some of them changed, and return their reader."""
        texts = {number: self.entry(number) for number in numbers}
        for number, (pattern, other) in (changes or {}).items():
            texts[number], count = re.subn(pattern, other, texts[number])
            assert count, pattern
        self.prepare(folder)
        text = self.head + "".join(texts[number] for number in numbers) + self.tail
        (folder / self.name).write_bytes(text.encode("utf-8", "surrogateescape"))
        return self.reader(folder / self.name)


@dataclass(frozen=True)
class ColumnKind:
    """An HDF5 file, of which entries are rows."""

    name: str
    reader: Callable[[Path], Any]
    columns: Callable[[list[int]], dict[str, Any]]
    spoil: Mapping[str, tuple[str, Any]]  # a column, and what its row holds
    id: str = "id"

    def write(self, folder: Path, numbers: list[int], changes: Mapping[int, tuple[str, Any]] | None = None) -> Any:
        """Write entries, some of them changed, and return their reader."""
        columns = self.columns(numbers)
        for number, (column, value) in (changes or {}).items():
            columns[column][number] = value
        return self.reader(columns_file(folder / self.name, **columns))


OF_PEAKS: Spoil = {
    "a letter in a number": ("100.5 3.0", "1o0.5 3.0"),
    "negative m/z": ("100.5 ", "-100.5 "),
    "NaN": ("100.5 3.0", "100.5 nan"),
    "infinite": ("100.5 3.0", "inf 3.0"),
    "negative intensity": ("100.5 3.0", "100.5 -3.0"),
    "one number": ("100.5 3.0", "100.5"),
    "zeros": (r" (3|10|1)\.0\n", " 0\n"),
}
MGF: Spoil = {
    **OF_PEAKS,
    "beyond float32": ("100.5 3.0", "1e39 3.0"),
    "an underscore": ("100.5 3.0", "1_0 3.0"),
    "a decimal comma": ("100.5 3.0", "100,5 3.0"),
    "four numbers in two lines": ("100.5 3.0", "1 2 3\n5"),
    "too many peaks": ("100.5 3.0", "100.5 3.0\n" * 9999 + "1 1"),
    "no peaks": (r"\n\d[^E]*", "\n"),
    "text behind BEGIN IONS": ("IONS\nT", "IONSX\nT"),
    "no precursor": ("PEPMASS", "X"),
    "a precursor that is no number": ("PEPMASS=", "PEPMASS=x"),
    "a negative precursor": ("PEPMASS=", "PEPMASS=-"),
    "a charge that is none": (r"1\+", "one"),
    "a letter that is no amino acid": ("CHARGE", "SEQ=PEPTXDE\nCHARGE"),
    "no end": ("END IONS\n", ""),
}
MSP: Spoil = {
    **OF_PEAKS,
    "no precursor": ("PRECURSORMZ", "X"),
    "a precursor that is no number": ("MZ: ", "MZ: x"),
    "a charge that is none": ("CHARGE: 1", "CHARGE: one"),
    "a lost line": ("100.5 3.0\n", ""),
    "no count": (r"(?s)Num.*", "\n"),
}
MZML: Spoil = {
    "no end": ("</spectrum>", ""),
    "no XML": ("</precursorList>", ""),
    "an entity": ('name="selected', 'name="&x;selected'),
    "no precursor": ("MS:1000744", "MS:0"),
    "a charge that is none": ('state" value="1"', 'state" value="one"'),
    "no base64": ("<binary>", "<binary>?"),
    "no array": ("MS:1000514", "MS:0"),
    "another count": ('Length="3"', 'Length="4"'),
    "MS-Numpress": (
        'MS:1000576" name="no compression',
        'MS:1002312" name="MS-Numpress linear prediction compression',
    ),
    "a profile": ("<precursorList>", '<cvParam accession="MS:1000128" name="profile"/><precursorList>'),
}
PEPTIDES: Spoil = {
    "a letter that is no amino acid": ("SEQ=", "SEQ=PEPX"),
    "no modification of this residue": ("SEQ=", "SEQ=W+15.995"),
    "an unknown modification": ("SEQ=", "SEQ=S[Phospho]"),
    "no peptide": ("SEQ=", "SEQUENCE="),
    "too short": ("SEQ=PEPTIDEK", "SEQ=SHRT"),
    "too few peaks": (r"100\.5 3\.0\n", ""),
    "garbage": ("SEQ=", "garbage here\nSEQ="),
}
TSV: Spoil = {
    "an empty side": (r"\tMKV\d+", "\t"),
    "too long": (r"of (\d+)", r"of \1" + "x" * 40),
    "too few columns": (r"\tof \d+", ""),
    "too many columns": ("\n", "\tmore\n"),
    "not UTF-8": ("of ", "of \udcff"),
}
CAPTIONS: Spoil = {
    **{f"an image that is {name}": ("good", name) for name in ("missing", "cut", "empty", "text", "huge", "folder")},
    "no caption": (r",picture \d+", ","),
    "too many columns": ("\n", ",more\n"),
    "not UTF-8": ("picture", "caf\udce9"),
}


def spectrum_columns(numbers: list[int]) -> dict[str, Any]:
    return {
        "id": [f"e{number}" for number in numbers],
        "spectrum": np.tile([[100.5, 200.25], [3.0, 10.0]], (len(numbers), 1, 1)),
        "precursor_mz": 300 + np.array(numbers) / 10,
        "charge": np.ones(len(numbers)),
        "sequence": ["PEK"] * len(numbers),
    }


def pair_columns(numbers: list[int]) -> dict[str, Any]:
    left = np.arange(12.0).reshape(3, 4) + np.array(numbers)[:, None, None]
    return {"id": [f"e{number}" for number in numbers], "left": left, "right": [f"of {number}" for number in numbers]}


KINDS: dict[str, TextKind | ColumnKind] = {
    "MGF": TextKind("x.mgf", Spectra, mgf_text, MGF),
    "MSP": TextKind("x.msp", partial(Spectra, id="NAME"), msp_text, MSP),
    "mzML": TextKind("x.mzML", Spectra, mzml_text, MZML, *mzml_file("|").split("|"), id="scan=1"),
    "peptides": TextKind(
        "x.mgf",
        partial(PeptideSpectra, least_peaks=3, shortest=7),
        lambda number: mgf_text(number).replace("CHARGE", "SEQ=PEPTIDEK\nCHARGE"),
        PEPTIDES,
    ),
    "TSV": TextKind(
        "x.tsv",
        partial(Pairs, most=40),
        lambda number: f"e{number}\tMKV{number}\tof {number}\n",
        TSV,
        "id\tleft\tright\n",
    ),
    "CSV": TextKind(
        "x.csv",
        Pairs,
        lambda number: f'e{number},MKV{number},"of, {number}"\n',
        {"text behind a quote": ('"\n', '"x\n'), "an empty side": (r"MKV\d+", "")},
        "id,left,right\n",
    ),
    "captions": TextKind(
        "x.csv",
        partial(Captions, size=16),
        lambda number: f"e{number},good.jpg,picture {number}\n",
        CAPTIONS,
        "id,image,caption\n",
        prepare=images,
    ),
    "spectra in HDF5": ColumnKind(
        "x.h5",
        Spectra,
        spectrum_columns,
        {
            "padding alone": ("spectrum", 0),
            "m/z of zero": ("spectrum", [[0, 5], [3, 1]]),
            "negative m/z": ("spectrum", [[5, -5], [3, 1]]),
            "negative intensity": ("spectrum", [[5, 6], [3, -1]]),
            "NaN": ("spectrum", [[5, np.nan], [3, 1]]),
            "infinite": ("spectrum", [[5, 6], [3, np.inf]]),
            "precursor": ("precursor_mz", np.nan),
            "charge": ("charge", np.nan),
            "half a charge": ("charge", 2.7),
            "peptide": ("sequence", "PEpK"),
        },
    ),
    "pairs in HDF5": ColumnKind(
        "x.h5",
        Pairs,
        pair_columns,
        {"NaN": ("left", np.nan), "too large": ("left", 1e60), "no text": ("right", "")},
    ),
}
EACH = pytest.mark.parametrize("kind", KINDS)


@EACH
def test_entries_come_in_order_and_several_threads_and_another_process_read_them_again(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "copy").mkdir()
    found, again = (read_twice(KINDS[kind].write(folder, list(range(6)))) for folder in (tmp_path, tmp_path / "copy"))
    assert [int(re.findall(r"\d+$", entry.id)[0]) for entry in found] == list(range(6))
    assert all(isinstance(entry, Entry) and entry.origin.startswith(f"{KINDS[kind].name}:") for entry in found)
    digests = [[arrays_digest(as_arrays(one.arrays)) for one in some] for some in (found, again)]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 6
    reader = KINDS[kind].reader(tmp_path / KINDS[kind].name)
    with ThreadPoolExecutor(4) as threads:
        for entry, arrays in zip(found * 4, threads.map(lambda one: reader.read(one.place), found * 4), strict=True):
            assert_same(arrays, entry.arrays)


@EACH
def test_of_many_entries_those_that_are_spoilt_are_rejected_where_they_are_and_all_others_read(
    tmp_path: Path, kind: str
) -> None:
    spoilt = {3 + 5 * at: way for at, way in enumerate(KINDS[kind].spoil)}
    numbers, changes = list(range(5 * len(spoilt) + 20)), {at: KINDS[kind].spoil[way] for at, way in spoilt.items()}
    found = read_twice(KINDS[kind].write(tmp_path, numbers, changes))
    assert len(found) == len(numbers)
    for number, entry in zip(numbers, found, strict=True):
        assert isinstance(entry, Rejection) == (number in spoilt), (spoilt.get(number), entry)
        if isinstance(entry, Rejection):
            assert (entry.reason, bool(entry.detail)) == (Reason.BAD_ENTRY, True)
            assert re.fullmatch(rf"{KINDS[kind].name}:\d+", entry.origin)


HOSTILE = (
    "../../etc/passwd",
    "-rf",
    "a\x1b[31mb",
    "\u202eb",
    "a\u200bb",
    "蛋白质",
    "x" * 300,
    "a  b",
    "=cmd|' /C x'!A0",
)


@EACH
def test_hostile_ids_are_made_harmless_or_rejected_and_the_others_are_read(tmp_path: Path, kind: str) -> None:
    for name in HOSTILE:
        taken = EntriesTaken()
        refused = list(
            take_entries(KINDS[kind].write(tmp_path, [0, 1, 2], {1: (KINDS[kind].id, name)}).entries(), taken)
        )
        assert len(taken.table) + len(refused) == 3, name
        assert len(refused) <= 1, name
        for one in refused:
            assert one.reason in (Reason.BAD_ID, Reason.BAD_ENTRY), name
            assert one.id.isprintable(), name


@EACH
def test_of_two_entries_of_one_id_the_second_is_rejected(tmp_path: Path, kind: str) -> None:
    taken = EntriesTaken()
    refused = list(take_entries(KINDS[kind].write(tmp_path, [0, 1, 1, 2]).entries(), taken))
    assert ([one.reason for one in refused], len(taken.table)) == ([Reason.DUPLICATE_ID], 3)


@EACH
def test_a_file_with_nothing_in_it_is_a_rejection_or_an_error_that_names_it(tmp_path: Path, kind: str) -> None:
    path = tmp_path / KINDS[kind].name
    path.write_bytes(b"")
    try:
        (bad,) = KINDS[kind].reader(path).entries()
    except DataError as error:
        assert (str(path) in error.where, bool(error.remedy)) == (True, True)  # noqa: PT017 - one or the other
    else:
        assert isinstance(bad, Rejection)


@EACH
def test_a_file_that_became_shorter_is_named(tmp_path: Path, kind: str) -> None:
    reader = KINDS[kind].write(tmp_path, list(range(6)))
    last = list(reader.entries())[-1]
    path = tmp_path / KINDS[kind].name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError) as caught:
        KINDS[kind].reader(path).read(last.place)
    assert path.name in str(caught.value.where)


@EACH
@given(
    st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(1, 255)), max_size=8),
    st.binary(max_size=100),
    st.floats(0.1, 1),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_whatever_is_done_to_the_bytes_each_entry_is_read_or_rejected_or_the_file_refused(
    tmp_path_factory: pytest.TempPathFactory, kind: str, flips: list[tuple[int, int]], more: bytes, share: float
) -> None:
    folder = tmp_path_factory.mktemp("x")
    KINDS[kind].write(folder, [0, 1, 2])
    path = folder / KINDS[kind].name
    data = bytearray(path.read_bytes())
    for at, mask in flips:
        data[at % len(data)] ^= mask
    path.write_bytes(bytes(data[: int(share * len(data))]) + more)
    with suppress(DataError):
        for entry in read_twice(KINDS[kind].reader(path)):
            if isinstance(entry, Entry):
                assert all(np.isfinite(array).all() for name, array in entry.arrays.items() if name != "target")
            else:
                assert entry.detail


# ---- options and files that are refused ----

WRONG: dict[str, list[dict[str, Any]]] = {  # the first option is the one that is named
    "MGF": [
        *({"max_peaks": value} for value in (0, 10.5, None)),
        *({"most_peaks": value} for value in (0, "5", True)),
        *({"least_intensity": value} for value in (1.0, "0.1", float("nan"))),
        *({"target": value} for value in ([1], None, [""])),
        *({"split": None}, {"quality": "Z"}),
    ],
    "TSV": [*({"most": value} for value in (0, "5", True)), {"left": 1}, {"id": None}, {"split": ["x"]}],
    "captions": [
        *({"size": 0}, {"context": 1}, {"long": "drop"}, {"merges": "none.gz"}, {"merges": "x.csv"}),
        *({"classes": value, "label": "image"} for value in (["a", "a"], "none.txt")),
    ],
    "peptides": [{"least_peaks": 0}, {"longest": 1.5}, {"unknown": "yes"}],
    "triplets": [{"mass_within": 0, "molecule": "inchikey"}],
}
READERS = {"MGF": Spectra, "TSV": Pairs, "captions": Captions, "peptides": PeptideSpectra, "triplets": SpectrumTriplets}


def test_an_option_of_another_type_or_out_of_range_is_refused_by_its_name(tmp_path: Path) -> None:
    for kind, cases in WRONG.items():
        written = KINDS["MGF" if kind == "triplets" else kind]
        written.write(tmp_path, [0])
        for options in cases:
            with pytest.raises(ConfigError) as caught:
                READERS[kind](tmp_path / written.name, **options)
            assert caught.value.where == f"data.options.{next(iter(options))}", options


def refused(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return what is wrong with files, one for each place in the readers that says so."""
    for name in ("x.mgf.gz", "x.txt", "x.json"):
        (folder / name).write_text(mgf_text(0))
    (folder / "bad.tsv").write_text("left\n")
    (folder / "twice.tsv").write_text("left\tright\tleft\n")
    (folder / "bytes.tsv").write_bytes(b"\xff\n")
    (folder / "text.h5").write_text("x")
    for name in ("none", "y.tsv", "deep/y.mgf"):
        (folder / name).mkdir(parents=True)
    for name in ("pipe.mgf", "pipe.h5", "pipe.tar", "pipe.csv"):
        os.mkfifo(folder / name)
    whole, wanting = {"spectrum": np.ones((1, 2, 3)), "precursor_mz": [1.0]}, partial(Spectra, target=("logp",))
    columns = {
        "no dataset": (Spectra, {"mz": [1.0]}),
        "no precursor": (Spectra, {"spectrum": np.ones((1, 2, 3))}),
        "another shape": (Spectra, {**whole, "spectrum": np.ones((1, 3, 4))}),
        "texts for peaks": (Spectra, {**whole, "spectrum": [[["a"], ["b"]]]}),
        "lengths": (Spectra, {**whole, "name": ["a", "b"]}),
        "no target": (wanting, whole),
        "a number for a target": (wanting, {**whole, "logp": 1.0}),
        "no column": (partial(Pairs, split="flod"), {"left": ["a"], "right": ["b"], "fold": ["c"]}),
        **{
            f"no side {at}": (Pairs, {"left": left, "right": ["x", "y"]})
            for at, left in enumerate(([1, 2], np.ones((2, 3)), [["a"], ["b"]], ["a", "b", "c"]))
        },
    }

    def read_columns(name: str) -> list[Any]:
        reader, datasets = columns[name]
        return list(reader(columns_file(folder / f"{name}.h5", **datasets)).entries())

    return {
        **{name: partial(read_columns, name) for name in columns},
        "no HDF5": lambda: list(Spectra(folder / "text.h5").entries()),
        "a column missing": lambda: Pairs(folder / "bad.tsv"),
        "a column twice": lambda: Pairs(folder / "twice.tsv"),
        "a header that is no text": lambda: Pairs(folder / "bytes.tsv"),
        "a column that is named": lambda: Pairs(folder / "bad.tsv", right="left", left="flod"),
        "a header in no spectrum": lambda: list(Spectra(KINDS["MGF"].write(folder, [0]).files()[0], id="x").entries()),
        "no files": lambda: Spectra(folder / "none"),
        "no such file": lambda: Spectra(folder / "nowhere"),
        "packed": lambda: list(Spectra(folder / "x.mgf.gz").entries()),
        "another suffix": lambda: Spectra(folder / "x.txt"),
        "no table": lambda: Pairs(folder / "x.json"),
        "a pipe": lambda: Spectra(folder / "pipe.mgf"),
        "a pipe for HDF5": lambda: Pairs(folder / "pipe.h5"),
        "a pipe for a tar": lambda: Captions(folder / "pipe.tar"),
        "a pipe for a table": lambda: Pairs(folder / "pipe.csv"),
        "a folder without tars": lambda: Captions(folder / "none"),
        "a folder for a file": lambda: Spectra(folder / "deep"),
        "a folder for a table": lambda: Pairs(folder / "y.tsv"),
        "a suffix that is not written": lambda: made.sequences(folder / "x.mgf", 1),
    }


def test_every_file_that_is_refused_is_named_with_what_to_do(tmp_path: Path) -> None:
    for name, wrong in refused(tmp_path).items():
        with pytest.raises((ConfigError, DataError)) as caught:
            wrong()
        assert caught.value.remedy, name
        assert caught.value.where, name


# ---- HDF5, whoever reads it ----


def test_no_link_is_followed_out_of_a_file_or_within_it(tmp_path: Path) -> None:
    hdf5_file(tmp_path / "other.h5")
    links = {"out.h5": h5py.ExternalLink("other.h5", "spectrum"), "within.h5": h5py.SoftLink("/real")}
    for name, link in links.items():
        path = hdf5_file(tmp_path / name, spectrum=None, real=[[[1.0], [2.0]]])
        with h5py.File(path, "a") as file:
            file["spectrum"] = link
        with pytest.raises(DataError, match="'spectrum'") as caught:
            list(Spectra(path).entries())
        assert caught.value.remedy
    path = hdf5_file(tmp_path / "x.h5", name=["a"])
    with h5py.File(path, "a") as file:  # links that no option names do no harm
        file["nowhere"], file["round"] = h5py.SoftLink("/none"), h5py.SoftLink("/round")
        file["elsewhere"] = h5py.ExternalLink("none.h5", "x")
    assert [one.id for one in Spectra(path).entries()] == ["a"]


def test_datasets_made_of_other_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    hdf5_file(tmp_path / "other.h5")
    layout = h5py.VirtualLayout((1, 2, 3), "i8")
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "spectrum", (1, 2, 3))
    for side in ("outside", "virtual"):
        with h5py.File(tmp_path / f"{side}.h5", "w") as file:
            file["left"] = ["a"]
            if side == "virtual":
                file.create_virtual_dataset("right", layout)
            else:
                file.create_dataset("right", (1, 2, 3), "u1", external=[(str(tmp_path / "secret"), 0, 6)])
        with pytest.raises(DataError, match="'right'"):
            list(Pairs(tmp_path / f"{side}.h5").entries())
