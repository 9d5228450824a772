"""What the original was measured to do: its weights, inputs and outputs, and our network with its weights."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.tasks.spectra.peak_transformer import DreamsNames, Peaks, PeakSizes, PeakTransformer

FOLDER = Path(__file__).resolve().parents[4] / "shared" / "originals" / "dreams"
SIZES = PeakSizes(layers=3, heads=4, d_fourier=40, d_peak=8, fourier_width=16, as_published=True, classes=2000)
HEADS = {
    "regression": {"head": "regression"},
    "mol_props": {"head": "regression", "targets": 11},
    "binary": {"head": "binary"},
    "fingerprint": {"head": "fingerprint", "targets": 64, "summed": True},
    "fingerprint_precursor": {"head": "fingerprint", "targets": 64, "head_depth": 2},
    "contrastive": {"head": "embedding", "targets": 48},
}

needs_original = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="what the original made (../shared/originals/dreams) is not beside this checkout"
)


@cache
def stored(name: str) -> dict[str, torch.Tensor]:
    return load_file(FOLDER / f"{name}.safetensors")


@cache
def told(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def published(name: str) -> dict[str, torch.Tensor]:
    """The state of a model as it was published: `ssl`, or a fine-tuned one."""
    state = stored("state")
    ssl = {key.removeprefix("ssl."): tensor for key, tensor in state.items() if key.startswith("ssl.")}
    if name == "ssl":
        return ssl
    head = {key.removeprefix(f"{name}."): tensor for key, tensor in state.items() if key.startswith(f"{name}.")}
    return {f"backbone.{key}": tensor for key, tensor in ssl.items()} | head


def sizes_of(name: str) -> PeakSizes:
    return replace(SIZES, **HEADS.get(name, {}))


@cache
def model_of(name: str = "ssl", dtype: torch.dtype = torch.float32, **others: Any) -> PeakTransformer:
    """Our network with the original's weights."""
    sizes = replace(sizes_of(name), **others)
    model = PeakTransformer(sizes)
    read = DreamsNames(replace(sizes, as_published=True)).read(published(name))
    missing, unexpected = model.load_state_dict(read, strict=False)
    assert not unexpected
    assert name == "ssl" or not missing
    return model.to(dtype).eval()


def peaks_of(spec_BL2: torch.Tensor) -> Peaks:
    mz_BL, intensity_BL = spec_BL2.unbind(-1)
    return Peaks(mz_BL, intensity_BL, mz_BL != 0)


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max())
