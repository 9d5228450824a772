"""The names under which pepTRM's trainer writes a model: as it is, and compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.training.checkpoints.published_names import NameTable

if TYPE_CHECKING:
    from collections.abc import Mapping

FORM, COMPILED_FORM = "peptrm", "peptrm_compiled"
COMPILED = "_orig_mod."
DECODER = "recursive_core.decoder"
UNUSED = f"{DECODER}.token_embedding.weight"
ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
NORMS = ("own_norm", "cross_norm", "feed_norm")
NAMES = {
    "spectrum.precursor": "encoder.precursor_token",
    "spectrum.peak_waves.scale": "encoder.peak_encoder.mass_embedding.scale",
    "spectrum.peak_waves.frequency_K": "encoder.peak_encoder.mass_embedding.freqs",
    "spectrum.intensity_in": "encoder.peak_encoder.intensity_encoder.0",
    "spectrum.intensity_out": "encoder.peak_encoder.intensity_encoder.2",
    "spectrum.precursor_waves.scale": "encoder.precursor_encoder.mass_embedding.scale",
    "spectrum.precursor_waves.frequency_K": "encoder.precursor_encoder.mass_embedding.freqs",
    "spectrum.charge": "encoder.precursor_encoder.charge_embedding",
    "spectrum.norm": "encoder.norm",
    "first_answer": f"{DECODER}.initial_logits",
    "first_latent": f"{DECODER}.initial_z",
    "place": f"{DECODER}.position_embedding",
    "letter": f"{DECODER}.soft_embed_proj",
    "step": f"{DECODER}.step_embedding",
    "norm": f"{DECODER}.norm",
    "out": f"{DECODER}.output_head",
    "gate": f"{DECODER}.gate_head",
    "unused_letter": UNUSED,
}


def _layer_names(ours: str, theirs: str, attentions: Mapping[str, str], norms: tuple[str, ...]) -> dict[str, str]:
    """Return the names within a layer."""
    names = {f"{ours}.*.{norm}": f"{theirs}.*.norm{at}" for at, norm in enumerate(norms, 1)}
    for own, other in attentions.items():
        names |= {f"{ours}.*.{own}.{part}": f"{theirs}.*.{other}.{proj}" for part, proj in ATTENTION.items()}
    return names | {f"{ours}.*.feed": f"{theirs}.*.ff.net"}


def peptrm_forms(*, gated: bool, has_unused: bool) -> dict[str, NameTable]:
    """Return the tables of names; models that have no gate have no embedding of steps either."""
    names = NAMES | _layer_names("spectrum.layers", "encoder.layers", {"own": "self_attn"}, NORMS[::2])
    names |= _layer_names("decoder", f"{DECODER}.layers", {"own": "self_attn", "cross": "cross_attn"}, NORMS)
    if not gated:
        names = {ours: theirs for ours, theirs in names.items() if ours not in ("step", "gate")}
    left = () if has_unused else (UNUSED,)
    return {FORM: _table(names, left, ""), COMPILED_FORM: _table(names, left, COMPILED)}


def _table(names: Mapping[str, str], left: tuple[str, ...], prefix: str) -> NameTable:
    theirs = {ours: f"{prefix}{name}" for ours, name in names.items()}
    signs = theirs["first_answer"], theirs["spectrum.precursor"]
    return NameTable(theirs, signs, left=tuple(prefix + name for name in left))
