"""`Spectra`: mass spectra from MGF, MSP, mzML and HDF5 files, cleaned the same way, as peaks, precursor and labels.

HDF5 is the layout of DreaMS: `spectrum` [N, 2, P] of m/z and intensity, padded with zeros, `precursor_mz` [N], and
where they are there `charge`, `RT`, `id` or `name`, `fold`, `sequence` and columns for `target`.
Shapes: P peaks (2: m/z and intensity), K targets, L residues.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.errors import ConfigError, DataError
from pipeline.readers import hdf5, peptides
from pipeline.readers.entry import (
    PACKED,
    SCAN_AGAIN,
    Bytes,
    Column,
    Count,
    Opened,
    UnusableEntry,
    cannot_read,
    check_option,
    check_types,
    checked_file,
    checked_path,
    column_of,
    entry_id,
    entry_or_rejection,
    parse_number,
)
from pipeline.readers.spectrum_files.blocks import MGF, MSP, charge
from pipeline.readers.spectrum_files.mzml import MZML
from pipeline.readers.spectrum_files.spectrum_headers import (
    FORMATS,
    molecule_number,
    precursor_text,
    retention_s,
    shared_headers,
)
from pipeline.readers.table_rows import LabelTable, label_number
from pipeline.records import Reason, Rejection
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.readers.spectrum_files.blocks import Block
    from pipeline.records import Entry

    Arrays = Mapping[str, NDArray[Any]]

KEYS = {  # what an option means where it is left out: an MGF header, and HDF5 columns
    "id": ("TITLE", ("id", "name")),
    "split": ("SPLIT", ("fold", "split")),
    "peptide": ("SEQ", ("sequence",)),
    "molecule": ("", ()),
}
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


FORMS = {".mgf": MGF, ".msp": MSP, ".mzml": MZML}
SUFFIXES = (*FORMS, *hdf5.SUFFIXES)
MOST_NAMES = 100  # of headers that an error lists


class RawSpectrum(NamedTuple):
    """A spectrum as read from a file, before cleaning."""

    peak_P2: NDArray[Any]
    precursor_mz: float
    charge: int
    target: tuple[float, ...]
    peptide: str
    retention_s: float = math.nan
    molecule: str = ""


@dataclass(eq=False)
class Spectra:
    """The spectra of a file, or of all MGF, MSP, mzML (MS level 2 and above) and HDF5 files of a folder, by name.

    Arrays: `peaks.mz` and `peaks.intensity` (relative to the largest) float32 [P] in order of m/z, `precursor_mz`
    float32 and `charge` int64 (0: unknown) without axes, `target` float32 [K] where asked for (NaN: unknown),
    `peptide.residue` int8 [L] where the spectrum has a peptide, `retention_s` float32 and `molecule` int64 (0: unknown)
    where asked for. A place is the number of the file and, of a text file, the offset and length of the spectrum; of an
    HDF5 file, the row; and its id where targets are found by it.
    """

    path: Path
    max_peaks: Count = 100  # the most intense are kept; of equal ones, those of lower m/z
    most_peaks: Count = 5000  # a spectrum of more is refused: it was not centroided
    least_intensity: float = 0.0  # relative to the largest; a peak of intensity 0 is never kept
    target: tuple[str, ...] = ()  # headers or columns that are numbers; nothing, NA and NaN are not known
    labels: str = ""  # a CSV or TSV with a column `id` that has the targets, beside the data or by its whole path
    quality: str = ""  # A: what DreaMS' data, format A, would leave out is refused
    retention: bool = False  # whether the time of retention is read
    molecule: str = ""  # header or column of InChI keys, by which spectra of one molecule are known
    id: str = ""  # header or column; TITLE, `id` or `name`; where it is empty, the file's name and a number
    split: str = ""  # header or column; SPLIT, `fold` or `split`
    peptide: str = ""  # header or column; SEQ, `sequence`

    def __post_init__(self) -> None:
        self.target = (self.target,) if isinstance(self.target, str) else self.target
        self._check_options()
        self.target, self.path = tuple(self.target), checked_path(Path(self.path))
        self._folder = self.path if self.path.is_dir() else self.path.parent
        self._paths = _files(self.path)
        self._given = {option: name for option in KEYS if (name := getattr(self, option))}
        self._keys = {option: str(self._given.get(option, KEYS[option][0])).upper() for option in KEYS}
        self._table = LabelTable(self._folder / self.labels, self.target) if self.labels else None
        self._own_targets = () if self.labels else self.target  # those in the files of spectra
        targets = {name.upper(): "target" for name in self._own_targets}
        self._wanted = {self._keys[option]: option for option in self._given} | targets  # headers
        self._bytes = Opened(Bytes)
        self._tables = Opened(partial(_table, columns=self._columns()))
        self._shared = Opened(_shared)

    def files(self) -> tuple[Path, ...]:
        """Return the files in reading order, and last the table of labels."""
        return (*self._paths, *([self._folder / self.labels] if self.labels else ()))

    def entries(self) -> Iterator[Entry | Rejection]:
        """Yield every spectrum as an entry, or its rejection."""
        for file, path in enumerate(self._paths):
            yield from self._of_text(file, path) if _suffix(path) in FORMS else self._of_hdf5(file, path)

    def headers(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Yield the id of each readable spectrum, and what its file says of it by names that all files share."""
        for _, headers in self.runs():
            yield from headers

    def runs(self) -> Iterator[tuple[Path, Iterator[tuple[str, Mapping[str, str]]]]]:
        """Yield each file, and the id and the headers of each readable spectrum in it."""
        for path in self._paths:
            yield path, self._text_headers(path) if _suffix(path) in FORMS else self._hdf5_headers(path)

    def read(self, place: Sequence[int]) -> Arrays:
        """Return the arrays of the spectrum at a place."""
        file, start, *rest = place
        name = str(rest.pop()) if self._table is not None else ""
        try:
            path = self._paths[file]
            if rest:
                body = self._bytes(path).at(start, rest[0])
                return self._text_arrays(*self._divide(path, body), name)
            return self._hdf5_arrays(self._tables(path).rows(start, start + 1)[0], name)
        except (UnusableEntry, IndexError) as error:
            what = f"no spectrum at {list(place)}: {error}"
            raise DataError(what, where=str(self.path), remedy=SCAN_AGAIN) from error

    def _columns(self) -> list[Column]:
        """Return the datasets of an HDF5 file."""
        return [
            Column("spectrum", ("spectrum",), "write m/z and intensity as 'spectrum' [N, 2, P], padded with zeros"),
            Column("precursor_mz", ("precursor_mz",), "write the precursors' m/z as 'precursor_mz' [N]"),
            *(Column(name, (name,)) for name in ("charge", "RT")),
            *(column_of(option, getattr(self, option), *names) for option, (_, names) in KEYS.items()),
            *(column_of("target", name, meaning=f"target {name}") for name in self._own_targets),
        ]

    def _check_options(self) -> None:
        check_types(self)
        least = self.least_intensity
        fits = type(least) in (int, float) and 0 <= least < 1
        check_option("least_intensity", least, "a number from 0 and less than 1", fits=fits)
        fits = isinstance(self.target, (list, tuple)) and all(type(name) is str and name for name in self.target)
        check_option("target", self.target, "a list of names", fits=fits)
        fits = bool(self.target) or not self.labels
        check_option("target", self.target, "a list of the columns of data.options.labels", fits=fits)
        known = f"one of {', '.join(filter(None, FORMATS))}"
        check_option("quality", self.quality, known, fits=self.quality in FORMATS)

    def _of_text(self, file: int, path: Path) -> Iterator[Entry | Rejection]:
        form, count, seen = FORMS[_suffix(path)], 0, dict[str, None]()
        missing = self._wanted
        for block in form.blocks(path):
            origin = f"{path.name}:{block.line}"
            if block.is_between:
                yield Rejection(f"{path.name}-line-{block.line}", Reason.BAD_ENTRY, block.problem, origin)
                continue
            headers, peaks = self._divided(path, block)
            name, split = entry_id(self._name(headers, path), path, count), headers.get(self._keys["split"], "")
            arrays = partial(self._text_arrays, headers, peaks, name)
            place = [file, block.offset, len(block.body)]
            yield entry_or_rejection(name, self._place(place, name), arrays, split, path, block.line)
            count += 1
            if missing:
                missing = {key: option for key, option in missing.items() if key not in headers}
                seen |= dict.fromkeys(headers) if len(seen) < MOST_NAMES else {}
        if not count:
            yield Rejection(path.name, Reason.BAD_ENTRY, form.none, path.name)
        for key, option in missing.items() if count else ():
            there = ", ".join(map(printable_text, seen)) or "none"
            remedy = f"data.options.{option} must name one of these, or be omitted"
            raise DataError(f"no spectrum has the header {key!r}; there are: {there}", where=str(path), remedy=remedy)

    def _divided(self, path: Path, block: Block) -> tuple[Mapping[str, str], NDArray[np.float64] | UnusableEntry]:
        """Return headers and peaks of a block; the error and the headers that matter if it is damaged."""
        try:
            if block.problem:
                raise UnusableEntry(block.problem)
            return self._divide(path, block.body)
        except UnusableEntry as error:
            return FORMS[_suffix(path)].headers(block.body), error

    def _divide(self, path: Path, body: bytes) -> tuple[dict[str, str], NDArray[np.float64]]:
        """Return headers and peaks of a spectrum's text."""
        return FORMS[_suffix(path)].divide(body, self._shared(path))

    def _name(self, headers: Mapping[str, str], path: Path) -> str:
        """Return what a spectrum is called: by the option `id`, or of MGF its title, of mzML its scan."""
        suffix = _suffix(path)
        if self.id or suffix == ".mgf":
            return headers.get(self._keys["id"], "")
        scan = headers.get("SCANS", "") if suffix == ".mzml" else ""  # a name of MSP is a molecule's, of many spectra
        return f"{path.name}-scan-{scan}" if scan else ""

    def _text_headers(self, path: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
        blocks = (block for block in FORMS[_suffix(path)].blocks(path) if not block.is_between)
        for count, block in enumerate(blocks):
            headers, peaks = self._divided(path, block)
            with suppress(UnusableEntry):  # the scan has rejected it
                if not isinstance(peaks, UnusableEntry):
                    shared = shared_headers(headers, path.name, charge(headers.get("CHARGE", "")))
                    yield entry_id(self._name(headers, path), path, count), shared

    def _hdf5_headers(self, path: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
        with hdf5.Hdf5Table(path) as table:
            table.add_all()
            table.columns = {name: column for name, column in table.columns.items() if column.ndim == 1}
            ids = [name for name in ((self.id,) if self.id else KEYS["id"][1]) if name in table.columns]
            for at, row in table.all_rows():
                told = {name: hdf5.cell_text(row, name) for name in row}
                yield entry_id(told[ids[0]] if ids else "", path, at), told

    def _of_hdf5(self, file: int, path: Path) -> Iterator[Entry | Rejection]:
        with _table(path, self._columns()) as table:
            for at, row in table.all_rows():
                name, split = entry_id(hdf5.cell_text(row, "id"), path, at), hdf5.cell_text(row, "split").strip()
                arrays = partial(self._hdf5_arrays, row, name)
                yield entry_or_rejection(name, self._place([file, at], name), arrays, split, path, at)

    def _place(self, place: list[Any], name: str) -> list[Any]:
        return place if self._table is None else [*place, name]

    def _text_arrays(
        self, headers: Mapping[str, str], peak_P2: NDArray[np.float64] | UnusableEntry, name: str
    ) -> Arrays:
        if isinstance(peak_P2, UnusableEntry):
            raise peak_P2
        raw = RawSpectrum(
            peak_P2,
            precursor_mz=_number(precursor_text(headers), "the precursor's m/z"),
            charge=charge(headers.get("CHARGE", "")),
            target=tuple(label_number(headers.get(name.upper(), ""), name) for name in self._own_targets),
            peptide=headers.get(self._keys["peptide"], ""),
            retention_s=retention_s(headers) if self.retention else math.nan,
            molecule=headers.get(self._keys["molecule"], "") if self.molecule else "",
        )
        return self._arrays(raw, name)

    def _hdf5_arrays(self, row: Mapping[str, Any], name: str) -> Arrays:
        peak_2P = row["spectrum"]
        charge = _number(row.get("charge", 0), "the charge")
        if not (abs(charge) < 1000 and charge.is_integer()):  # NaN is not less, either
            raise UnusableEntry(f"the charge is {charge:g}, not a whole number or too large")
        raw = RawSpectrum(
            peak_2P[:, (peak_2P != 0).any(axis=0)].T,
            precursor_mz=_number(row["precursor_mz"], "the precursor's m/z"),
            charge=int(charge),
            target=tuple(label_number(hdf5.text_of(row[f"target {name}"]), name) for name in self._own_targets),
            peptide=hdf5.cell_text(row, "peptide"),
            retention_s=_number(row.get("RT", math.nan), "RT") if self.retention else math.nan,
            molecule=hdf5.cell_text(row, "molecule"),
        )
        return self._arrays(raw, name)

    def _arrays(self, raw: RawSpectrum, name: str) -> Arrays:
        """Return the arrays of an entry, the same from every kind of file; by its name labels of a table are found."""
        mz_P, intensity_P = self._peaks(*raw.peak_P2.T)
        if not SMALLEST <= raw.precursor_mz <= LARGEST:
            raise UnusableEntry(f"the precursor's m/z is {raw.precursor_mz:g}")
        if (limits := FORMATS[self.quality]) is not None:
            limits.check(raw.peak_P2, raw.precursor_mz, raw.charge)
        return {
            "peaks.mz": mz_P,
            "peaks.intensity": intensity_P,
            "precursor_mz": np.array(raw.precursor_mz, np.float32),
            "charge": np.array(raw.charge, np.int64),
            **self._labels(self._table.of(name) if self._table is not None else raw.target, raw.peptide),
            **({"retention_s": np.array(raw.retention_s, np.float32)} if self.retention else {}),
            **({"molecule": molecule_number(raw.molecule)} if self.molecule else {}),
        }

    def _labels(self, target: Sequence[float], peptide: str) -> Arrays:
        labels: dict[str, NDArray[Any]] = {"target": np.array(target, np.float32)} if self.target else {}
        if peptide:
            try:
                labels["peptide.residue"] = peptides.residue_codes(peptide)
            except ValueError as error:
                raise UnusableEntry(f"peptide {printable_text(peptide)}: {error}") from error
        return labels

    def _peaks(self, mz_P: NDArray[Any], intensity_P: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the peaks to keep, in order of m/z."""
        if not len(mz_P):
            raise UnusableEntry("no peaks")
        if len(mz_P) > self.most_peaks:
            raise UnusableEntry(f"{len(mz_P):,} peaks, most_peaks allows {self.most_peaks:,}: not centroided?")
        _check(mz_P, SMALLEST, "m/z")
        _check(intensity_P, 0.0, "intensity")
        mz_P, relative_P = mz_P.astype(np.float32), _relative(intensity_P)
        order = np.argsort(mz_P, kind="stable")
        relative_P = relative_P[order]
        kept = np.flatnonzero((relative_P > 0) & (relative_P >= self.least_intensity))
        if len(kept) > self.max_peaks:
            kept = np.sort(kept[np.argsort(-relative_P[kept], kind="stable")[: self.max_peaks]])
        return mz_P[order[kept]], relative_P[kept]


def _shared(path: Path) -> Any:
    return FORMS[_suffix(path)].shared(path)


def _suffix(path: Path) -> str:
    """Return the suffix of a file, without the .gz of a packed one."""
    return (path.with_suffix("") if path.suffix.lower() == PACKED else path).suffix.lower()


def _files(path: Path) -> tuple[Path, ...]:
    """Return the file, or the spectrum files of a folder, by name."""
    try:
        paths = sorted(path.iterdir()) if path.is_dir() else [path]
    except OSError as error:
        raise cannot_read(path, error) from error
    files = tuple(checked_file(file) for file in paths if _suffix(file) in FORMS or file.suffix.lower() in SUFFIXES)
    if not files:
        problem = f"no spectra: no file ends with {', '.join(SUFFIXES)} (or {', '.join(FORMS)} with {PACKED})"
        raise ConfigError(problem, where=str(path), remedy="set data.path to one, or their folder")
    return files


def _table(path: Path, columns: Sequence[Column]) -> hdf5.Hdf5Table:
    """Open an HDF5 file of spectra."""
    table = hdf5.Hdf5Table(path, columns)
    spectrum = table.columns["spectrum"]
    if len(spectrum.shape) != 3 or spectrum.shape[1] != 2 or spectrum.dtype.kind not in "fiu":
        problem = f"'spectrum' is {spectrum.dtype} {spectrum.shape}, expected numbers [N, 2, P]"
        raise DataError(problem, where=str(path), remedy="write m/z and intensity in this shape, padded with zeros")
    table.check_lengths()
    return table


def _number(value: Any, name: str) -> float:
    """Return a header or a cell, which may be text, as a number."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    try:
        return parse_number(text) if isinstance(text, str) else float(text)
    except (TypeError, ValueError):
        what = f"is not a number: {printable_text(str(text))!r}" if str(text) else "is missing"
        raise UnusableEntry(f"{name} {what}") from None


def _check(value_P: NDArray[Any], least: float, name: str) -> None:
    """Raise for the first peak whose value is out of bounds; NaN is."""
    if not (value_P.min() >= least and value_P.max() <= LARGEST):
        first = int(np.argmin((value_P >= least) & (value_P <= LARGEST)))
        raise UnusableEntry(f"the {name} of peak {first + 1} is {value_P[first]:g}")


def _relative(intensity_P: NDArray[Any]) -> NDArray[np.float32]:
    """Return intensities relative to the largest, rounded once."""
    largest = float(intensity_P.max())
    if not largest:
        raise UnusableEntry("no peaks: every intensity is 0")
    return np.asarray(intensity_P.astype(np.float64) / largest, np.float32)
