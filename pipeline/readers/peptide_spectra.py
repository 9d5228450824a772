"""`PeptideSpectra`: spectra with their peptides, as data sets of de-novo sequencing and peptide libraries hold them.

    nine-species, MassIVE-KB, DeepNovo   MGF with SEQ=, modifications in any way that `peptides` reads
    ProteomeTools, NIST                  MSP with `Name: PEPTIDE/2_0` and `Comment: Parent=… Mods=1/3,M,Oxidation`
    any                                  a USI that ends with its peptide, in the header that `peptide` names

Other spectra are rejected with a reason: too few peaks, a peptide that is too short or too long, or no peptide.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.readers.entry import Count, UnusableEntry, check_option
from pipeline.readers.peptides import letters_only
from pipeline.readers.spectra import KEYS, Spectra
from pipeline.records import Entry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from pipeline.records import Rejection

    Arrays = Mapping[str, NDArray[Any]]

NAME = re.compile(r"(?P<letters>[A-Za-z]+)/(?P<charge>\d+)(?:_.*)?")
PARENT = re.compile(r"\bParent=(\S+)")
MODS = re.compile(r"\bMods=(\d+)((?:[/(][^/()\s]*\)?)*)")
CHANGE = re.compile(r"[/(](-?\d+),[A-Za-z]*,([^/()\s]+)")
RESIDUE = "peptide.residue"
FILES = ("test_file", "val_file")


@dataclass(eq=False)
class PeptideSpectra(Spectra):
    """Spectra of peptides; arrays and options are those of `Spectra`, and some of which peptides are taken."""

    least_peaks: Count = 1  # of a spectrum, as it stands in its file
    shortest: Count = 1  # peptide, in residues
    longest: Count = 100
    unknown: bool = False  # whether spectra without a peptide are taken, to be predicted
    test_file: str = ""  # whose spectra are the test split, such as H.-sapiens.mgf; those of others are for training
    val_file: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        there = [path.name for path in self._paths]
        for name in FILES:
            file = getattr(self, name)
            check_option(name, file, f"a file of the data: {', '.join(there[:10])}", fits=not file or file in there)

    def _check_options(self) -> None:
        super()._check_options()
        check_option("longest", self.longest, f"shortest ({self.shortest}) or more", fits=self.longest >= self.shortest)

    def entries(self) -> Iterator[Entry | Rejection]:
        """Yield every spectrum as an entry, or its rejection."""
        splits = {self.test_file: "test", self.val_file: "val"}
        for entry in super().entries():
            if isinstance(entry, Entry) and (self.test_file or self.val_file):
                entry = entry._replace(split=splits.get(self._paths[entry.place[0]].name, "train"))
            yield entry

    def _divide(self, path: Path, body: bytes) -> tuple[dict[str, str], NDArray[np.float64]]:
        headers, peak_P2 = super()._divide(path, body)
        return library_headers(headers, self._keys["peptide"]), peak_P2

    def _arrays(self, headers: Mapping[str, str], peak_P2: NDArray[Any] | UnusableEntry, name: str) -> Arrays:
        if not isinstance(peak_P2, UnusableEntry) and len(peak_P2) < self.least_peaks:
            raise UnusableEntry(f"{len(peak_P2)} peaks, least_peaks is {self.least_peaks}")
        arrays = super()._arrays(headers, peak_P2, name)
        if RESIDUE in arrays:
            self._check_length(len(letters_only(arrays[RESIDUE])))
        elif not self.unknown:
            raise UnusableEntry(f"no peptide: no header {self._keys['peptide']}; unknown: true accepts such spectra")
        return arrays

    def _check_length(self, residues: int) -> None:
        if not self.shortest <= residues <= self.longest:
            raise UnusableEntry(f"a peptide of {residues} residues; accepted: {self.shortest} to {self.longest}")


def library_headers(headers: dict[str, str], key: str = KEYS["peptide"][0]) -> dict[str, str]:
    """Return the headers of a spectrum, with what the name and the comment of a library of peptides tell."""
    match = NAME.fullmatch(headers.get("NAME", ""))
    if match is None or key in headers:
        return headers
    comment = headers.get("COMMENT", "")
    found = {key: _modified(match["letters"], comment), "CHARGE": match["charge"]}
    if parent := PARENT.search(comment):
        found["PEPMASS"] = parent[1]
    return {**found, **headers}


def _modified(letters: str, comment: str) -> str:
    """Return a peptide with the modifications that a comment tells, as ProForma."""
    mods = MODS.search(comment)
    changes = CHANGE.findall(mods[2]) if mods else []
    if mods and len(changes) != int(mods[1]):
        raise UnusableEntry(f"{mods[0]} has {len(changes)} modifications, expected {mods[1]}")
    marks = [""] * len(letters)
    for place, name in changes:
        at = max(int(place), 0)  # NIST has -1 for the N-terminus
        if at >= len(letters):
            raise UnusableEntry(f"a modification of residue {place} of {letters}")
        marks[at] += f"[{name}]"
    return "".join(letter + mark for letter, mark in zip(letters, marks, strict=True))
