"""Targets of the made pockets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.tasks.rna.made import DIM, SMALL, by_key


@pytest.fixture
def targets():
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=DIM).astype(np.float32) for name in ("1aaa_ARG", "2bbb_FMN")}


@pytest.fixture
def learned(tmp_path, targets):
    """The task in small, with a file of targets."""
    return replace(SMALL, targets=by_key(tmp_path / "targets.h5", targets))
