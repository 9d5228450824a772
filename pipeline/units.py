"""Formats sizes, durations, lists and foreign text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LEAST_HOURS = 0.01
SHOWN_LENGTH = 80  # most characters of a foreign text
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(count: float, *, above: float = -1) -> str:
    """Format bytes: 512 B, 1.5 KiB, 340 MiB, 23.5 GiB.

    The text differs from that of the smaller count `above`.
    """
    if above >= 0 and format_bytes(above) == format_bytes(count):
        return f"{count:,.0f} B (above {above:,.0f} B)"
    for unit in _UNITS:
        if abs(count) < 1024 or unit == _UNITS[-1]:
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """Format a duration: 4.2 s, 3 min 07 s, 2 h 15 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"


def short_bytes(count: float) -> str:
    """Format bytes for a table: 512B, 1.5K, 340M, 23.5G."""
    value, unit = format_bytes(count).split()
    return value + unit[0]


def short_seconds(seconds: float) -> str:
    """Format a duration for a table: 4.2s, 51s, 3m 07s, 12m, 2h, 2h 15m."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m" if whole >= 600 or not whole % 60 else f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m".removesuffix(" 00m")


def hours_text(count: float) -> str:
    """Format hours."""
    return f"{count:,.2f}" if count >= LEAST_HOURS else f"<{LEAST_HOURS}"


def printable_text(text: str) -> str:
    """Make untrusted text printable: clip it and escape control characters."""
    cut = text if len(text) <= SHOWN_LENGTH else text[: SHOWN_LENGTH - 1] + "…"
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in cut)


def first_few(names: Iterable[str], most: int = 12) -> str:
    """Format the first few names and the number of the others."""
    known = list(names)
    return ", ".join(known[:most]) + (f" and {len(known) - most:,} more" if len(known) > most else "")
