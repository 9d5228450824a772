"""What pepTRM itself makes of small inputs (../shared/originals/peptrm), and the same network here with its weights."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.tasks.denovo_recursive import DenovoBatch, DenovoRecursive
from pipeline.tasks.peptides.recursive_network import FORM, SpectrumInput

FOLDER = Path(__file__).resolve().parents[4] / "shared" / "originals" / "peptrm"
TASK = DenovoRecursive(
    width=48, heads=4, encoder_layers=2, decoder_layers=2, latent_steps=2, as_published=True
)  # fmt: skip

needs_original = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="what the original made (../shared/originals/peptrm) is not beside this checkout"
)


@cache
def stored(name):
    return load_file(FOLDER / f"{name}.safetensors")


@cache
def told(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def spectra(of="nine"):
    data = stored("inputs")
    names = ("spectrum_masses", "spectrum_intensities", "spectrum_mask", "precursor_mz", "precursor_charge")
    return SpectrumInput(*(data[f"{of}.{name}"] for name in names))


def batch(of="nine"):
    """The batch that the task would make of these spectra and their peptides."""
    data = stored("inputs")
    letter_BL, is_known_BL = data[f"{of}.sequence"], data[f"{of}.sequence_mask"]
    count = float(len(letter_BL))
    return DenovoBatch(
        spectra=spectra(of),
        mass_B=data[f"{of}.precursor_mass"],
        letter_BL=letter_BL,
        residues_B=is_known_BL.sum(1),
        has_terminal_B=torch.zeros(len(letter_BL), dtype=torch.bool),
        known=(float(is_known_BL.sum()), count, count),
    )


@cache
def network():
    model = TASK.model().eval()
    model.load_state_dict(model.published_forms()[FORM].read(stored("state")))
    return model


def off(found, expected):
    return float((found - expected).abs().max())
