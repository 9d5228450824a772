"""Random weights in the families' own formats, for tests and benchmarks: real shapes and names without the download.

Shapes: D width of the model, F of its feed-forward part, V tokens.
"""

from __future__ import annotations

import math
import os
import re
import secrets
from argparse import Namespace
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from pipeline.command_line import quoted
from pipeline.encoder.checkpoint_files import ESM1B, ESMC, FAMILIES
from pipeline.encoder.embedding_recipe import PAD, VOCABULARY
from pipeline.encoder.esm_checkpoint import (
    PT_PREFIX,
    Architecture,
    esm1b_settings,
    esmc_name,
    frequencies,
    shapes,
)
from pipeline.errors import ConfigError
from pipeline.store.format.disk import Disk, link_or_rename

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

_DISK = Disk()
_SPREAD = 0.1  # of layer-norm parameters and output biases: with ones and zeros, no test would notice if one is unused


def write_random_checkpoint(out: Path, layers: int, dim: int, heads: int, seed: int = 0, stress: float = 1.0) -> None:
    """Write a random ESM-2, and the contact regression that fair-esm wants beside it.

    `stress` multiplies the query and key weights, so that attention becomes as sharp as half precision can bear.
    """
    regression = out.parent / f"{out.stem}-contact-regression.pt"
    _check(out, regression, layers, dim, heads)
    random = torch.Generator().manual_seed(seed)
    encoder = _random(Architecture(layers, dim, heads, token_dropout=True), random, stress)
    rotary_F = frequencies(dim // heads).half().float()  # rounded, as those of the published models are
    model = {f"{PT_PREFIX}{name}": tensor for name, tensor in encoder.items()}
    model |= {f"{PT_PREFIX}layers.{layer}.self_attn.rot_emb.inv_freq": rotary_F for layer in range(layers)}
    model |= _language_head(encoder["embed_tokens.weight"], random)
    settings = Namespace(
        encoder_layers=layers, encoder_embed_dim=dim, encoder_attention_heads=heads, token_dropout=True
    )
    _publish({"model": _regression(layers * heads, random)}, regression)
    try:
        _publish({"args": None, "cfg": {"model": settings}, "model": model}, out)
    except BaseException:
        regression.unlink()
        raise


def relative(family: str, layers: int, dim: int, heads: int) -> Architecture:
    """Return the architecture of another family with these sizes; refuse what none has."""
    if family not in (ESM1B, ESMC):
        raise ConfigError(f"unknown family {family!r}", where="--family", remedy="--family esm2, esm1b or esmc")
    if min(layers, dim, heads) < 1 or dim % (2 * heads) or (family == ESMC and dim != 64 * heads):
        wanted = "64 numbers for each head" if family == ESMC else "an even number for each head"
        what = f"{layers} layers of width {dim} with {heads} heads: {FAMILIES[family]} has {wanted}"
        raise ConfigError(what, where="--dim", remedy=f"try --dim {64 * max(1, heads)}")
    if family == ESMC:
        return Architecture(layers, dim, heads, token_dropout=False, family=ESMC)
    return Architecture(layers, dim, heads, token_dropout=True, family=ESM1B, positions=1024, norm_before=True)


def write_random_relative(out: Path, architecture: Architecture, seed: int = 0, stress: float = 1.0) -> None:
    """Write a random checkpoint of another family: of ESM-1b or ESM-1v as fair-esm does, of ESM C as its authors do."""
    if out.exists():
        remedy = "choose another --out, or replace it with --force"
        raise ConfigError("already exists", where=str(out), remedy=remedy)
    random = torch.Generator().manual_seed(seed)
    encoder = _random(architecture, random, stress)
    if architecture.family == ESMC:
        head = {"sequence_head.0.weight": torch.eye(architecture.dim), "sequence_head.0.bias": torch.zeros(1)}
        _publish({esmc_name(name): tensor for name, tensor in encoder.items()} | head, out)
        return
    model = {f"{PT_PREFIX}{name}": tensor for name, tensor in encoder.items()}
    model |= _language_head(encoder["embed_tokens.weight"], random)
    _publish({"args": Namespace(**esm1b_settings(architecture)), "model": model}, out)


def _random(architecture: Architecture, random: torch.Generator, stress: float) -> dict[str, torch.Tensor]:
    """Return the tensors of an encoder."""
    if not 0 < stress < math.inf:
        raise ConfigError(f"{stress} must be at least 1", where="--stress", remedy="--stress 1, or a larger number")
    encoder = {name: _tensor(name, shape, random) for name, shape in shapes(architecture).items()}
    for name in encoder:
        if re.search(r"[qk]_(proj|layer_norm)\.weight", name):
            encoder[name] *= stress
    return encoder


def _check(out: Path, regression: Path, layers: int, dim: int, heads: int) -> None:
    """Refuse sizes or names that are no ESM-2 checkpoint's, and existing files."""
    if layers < 1 or heads < 1 or dim < 1:
        raise ConfigError(
            f"{layers} layers of width {dim} with {heads} heads: each must be at least 1",
            remedy="pipeline weights synth --help",
        )
    if dim % heads or (dim // heads) % 2:
        what = f"width {dim} does not divide into {heads} heads of an even width, which rotary positions need"
        raise ConfigError(what, remedy=f"try --dim {2 * heads * max(1, round(dim / (2 * heads)))}")
    if not out.name.startswith("esm2") or out.suffix != ".pt":
        what = "fair-esm tells ESM-2 by the name of the file: it must be esm2….pt"
        raise ConfigError(what, where=str(out), remedy=f"--out {out.parent / f'esm2_{out.stem}.pt'}")
    for path in (out, regression):
        if path.exists():
            what = "already exists"
            raise ConfigError(what, where=str(path), remedy="choose another --out, or replace it with --force")


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
        if "qkv_proj" in name:
            shape = (shape[1], shape[1])
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


def _regression(maps: int, random: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the contact head: a logistic regression over every attention map."""
    weight = torch.empty(1, maps).uniform_(-1, 1, generator=random).div_(math.sqrt(maps))
    return {"contact_head.regression.weight": weight, "contact_head.regression.bias": torch.zeros(1)}


def _publish(data: dict[str, Any], out: Path) -> None:
    """Write a file whole or not at all, and never over another."""
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        _DISK.make_folder(out.parent)
        with partial.open("xb") as file:
            torch.save(data, file)
            file.flush()
            os.fsync(file.fileno())
        link_or_rename(_DISK, partial, out)
        _DISK.fsync_folder(out.parent)
    except (OSError, RuntimeError) as error:  # when a disk takes no more, torch's writer says it in a RuntimeError
        why = error.strerror if isinstance(error, OSError) else "the disk wrote only a part of it"
        remedy = f"df -h {quoted(out.parent)}   (free space, or choose another --out)"
        raise ConfigError(f"the checkpoint cannot be written: {why}", where=str(out), remedy=remedy) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
