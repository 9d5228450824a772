"""Text files of spectra: a scanner that cuts a file into blocks, the forms MGF and MSP, and what their headers mean.

pipeline reads these files itself: the bytes of a spectrum are its place, so any thread reads any one at random, and a
damaged spectrum does not end the file. Shapes: P peaks; 2 is m/z and intensity.

MGF (Mascot generic format): text between BEGIN IONS and END IONS, headers `KEY=value`, then one line per peak: m/z,
intensity, and sometimes a charge, which is not kept. Lines that start with `#;!/` are comments. `KEY=value` outside of
spectra, meant for all of them, is ignored.

MSP (NIST, MassBank, MS-DIAL): headers `KEY: value`, `Num Peaks: n`, then peaks, and an empty line. A peak is m/z and
intensity, sometimes with an annotation, which is not kept; a line may hold several peaks, separated by ";".

Headers have the names of MGF in every form; those that DreaMS gives to spectra of all files are in `shared_headers`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from pipeline.readers.entry import NOT_KNOWN, UnusableEntry, cannot_read, opened, parse_number
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Divided = tuple[dict[str, str], NDArray[np.float64]]

CHUNK_BYTES = 1 << 20
MOST_BYTES = 4 << 20  # of a spectrum in plain lines; a longer one is given up
OVERLAP = 1 << 10  # bytes that are searched again, since a chunk may end within a match


class Block(NamedTuple):
    """The bytes of one spectrum; or of text between spectra where none may be."""

    offset: int
    line: int
    body: bytes
    problem: str = ""  # why it is not a whole spectrum
    is_between: bool = False


class SpectrumForm(NamedTuple):
    """How one kind of text file is read: in blocks, each by itself."""

    blocks: Callable[[Path], Iterator[Block]]
    divide: Callable[[bytes, Any], Divided]  # headers by their MGF names, and peaks [P, 2]
    header: Callable[[str], tuple[str, str] | None]  # key and value of a line; None for other lines
    none: str  # what to say of a file without spectra
    shared: Callable[[Path], Any] = lambda _path: None  # what its spectra refer to, for `divide`

    def headers(self, body: bytes) -> dict[str, str]:
        """Return the headers of a spectrum that cannot be read."""
        return dict(filter(None, map(self.header, reversed(bare_lines(body)))))  # the first of a key


class Piece(NamedTuple):
    """The bytes of a file from one match of a pattern to the next."""

    offset: int
    line: int
    text: bytes
    is_cut: bool = False  # because it is too long


def pieces(path: Path, start: re.Pattern[bytes], most_bytes: int) -> Iterator[Piece]:
    """Yield a file, as if after an empty line, in pieces that begin with `start`, except perhaps the first one."""
    rest, offset, line, searched = b"\n", -1, 0, 0
    try:
        with opened(path) as file:
            while chunk := file.read(CHUNK_BYTES):
                rest += chunk
                cuts = [0, *(found.start() for found in start.finditer(rest, searched) if found.start())]
                if is_cut := len(rest) - cuts[-1] > most_bytes:
                    cuts.append(len(rest) - OVERLAP)
                for begin, end in pairwise(cuts):
                    yield Piece(offset + begin, line, rest[begin:end], is_cut and end == cuts[-1])
                    line += rest.count(b"\n", begin, end)
                rest, offset = rest[cuts[-1] :], offset + cuts[-1]
                searched = max(0, len(rest) - OVERLAP)
    except OSError as error:
        raise cannot_read(path, error) from error
    yield Piece(offset, line, rest)


def bare_lines(text: bytes) -> list[str]:
    """Return the lines of a text without white space around them."""
    return [line.strip() for line in text.decode("utf-8", "replace").split("\n")]


def _not_a_peak(line: str, at: int) -> UnusableEntry:
    return UnusableEntry(f"not a peak, m/z and intensity: {printable_text(line)!r}", at)


# MGF

BEGIN, END = b"\nBEGIN IONS", b"\nEND IONS"
BEGIN_PATTERN = re.compile(BEGIN)
COMMENTS = ("#", ";", "!", "/")
FRAGMENT_CHARGE = re.compile(r"\d{1,3}[+-]?")
PRECURSOR_CHARGE = re.compile(r"([+-]?)(\d{1,3})([+-]?)")


def mgf_blocks(path: Path) -> Iterator[Block]:
    """Yield the text between BEGIN IONS and END IONS, and lines between spectra that are no headers or comments."""
    for offset, line, text, _ in pieces(path, BEGIN_PATTERN, MOST_BYTES):
        after = 0
        if text.startswith(BEGIN):
            end = text.find(END)
            problem = "" if end >= 0 else "no END IONS before the next spectrum or the end of the file: truncated?"
            body = text[len(BEGIN) : end if end >= 0 else None]
            yield Block(offset + len(BEGIN), line + 1, body, problem)
            after = end + len(END) if end >= 0 else len(text)
        if text[after:].strip():
            yield from _stray_line(text[after:], line + text.count(b"\n", 0, after))


def _stray_line(text: bytes, line: int) -> Iterator[Block]:
    """Yield the first line between spectra that is no header or comment."""
    for number, stray in enumerate(bare_lines(text), line):
        if stray and "=" not in stray and not stray.startswith(COMMENTS):
            problem = f"outside of BEGIN IONS … END IONS: {printable_text(stray)!r}"
            yield Block(0, number, b"", problem, is_between=True)
            return


def divide_mgf(body: bytes, _shared: None = None) -> Divided:
    """Return the headers and the peaks [P, 2] of the text between BEGIN IONS and END IONS."""
    end = body.find(b"\n", body.rfind(b"=") + 1)
    head, peaks = (body, b"") if end < 0 else (body[:end], body[end + 1 :] + b"\n")
    headers = [_mgf_pair(line) for line in bare_lines(head) if line]
    peak_P2 = None if None in headers else _number_pairs(peaks)
    return _line_by_line(body) if peak_P2 is None else (dict(filter(None, headers)), peak_P2)


def charge(text: str) -> int:
    """Return the charge in a header; 0 for none or several."""
    if not text or " and " in text or "," in text:
        return 0
    match = PRECURSOR_CHARGE.fullmatch(text)
    if match is None:
        raise UnusableEntry(f"invalid charge: {printable_text(text)!r}")
    return -int(match[2]) if "-" in (match[1], match[3]) else int(match[2])


def _mgf_pair(line: str) -> tuple[str, str] | None:
    """Return key and value of a header line; None for other lines."""
    key, equals, value = line.partition("=")
    return (key.rstrip().upper(), value.lstrip()) if equals and key[:1].isalpha() else None


def _number_pairs(text: bytes) -> NDArray[np.float64] | None:
    """Return the peaks of lines of two numbers each; None if any line is something else.

    Line ends are read as NaN, so that one call reads all numbers: each third must be one. NaN in the file shifts that,
    or gives a NaN peak, which is refused later.
    """
    if not text or text.isspace():
        return np.empty((0, 2))
    try:
        numbers = np.fromstring(text.replace(b"\n", b" nan "), sep=" ")
    except ValueError:
        return None
    if len(numbers) != 3 * text.count(b"\n"):
        return None
    row_P3 = numbers.reshape(-1, 3)
    return row_P3[:, :2] if np.isnan(row_P3[:, 2]).all() else None


def _line_by_line(body: bytes) -> Divided:
    """Read a spectrum line by line where the fast way fails; the error names the line that cannot be read."""
    headers: dict[str, str] = {}
    peaks = []
    for at, line in enumerate(bare_lines(body)):
        if not line or line.startswith(COMMENTS):
            continue
        if header := _mgf_pair(line):
            headers.update([header])
            continue
        words = line.split()
        try:
            if not (len(words) == 2 or (len(words) == 3 and FRAGMENT_CHARGE.fullmatch(words[2]))):
                raise _not_a_peak(line, at)
            peaks.append((parse_number(words[0]), parse_number(words[1])))
        except ValueError:
            raise _not_a_peak(line, at) from None
    return headers, np.array(peaks, np.float64).reshape(-1, 2)


# MSP

EMPTY_LINE = re.compile(rb"\n[ \t\r]*(?=\n)")
COUNT = "NUM PEAKS"
SPELLED = {"NUMPEAKS": COUNT, "NUM_PEAKS": COUNT}


def msp_blocks(path: Path) -> Iterator[Block]:
    """Yield the text between empty lines."""
    for offset, line, text, is_cut in pieces(path, EMPTY_LINE, MOST_BYTES):
        if body := text.strip():
            before = text.find(body)
            problem = f"no empty line within {MOST_BYTES >> 20} MiB: one spectrum has no end" if is_cut else ""
            yield Block(offset + before, line + text.count(b"\n", 0, before), body, problem)


def divide_msp(body: bytes, _shared: None = None) -> Divided:
    """Return the headers and the peaks [P, 2] of a spectrum's text."""
    headers: dict[str, str] = {}
    lines = enumerate(bare_lines(body))
    for at, line in lines:
        header = _msp_pair(line)
        if header is None:
            raise UnusableEntry(f"not a header, KEY: value: {printable_text(line)!r}", at)
        headers.update([header])
        if header[0] == COUNT:
            break
    else:
        raise UnusableEntry("no line 'Num Peaks: n': truncated?")
    peaks = [peak for at, line in lines for peak in _msp_peaks(line, at)]
    if headers[COUNT] != str(len(peaks)):
        raise UnusableEntry(f"Num Peaks is {printable_text(headers[COUNT])!r}, found {len(peaks)}: truncated?")
    return headers, np.array(peaks, np.float64).reshape(-1, 2)


def _msp_pair(line: str) -> tuple[str, str] | None:
    key, colon, value = line.partition(":")
    name = key.strip().upper()
    return (SPELLED.get(name, name), value.strip()) if colon and key[:1].isalpha() else None


def _msp_peaks(line: str, at: int) -> Iterator[tuple[float, float]]:
    for part in re.sub(r'"[^"]*"', "", line).split(";"):
        if words := part.replace(",", " ").replace(":", " ").split():
            try:
                yield parse_number(words[0]), parse_number(words[1])
            except (ValueError, IndexError):
                raise _not_a_peak(line, at) from None


MGF = SpectrumForm(mgf_blocks, divide_mgf, _mgf_pair, "no spectra found (no BEGIN IONS line)")
MSP = SpectrumForm(msp_blocks, divide_msp, _msp_pair, "no spectra found (no headers and peaks)")


# Headers, by the names that MGF has for them

PRECURSORS = ("PEPMASS", "PRECURSOR_MZ", "PRECURSORMZ")
SECONDS = ("RTINSECONDS", "RETENTION_TIME", "RT")
MINUTES = ("RTINMINUTES", "RETENTIONTIME")  # the second is of MSP
UNITS = {"": 0.0, "s": 1.0, "sec": 1.0, "seconds": 1.0, "min": 60.0, "minutes": 60.0}
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
    written = next((headers[key] for key in PRECURSORS if key in headers), "")
    return (written.split() or [""])[0]


def retention_s(headers: Mapping[str, str]) -> float:
    """Return the retention time in seconds, NaN if it is unknown; a unit in the value overrides that of the key."""
    for keys, unit in ((SECONDS, 1.0), (MINUTES, 60.0)):
        for text in (headers[key].strip().lower() for key in keys if key in headers):
            if text in NOT_KNOWN:
                continue
            number = text.rstrip(f" {ascii_lowercase}")
            try:
                return parse_number(number) * (UNITS[text[len(number) :].strip()] or unit)
            except (ValueError, KeyError):
                raise UnusableEntry(f"invalid retention time: {printable_text(text)!r}") from None
    return math.nan


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
    shared = {SHARED.get(key, key): value for key, value in headers.items() if key not in skipped}
    shared["precursor_mz"] = precursor_text(headers)
    shared["charge"] = str(charge)
    if not math.isnan(time := retention_s(headers)):
        shared["RT"] = f"{time:.10g}"
    if mode := headers.get("IONMODE", "").strip().lower():
        shared["ionmode"] = "-" if mode.startswith(("n", "-")) else "+"
    return shared | {"file_name": file_name}


FORMAT_A = "A"  # the quality that DreaMS calls so


def refuse_below_format_a(peak_P2: NDArray[Any], precursor_mz: float, charge: int) -> None:
    """Refuse a spectrum that DreaMS' data, format A, would leave out; a charge of 0 is not known, and passes."""
    mz_P, intensity_P = peak_P2[peak_P2[:, 1] > 0].T
    highest, high = intensity_P.max(), int((intensity_P > 0.1 * intensity_P.max()).sum())
    for problem, is_so in (
        (f"the precursor's m/z is {precursor_mz:g}, above 1000", precursor_mz > 1000),
        (f"the charge is {charge}, above 1", abs(charge) > 1),
        (f"{len(mz_P)} peaks, not 3 to 128", not 3 <= len(mz_P) <= 128),
        (f"a peak at m/z {mz_P.max():g}, above 1000", mz_P.max() > 1000),
        ("the highest peak is not 20 times as high as the lowest", highest < 20 * intensity_P.min()),
        (f"{high} peaks above 0.1 of the highest, fewer than 3", high < 3),
    ):
        if is_so:
            raise UnusableEntry(f"quality A: {problem}")
