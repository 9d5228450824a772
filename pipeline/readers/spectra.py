"""`Spectra`: mass spectra from MGF, MSP, mzML and HDF5 files, cleaned the same way, as peaks, precursor and labels.

HDF5 is the layout of DreaMS: `spectrum` [N, 2, P] of m/z and intensity, padded with zeros, `precursor_mz` [N], and
where they are there `charge`, `RT`, `id` or `name`, `fold`, `sequence` and columns for `target`.
Shapes: P peaks (2: m/z and intensity), K targets, L residues.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from pipeline.errors import ConfigError, DataError
from pipeline.readers import hdf5, peptides
from pipeline.readers.entry import (
    LARGEST,
    PACKED,
    SCAN_AGAIN,
    SMALLEST,
    Bytes,
    Column,
    Count,
    Opened,
    UnusableEntry,
    bounded_number,
    cannot_read,
    check_option,
    check_types,
    checked_file,
    checked_path,
    column_of,
    entry_id,
    entry_or_rejection,
)
from pipeline.readers.mzml import MZML
from pipeline.readers.scaffolds import refuse_without_rdkit, scaffold_split
from pipeline.readers.spectrum_files import (
    FORMAT_A,
    MGF,
    MSP,
    charge,
    molecule_number,
    precursor_text,
    refuse_below_format_a,
    retention_s,
    shared_headers,
)
from pipeline.readers.table_rows import LabelTable, label_number
from pipeline.records import Reason, Rejection
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.records import Entry

    Arrays = Mapping[str, NDArray[Any]]

KEYS = {  # what an option means where it is left out: an MGF header, and HDF5 columns
    "id": ("TITLE", ("id", "name")),
    "split": ("SPLIT", ("fold", "split")),
    "peptide": ("SEQ", ("sequence",)),
    "molecule": ("", ()),
    "run": ("", ()),
    "murcko": ("", ()),
}


FORMS = {".mgf": MGF, ".msp": MSP, ".mzml": MZML}
SUFFIXES = (*FORMS, *hdf5.SUFFIXES)
MOST_NAMES = 100  # of headers that an error lists


class FoundSpectrum(NamedTuple):
    """A spectrum as in its file, before cleaning."""

    name: str
    place: list[int]  # in its file
    line: int  # or row
    headers: Mapping[str, str]  # as MGF calls them
    peak_P2: NDArray[Any] | UnusableEntry


@dataclass(eq=False)
class Spectra:
    """The spectra of a file, or of all MGF, MSP, mzML (MS level 2 and above) and HDF5 files of a folder, by name.

    Arrays: `peaks.mz` and `peaks.intensity` (relative to the largest) float32 [P] in order of m/z, `precursor_mz`
    float32 and `charge` int64 (0: unknown) without axes, `target` float32 [K] where asked for (NaN: unknown),
    `peptide.residue` int8 [L] where the spectrum has a peptide, `retention_s` float32, `molecule` (0: unknown) and
    `run` int64 where asked for. A place is the number of the file and, of a text file, the offset and length of the
    spectrum; of an HDF5 file, the row; and its id where targets are found by it.
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
    run: str = ""  # header or column of LC-MS runs, where a file has several
    murcko: str = ""  # header or column of SMILES or InChI, whose Murcko scaffolds decide the splits
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
        self._labels = LabelTable(self._folder / self.labels, self.target) if self.labels else None
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
            for found in self._in_text(path) if _suffix(path) in FORMS else self._in_hdf5(path):
                if isinstance(found, Rejection):
                    yield found
                    continue
                name, _, line, headers, peak_P2 = found
                place = [file, *found.place, *([] if self._labels is None else [name])]
                arrays: Any = partial(self._arrays, headers, peak_P2, name)
                split = headers.get(self._keys["split"], "")
                if self.murcko:
                    try:
                        split = scaffold_split(headers.get(self._keys["murcko"], ""))
                    except UnusableEntry as error:
                        arrays = error
                yield entry_or_rejection(name, place, arrays, split.strip(), path, line)

    def headers(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Yield the id of each readable spectrum, and what its file says of it by names that all files share."""
        for _, headers in self.runs():
            yield from headers

    def runs(self) -> Iterator[tuple[Path, Iterator[tuple[str, Mapping[str, str]]]]]:
        """Yield each file, and the id and the headers of each readable spectrum in it."""
        for path in self._paths:
            yield path, self._text_headers(path) if _suffix(path) in FORMS else self._hdf5_headers(path)

    def read(self, place: Sequence[int]) -> Arrays:
        file, start, *rest = place
        name = "" if self._labels is None else str(rest.pop())
        try:
            path = self._paths[file]
            if rest:
                return self._arrays(*self._divide(path, self._bytes(path).at(start, rest[0])), name)
            return self._arrays(*_divide_row(self._tables(path).rows(start, start + 1)[0]), name)
        except (UnusableEntry, IndexError) as error:
            what = f"no spectrum at {list(place)}: {error}"
            raise DataError(what, where=str(self.path), remedy=SCAN_AGAIN) from error

    def _columns(self) -> list[Column]:
        """Return the datasets of an HDF5 file, by the headers that MGF has for them."""
        return [
            Column("spectrum", ("spectrum",), "write m/z and intensity as 'spectrum' [N, 2, P], padded with zeros"),
            Column("PEPMASS", ("precursor_mz",), "write the precursors' m/z as 'precursor_mz' [N]"),
            Column("CHARGE", ("charge",)),
            Column("RTINSECONDS", ("RT",)),
            *(
                # a column of runs, such as GeMS' `name`, is not that of ids
                column_of(
                    option, getattr(self, option), *(n for n in names if n != self.run), meaning=self._keys[option]
                )
                for option, (_, names) in KEYS.items()
            ),
            *(column_of("target", name, meaning=name.upper()) for name in self._own_targets),
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
        check_option("quality", self.quality, FORMAT_A, fits=self.quality in ("", FORMAT_A))
        if self.murcko:
            refuse_without_rdkit()

    def _in_text(self, path: Path) -> Iterator[FoundSpectrum | Rejection]:
        form, count, seen = FORMS[_suffix(path)], 0, dict[str, None]()
        missing = self._wanted
        for block in form.blocks(path):
            origin = f"{path.name}:{block.line}"
            if block.is_between:
                yield Rejection(f"{path.name}-line-{block.line}", Reason.BAD_ENTRY, block.problem, origin)
                continue
            peak_P2: NDArray[Any] | UnusableEntry
            try:
                if block.problem:
                    raise UnusableEntry(block.problem)
                headers, peak_P2 = self._divide(path, block.body)
            except UnusableEntry as error:
                headers, peak_P2 = form.headers(block.body), error
            name = entry_id(self._name(headers, path), path, count)
            yield FoundSpectrum(name, [block.offset, len(block.body)], block.line, headers, peak_P2)
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

    def _in_hdf5(self, path: Path) -> Iterator[FoundSpectrum]:
        with _table(path, self._columns()) as table:
            for at, row in table.all_rows():
                headers, peak_P2 = _divide_row(row)
                name = entry_id(headers.get(self._keys["id"], ""), path, at)
                yield FoundSpectrum(name, [at], at, headers, peak_P2)

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
        for found in self._in_text(path):
            with suppress(UnusableEntry):  # the scan has rejected it
                if isinstance(found, FoundSpectrum) and not isinstance(found.peak_P2, UnusableEntry):
                    number = charge(found.headers.get("CHARGE", ""))
                    yield found.name, shared_headers(found.headers, path.name, number)

    def _hdf5_headers(self, path: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
        with hdf5.Hdf5Table(path) as table:
            table.add_all()
            table.columns = {name: column for name, column in table.columns.items() if column.ndim == 1}
            ids = [name for name in ((self.id,) if self.id else KEYS["id"][1]) if name in table.columns]
            for at, row in table.all_rows():
                headers = {name: hdf5.cell_text(row, name) for name in row}
                yield entry_id(headers[ids[0]] if ids else "", path, at), headers

    def _arrays(self, headers: Mapping[str, str], peak_P2: NDArray[Any] | UnusableEntry, name: str) -> Arrays:
        """Return the arrays of an entry, the same from every kind of file; by its name labels of a table are found."""
        if isinstance(peak_P2, UnusableEntry):
            raise peak_P2
        mz_P, intensity_P = self._peaks(*peak_P2.T)
        precursor_mz = bounded_number(precursor_text(headers), "the precursor's m/z", SMALLEST)
        number = charge(headers.get("CHARGE", ""))
        if self.quality:
            refuse_below_format_a(peak_P2, precursor_mz, number)
        arrays: dict[str, NDArray[Any]] = {
            "peaks.mz": mz_P,
            "peaks.intensity": intensity_P,
            "precursor_mz": np.array(precursor_mz, np.float32),
            "charge": np.array(number, np.int64),
        }
        own = [label_number(headers.get(target.upper(), ""), target) for target in self._own_targets]
        if self.target:
            arrays["target"] = np.array(own if self._labels is None else self._labels.of(name), np.float32)
        if peptide := headers.get(self._keys["peptide"], ""):
            try:
                arrays["peptide.residue"] = peptides.residue_codes(peptide)
            except ValueError as error:
                raise UnusableEntry(f"peptide {printable_text(peptide)}: {error}") from error
        if self.retention:
            arrays["retention_s"] = np.array(retention_s(headers), np.float32)
        if self.run:
            arrays["run"] = np.array(xxhash.xxh3_64_intdigest(headers.get(self._keys["run"], "").encode()) >> 1)
        if self.molecule:
            arrays["molecule"] = molecule_number(headers.get(self._keys["molecule"], ""))
        return arrays

    def _peaks(self, mz_P: NDArray[Any], intensity_P: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the peaks to keep, in order of m/z."""
        if not len(mz_P):
            raise UnusableEntry("no peaks")
        if len(mz_P) > self.most_peaks:
            raise UnusableEntry(f"{len(mz_P):,} peaks, most_peaks allows {self.most_peaks:,}: not centroided?")
        _check(mz_P, SMALLEST, "m/z")
        _check(intensity_P, 0.0, "intensity")
        if not (largest := float(intensity_P.max())):
            raise UnusableEntry("no peaks: every intensity is 0")
        mz_P, relative_P = mz_P.astype(np.float32), np.asarray(intensity_P.astype(np.float64) / largest, np.float32)
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


def _divide_row(row: Mapping[str, Any]) -> tuple[dict[str, str], NDArray[Any]]:
    """Return headers and peaks of a row of HDF5."""
    peak_2P = row["spectrum"]
    headers = {key: hdf5.cell_text(row, key) for key in row if key != "spectrum"}
    return headers, peak_2P.compress(peak_2P.any(axis=0), axis=1).T  # without padding


def _check(value_P: NDArray[Any], least: float, name: str) -> None:
    """Raise for the first peak whose value is out of bounds; NaN is."""
    if not (value_P.min() >= least and value_P.max() <= LARGEST):
        first = int(np.argmin((value_P >= least) & (value_P <= LARGEST)))
        raise UnusableEntry(f"the {name} of peak {first + 1} is {value_P[first]:g}")
