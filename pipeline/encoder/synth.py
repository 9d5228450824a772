"""Random weights in the families' own formats, for tests and benchmarks: real shapes and names without the download."""

from __future__ import annotations

import math
import re
from argparse import Namespace
from typing import TYPE_CHECKING

import torch

from pipeline.command_line import quoted
from pipeline.encoder.checkpoint_files import ESM1B, ESM2, ESMC, FAMILIES
from pipeline.encoder.embedding_recipe import PAD, VOCABULARY
from pipeline.encoder.esm_checkpoint import (
    ESMC_PTH,
    FAIR,
    FREQUENCIES,
    Architecture,
    esm1b_settings,
    frequencies,
    shapes,
)
from pipeline.errors import ConfigError
from pipeline.files import replacing

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

_SPREAD = 0.1  # of layer-norm parameters and output biases: with ones and zeros, no test would notice if one is unused


def write_random_checkpoint(
    out: Path, layers: int, dim: int, heads: int, seed: int = 0, stress: float = 1.0, family: str = ESM2
) -> None:
    """Write a random checkpoint of a family; refuse sizes that no model of it has."""
    if family not in FAMILIES:
        raise ConfigError(f"unknown family {family!r}", where="--family", remedy="--family esm2, esm1b or esmc")
    if family == ESM2 and not (out.name.startswith("esm2") and out.suffix == ".pt"):
        what = "fair-esm tells ESM-2 by the name of the file: it must be esm2….pt"
        raise ConfigError(what, where=str(out), remedy=f"--out {out.parent / f'esm2_{out.stem}.pt'}")
    is_esmc = family == ESMC
    head_dim = 64 if is_esmc else dim // max(1, heads)
    if min(layers, dim, heads) < 1 or dim != head_dim * heads or head_dim % 2:  # rotary positions turn pairs
        wanted = "64 numbers" if is_esmc else "an even number"
        what = f"{layers} layers of width {dim} with {heads} heads: {FAMILIES[family]} has {wanted} for each head"
        per_head = 64 if is_esmc else 2 * max(1, round(dim / max(1, 2 * heads)))
        raise ConfigError(what, where="--dim", remedy=f"try --dim {per_head * max(1, heads)}")
    is_old = family == ESM1B
    shape = Architecture(layers, dim, heads, not is_esmc, family, positions=1024 * is_old, norm_before=is_old)
    write_random(out, shape, seed, stress)


def write_random(out: Path, architecture: Architecture, seed: int = 0, stress: float = 1.0) -> None:
    """Write a random checkpoint: of ESM-2 with the contact regression that fair-esm wants, of ESM C as a .pth file.

    `stress` multiplies the query and key weights, so that attention becomes as sharp as half precision can bear.
    """
    random = torch.Generator().manual_seed(seed)
    layers, dim, heads = architecture.layers, architecture.dim, architecture.heads
    encoder = _random(architecture, random, stress)
    if architecture.family == ESMC:
        head = {"sequence_head.0.weight": torch.eye(dim), "sequence_head.0.bias": torch.zeros(1)}
        _publish({out: ESMC_PTH.write(encoder) | head})
        return
    table_VD = encoder["embed_tokens.weight"]
    if architecture.family == ESM2:
        rotary_F = frequencies(dim // heads).half().float()  # rounded, as those of the published models are
        encoder |= {f"layers.{layer}.{FREQUENCIES}": rotary_F for layer in range(layers)}
    model = FAIR.write(encoder) | _language_head(table_VD, random)
    if architecture.family == ESM1B:
        _publish({out: {"args": Namespace(**esm1b_settings(architecture)), "model": model}})
        return
    settings = {"encoder_layers": layers, "encoder_embed_dim": dim, "encoder_attention_heads": heads}
    data = {"args": None, "cfg": {"model": Namespace(**settings, token_dropout=True)}, "model": model}
    contact = torch.empty(1, layers * heads).uniform_(-1, 1, generator=random).div_(math.sqrt(layers * heads))
    regression = {"contact_head.regression.weight": contact, "contact_head.regression.bias": torch.zeros(1)}
    _publish({out: data, out.with_name(f"{out.stem}-contact-regression.pt"): {"model": regression}})


def _random(architecture: Architecture, random: torch.Generator, stress: float) -> dict[str, torch.Tensor]:
    """Return the tensors of an encoder."""
    if not 0 < stress < math.inf:
        raise ConfigError(f"{stress} must be at least 1", where="--stress", remedy="--stress 1, or a larger number")
    encoder = {name: _tensor(name, shape, random) for name, shape in shapes(architecture).items()}
    for name in encoder:
        if re.search(r"[qk]_(proj|layer_norm)\.weight", name):
            encoder[name] *= stress
    return encoder


def _tensor(name: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """Return a parameter as fair-esm initialises it, but for the spread of norms and output biases."""
    if name in ("embed_tokens.weight", "embed_positions.weight"):
        table_VD = torch.empty(shape).normal_(generator=random)
        table_VD[PAD] = 0
        return table_VD
    if "layer_norm" in name:
        noise_D = torch.empty(shape).normal_(0, _SPREAD, generator=random)
        return noise_D + 1 if name.endswith("weight") else noise_D
    if name.endswith("out_proj.bias"):
        return torch.empty(shape).normal_(0, _SPREAD, generator=random)
    return torch.empty(shape).uniform_(-1, 1, generator=random).mul_(_bound(name, shape))


def _bound(name: str, shape: tuple[int, ...]) -> float:
    """Return the largest value of a linear layer's parameter: Xavier's for attention, torch's own otherwise."""
    if "self_attn" in name and name.endswith("weight"):
        gain = 1.0 if "out_proj" in name else 1 / math.sqrt(2)
        return gain * math.sqrt(6 / sum(shape))
    inputs = 4 * shape[0] if name.endswith("fc2.bias") else shape[0] // 4 if name.endswith("fc1.bias") else shape[-1]
    return 1 / math.sqrt(inputs)


def _language_head(table_VD: torch.Tensor, random: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the tensors of the language-model head, which shares the embedding table."""
    dim = table_VD.shape[1]
    return {
        "encoder.lm_head.weight": table_VD,
        "encoder.lm_head.bias": torch.zeros(len(VOCABULARY)),
        "encoder.lm_head.dense.weight": torch.empty(dim, dim).uniform_(-1, 1, generator=random).div_(math.sqrt(dim)),
        "encoder.lm_head.dense.bias": torch.zeros(dim),
        "encoder.lm_head.layer_norm.weight": torch.ones(dim),
        "encoder.lm_head.layer_norm.bias": torch.zeros(dim),
    }


def _publish(files: dict[Path, dict[str, Any]]) -> None:
    """Write files whole or not at all, and never over others."""
    for out in files:
        if out.exists():
            remedy = "choose another --out, or replace it with --force"
            raise ConfigError("already exists", where=str(out), remedy=remedy)
    for out, data in files.items():
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with replacing(out) as aside, aside.open("xb") as file:
                torch.save(data, file)
        except (OSError, RuntimeError) as error:  # when a disk takes no more, torch's writer says it in a RuntimeError
            why = error.strerror if isinstance(error, OSError) else "the disk wrote only a part of it"
            remedy = f"df -h {quoted(out.parent)}   (free space, or choose another --out)"
            raise ConfigError(f"the checkpoint cannot be written: {why}", where=str(out), remedy=remedy) from error
