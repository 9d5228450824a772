"""What tests of several tasks begin with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest


@pytest.fixture
def targets():
    from tests.tasks.rna_models import DIM, IDS, RNG

    return {name: RNG.normal(size=DIM).astype(np.float32) for name in IDS}


@pytest.fixture
def learned(tmp_path, targets):
    """The equivariant task in small, with a file of targets."""
    from tests.tasks.rna_items import by_item
    from tests.tasks.rna_models import SMALL

    return replace(SMALL, targets=by_item(tmp_path / "targets.h5", targets))
