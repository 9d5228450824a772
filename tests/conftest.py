"""What every test may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "structures"


@pytest.fixture(scope="session")
def shared_structures() -> Path:
    """Return the folder of real structures that stands beside the project."""
    if not SHARED.is_dir():
        pytest.skip("the real structures (../shared/structures) are not beside this checkout")
    return SHARED
