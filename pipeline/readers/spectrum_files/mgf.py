"""Spectra as Mascot generic format: text between BEGIN IONS and END IONS, headers `KEY=value`, then a line a peak.

A peak is m/z and intensity, perhaps a charge, which is not kept. Lines that start with `#;!/` are comments. `KEY=value`
outside of spectra, meant for all of them, is ignored. Shapes: P peaks; 2 is m/z and intensity.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.errors import DataError
from pipeline.readers.entry import UnusableEntry, cannot_read, opened, parse_number
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

BEGIN, END = b"\nBEGIN IONS", b"\nEND IONS"
CHUNK_BYTES = 1 << 20
MOST_BYTES = 4 << 20  # of a spectrum; what has no end within them is given up
MOST_NAMES = 100  # of headers that an error tells
COMMENTS = ("#", ";", "!", "/")
FRAGMENT_CHARGE = re.compile(r"\d{1,3}[+-]?")
PRECURSOR_CHARGE = re.compile(r"([+-]?)(\d{1,3})([+-]?)")


class MgfBlock(NamedTuple):
    """The text after a BEGIN IONS up to the next, or before the first one."""

    offset: int
    line: int
    text: bytes
    end: int  # of the spectrum in the text; -1 where none begins, all of it where none ends

    def spectrum(self) -> bytes:
        """Return the text between BEGIN IONS and END IONS."""
        if self.end == len(self.text):
            raise UnusableEntry("no END IONS before the next spectrum or the end of the file: truncated?")
        return self.text[: self.end]


class TextBlock(NamedTuple):
    """The text of one spectrum, or what came of it."""

    offset: int
    line: int
    text: bytes
    problem: str = ""

    @property
    def end(self) -> int:
        return len(self.text)

    def spectrum(self) -> bytes:
        """Return the text, if it is whole."""
        if self.problem:
            raise UnusableEntry(self.problem)
        return self.text


class Sought:
    """The headers that options name, to check that each occurs in some spectrum of the file."""

    def __init__(self, headers: Sequence[tuple[str, str]]) -> None:
        self._missing = list(headers)  # options and headers
        self._there: dict[str, None] = {}

    def take(self, headers: Mapping[str, str]) -> None:
        """Note the headers of a spectrum."""
        if self._missing:
            self._missing = [(option, key) for option, key in self._missing if key not in headers]
            self._there.update(dict.fromkeys(islice(headers, max(MOST_NAMES - len(self._there), 0))))

    def take_unreadable(self, body: bytes, value_of: Callable[[bytes, str], str]) -> None:
        """Note the headers of a spectrum that cannot be read."""
        self.take({key: value for _, key in self._missing if (value := value_of(body, key))})

    def check(self, path: Path) -> None:
        """Raise, after all spectra were read, if a header occurred in none."""
        for option, key in self._missing:
            there = ", ".join(map(printable_text, self._there)) or "none"
            remedy = f"data.options.{option} must name one of these, or be omitted"
            raise DataError(f"no spectrum has the header {key!r}; there are: {there}", where=str(path), remedy=remedy)


def blocks(path: Path) -> Iterator[MgfBlock]:
    """Yield a file in blocks, none longer than `MOST_BYTES` and a chunk."""
    rest, offset, line, begun = b"\n", -1, 0, False  # as if an empty line stood before the file
    try:
        with opened(path) as file:
            while chunk := file.read(CHUNK_BYTES):
                *whole, rest = (rest + chunk).split(BEGIN)
                for text in whole:
                    yield _block(offset, line, text, begun=begun)
                    offset, line, begun = offset + len(text) + len(BEGIN), line + text.count(b"\n") + 1, True
                if len(rest) > MOST_BYTES:
                    text, rest = rest[: -len(BEGIN)], rest[-len(BEGIN) :]
                    yield _block(offset, line, text, begun=begun)
                    offset, line, begun = offset + len(text), line + text.count(b"\n"), False
    except OSError as error:
        raise cannot_read(path, error) from error
    yield _block(offset, line, rest, begun=begun)


def stray(block: MgfBlock) -> UnusableEntry | None:
    """Return the error for the first line of a block that is outside of spectra and no header or comment."""
    start = 0 if block.end < 0 else block.end + len(END)
    text = block.text[start:]
    if not text.strip():
        return None
    for at, line in enumerate(bare_lines(text), block.text.count(b"\n", 0, start)):
        if line and "=" not in line and not line.startswith(COMMENTS):
            return UnusableEntry(f"outside of BEGIN IONS … END IONS: {printable_text(line)!r}", at)
    return None


def divide(body: bytes) -> tuple[dict[str, str], NDArray[np.float64]]:
    """Return the headers and the peaks [P, 2] of the text between BEGIN IONS and END IONS."""
    end = body.find(b"\n", body.rfind(b"=") + 1)
    head, peaks = (body, b"") if end < 0 else (body[:end], body[end + 1 :] + b"\n")
    headers = _headers(head)
    peak_P2 = None if headers is None else _peaks(peaks)
    return _line_by_line(body) if headers is None or peak_P2 is None else (headers, peak_P2)


def header_value(body: bytes, key: str) -> str:
    """Return the value of a header in a spectrum that cannot be read; empty if absent."""
    return next((header[1] for line in bare_lines(body) if (header := _header(line)) and header[0] == key), "")


def charge(text: str) -> int:
    """Return the charge in a header; 0 for none or several."""
    if not text or " and " in text or "," in text:
        return 0
    match = PRECURSOR_CHARGE.fullmatch(text)
    if match is None:
        raise UnusableEntry(f"invalid charge: {printable_text(text)!r}")
    return -int(match[2]) if "-" in (match[1], match[3]) else int(match[2])


def _block(offset: int, line: int, text: bytes, *, begun: bool) -> MgfBlock:
    end = text.find(END) if begun else -1
    return MgfBlock(offset, line, text, len(text) if begun and end < 0 else end)


def bare_lines(text: bytes) -> list[str]:
    """Return the lines of a text without white space around them."""
    return [line.strip() for line in text.decode("utf-8", "replace").split("\n")]


def _header(line: str) -> tuple[str, str] | None:
    """Return key and value of a header line; None for other lines."""
    key, equals, value = line.partition("=")
    return (key.rstrip().upper(), value.lstrip()) if equals and key[:1].isalpha() else None


def _headers(text: bytes) -> dict[str, str] | None:
    """Return the headers of a text; None if another line is among them."""
    headers = [_header(line) for line in bare_lines(text) if line]
    return None if None in headers else dict(filter(None, headers))


def _peaks(text: bytes) -> NDArray[np.float64] | None:
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


def _line_by_line(body: bytes) -> tuple[dict[str, str], NDArray[np.float64]]:
    """Read a spectrum line by line where the fast way fails; the error names the line that cannot be read."""
    headers: dict[str, str] = {}
    peaks = []
    for at, line in enumerate(bare_lines(body)):
        if not line or line.startswith(COMMENTS):
            continue
        if header := _header(line):
            headers.update([header])
        else:
            peaks.append(_peak(line, at))
    return headers, np.array(peaks, np.float64).reshape(-1, 2)


def _peak(line: str, at: int) -> tuple[float, float]:
    words = line.split()
    try:
        if len(words) == 2 or (len(words) == 3 and FRAGMENT_CHARGE.fullmatch(words[2])):
            return parse_number(words[0]), parse_number(words[1])
    except ValueError:
        pass
    raise UnusableEntry(f"not a peak, m/z and intensity: {printable_text(line)!r}", at)
