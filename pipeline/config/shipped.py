"""The files that come with the program: in a checkout they lie beside the package, in an installation within it."""

from __future__ import annotations

from pathlib import Path

PACKAGED = Path(__file__).parents[1] / "data"
CHECKOUT = Path(__file__).parents[2]


def shipped(name: str) -> Path:
    """Return a folder that is shipped, such as configs/recipes."""
    return (PACKAGED if PACKAGED.is_dir() else CHECKOUT) / name
