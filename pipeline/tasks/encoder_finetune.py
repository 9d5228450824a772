"""Fine-tuning ESM-2 itself on labelled sequences: by low-rank additions (LoRA), or its top layers.

    train: {task: "pipeline.tasks.encoder_finetune:EncoderFinetune", batching: padded, pretrained: weights/ESM2.pt}

An item has `sequence.letter`, and `target`, numbers of which NaN is not known (`told: sequence`), or `sequence.site`,
1, 0 or -1 for each residue (`told: residues`): `pipeline.readers.sequences:Sequences` reads both. Sizes by default are
those of the 650M model.

The encoder computes what `encoder.esm2` computes, padded instead of packed, and has fair-esm's names. Its weights are
read from fair-esm's and Hugging Face's files. They are written for the latter as an ordinary checkpoint, low-rank
additions merged: `pipeline model export MODEL DIR --as esm2`.

Shapes: B sequences, L tokens of the longest (its residues between two marks), K targets, D features, H heads, C columns
of a head, F frequencies of it, R the rank of an addition, I inputs, O outputs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from pipeline.encoder.checkpoint_files import CONFIG
from pipeline.encoder.embedding_recipe import CLS, ENDS, EOS, PAD, VOCABULARY, tokenize
from pipeline.encoder.esm2 import EPSILON, MASKED_IN_TRAINING
from pipeline.encoder.esm_checkpoint import FACE, FAIR, FREQUENCIES, Architecture, face_config, frequencies
from pipeline.protocol import ITEMS
from pipeline.readers.sequences import LETTER, NOT_KNOWN, SITE, TARGET
from pipeline.tasks.ranking_scores import Ranking, logits
from pipeline.tasks.spectra.peak_transformer import item_target
from pipeline.tasks.spectra.spectra_measures import PREDICTION, error_figures, squared_error
from pipeline.tasks.task_parts import (
    WHERE,
    above_zero,
    at_least,
    at_least_single,
    known_figures,
    labelled,
    labels_of,
    one_of,
    part_of,
    refuse,
    values_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from pipeline.protocol import Sizes
    from pipeline.training.items.batch import ItemTensors


LORA = ("lora_down", "lora_up")
NAME = "encoder"  # of the encoder within a model
OURS = f"{NAME}.frequency_F"


@dataclass(frozen=True)
class TunedSizes:
    """The sizes of an ESM-2, and its trained parts."""

    layers: int = 33  # of the checkpoint, as are the next three
    width: int = 1280
    heads: int = 20
    token_dropout: bool = True
    rank: int = 8  # of additions to queries, keys, values and outputs of attention; 0: none
    alpha: float = 16.0  # additions are scaled by alpha / rank
    top_layers: int = 0  # trained whole, with the norm behind them, instead of additions

    @property
    def scale(self) -> float:
        return self.alpha / self.rank if self.rank else 0.0


class LowRankLinear(nn.Linear):
    """A frozen linear layer, and a trained addition of low rank that begins as nothing."""

    def __init__(self, width: int, sizes: TunedSizes) -> None:
        super().__init__(width, width)
        self.scale = sizes.scale
        self.lora_down = nn.Parameter(torch.empty(sizes.rank, width))
        self.lora_up = nn.Parameter(torch.zeros(width, sizes.rank))
        nn.init.kaiming_uniform_(self.lora_down, a=5**0.5)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's word for it
        added = functional.linear(functional.linear(input, self.lora_down), self.lora_up)
        return super().forward(input) + self.scale * added


class TunedAttention(nn.Module):
    """Attention with rotary positions."""

    def __init__(self, sizes: TunedSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            layer = LowRankLinear(sizes.width, sizes) if sizes.rank else nn.Linear(sizes.width, sizes.width)
            self.add_module(name, layer)

    def forward(self, x_BLD: Tensor, turn_2LC: Tensor, real_BL: Tensor | None) -> Tensor:
        queries, keys, values = (
            self.get_submodule(name)(x_BLD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        mask = None if real_BL is None else real_BL[:, None, None, :]
        mixed_BHLC = functional.scaled_dot_product_attention(
            turned(queries, turn_2LC), turned(keys, turn_2LC), values, attn_mask=mask
        )
        attended_BLD: Tensor = self.get_submodule("out_proj")(mixed_BHLC.transpose(1, 2).flatten(2))
        return attended_BLD


class TunedLayer(nn.Module):
    """A transformer layer of ESM-2."""

    def __init__(self, sizes: TunedSizes) -> None:
        super().__init__()
        width = sizes.width
        self.self_attn = TunedAttention(sizes)
        self.self_attn_layer_norm = nn.LayerNorm(width, eps=EPSILON)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.final_layer_norm = nn.LayerNorm(width, eps=EPSILON)

    def forward(self, x_BLD: Tensor, turn_2LC: Tensor, real_BL: Tensor | None) -> Tensor:
        x_BLD = x_BLD + self.self_attn(self.self_attn_layer_norm(x_BLD), turn_2LC, real_BL)
        changed_BLD: Tensor = x_BLD + self.fc2(functional.gelu(self.fc1(self.final_layer_norm(x_BLD))))
        return changed_BLD


class TunedEsm2(nn.Module):
    """ESM-2, of which little is trained."""

    frequency_F: Tensor

    def __init__(self, sizes: TunedSizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(len(VOCABULARY), sizes.width)
        self.layers = nn.ModuleList(TunedLayer(sizes) for _ in range(sizes.layers))
        self.emb_layer_norm_after = nn.LayerNorm(sizes.width, eps=EPSILON)
        self.register_buffer("frequency_F", frequencies(sizes.width // sizes.heads))
        self.scale = 1 - MASKED_IN_TRAINING if sizes.token_dropout else 1.0
        self.requires_grad_(requires_grad=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad = name.endswith(LORA)
        if sizes.top_layers:
            for module in (*self.layers[-sizes.top_layers :], self.emb_layer_norm_after):
                module.requires_grad_(requires_grad=True)

    def forward(self, token_BL: Tensor) -> Tensor:
        """Return the features of every token, marks and padding included."""
        x_BLD = self.scale * self.embed_tokens(token_BL)
        angle_LF = torch.outer(torch.arange(token_BL.shape[1], device=x_BLD.device).float(), self.frequency_F.float())
        angle_LC = torch.cat([angle_LF, angle_LF], -1)
        turn_2LC = torch.stack([angle_LC.cos(), angle_LC.sin()])
        real_BL = None if len(token_BL) == 1 else token_BL != PAD
        for layer in self.layers:
            x_BLD = layer(x_BLD, turn_2LC, real_BL)
        features_BLD: Tensor = self.emb_layer_norm_after(x_BLD)
        return features_BLD


def turned(x_BHLC: Tensor, turn_2LC: Tensor) -> Tensor:
    """Return queries or keys rotated by their positions, in single precision where the rest is in half."""
    left, right = at_least_single(x_BHLC).chunk(2, -1)
    cosine_LC, sine_LC = turn_2LC
    turned_BHLC: Tensor = torch.cat([left, right], -1) * cosine_LC + torch.cat([-right, left], -1) * sine_LC
    return turned_BHLC.to(x_BHLC.dtype)


@dataclass(frozen=True)
class Esm2Names:
    """ESM-2 as it is published, of these sizes."""

    sizes: TunedSizes
    # theirs that are not needed: their heads, and positions of other models
    left: tuple[str, ...] = (
        "*lm_head.*",
        "*contact_head.*",
        "*pooler.*",
        "*position_ids",
        "*position_embeddings.weight",
    )
    fresh: tuple[str, ...] = ("head.*", OURS, *(f"*.{name}" for name in LORA))  # ours that may stay as they begin

    def knows(self, names: Collection[str]) -> bool:
        """Say whether tensors of these names are ESM-2's."""
        return OURS not in names and (FAIR.knows(names) or FACE.knows(names))

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return their tensors under our names; the frequencies are the same in all layers."""
        ours = (FAIR if FAIR.knows(tensors) else FACE).read(tensors)
        found = {f"{NAME}.{name}": tensor for name, tensor in ours.items() if not name.endswith(FREQUENCIES)}
        stored = f"layers.0.{FREQUENCIES}"
        return found | ({OURS: ours[stored].float()} if stored in ours else {})

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the encoder's tensors as Hugging Face names them, additions merged; the head is left behind."""
        encoder = {name.removeprefix(f"{NAME}."): tensor for name, tensor in tensors.items() if name.startswith(NAME)}
        frequency_F = encoder.pop("frequency_F")
        merged = {name: self._merged(name, encoder) for name in encoder if not name.endswith(LORA)}
        merged |= {f"layers.{layer}.{FREQUENCIES}": frequency_F for layer in range(self.sizes.layers)}
        return replace(FACE, prefix="").write(merged)

    def beside(self) -> dict[str, str]:
        """Return the files that belong to the weights."""
        sizes = self.sizes
        architecture = Architecture(sizes.layers, sizes.width, sizes.heads, sizes.token_dropout)
        return {CONFIG: json.dumps(face_config(architecture), indent=1) + "\n"}

    def _merged(self, name: str, encoder: Mapping[str, Tensor]) -> Tensor:
        weight, parts = encoder[name], [f"{name.removesuffix('.weight')}.{part}" for part in LORA]
        if not name.endswith(".weight") or parts[0] not in encoder:
            return weight
        down, up = (encoder[part].double() for part in parts)
        return (weight.double() + self.sizes.scale * (up @ down)).to(weight.dtype)


TOLD = ("sequence", "residues")
TOKENS = "sequence"  # the size that an item's residues are counted by
LEAST = {"targets": 1, "layers": 1, "width": 1, "heads": 1, "rank": 0, "top_layers": 0, "longest": 1}


class SequenceBatch(NamedTuple):
    """Some sequences as tokens, and their labels."""

    token_BL: Tensor  # between their marks, then padding
    target_BK: Tensor  # of sequences [B, K], or of tokens [B, L]
    is_known_BK: Tensor
    known: float
    residues: tuple[int, ...]  # of each sequence
    is_labelled: tuple[bool, ...]  # likewise: whether anything is known of it


class TunedHead(nn.Module):
    """Predicts numbers from features."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, outputs)

    def forward(self, x_BD: Tensor) -> Tensor:
        told_BK: Tensor = self.outer(functional.silu(self.inner(self.norm(x_BD))))
        return told_BK


class TunedEncoder(nn.Module):
    """ESM-2 and a head, which knows ESM-2's published names."""

    def __init__(self, sizes: TunedSizes, outputs: int, *, by_residue: bool) -> None:
        super().__init__()
        self.encoder, self.head = TunedEsm2(sizes), TunedHead(sizes.width, outputs)
        self.sizes, self.by_residue = sizes, by_residue

    def forward(self, token_BL: Tensor) -> Tensor:
        """Return the predictions for each sequence [B, K], or for each token [B, L]."""
        x_BLD = self.encoder(token_BL)
        if self.by_residue:
            return at_least_single(self.head(x_BLD).squeeze(-1))
        is_residue_BL = ~torch.isin(token_BL, token_BL.new_tensor([CLS, EOS, PAD]))
        share_BL1 = (is_residue_BL / is_residue_BL.sum(1, keepdim=True).clamp(min=1)).unsqueeze(-1)
        return at_least_single(self.head((x_BLD * share_BL1.to(x_BLD.dtype)).sum(1)))

    def published_forms(self) -> dict[str, Esm2Names]:
        """Return the names under which the encoder is published."""
        return {"esm2": Esm2Names(self.sizes)}


@dataclass(frozen=True)
class EncoderFinetune(TunedSizes):
    """The task: predict numbers of sequences, or yes or no of residues, while fine-tuning ESM-2."""

    told: str = TOLD[0]  # sequence: numbers, by squared error; residues: yes or no, by cross entropy
    targets: int = 1  # numbers of a sequence
    longest: int = 1022  # residues of a sequence; of a longer one, the first are read

    def __post_init__(self) -> None:
        at_least(self, LEAST)
        above_zero(self, ("alpha",))
        one_of(self, {"told": TOLD})
        if self.width % self.heads or self.width // self.heads % 2:
            problem = f"width {self.width} cannot be divided into {self.heads} heads of an even width"
            refuse("heads", problem, "use the checkpoint's values")
        if self.top_layers > self.layers:
            problem = f"top_layers is {self.top_layers}, but there are {self.layers} layers"
            refuse("top_layers", problem, f"--set {WHERE}.top_layers={self.layers}")
        if self.rank and self.top_layers:
            problem = "top_layers trains whole layers, and rank adapts the other layers"
            refuse("rank", problem, f"--set {WHERE}.rank=0   (or top_layers=0)")

    @property
    def by_residue(self) -> bool:
        return self.told == TOLD[1]

    def model(self) -> nn.Module:
        outputs = 1 if self.by_residue else self.targets
        return TunedEncoder(part_of(self, TunedSizes), outputs, by_residue=self.by_residue)

    def cost(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return how many tokens are read."""
        return {TOKENS: np.minimum(item[TOKENS], self.longest) + ENDS}

    def collate(self, items: Sequence[ItemTensors], rng: np.random.Generator) -> SequenceBatch:  # noqa: ARG002 - the protocol has it
        tokens = [self._tokens(item) for item in items]
        token_BL = nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=PAD)
        if self.by_residue:
            target_BK = self._sites(items, token_BL)
        else:
            target_BK = torch.stack([item_target(item, self.targets) for item in items])
        is_known_BK = ~target_BK.isnan()
        known, residues = float(is_known_BK.sum()), tuple(len(token_L) - ENDS for token_L in tokens)
        labelled_B = tuple(is_known_BK.any(-1).tolist())
        return SequenceBatch(token_BL, target_BK.nan_to_num(0.0), is_known_BK, known, residues, labelled_B)

    def _tokens(self, item: ItemTensors) -> Tensor:
        (letter_R,) = values_of(item, (LETTER,), "use a reader of sequences: pipeline.readers.sequences:Sequences")
        letters = bytes(letter_R[: self.longest].tolist()).decode("ascii")
        return torch.from_numpy(np.concatenate([[CLS], tokenize(letters), [EOS]]).astype(np.int64))

    def _sites(self, items: Sequence[ItemTensors], token_BL: Tensor) -> Tensor:
        """Return the labels of residues where their tokens are, NaN for marks, padding and unknown ones."""
        site_BL = torch.full(token_BL.shape, torch.nan)
        for row_L, item in zip(site_BL, items, strict=True):
            if (site_L := item.values.get(SITE)) is not None:
                site_L = site_L[: self.longest]
                row_L[1 : 1 + len(site_L)] = torch.where(site_L == NOT_KNOWN, torch.nan, site_L.float())
        return site_BL

    def loss(self, model: nn.Module, batch: SequenceBatch) -> dict[str, tuple[Tensor, float]]:
        """Return the sum of errors, and how many numbers or residues are known."""
        told_BK = model(batch.token_BL)
        if not self.by_residue:
            return {TARGET: (squared_error(told_BK, batch.target_BK, batch.is_known_BK), batch.known)}
        weight_BK = batch.is_known_BK.to(told_BK.dtype)
        target_BK = batch.target_BK.to(told_BK.dtype)
        error = functional.binary_cross_entropy_with_logits(told_BK, target_BK, weight_BK, reduction="sum")
        return {TARGET: (error, batch.known)}

    def weights(self, batch: SequenceBatch) -> dict[str, float]:
        """Return how many numbers or residues are known."""
        return {TARGET: batch.known}

    def outputs(self, model: nn.Module, batch: SequenceBatch) -> dict[str, Any]:
        """Return the prediction for each item and its target: NaN where unknown, of no size where nothing is known."""
        told_BK, labels = model(batch.token_BL), labels_of(batch.target_BK, batch.is_known_BK, batch.is_labelled)
        if not self.by_residue:
            return {PREDICTION: told_BK, TARGET: labels}
        each = [slice(1, 1 + residues) for residues in batch.residues]
        return {
            PREDICTION: [told_L[own] for told_L, own in zip(told_BK.sigmoid(), each, strict=True)],
            TARGET: [known_L[own] for known_L, own in zip(labels, each, strict=True)],
        }

    def metrics(self, outputs: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Return the metrics of a split: errors of numbers, or the ranking of residues; none if nothing is known."""
        if not self.by_residue:
            names = tuple(str(place) for place in range(self.targets))
            return error_figures(outputs[PREDICTION], outputs[TARGET], names)
        ranking = Ranking()
        for chance_L, known_L in labelled(outputs[PREDICTION], outputs[TARGET]):
            is_known_L = ~np.isnan(known_L)
            ranking.add(logits(chance_L[is_known_L]), known_L[is_known_L])
        return known_figures({"auroc": ranking.auroc(), "auprc": ranking.auprc()})

    def example(self, sizes: Sizes) -> SequenceBatch:
        items, length = sizes[ITEMS], sizes[TOKENS]
        shape = (items, length) if self.by_residue else (items, self.targets)
        token_BL = torch.full((items, length), CLS + 4)
        known, is_known = float(np.prod(shape)), torch.ones(shape, dtype=torch.bool)
        residues = (length - ENDS,) * items
        return SequenceBatch(token_BL, torch.zeros(shape), is_known, known, residues, (True,) * items)
