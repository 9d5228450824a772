"""Checks that our encoder equals its reference: a few sequences through both, on each kind of device.

The reference is fair-esm's own model; of ESM C, whose authors' package cannot live beside fair-esm, it is the model
written out plainly. Shapes: L residues of a sequence, R residues of all, T its tokens, D features, H heads, C columns.
"""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import layer_norm, linear, silu

from pipeline.command_line import Command
from pipeline.device.accelerator import free_caches, is_card, unless_out_of_memory
from pipeline.device.kinds import CPU
from pipeline.encoder.checkpoint_files import ESM1B, ESMC
from pipeline.encoder.embedding_recipe import BF16_PRODUCTS, CLS, EOS, LETTERS, tokenize
from pipeline.encoder.esm2 import EsmEncoder, without_tf32
from pipeline.encoder.esm_checkpoint import FREQUENCIES, esm1b_settings
from pipeline.errors import PlanInfeasible, WeightsUnusable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, TypeAlias

    from numpy.typing import NDArray

    from pipeline.encoder.esm_checkpoint import Architecture, EsmCheckpoint

    Tokens = NDArray[np.uint8]
    Rows: TypeAlias = NDArray[np.float32] | NDArray[np.float64]

# Rough frequencies of amino acids in known proteins, in percent; the sample only needs each of them.
_FREQUENCIES = {
    "A": 8.3, "R": 5.5, "N": 4.1, "D": 5.5, "C": 1.4, "Q": 3.9, "E": 6.7, "G": 7.1, "H": 2.3, "I": 5.9,
    "L": 9.7, "K": 5.8, "M": 2.4, "F": 3.9, "P": 4.7, "S": 6.6, "T": 5.4, "W": 1.1, "Y": 2.9, "V": 6.9,
}  # fmt: skip
_LENGTHS = (300, 251, 190, 128, 97, 64, 33, 17)
_COSTLY, _OF_COSTLY = 20_000_000, 5  # layers by width by width, beyond which only the sixth is taken
_SEED = 20_260_101
# In fp32 every token must agree; in half precision tokens differ, and a sequence as a whole must agree.
# With products alone in bf16 every token of any sequence must reach 0.999: the sample, a fourth of that error.
_THRESHOLDS = {"fp32": 0.99999, "fp16": 0.999, "bf16": 0.999, BF16_PRODUCTS: 0.99975}
# With attention weights multiplied by 6 (12 layers of 480), fair-esm in fp32 is 2e-5 off what it computes in fp64, and
# ours 6e-5: the order of sums decides. Where errors exceed that, fp32 is not precise enough for either implementation.
_LEEWAY, _DOUBTFUL = 10.0, 0.999
VERSION = 2  # raise it when the sample or a threshold changes
_WORST = -1.0  # stands for NaN


@dataclass(frozen=True, slots=True)
class ParityVerdict:
    """How close an encoder came to the reference."""

    lowest: float  # cosine: of a token where rows are in fp32, of a sequence in half precision
    sequences: int
    threshold: float

    @property
    def passed(self) -> bool:
        return self.lowest >= self.threshold


def check_parity(
    checkpoint: EsmCheckpoint, precision: str, layer: int, device: str, *, cls: bool = False
) -> tuple[ParityVerdict, EsmEncoder]:
    """Compare our encoder with the reference in fp32, on the same device where that has room for it; return both.

    Where `cls`, the rows of the marks before the sequences are compared, too.
    """
    sequences = sample_sequences(checkpoint.architecture, device)
    rows_of = partial(_reference_rows, checkpoint, layer, device, sequences, cls=cls)
    wanted = rows_of(torch.float32)

    def encoded() -> tuple[EsmEncoder, torch.Tensor]:
        encoder = EsmEncoder(checkpoint, layer=layer, precision=precision, device=torch.device(device))
        return encoder, encoder([tokenize(sequence) for sequence in sequences], cls=cls).float().cpu()

    built = unless_out_of_memory(encoded)
    if built is None:
        raise no_room(f"comparing {checkpoint.name} with its reference does", device, where=str(checkpoint.path))
    encoder, found_RD = built
    sizes = [cls + len(sequence) for sequence in sequences]
    found = [rows_LD.numpy() for rows_LD in torch.split(found_RD, sizes)]
    verdict = judge_rows(found, wanted, precision, cls=cls)
    if not verdict.passed and precision == "fp32":
        truth = rows_of(torch.float64)
        verdict = against_double(judge_rows(found, truth, precision, cls=cls), wanted, truth)
    return verdict, encoder


def _reference_rows(
    checkpoint: EsmCheckpoint, layer: int, device: str, sequences: Sequence[str], dtype: torch.dtype, *, cls: bool
) -> list[Rows]:
    """Return the reference's rows of sequences; on the host where the card has no room for them."""
    for place in dict.fromkeys((device, CPU)):

        def attempt(place: str = place) -> list[Rows]:
            return Reference(checkpoint, layer, torch.device(place), dtype)(sequences, cls=cls)

        rows = unless_out_of_memory(attempt)
        free_caches(place)
        if rows is not None:
            return rows
    raise no_room(f"comparing {checkpoint.name} with its reference does", CPU, where=str(checkpoint.path))


def no_room(what: str, device: str, where: str = "") -> PlanInfeasible:
    """Return the error that something does not fit the memory of a device, and what helps there."""
    if is_card(device):
        on_cpu = ("embed.device", "cpu"), ("cluster.embed.gpus", "0")
        larger = Command.submit("embed", before="use a larger GPU   or   ").with_settings(*on_cpu)
        return PlanInfeasible(f"{what} not fit into the memory of the GPU", where=where, remedy=larger)
    remedy = "request more memory: --set cluster.embed.mem=SIZE"
    return PlanInfeasible(f"{what} not fit into the memory of this process", where=where, remedy=remedy)


def against_double(ours: ParityVerdict, theirs: Sequence[Rows], truth: Sequence[Rows]) -> ParityVerdict:
    """Return a verdict for weights with which fp32 itself is imprecise: the reference's error sets the threshold."""
    away = 1 - min(_lowest_cosine(*pair) for pair in zip(theirs, truth, strict=True))
    return ParityVerdict(ours.lowest, ours.sequences, max(_DOUBTFUL, min(ours.threshold, 1 - _LEEWAY * away)))


def judge_rows(found: Sequence[Rows], wanted: Sequence[Rows], precision: str, *, cls: bool = False) -> ParityVerdict:
    """Return the verdict on the rows of sequences that an encoder gave in some precision.

    Where `cls`, the first row of each is that of the mark before it, which is used by itself, and judged so.
    """
    by_token = precision in ("fp32", BF16_PRODUCTS)
    parts = (slice(0, 1), slice(1, None)) if cls else (slice(None),)
    pairs = [(ours[part], theirs[part]) for ours, theirs in zip(found, wanted, strict=True) for part in parts]
    lowest = min(_lowest_cosine(*pair, by_token=by_token) for pair in pairs)
    return ParityVerdict(lowest, len(wanted), _THRESHOLDS[precision])


def _lowest_cosine(found_LD: Rows, wanted_LD: Rows, *, by_token: bool = True) -> float:
    """Return the lowest cosine of two rows, or that of all rows taken as one."""
    shape = found_LD.shape if by_token else (1, -1)
    found, wanted = (rows_LD.astype(np.float64).reshape(shape) for rows_LD in (found_LD, wanted_LD))
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    dots = np.einsum("ld,ld->l", found, wanted)
    cosine = float((dots / np.maximum(norms, np.finfo(np.float64).tiny)).min())
    return cosine if np.isfinite(cosine) else _WORST


def sample_sequences(shape: Architecture | None = None, device: str = CPU) -> list[str]:
    """Return the sequences to compare, always the same: one with every letter, and natural ones; cut to a limit.

    Large models are compared by two of them on a CPU, where a token costs them up to a second.
    """
    random = np.random.default_rng(_SEED)
    chances = np.array(list(_FREQUENCIES.values()))
    drawn = ["".join(random.choice(list(_FREQUENCIES), length, p=chances / chances.sum())) for length in _LENGTHS]
    is_costly = shape is not None and shape.layers * shape.dim**2 > _COSTLY and not is_card(device)
    longest = shape.longest if shape else 0
    return [
        text[: longest or None] for text in (LETTERS, *(drawn[_OF_COSTLY : _OF_COSTLY + 1] if is_costly else drawn))
    ]


class Reference:
    """The reference of a checkpoint with its very tensors, shared where device and precision allow it."""

    def __init__(
        self, checkpoint: EsmCheckpoint, layer: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        shape = checkpoint.architecture
        self._layer, self._device = layer, device
        if shape.family == ESMC:
            self._model: Any = PlainEsmC(checkpoint, device, dtype)
            return
        with torch.device("meta"):
            self._model = _fair_esm(shape)
        tensors = {name: tensor.to(device, dtype) for name, tensor in checkpoint.tensors.items()}
        for number in range(0 if shape.positions else shape.layers):
            tensors[f"layers.{number}.{FREQUENCIES}"] = checkpoint.rotary_F.to(device, dtype)
        self._model.load_state_dict(tensors, assign=True, strict=False)
        self._model.lm_head = torch.nn.Identity()  # predicts letters, which are not needed
        self._model.contact_head = torch.nn.Identity()
        self._model.eval()
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            if tensor.is_meta:
                raise WeightsUnusable(f"the checkpoint has no {name}", where=str(checkpoint.path))

    def __call__(self, sequences: Sequence[str], *, cls: bool = False) -> list[Rows]:
        """Return rows_LD of each sequence, computed one by one; where `cls`, after the row of its mark."""
        with torch.inference_mode(), without_tf32():
            return [self._rows(tokenize(sequence))[not cls :] for sequence in sequences]

    def _rows(self, tokens_L: Tokens) -> Rows:
        """Return the rows of the mark before a sequence and of its residues."""
        tokens_T = np.concatenate([[CLS], tokens_L, [EOS]])
        tokens_1T = torch.from_numpy(tokens_T.astype(np.int64)[None]).to(self._device)
        rows_1TD = self._model(tokens_1T, repr_layers=[self._layer])["representations"][self._layer]
        rows_LD: Rows = rows_1TD[0, :-1].cpu().numpy()
        return rows_LD


def _fair_esm(shape: Architecture) -> Any:
    """Return fair-esm's ESM-2, ESM-1b or ESM-1v."""
    from esm.data import Alphabet  # type: ignore[import-untyped]
    from esm.model.esm1 import ProteinBertModel  # type: ignore[import-untyped]
    from esm.model.esm2 import ESM2  # type: ignore[import-untyped]

    if shape.family != ESM1B:
        return ESM2(shape.layers, shape.dim, shape.heads, "ESM-1b", token_dropout=shape.token_dropout)
    settings = {name.removeprefix("encoder_"): value for name, value in esm1b_settings(shape).items()}
    settings["emb_layer_norm_before"] = shape.norm_before
    return ProteinBertModel(Namespace(**settings), Alphabet.from_architecture("ESM-1b"))


class PlainEsmC:
    """ESM C as it is published, one sequence at a time, and nothing joined, packed or folded into weights."""

    def __init__(self, checkpoint: EsmCheckpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._shape = checkpoint.architecture
        self._tensors = {name: tensor.to(device, dtype) for name, tensor in checkpoint.tensors.items()}
        self._divided_by = math.sqrt(self._shape.layers / 36)

    def __call__(self, tokens_1T: torch.Tensor, repr_layers: Sequence[int]) -> Mapping[str, Any]:
        """Return the rows of some layers, as fair-esm's models do; those of the last one after its norm."""
        x_TD = self._tensors["embed_tokens.weight"][tokens_1T[0]]
        found = {0: x_TD}
        for number in range(self._shape.layers):
            x_TD = x_TD + self._attended(x_TD, f"layers.{number}") / self._divided_by
            x_TD = x_TD + self._fed_forward(x_TD, f"layers.{number}") / self._divided_by
            found[number + 1] = x_TD
        found[self._shape.layers] = self._norm(x_TD, "emb_layer_norm_after")
        return {"representations": {layer: found[layer][None] for layer in repr_layers}}

    def _attended(self, x_TD: torch.Tensor, layer: str) -> torch.Tensor:
        before_TD = self._norm(x_TD, f"{layer}.self_attn_layer_norm")
        q_TD, k_TD, v_TD = (self._linear(before_TD, f"{layer}.self_attn.{part}_proj") for part in "qkv")
        q_TD, k_TD = (self._norm(x, f"{layer}.self_attn.{part}_layer_norm") for part, x in (("q", q_TD), ("k", k_TD)))
        q_HTC, k_HTC, v_HTC = (x.view(len(x), self._shape.heads, -1).transpose(0, 1) for x in (q_TD, k_TD, v_TD))
        q_HTC, k_HTC = self._turned(q_HTC), self._turned(k_HTC)
        scores_HTT = q_HTC @ k_HTC.transpose(1, 2) / math.sqrt(q_HTC.shape[-1])
        context_TD = (scores_HTT.softmax(-1) @ v_HTC).transpose(0, 1).flatten(1)
        return self._linear(context_TD, f"{layer}.self_attn.out_proj")

    def _fed_forward(self, x_TD: torch.Tensor, layer: str) -> torch.Tensor:
        before_TD = self._norm(x_TD, f"{layer}.final_layer_norm")
        gate, passed = (self._linear(before_TD, f"{layer}.{part}") for part in ("gate", "fc1"))
        return self._linear(silu(gate) * passed, f"{layer}.fc2")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, self._tensors[f"{name}.weight"])

    def _turned(self, x_HTC: torch.Tensor) -> torch.Tensor:
        """Return queries or keys, turned by their positions: column c with column c + C/2."""
        tokens, columns = x_HTC.shape[1:]
        frequency_F = 10_000.0 ** (-torch.arange(0, columns, 2, dtype=torch.float64) / columns)
        angle_TF = torch.outer(torch.arange(tokens, dtype=torch.float64), frequency_F)
        cosine_TF, sine_TF = (part.to(x_HTC.device, x_HTC.dtype) for part in (angle_TF.cos(), angle_TF.sin()))
        low, high = x_HTC.chunk(2, dim=-1)
        return torch.cat([low * cosine_TF - high * sine_TF, high * cosine_TF + low * sine_TF], dim=-1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return layer_norm(x, x.shape[-1:], self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))
