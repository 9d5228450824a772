"""Lines of text files that people made: UTF-8, perhaps gzipped, in bounded memory whatever the file holds."""

from __future__ import annotations

import codecs
import gzip
import zlib
from shlex import quote
from typing import TYPE_CHECKING

from pipeline.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Generator
    from io import BufferedReader
    from pathlib import Path

    Stream = gzip.GzipFile | BufferedReader

MAX_LINE_BYTES = 4 << 20
# Text seldom shrinks more than 30 times; far beyond that a small file is there to fill the disk or the day.
MAX_EXPANSION = 200
EXPANSION_FLOOR_BYTES = 64 << 20
GZIP_MAGIC = b"\x1f\x8b"


def text_lines(path: Path) -> Generator[str, None, None]:
    """Yield the lines of a file with their ends, without a byte order mark."""
    offset = 0
    with _opened(path) as stream:
        allowed_bytes = EXPANSION_FLOOR_BYTES + MAX_EXPANSION * path.stat().st_size
        while line := _next_line(stream, path):
            text = _decoded(line, offset, path)
            if offset == 0:
                text = _checked_start(text, path)
            offset += len(line)
            if offset > allowed_bytes:
                raise _refused(
                    path, f"unfolds to more than {MAX_EXPANSION} times its size", f"gzip -l {quote(str(path))}"
                )
            yield text
    if offset == 0:
        raise _refused(path, "the file is empty", f"ls -l {quote(str(path))}")


def _opened(path: Path) -> Stream:
    """Open a file for reading, or say what the configuration should name instead."""
    try:
        return gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    except FileNotFoundError:
        what, remedy = "no such file", "pipeline config show   (says where this path comes from)"
    except IsADirectoryError:
        what, remedy = (
            "a folder, where a file is wanted",
            f"ls {quote(str(path))}   (then set data.path to one of these)",
        )
    except OSError as error:
        what, remedy = f"cannot be opened: {error.strerror or error}", f"ls -l {quote(str(path))}"
    raise ConfigError(what, where=str(path), remedy=remedy)


def _next_line(stream: Stream, path: Path) -> bytes:
    try:
        line = stream.readline(MAX_LINE_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _refused(path, f"not a whole gzip file: {error}", f"gzip -t {quote(str(path))}") from error
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror or error}", f"ls -l {quote(str(path))}") from error
    if len(line) > MAX_LINE_BYTES:
        raise _refused(path, f"a line is longer than {MAX_LINE_BYTES >> 20} MiB", f"file {quote(str(path))}")
    return line


def _decoded(line: bytes, offset: int, path: Path) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        if offset == 0 and line.startswith(GZIP_MAGIC):
            name = quote(str(path))
            raise _refused(path, "gzip data without the suffix .gz", f"mv {name} {name}.gz") from error
        what = f"not UTF-8 text: byte {offset + error.start} is 0x{line[error.start]:02x}"
        raise _refused(path, what, f"iconv -f latin1 -t utf-8 {quote(str(path))} > utf8{path.suffix}") from error


def _checked_start(text: str, path: Path) -> str:
    """Take the byte order mark off the first line, and refuse line ends that would make the file one line."""
    if "\r" in text.rstrip("\r\n"):
        name = quote(str(path))
        raise _refused(path, "lines end with a bare carriage return", f"tr '\\r' '\\n' < {name} > unix{path.suffix}")
    return text.removeprefix(codecs.BOM_UTF8.decode())


def _refused(path: Path, what: str, remedy: str) -> DataError:
    return DataError(what, where=str(path), remedy=remedy)
