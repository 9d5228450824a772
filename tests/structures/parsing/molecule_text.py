"""Small molecules as text, so that a test can put anything wrong: theophylline in SDF (V2000), acetamide in MOL2."""

from __future__ import annotations

from pathlib import Path

THEOPHYLLINE, ACETAMIDE = (
    Path(__file__).with_name(name).read_text() for name in ("theophylline.sdf", "acetamide.mol2")
)


def moved(block: str, *shift: float) -> str:
    """Return a V2000 block elsewhere."""
    lines = block.split("\n")
    atoms = int(lines[3][:3])
    for at in range(4, 4 + atoms):
        xyz = [float(lines[at][first : first + 10]) + by for first, by in zip((0, 10, 20), shift, strict=True)]
        lines[at] = "".join(f"{one:10.4f}" for one in xyz) + lines[at][30:]
    return "\n".join(lines)
