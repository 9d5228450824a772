"""CLIP's byte pairs: text becomes the numbers of tokens, by a file of merges as openai or Hugging Face publish it.

Without a file each byte is a token. Numbers: 256 bytes, the same at the end of a word, the merges, start, end.
"""

from __future__ import annotations

import gzip
import html
import re
import unicodedata
import zlib
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pipeline.command_line import install_extra
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOST_MERGES = 49152 - 256 - 2  # openai's file has more, which are not used
MOST_BYTES = 64 << 20  # of a file, unpacked; openai's has 3 MB
GZIP = b"\x1f\x8b"
SUFFIXES = re.compile("'(?:s|t|re|ve|m|ll|d)")
KEPT_WORDS = 1 << 16
CONTEXT = 77


class TooLong(Exception):
    """A text has more tokens than there may be."""


@dataclass(frozen=True)
class BytePairs:
    """The merges, those first that are done first: two tokens, and the one that they become."""

    merges: tuple[tuple[int, int, int], ...] = ()
    _rank: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rank", {(left, right): rank for rank, (left, right, _) in enumerate(self.merges)})
        object.__setattr__(self, "word", lru_cache(KEPT_WORDS)(self._word))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the words that were kept."""
        return BytePairs, (self.merges,)

    @classmethod
    def read(cls, path: Path | None, *, where: str) -> BytePairs:
        """Read a file of merges; `where` names the setting that an error is about."""
        if path is None:
            return cls()
        remedy = f"--set {where}=FILE, openai's bpe_simple_vocab_16e6.txt.gz or merges.txt of a model's folder"
        try:
            with path.open("rb") as file, gzip.open(file) if file.peek(2).startswith(GZIP) else file as merges:
                content = merges.read(MOST_BYTES + 1)
            if len(content) > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
            return cls(_merges(content.decode()))
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{path} cannot be read: {error}", where=where, remedy=remedy) from error
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{path} is not a merges file: {error}", where=where, remedy=remedy) from error

    @property
    def start(self) -> int:
        """The token before every text; that after it is the next number."""
        return 512 + len(self.merges)

    def encoded(self, text: str, most: int = CONTEXT, *, cut: bool = False) -> list[int]:
        """Return the tokens of a text between start and end; a longer one is cut before its end, or raises TooLong."""
        tokens = [token for word in words(mended(text)) for token in self.word(word)]  # type: ignore[attr-defined]
        if len(tokens) + 2 > most and not cut:
            raise TooLong(f"{len(tokens) + 2} tokens, start and end included, and {most} are allowed: {text[:60]!r}")
        return [self.start, *tokens[: most - 2], self.start + 1]

    def _word(self, word: str) -> tuple[int, ...]:
        """Return the tokens of a word: again and again, the pair that is earliest among the merges is merged."""
        tokens = [_BYTE[byte] for byte in word.encode()]
        tokens[-1] += 256
        while len(tokens) > 1:
            rank, pair = min((self._rank.get(pair, len(self.merges)), pair) for pair in pairwise(tokens))
            if rank == len(self.merges):
                break
            tokens = _merged(tokens, pair, self.merges[rank][2])
        return tuple(tokens)


def _merged(tokens: list[int], pair: tuple[int, int], token: int) -> list[int]:
    """Return tokens with a pair replaced wherever it is."""
    merged: list[int] = []
    for right in tokens:
        if merged and (merged[-1], right) == pair:
            merged[-1] = token
        else:
            merged.append(right)
    return merged


def _merges(text: str) -> tuple[tuple[int, int, int], ...]:
    """Return the merges of a file, whose first line is no merge; of two that make the same, the last has the number."""
    number = {character + end: _BYTE[byte] + shift for byte, character in _SHOWN.items() for end, shift in _ENDS}
    lines = [line.split() for line in text.split("\n")[1 : 1 + MOST_MERGES] if line.strip()]
    number |= {left + right: 512 + place for place, (left, right) in enumerate(lines)}
    return tuple((number[left], number[right], number[left + right]) for left, right in lines)


def mended(text: str) -> str:
    """Return a text as CLIP reads it: broken characters mended, entities undone, spaces joined, in small letters."""
    text = _mender().fix_text(text)
    return " ".join(html.unescape(html.unescape(text)).split()).lower()


@lru_cache(1)
def _mender() -> Any:
    try:
        import ftfy
    except ImportError as error:
        raise ConfigError(
            "text cleaning needs ftfy, which is not installed",
            where="data.reader",
            remedy=install_extra("images"),
        ) from error
    return ftfy


def words(text: str) -> Iterator[str]:
    """Yield the words of a text: runs of letters, single digits, runs of other characters, and endings such as 's."""
    at = 0
    while at < len(text):
        if ending := SUFFIXES.match(text, at):
            stop = ending.end()
        else:
            kind, stop = _kind(text[at]), at + 1
            while kind in "LO" and stop < len(text) and _kind(text[stop]) == kind:
                stop += 1
            if kind == " ":
                at = stop
                continue
        yield text[at:stop]
        at = stop


def _kind(character: str) -> str:
    """Return L for a letter, N for a number, a space, or O."""
    kind = unicodedata.category(character)[0]
    return kind if kind in "LN" else " " if character.isspace() else "O"


def _bytes_shown() -> dict[int, str]:
    """Return the character that stands for each byte in a file of merges, in the order of their tokens."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + place) for place, byte in enumerate(others)}


_SHOWN = _bytes_shown()
_BYTE = {byte: place for place, byte in enumerate(_SHOWN)}
_ENDS = (("", 0), ("</w>", 256))
