"""The published systems' networks here, with the weights and the inputs of tests/reference."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch.nn.functional import normalize

from pipeline.tasks.contrastive_pair import ContrastivePair
from pipeline.tasks.denovo_recursive import DenovoBatch, DenovoRecursive
from pipeline.tasks.docking.equivariant import listed_pairs
from pipeline.tasks.docking.rigid_diffusion import NoiseSchedule, rotation_tables
from pipeline.tasks.docking.score_network import (
    FORM as DIFFDOCK,
)
from pipeline.tasks.docking.score_network import (
    ConfidenceModel,
    DockingPartner,
    PosedComplex,
    ScoreModel,
    TrunkSizes,
)
from pipeline.tasks.pairs.pair_towers import CLIP, FORMS, TextBatch, options_of
from pipeline.tasks.peptides.recursive_network import FORM, SpectrumInput
from pipeline.tasks.rna.pocket_network import KINDS, Entries, PocketBatch, PocketNetwork, PocketSizes
from pipeline.tasks.spectra.peak_transformer import DreamsForm, Peaks, PeakSizes, PeakTransformer
from tests.reference import FOLDER, docking_complex, document, recorded

F32 = torch.float32


def off(found, expected):
    """The largest difference."""
    return float((found.detach().double() - expected.double()).abs().max())


def relative_off(found, expected):
    """The largest difference over the largest magnitude."""
    return off(found, expected) / float(expected.double().abs().max())


def part(name, prefix):
    """The tensors of a file whose names begin so, without that."""
    return {key.removeprefix(prefix): one for key, one in recorded(name).items() if key.startswith(prefix)}


# ---- DiffDock-PP ----

COMPLEXES = ("1Z0K", "1HIA", "1R8S", "3H2V", "3BX7")
PRECISIONS = {"f32": torch.float32, "f64": torch.float64}
CONFIDENCE_SIZES = TrunkSizes(scalars=16, vectors=4, as_published=True)
tables = rotation_tables


def docked(name):
    """What the original gave of a complex."""
    return part("diffdock_pp/outputs", f"{name}.")


def partner_of(name, role, dtype):
    data = docking_complex(name)
    pairs = listed_pairs(data[f"{role}.neighbours"].long(), torch.zeros((), dtype=dtype))
    return DockingPartner(data[f"{role}.pos"].to(dtype), data[f"{role}.token"], data[f"{role}.esm"].to(dtype), pairs)


def posed(name, pos_PL3, time, dtype=F32):
    partners = (partner_of(name, role, dtype) for role in ("receptor", "ligand"))
    return PosedComplex(*partners, pos_PL3.to(dtype), torch.as_tensor(time, dtype=dtype).reshape(-1))


def noised(name, dtype=F32, place=1):
    """A complex with its ligand noised as at the second of three times."""
    data = docking_complex(name)
    return posed(name, data["ligand.pos_noised"][place : place + 1], data["t"][place : place + 1], dtype)


def fresh_score_model(dtype=F32):
    model = ScoreModel(TrunkSizes(as_published=True), NoiseSchedule(), torch.from_numpy(tables().norms_W))
    model.load_state_dict(DIFFDOCK.read(recorded("diffdock_pp/score_state")))
    return model.to(dtype)


@cache
def score_model(precision="f32"):
    return fresh_score_model(PRECISIONS[precision])


@cache
def confidence_model(precision="f32"):
    model = ConfidenceModel(CONFIDENCE_SIZES)
    model.load_state_dict(DIFFDOCK.read(recorded("diffdock_pp/confidence_state")))
    return model.to(PRECISIONS[precision])


def as_original(model, others=()):
    """A model's state, some of its tensors others, as the original's state dict with its constants."""
    form = replace(model.published_forms()["diffdock_pp"], as_published=True)
    return form.write(model.state_dict() | dict(others))


# ---- RNA-3E-FFI ----

POCKETS = ("9aaa_ARG_model0", "9aab_FMN_model0", "9aac_GTP_model1")
POCKET_FILES = FOLDER / "rna3effi" / "files"
VARIANTS = (
    "best", "basic_layers", "weighted", "no_nonbonded", "no_multi_hop", "plain_invariants", "rms", "no_gate", "v2",
)  # fmt: skip
THEIR_KINDS = {"bonds": "edge", "angles": "triple", "dihedrals": "quadra", "near": "nonbonded_edge"}
THEIR_OPTIONS = {
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


def pocket_sizes(variant, **more):
    """The options of a variant under our names."""
    theirs = document("rna3effi/hparams")["configs"][variant]
    options = {THEIR_OPTIONS.get(name, name): value for name, value in theirs.items() if THEIR_OPTIONS.get(name, name)}
    return {**options, "version": 3 if theirs.get("use_v3_model") else 2, "as_published": True, "dropout": 0.0, **more}


def pocket_state(variant):
    return part("rna3effi/state", f"{variant}.")


@cache
def pocket_network(variant):
    model = PocketNetwork(PocketSizes(**pocket_sizes(variant)))
    (form,) = model.published_forms().values()
    taken = form.read(pocket_state(variant))
    # what they keep is measured already
    model.load_state_dict({**taken, "atoms.mean_3": torch.zeros(3), "atoms.deviation_3": torch.ones(3)})
    return model.eval()


def pocket_batch(*names):
    """Pockets as one batch."""
    graphs = [part("rna3effi/inputs", f"graph.{name}.") for name in names]
    sizes = torch.tensor([len(graph["x"]) for graph in graphs])
    starts = sizes.cumsum(0) - sizes
    entries = {}
    for kind in KINDS:
        theirs = THEIR_KINDS[kind]
        index = [graph[f"{theirs}_index"] + start for graph, start in zip(graphs, starts, strict=True)]
        entries[kind] = Entries(torch.cat(index, 1), torch.cat([graph[f"{theirs}_attr"] for graph in graphs]))
    return PocketBatch(
        feature_N3=torch.cat([graph["x"] for graph in graphs]),
        pos_N3=torch.cat([graph["pos"] for graph in graphs]),
        item_N=torch.arange(len(graphs)).repeat_interleave(sizes),
        **entries,
        target_BD=recorded("rna3effi/inputs")["train.target"][: len(graphs)],
        has_target_B=torch.ones(len(graphs), dtype=torch.bool),
        known=(True,) * len(graphs),
    )


# ---- DreaMS ----

PEAK_SIZES = PeakSizes(layers=3, heads=4, d_fourier=40, d_peak=8, fourier_width=16, as_published=True, classes=2000)
HEADS = {
    "regression": {"head": "regression"},
    "mol_props": {"head": "regression", "targets": 11},
    "binary": {"head": "binary"},
    "fingerprint": {"head": "fingerprint", "targets": 64, "summed": True},
    "fingerprint_precursor": {"head": "fingerprint", "targets": 64, "head_depth": 2},
    "contrastive": {"head": "embedding", "targets": 48},
}


def dreams_state(name):
    """The state of a model as it was published: `ssl`, or a fine-tuned one."""
    ssl = part("dreams/state", "ssl.")
    if name == "ssl":
        return ssl
    return {f"backbone.{key}": one for key, one in ssl.items()} | part("dreams/state", f"{name}.")


def peak_sizes(name):
    return replace(PEAK_SIZES, **HEADS.get(name, {}))


@cache
def peak_model(name="ssl", dtype=F32, **others):
    sizes = replace(peak_sizes(name), **others)
    model = PeakTransformer(sizes)
    read = DreamsForm.of(replace(sizes, as_published=True)).read(dreams_state(name))
    missing, unexpected = model.load_state_dict(read, strict=False)
    assert not unexpected
    assert name == "ssl" or not missing
    return model.to(dtype).eval()


def tokens_of(model, peaks):
    """The features of every place [B, L, D]; the first, the precursor's, is what the backbone embeds."""
    return model.norm(model.last_layer(peaks))


def peaks_of(spec_BL2):
    mz_BL, intensity_BL = spec_BL2.unbind(-1)
    return Peaks(mz_BL, intensity_BL, mz_BL != 0)


# ---- pepTRM ----

PEPTRM = DenovoRecursive(width=48, heads=4, encoder_layers=2, decoder_layers=2, latent_steps=2, as_published=True)


def peptide_spectra():
    names = ("spectrum_masses", "spectrum_intensities", "spectrum_mask", "precursor_mz", "precursor_charge")
    return SpectrumInput(*(recorded("peptrm/inputs")[f"nine.{name}"] for name in names))


def peptide_batch():
    """The batch that the task would make of these spectra and their peptides."""
    data = part("peptrm/inputs", "nine.")
    letter_BL, is_known_BL = data["sequence"], data["sequence_mask"]
    count = float(len(letter_BL))
    return DenovoBatch(
        spectra=peptide_spectra(),
        mass_B=data["precursor_mass"],
        letter_BL=letter_BL,
        residues_B=is_known_BL.sum(1),
        has_terminal_B=torch.zeros(len(letter_BL), dtype=torch.bool),
        known=(float(is_known_BL.sum()), count, count),
    )


@cache
def peptide_network():
    model = PEPTRM.model().eval()
    model.load_state_dict(model.published_forms()[FORM].read(recorded("peptrm/state")))
    return model


# ---- CLIP ----

CLIP_FILES = FOLDER / "clip" / "files"
MERGES = CLIP_FILES / "bpe_simple_vocab_16e6.txt.gz"


@cache
def clip_task():
    return ContrastivePair(**options_of(recorded("clip/state")))


def clip_with(weights, form=CLIP, **options):
    """A model with published weights, which it must have all."""
    model = ContrastivePair(**options_of(weights) | options).model()
    left = FORMS[form].left
    model.load_state_dict({name: one for name, one in FORMS[form].read(weights).items() if name not in left})
    return model.eval()


def clip_texts():
    """The texts of the reference, padded to all places as the originals pad them."""
    token_BL = recorded("clip/inputs")["text"]
    return TextBatch(token_BL, token_BL.argmax(-1))


def clip_features(model):
    """Features of both sides as the towers have them, before they are made of length 1."""
    return model.left.features(recorded("clip/inputs")["image_noise"]), model.right.features(clip_texts())


def clip_logits(model):
    image, text = (normalize(one, dim=-1) for one in clip_features(model))
    return model.scale() * image @ text.T
