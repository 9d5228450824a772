"""What headers of spectra mean, whatever a file calls them, and whether a spectrum is good enough to learn from.

The shared names are those of DreaMS: `precursor_mz`, `charge`, `RT` (seconds), `smiles`, `adduct`, `ionmode`, `name`;
so are the checks, its format A.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from pipeline.readers.entry import UnusableEntry, parse_number
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

PRECURSORS = ("PEPMASS", "PRECURSOR_MZ", "PRECURSORMZ")
SECONDS = ("RTINSECONDS", "RETENTION_TIME", "RT")
MINUTES = ("RTINMINUTES", "RETENTIONTIME")  # the second is of MSP
UNITS = {"": 0.0, "s": 1.0, "sec": 1.0, "seconds": 1.0, "min": 60.0, "minutes": 60.0}
NOT_KNOWN = {"", "nan", "na", "n/a", "none", "null"}
TIMED = re.compile(r"([-+.\deE]+)\s*([a-z]*)")
SHARED = {
    "NAME": "name",
    "SMILES": "smiles",
    "ADDUCT": "adduct",
    "PRECURSORTYPE": "adduct",
    "PRECURSOR_TYPE": "adduct",
    "INCHIKEY": "inchikey",
    "FEATURE_ID": "feature_id",
    "SCAN_NUMBER": "scan_number",
}
BLOCK_LETTERS = 14  # of an InChI key: those of its skeleton


def precursor_text(headers: Mapping[str, str]) -> str:
    """Return the precursor's m/z as it is written; empty if it is not."""
    told = next((headers[key] for key in PRECURSORS if key in headers), "")
    return (told.split() or [""])[0]


def retention_s(headers: Mapping[str, str]) -> float:
    """Return the time of retention in seconds, NaN if it is not told; a unit that is written goes before the key's."""
    for keys, unit in ((SECONDS, 1.0), (MINUTES, 60.0)):
        for text in (headers[key].strip().lower() for key in keys if key in headers):
            if text in NOT_KNOWN:
                continue
            found = TIMED.fullmatch(text)
            if found is None or found[2] not in UNITS:
                raise UnusableEntry(f"invalid retention time: {printable_text(text)!r}")
            return parse_time(found[1]) * (UNITS[found[2]] or unit)
    return math.nan


def parse_time(text: str) -> float:
    """Return a time as it is written."""
    try:
        return parse_number(text)
    except ValueError:
        raise UnusableEntry(f"invalid retention time: {printable_text(text)!r}") from None


def molecule_number(inchi_key: str) -> NDArray[np.int64]:
    """Return a number for the skeleton that an InChI key names, 0 where it names none."""
    block = inchi_key.strip().upper()[:BLOCK_LETTERS]
    if not block or block.lower() in NOT_KNOWN:
        return np.array(0, np.int64)
    if len(block) < BLOCK_LETTERS or not block.isalpha():
        raise UnusableEntry(f"not an InChI key: {printable_text(inchi_key)!r}")
    return np.array(xxhash.xxh3_64_intdigest(block.encode()) >> 1, np.int64)


def shared_headers(headers: Mapping[str, str], file_name: str, charge: int) -> dict[str, str]:
    """Return the headers by the names that all files share; others stay as they are."""
    skipped = {*PRECURSORS, *SECONDS, *MINUTES, "CHARGE", "IONMODE", "NUM PEAKS"}
    told = {SHARED.get(key, key): value for key, value in headers.items() if key not in skipped}
    told["precursor_mz"] = precursor_text(headers)
    told["charge"] = str(charge)
    if not math.isnan(time := retention_s(headers)):
        told["RT"] = f"{time:.10g}"
    if mode := headers.get("IONMODE", "").strip().lower():
        told["ionmode"] = "-" if mode.startswith(("n", "-")) else "+"
    return told | {"file_name": file_name}


@dataclass(frozen=True)
class SpectrumQuality:
    """Limits of spectra; what is outside is refused, with the first limit that it is outside of."""

    most_precursor_mz: float = 1000.0
    most_charge: int = 1
    least_peaks: int = 3
    most_peaks: int = 128
    most_mz: float = 1000.0
    least_contrast: float = 20.0  # the highest intensity over the lowest
    high: float = 0.1  # of the highest intensity; so high at least `least_peaks` must be

    def check(self, peak_P2: NDArray[Any], precursor_mz: float, charge: int) -> None:
        """Raise for a spectrum that is outside of a limit; a charge of 0 is not known, and passes."""
        if precursor_mz > self.most_precursor_mz:
            raise UnusableEntry(f"the precursor's m/z is {precursor_mz:g}, above {self.most_precursor_mz:g}")
        if abs(charge) > self.most_charge:
            raise UnusableEntry(f"the charge is {charge}, above {self.most_charge}")
        mz_P, intensity_P = peak_P2[peak_P2[:, 1] > 0].T
        if not self.least_peaks <= len(mz_P) <= self.most_peaks:
            raise UnusableEntry(f"{len(mz_P)} peaks, not {self.least_peaks} to {self.most_peaks}")
        if mz_P.max() > self.most_mz:
            raise UnusableEntry(f"a peak at m/z {mz_P.max():g}, above {self.most_mz:g}")
        if intensity_P.max() < self.least_contrast * intensity_P.min():
            raise UnusableEntry(f"the highest peak is not {self.least_contrast:g} times as high as the lowest")
        if (count := int((intensity_P > self.high * intensity_P.max()).sum())) < self.least_peaks:
            raise UnusableEntry(f"{count} peaks above {self.high:g} of the highest, fewer than {self.least_peaks}")


FORMATS = {"": None, "A": SpectrumQuality()}
