"""Spectra as MSP (NIST, MassBank, MS-DIAL): headers `KEY: value`, `Num Peaks: n`, then peaks, and an empty line.

A peak is m/z and intensity, then perhaps an annotation, which is not kept; a line may hold several, parted by ";".
It is read here and by no library: a place in the file is what lets spectra be read at random, and a damaged one must
not end the file. Shapes: P peaks; 2 is m/z and intensity.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from pipeline.readers.entry import UnusableEntry, cannot_read, opened, parse_number
from pipeline.readers.spectrum_files.mgf import CHUNK_BYTES, MOST_BYTES, TextBlock, bare_lines
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

GAP = re.compile(rb"\n[ \t\r]*(?=\n)")  # an empty line
COUNT = "NUM PEAKS"
SPELLED = {"NUMPEAKS": COUNT, "NUM_PEAKS": COUNT}


def msp_blocks(path: Path) -> Iterator[TextBlock]:
    """Yield a file in blocks between empty lines, none longer than `MOST_BYTES` and a chunk."""
    rest, offset, line = b"", 0, 1
    try:
        with opened(path) as file:
            while chunk := file.read(CHUNK_BYTES):
                data, start = rest + chunk, 0
                for gap in GAP.finditer(data):
                    yield from _block(offset + start, line, data[start : gap.start()])
                    line += data.count(b"\n", start, gap.end())
                    start = gap.end()
                rest, offset = data[start:], offset + start
                if len(rest) > MOST_BYTES:
                    yield from _block(offset, line, rest)
                    rest, offset, line = b"", offset + len(rest), line + rest.count(b"\n")
    except OSError as error:
        raise cannot_read(path, error) from error
    yield from _block(offset, line, rest)


def _block(offset: int, line: int, text: bytes) -> Iterator[TextBlock]:
    """Yield a block from its first line that is not empty; nothing where none is."""
    bare = text.lstrip()
    if bare:
        before = len(text) - len(bare)
        problem = (
            f"no empty line within {MOST_BYTES >> 20} MiB: one spectrum has no end" if len(bare) > MOST_BYTES else ""
        )
        yield TextBlock(offset + before, line + text.count(b"\n", 0, before), bare, problem)


def divide_msp(body: bytes) -> tuple[dict[str, str], NDArray[np.float64]]:
    """Return the headers and the peaks [P, 2] of a spectrum's text."""
    headers: dict[str, str] = {}
    lines = enumerate(bare_lines(body))
    for at, line in lines:
        header = _header(line)
        if header is None:
            raise UnusableEntry(f"not a header, KEY: value: {printable_text(line)!r}", at)
        headers.update([header])
        if header[0] == COUNT:
            break
    else:
        raise UnusableEntry("no line 'Num Peaks: n': truncated?")
    peaks = [peak for at, line in lines for peak in _peaks(line, at)]
    if headers[COUNT] != str(len(peaks)):
        raise UnusableEntry(f"Num Peaks is {printable_text(headers[COUNT])!r}, found {len(peaks)}: truncated?")
    return headers, np.array(peaks, np.float64).reshape(-1, 2)


def msp_header(body: bytes, key: str) -> str:
    """Return the value of a header in a spectrum that cannot be read; empty if absent."""
    return next((header[1] for line in bare_lines(body) if (header := _header(line)) and header[0] == key), "")


def _header(line: str) -> tuple[str, str] | None:
    key, colon, value = line.partition(":")
    name = key.strip().upper()
    return (SPELLED.get(name, name), value.strip()) if colon and key[:1].isalpha() else None


def _peaks(line: str, at: int) -> Iterator[tuple[float, float]]:
    """Yield the peaks of a line."""
    bare = re.sub(r'"[^"]*"', "", line)
    for part in bare.split(";"):
        words = part.replace(",", " ").replace(":", " ").split()
        if not words:
            continue
        try:
            yield parse_number(words[0]), parse_number(words[1])
        except (ValueError, IndexError):
            raise UnusableEntry(f"not a peak, m/z and intensity: {printable_text(line)!r}", at) from None
