"""What the original made, read from beside the project: pockets, weights of nine networks, and what they gave."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.tasks.rna.pocket_network import KINDS, Entries, PocketBatch, PocketNetwork, PocketSizes
from pipeline.tasks.rna.published_form import RnaForm

FOLDER = Path(__file__).resolve().parents[4] / "shared" / "originals" / "rna3effi"
FILES = FOLDER / "files"
POCKETS = ("9aaa_ARG_model0", "9aab_FMN_model0", "9aac_GTP_model1")
VARIANTS = (
    "best", "basic_layers", "weighted", "no_nonbonded", "no_multi_hop", "plain_invariants", "rms", "no_gate", "v2",
)  # fmt: skip
THEIRS = {"bonds": "edge", "angles": "triple", "dihedrals": "quadra", "near": "nonbonded_edge"}
OURS = {
    "feature_hidden_dim": "feature_width",
    "num_layers": "layers",
    "num_radial_basis": "radial_functions",
    "initial_angle_weight": "angle_weight",
    "initial_dihedral_weight": "dihedral_weight",
    "initial_nonbonded_weight": "nonbonded_weight",
    "use_v3_model": None,
    "pooling_type": None,
    "input_dim": None,
}

needs_original = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="what the original made (../shared/originals/rna3effi) is not beside this checkout"
)


@cache
def stored(name):
    return load_file(FOLDER / f"{name}.safetensors")


@cache
def told(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def sizes_of(variant, **more):
    """The options of a variant under our names."""
    theirs = told("hparams")["configs"][variant]
    options = {OURS.get(name, name): value for name, value in theirs.items() if OURS.get(name, name)}
    return {**options, "version": 3 if theirs.get("use_v3_model") else 2, "as_published": True, "dropout": 0.0, **more}


def state(variant):
    return {name.partition(".")[2]: one for name, one in stored("state").items() if name.split(".")[0] == variant}


@cache
def network(variant):
    model = PocketNetwork(PocketSizes(**sizes_of(variant)))
    form = RnaForm(model)
    taken = form.read(without_left(state(variant), form.left))
    # what they keep is measured already
    model.load_state_dict({**taken, "atoms.mean_3": torch.zeros(3), "atoms.deviation_3": torch.ones(3)})
    return model.eval()


def without_left(tensors, patterns):
    """Tensors but for those that patterns of names leave out."""
    return {name: one for name, one in tensors.items() if not any(fnmatchcase(name, left) for left in patterns)}


def pocket(name="batch"):
    """A pocket, or all three as one batch."""
    data = stored("inputs")
    of = "batch" if name == "batch" else f"graph.{name}"
    entries = {kind: Entries(data[f"{of}.{THEIRS[kind]}_index"], data[f"{of}.{THEIRS[kind]}_attr"]) for kind in KINDS}
    item_N = data["batch.batch"] if name == "batch" else torch.zeros(len(data[f"{of}.x"]), dtype=torch.long)
    target_BD = data["train.target"][: int(item_N.max()) + 1]
    return PocketBatch(
        feature_N3=data[f"{of}.x"],
        pos_N3=data[f"{of}.pos"],
        item_N=item_N,
        **entries,
        target_BD=target_BD,
        has_target_B=torch.ones(len(target_BD), dtype=torch.bool),
        known=(True,) * len(target_BD),
    )


def off(found, expected):
    """The largest difference."""
    return float((found.double() - expected.double()).abs().max())
