"""What tests of the encoder may ask for."""

from __future__ import annotations

import pytest
import torch

from pipeline.encoder.synth import write_random_checkpoint


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tests share the machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Return a synthetic checkpoint: 3 layers of width 32 with 4 heads. Read it, leave it as it is."""
    path = tmp_path_factory.mktemp("weights") / "esm2_t3_tiny.pt"
    write_random_checkpoint(path, layers=3, dim=32, heads=4, seed=1)
    return path
