"""Where the full recordings lie beside the project: slices in tests/reference are theirs, and what was cut holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.training.checkpoints.trained_weights import stored_weights
from tests.reference import checkpoint, docking_complex, recorded, transformers_folder
from tests.tasks.docking.test_score_network import check_features
from tests.tasks.originals import COMPLEXES

FULL = Path(__file__).resolve().parents[3] / "shared" / "originals"
pytestmark = pytest.mark.nightly
STATES = ("clip/state", "dreams/state", "peptrm/state", "rna3effi/state")
STATES += ("diffdock_pp/score_state", "diffdock_pp/confidence_state")
CHECKPOINTS = {
    "diffdock_pp/confidence.pth": "diffdock_pp/confidence.pth",
    "dreams/ssl_model.ckpt": "dreams/ssl_model.ckpt",
    "dreams/embedding_model.ckpt": "dreams/embedding_model.ckpt",
    "rna3effi/best_model.pt": "rna3effi/checkpoint/best_model.pt",
    "clip/openai_half.pt": "clip/checkpoint/openai_half.pt",
}

if FULL.is_dir():

    def differing(found: dict[str, torch.Tensor], full: dict[str, torch.Tensor]) -> list[str]:
        """Return the names of tensors that are not there, or not equal bit for bit."""
        return [name for name, one in full.items() if name not in found or not torch.equal(found[name], one)]

    def test_weights_that_are_drawn_or_assembled_again_are_the_recorded_ones_bit_for_bit() -> None:
        for name in STATES:
            assert differing(recorded(name), load_file(FULL / f"{name}.safetensors")) == [], name
        for name, file in CHECKPOINTS.items():
            ours, theirs = (stored_weights(path).tensors for path in (checkpoint(name), FULL / file))
            assert differing(dict(ours), dict(theirs)) == [], name
        folders = transformers_folder(), FULL / "clip" / "checkpoint" / "transformers"
        ours, theirs = (stored_weights(folder).tensors for folder in folders)
        assert differing(dict(ours), dict(theirs)) == []

    def test_slices_are_parts_of_the_recordings() -> None:
        for system in ("clip", "dreams", "peptrm", "rna3effi"):
            for name in ("inputs", "outputs"):
                full = load_file(FULL / system / f"{name}.safetensors")
                own = {key: one for key, one in recorded(f"{system}/{name}").items() if key in full}
                assert len(own) > 2
                assert differing(full, own) == [], (system, name)
        for name in COMPLEXES:
            full = load_file(FULL / "diffdock_pp" / f"inputs_{name}.safetensors")
            own = {key: one for key, one in docking_complex(name).items() if key in full}
            assert {"receptor.esm", "ligand.esm"} < own.keys()
            assert differing(full, own) == [], name

    @pytest.mark.parametrize("precision", ["f32", "f64"])
    @pytest.mark.parametrize("name", COMPLEXES[1:])
    def test_features_of_the_complexes_that_were_cut_are_the_originals(name: str, precision: str) -> None:
        check_features(name, precision, load_file(FULL / "diffdock_pp" / f"outputs_{name}.safetensors"))
