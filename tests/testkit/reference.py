"""Reference data of the project, in tests/reference: its absence is a failure, never a skip."""

from __future__ import annotations

from pathlib import Path

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
STRUCTURES = REFERENCE / "structures"
