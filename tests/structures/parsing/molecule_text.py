"""Small molecules as text, so that a test can put anything wrong: theophylline in SDF (V2000), acetamide in MOL2."""

from __future__ import annotations

from pathlib import Path

THEOPHYLLINE, ACETAMIDE = (
    Path(__file__).with_name(name).read_text() for name in ("theophylline.sdf", "acetamide.mol2")
)
