"""How entries are compared, and files of spectra by hand."""

from __future__ import annotations

import base64
import pickle
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from pipeline.records import Entry, Rejection

Peaks = Sequence[tuple[float, float]]
PEAKS = ((100.5, 3.0), (200.25, 10.0), (50.125, 1.0))


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Compare arrays to the bit."""
    assert {name: (x.dtype, x.shape, x.tobytes()) for name, x in one.items()} == {
        name: (x.dtype, x.shape, x.tobytes()) for name, x in other.items()
    }


def read_twice(reader: Any) -> list[Entry | Rejection]:
    """Return what a reader yields; each entry is the same when the reader of another process reads it again."""
    other = pickle.loads(pickle.dumps(reader))
    found = list(reader.entries())
    for entry in found:
        if isinstance(entry, Entry):
            assert_same(other.read(entry.place), entry.arrays)
    return found


def only(found: list[Entry | Rejection]) -> Entry:
    """Return the one entry."""
    (entry,) = found
    assert isinstance(entry, Entry), entry
    return entry


def hdf5_file(path: Path, peaks: Any = (((100, 200, 0), (1, 2, 0)),), **columns: Any) -> Path:
    """Write a file of spectra; a column of None is left out."""
    spectrum_N2P = np.asarray(peaks)
    columns = {"spectrum": spectrum_N2P, "precursor_mz": np.full(len(spectrum_N2P), 500.5), **columns}
    return columns_file(path, **{name: values for name, values in columns.items() if values is not None})


def columns_file(path: Path, **columns: Any) -> Path:
    """Write datasets as HDF5."""
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file[name] = values
    return path


def mgf_text(number: int, peaks: Peaks = PEAKS) -> str:
    lines = "\n".join(f"{mz} {high}" for mz, high in peaks)
    return f"BEGIN IONS\nTITLE=e{number}\nPEPMASS={300 + number / 10}\nCHARGE=1+\n{lines}\nEND IONS\n\n"


def msp_text(number: int, peaks: Peaks = PEAKS) -> str:
    lines = "\n".join(f"{mz} {high}" for mz, high in peaks)
    return f"NAME: e{number}\nPRECURSORMZ: {300 + number / 10}\nCHARGE: 1\nNum Peaks: {len(peaks)}\n{lines}\n\n"


def binary(values: Sequence[float], accession: str, *, packed: bool = False) -> str:
    data = np.array(values, "<f8").tobytes()
    text = base64.b64encode(zlib.compress(data) if packed else data).decode()
    how = ("MS:1000574", "zlib compression") if packed else ("MS:1000576", "no compression")
    return (
        '<binaryDataArray><cvParam accession="MS:1000523" name="float"/>'
        f'<cvParam accession="{how[0]}" name="{how[1]}"/>'
        f'<cvParam accession="{accession}" name="array"/><binary>{text}</binary></binaryDataArray>'
    )


def mzml_text(number: int, peaks: Peaks = PEAKS, level: int = 2, **how: Any) -> str:
    arrays = (binary([peak[place] for peak in peaks], f"MS:100051{4 + place}", **how) for place in (0, 1))
    return (
        f'<spectrum index="{number}" id="scan={number}" defaultArrayLength="{len(peaks)}">\n'
        f'<cvParam accession="MS:1000511" name="ms level" value="{level}"/>\n'
        '<precursorList><precursor><selectedIonList><selectedIon><cvParam accession="MS:1000744" name="selected ion" '
        f'value="{300 + number / 10}"/><cvParam accession="MS:1000041" name="charge state" value="1"/></selectedIon>'
        f"</selectedIonList></precursor></precursorList>\n<binaryDataArrayList>{''.join(arrays)}</binaryDataArrayList>\n"
        "</spectrum>\n"
    )


def mzml_file(text: str, before: str = "") -> str:
    spectra = f'<run><spectrumList count="1">\n{text}</spectrumList></run>'
    return f'<mzML xmlns="http://psi.hupo.org/ms/mzml">{before}{spectra}</mzML>\n'
