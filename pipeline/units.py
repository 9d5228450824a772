"""Sizes as people read them: the one formatter of bytes."""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(count: float) -> str:
    """Return bytes in the unit that suits them: 512 B, 1.5 KiB, 340 MiB, 23.52 GiB."""
    unit = _UNITS[0]
    for unit in _UNITS:
        if abs(count) < 1024 or unit == _UNITS[-1]:
            break
        count /= 1024
    if unit == "B" or (unit in ("KiB", "MiB") and abs(count) >= 100):
        return f"{count:.0f} {unit}"
    return f"{count:.1f} {unit}" if unit in ("KiB", "MiB") else f"{count:.2f} {unit}"
