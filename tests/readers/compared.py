"""How entries are compared, and files of spectra by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Compare arrays to the bit."""
    assert {name: (x.dtype, x.shape, x.tobytes()) for name, x in one.items()} == {
        name: (x.dtype, x.shape, x.tobytes()) for name, x in other.items()
    }


def hdf5_file(path: Path, peaks: Any = (((100, 200, 0), (1, 2, 0)),), **columns: Any) -> Path:
    """Write a file of spectra; a column of None is left out."""
    spectrum_N2P = np.asarray(peaks)
    columns = {"spectrum": spectrum_N2P, "precursor_mz": np.full(len(spectrum_N2P), 500.5), **columns}
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            if values is not None:
                file[name] = values
    return path
