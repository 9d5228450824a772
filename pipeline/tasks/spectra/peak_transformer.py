"""The network of DreaMS: a transformer over the peaks of a spectrum, with waves of their masses and its heads.

As published, three things are mistakes that the published weights were trained with: phases of waves are rounded to
float32 twice, so that the finest waves are noise; every place of a padded spectrum is attended, so that predictions
depend on how many there are; and a head that sums tokens sums those of padding, too. `as_published` keeps all three;
otherwise phases are right, and padding is neither attended nor summed.

A published fine-tuned model has the pre-trained one below `backbone.`, and its head below `head.`; the pre-trained one
has neither. Their frequencies stand in a file twice, under two names.

Shapes: B items, T triplets, S = B + 2 T spectra, P peaks of one, L places (the precursor, its peaks, padding), Q waves,
D features, H heads, K targets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from pipeline.tasks.task_parts import (
    WHERE,
    OriginalForm,
    at_least,
    at_least_single,
    divided,
    dropout_of,
    highest,
    most_intense,
    padded_rows,
    refuse,
    require,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from pipeline.training.items.batch import ItemTensors


HEAVIEST = 1000.0  # m/z: the longest period of the waves; masses are also given as fractions of it
REGRESSION, BINARY, FINGERPRINT, EMBEDDING = "regression", "binary", "fingerprint", "embedding"
HEADS = (REGRESSION, BINARY, FINGERPRINT, EMBEDDING)
FINEST, COARSEST = 1e-5, 0.25  # Da: 50,000 waves, and 1
SIZES = ("layers", "heads", "d_fourier", "d_peak", "feedforward", "fourier_width", "fourier_layers", "head_depth")


@dataclass(frozen=True)
class PeakSizes:
    """The sizes of the network, and the kind of its head."""

    targets: int = 1  # numbers that an item's `target` has
    head: str = REGRESSION  # the kind of head
    as_published: bool = False  # like DreaMS, with its mistakes: published weights need this
    layers: int = 7
    heads: int = 8
    d_fourier: int = 980  # features of a peak's mass; with d_peak the width of every layer
    d_peak: int = 44  # features of a peak's mass and intensity as they are
    feedforward: int = 4  # how much wider a layer is within
    finest: float = 1e-4  # Da: half the shortest period of the waves; m/z itself has steps of 6e-5 at 1000 (float32)
    fourier_width: int = 512  # between frequencies and features
    fourier_layers: int = 5
    dropout: float = 0.0
    head_depth: int = 1  # layers of a head, of widths between; 0: the precursor's token as it is
    summed: bool = False  # fingerprints by the sum of all tokens, as published by default; else by the precursor's
    classes: int = 0  # of masked m/z, of the outputs of pre-training; 0: there are none

    @property
    def width(self) -> int:
        return self.d_fourier + self.d_peak

    def check_sizes(self) -> None:
        """Refuse sizes of which there is no network."""
        at_least(self, dict.fromkeys(SIZES, 1))
        dropout_of(self)
        require(FINEST <= self.finest <= COARSEST, self, "finest", f"from {FINEST} to {COARSEST} Da")
        divided(self.width, self.heads)


class Peaks(NamedTuple):
    """Spectra, padded: of each the precursor, then its peaks."""

    mz_BL: Tensor
    intensity_BL: Tensor
    real_BL: Tensor | None  # None: all are


class AttentionBias(NamedTuple):
    """What is added to scores, and which queries ask at all."""

    bias_B1QL: Tensor  # Q is 1 where all queries have the same
    asks_BL1: Tensor | None  # None: all do; a query that does not ask attends every place alike


class MassWaves(nn.Module):
    """Encodes m/z as waves of many periods, from a fraction of a dalton to the heaviest mass, and a small network."""

    frequency_1Q: Tensor
    ahead_21: Tensor

    def __init__(self, sizes: PeakSizes) -> None:
        super().__init__()
        fine = sizes.finest * torch.arange(2, math.ceil(1 / sizes.finest), 2, dtype=torch.float64)
        period_Q = torch.cat([fine, torch.arange(2, HEAVIEST, dtype=torch.float64)])
        self.as_published = sizes.as_published
        self.register_buffer("frequency_1Q", (1 / period_Q).float().unsqueeze(0))
        ahead_21 = torch.tensor([[0.25], [0.0]])  # a cosine is a sine, a quarter of a turn ahead
        self.register_buffer("ahead_21", ahead_21, persistent=False)
        widths = [2 * len(period_Q), *[sizes.fourier_width] * (sizes.fourier_layers - 1), sizes.d_fourier]
        pairs = pairwise(widths)
        # no list: its parts are no blocks to run again in backward, for they keep next to nothing
        self.network = nn.ModuleDict({str(place): nn.Linear(*pair) for place, pair in enumerate(pairs)})
        self.dropout = sizes.dropout

    def forward(self, mz_BL: Tensor) -> Tensor:
        x_BLD = self.rounded_waves(mz_BL) if self.as_published else self.waves(mz_BL)
        for layer in self.network.values():
            x_BLD = functional.dropout(functional.relu(layer(x_BLD)), self.dropout, self.training)
        return x_BLD

    def waves(self, mz_BL: Tensor) -> Tensor:
        """Return cosines, then sines of all frequencies [B, L, 2 Q], in place as they take most of the memory."""
        # In double, and no matmul: of five million turns, single precision leaves no more than halves.
        turns_BLQ = (mz_BL.double().unsqueeze(-1) * self.frequency_1Q.double()).frac_().to(mz_BL.dtype)
        waves_BL2Q = turns_BLQ.unsqueeze(-2) + self.ahead_21
        return waves_BL2Q.mul_(2 * math.pi).sin_().flatten(-2)

    def rounded_waves(self, mz_BL: Tensor) -> Tensor:
        """Return the same of phases that are rounded at each multiplication, as published."""
        phase_BLQ = (2 * math.pi * mz_BL).unsqueeze(-1) * self.frequency_1Q
        return torch.cat([phase_BLQ.cos(), phase_BLQ.sin()], -1)


class PeakFeatures(nn.Module):
    """Computes the features of a peak from m/z and intensity: those of both as they are, then those of its mass."""

    def __init__(self, sizes: PeakSizes) -> None:
        super().__init__()
        self.masses, self.peak = MassWaves(sizes), nn.Linear(2, sizes.d_peak)
        self.dropout = sizes.dropout

    def forward(self, mz_BL: Tensor, intensity_BL: Tensor) -> Tensor:
        peak_BLD = functional.relu(self.peak(torch.stack([mz_BL / HEAVIEST, intensity_BL], -1)))
        peak_BLD = functional.dropout(peak_BLD, self.dropout, self.training)
        return torch.cat([peak_BLD, self.masses(mz_BL)], -1)


class PeakAttention(nn.Module):
    """Attention whose queries, keys, values and output are projected by one tensor, as published."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.weight = nn.Parameter(torch.empty(4 * width, width))
        for projection in self.weight.detach().chunk(4):
            nn.init.xavier_uniform_(projection)

    def forward(self, x_BLD: Tensor, bias: AttentionBias) -> Tensor:
        """Return the rows' mixtures."""
        # Written out, as fused kernels take a bias in the precision of queries, and some keep no gradient of it.
        width = x_BLD.shape[-1]
        mixed, out = self.weight[: 3 * width], self.weight[3 * width :]
        rows = functional.linear(x_BLD, mixed).view(*x_BLD.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query_BHLD, key_BHLD, value_BHLD = rows
        if bias.asks_BL1 is not None:
            query_BHLD = query_BHLD * bias.asks_BL1.unsqueeze(1)
        score_BHLL = (query_BHLD * query_BHLD.shape[-1] ** -0.5) @ key_BHLD.transpose(-1, -2)
        share_BHLL = torch.softmax(score_BHLL + bias.bias_B1QL, -1)
        share_BHLL = functional.dropout(share_BHLL, self.dropout, self.training)
        mixed_BLD = (share_BHLL.to(value_BHLD.dtype) @ value_BHLD).transpose(1, 2).flatten(2)
        return functional.linear(mixed_BLD, out)


class PeakLayer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, sizes: PeakSizes) -> None:
        super().__init__()
        width, inner = sizes.width, sizes.feedforward * sizes.width
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = PeakAttention(width, sizes.heads, sizes.dropout)
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        self.drop = nn.Dropout(sizes.dropout)

    def forward(self, x_BLD: Tensor, bias: AttentionBias) -> Tensor:
        x_BLD = x_BLD + self.drop(self.attention(self.before_attention(x_BLD), bias))
        fed_BLD = self.down(self.drop(functional.relu(self.up(self.before_feed(x_BLD)))))
        changed_BLD: Tensor = x_BLD + self.drop(fed_BLD)
        return changed_BLD


class PrecursorHead(nn.Module):
    """Predicts from the precursor's token through layers of evenly changing widths; of depth 0 it returns the token."""

    def __init__(self, sizes: PeakSizes) -> None:
        super().__init__()
        bias = sizes.head in (REGRESSION, EMBEDDING)
        step = (sizes.targets - sizes.width) / max(sizes.head_depth, 1)
        widths = [round(sizes.width + step * place) for place in range(sizes.head_depth)] + [sizes.targets]
        pairs = pairwise(widths)
        self.steps = nn.ModuleDict({str(place): nn.Linear(*pair, bias=bias) for place, pair in enumerate(pairs)})

    def forward(self, x_BLD: Tensor, real_BL: Tensor | None) -> Tensor:  # noqa: ARG002 - heads are asked alike
        x_BK = x_BLD[:, 0]
        for place, layer in enumerate(self.steps.values()):
            x_BK = layer(functional.relu(x_BK) if place else x_BK)
        return x_BK


class SummedHead(nn.Module):
    """Tells numbers by the sum of all tokens, each through a layer before; as published padding is summed, too."""

    def __init__(self, sizes: PeakSizes) -> None:
        super().__init__()
        self.as_published = sizes.as_published
        self.each = nn.Linear(sizes.width, sizes.width, bias=False)
        self.all = nn.Linear(sizes.width, sizes.targets, bias=False)

    def forward(self, x_BLD: Tensor, real_BL: Tensor | None) -> Tensor:
        each_BLD = self.each(x_BLD)
        if real_BL is not None and not self.as_published:
            each_BLD = each_BLD * real_BL.unsqueeze(-1)
        predicted_BK: Tensor = self.all(each_BLD.sum(1))
        return predicted_BK


class PretrainingOutputs(nn.Module):
    """Predicts the masses of masked peaks, and which of two spectra came first."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.mass, self.order = nn.Linear(width, classes), nn.Linear(2 * width, 1, bias=False)


class PeakTransformer(nn.Module):
    """The transformer and its head: predicts numbers, or an embedding, of each spectrum."""

    def __init__(self, sizes: PeakSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed = PeakFeatures(sizes)
        self.layers = nn.ModuleList(PeakLayer(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = SummedHead(sizes) if sizes.summed else PrecursorHead(sizes)
        self.pretraining = PretrainingOutputs(sizes.width, sizes.classes) if sizes.classes else None
        if self.pretraining is not None:
            self.pretraining.requires_grad_(requires_grad=False)  # kept for files to write

    def forward(self, peaks: Peaks) -> Tensor:
        """Return the head's prediction for each spectrum [B, K]."""
        tokens_BLD = self.last_layer(peaks)
        if not isinstance(self.head, SummedHead):
            tokens_BLD = tokens_BLD[:, :1]
        predicted_BK: Tensor = self.head(self.norm(tokens_BLD), peaks.real_BL)
        return at_least_single(predicted_BK)

    def last_layer(self, peaks: Peaks) -> Tensor:
        """Return the output of the last layer, before the norm."""
        x_BLD = self.embed(peaks.mz_BL, peaks.intensity_BL)
        bias = self.bias(x_BLD, peaks.real_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD, bias)
        last_BLD: Tensor = x_BLD
        return last_BLD

    def bias(self, x_BLD: Tensor, real_BL: Tensor | None) -> AttentionBias:
        """Return the bias by differences of masses: of a key's features of mass, as a query's cancel in a softmax."""
        mass_BLD = x_BLD[..., self.embed.peak.out_features :]
        bias_B1QL = -mass_BLD.sum(-1, dtype=torch.promote_types(x_BLD.dtype, torch.float32))[:, None, None, :]
        if real_BL is None:
            return AttentionBias(bias_B1QL, None)
        if not self.sizes.as_published:
            return AttentionBias(bias_B1QL.masked_fill(~real_BL[:, None, None, :], -torch.inf), None)
        return AttentionBias(bias_B1QL * real_BL[:, None, :, None], real_BL.unsqueeze(-1))

    def published_forms(self) -> dict[str, DreamsForm]:
        """Return the names under which weights of it are published."""
        return {"dreams": DreamsForm.of(self.sizes)}

    def fitting_options(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the task's options that fit DreaMS' weights, by their shapes, which leave the number of heads open."""
        bare = {name.removeprefix(BACKBONE): tensor for name, tensor in tensors.items()}
        d_peak = len(bare[SIGN])
        inner, width = bare["transformer_encoder.ffs.0.in_proj.weight"].shape
        return {
            "layers": sum(fnmatchcase(name, "transformer_encoder.atts.*.weights") for name in bare),
            "d_fourier": width - d_peak,
            "d_peak": d_peak,
            "feedforward": inner // width,
            "finest": round(0.5 / float(bare[FREQUENCIES].flatten()[0]), 9),
            "fourier_width": len(bare["ff_fourier.ff.0.bias"]),
            "fourier_layers": sum(fnmatchcase(name, "ff_fourier.ff.*.bias") for name in bare),
            "classes": len(bare.get(MASSES + ".bias", ())),
        }


SIGN, BACKBONE, HEAD = "ff_peak.ff.0.weight", "backbone.", "head."
FREQUENCIES, AGAIN = "fourier_enc.b", "fourier_enc.Fourier frequencies"
APART = 3  # a linear layer of theirs is followed by ReLU and dropout, which are counted, too
PRETRAINING = {"pretraining.mass": "ff_out.ff.0", "pretraining.order": "ro_out"}
MASSES = PRETRAINING["pretraining.mass"]


@dataclass(frozen=True)
class DreamsForm(OriginalForm):
    """The form in which DreaMS publishes weights: only a fine-tuned model has `backbone.` before all but its head."""

    classes: int = 0

    @classmethod
    def of(cls, sizes: PeakSizes) -> DreamsForm:
        """Return the form of a network of these sizes."""
        layers = range(sizes.layers)
        head = {f"head.steps.{at}": f"head.ff.{APART * at}" for at in range(sizes.head_depth)}
        if sizes.head == EMBEDDING:
            head = {"head.steps.0": "head"}
        if sizes.summed:
            head = {"head.each": "head.phi.0", "head.all": "head.rho"}
        names = {
            "embed.peak": "ff_peak.ff.0",
            "embed.masses.frequency_1Q": FREQUENCIES,
            **{f"embed.masses.network.{at}": f"ff_fourier.ff.{APART * at}" for at in range(sizes.fourier_layers)},
            "layers.*.attention.weight": "transformer_encoder.atts.*.weights",
            "layers.*.up": "transformer_encoder.ffs.*.in_proj",
            "layers.*.down": "transformer_encoder.ffs.*.out_proj",
            **{f"layers.{at}.before_attention": f"transformer_encoder.scales.{2 * at}" for at in layers},
            **{f"layers.{at}.before_feed": f"transformer_encoder.scales.{2 * at + 1}" for at in layers},
            "norm": f"transformer_encoder.scales.{2 * sizes.layers}",
            **(PRETRAINING if sizes.classes else {}),
            **head,
        }
        outputs = () if sizes.classes else [f"{name}.*" for name in PRETRAINING.values()]
        left = *outputs, *(BACKBONE + name for name in outputs), *(() if sizes.head_depth else (f"{HEAD}*",))
        return cls(
            names, (SIGN,), left, fresh=("head.*", "pretraining.*"), prefix=BACKBONE, system="DreaMS",
            as_published=sizes.as_published, classes=sizes.classes,
        )  # fmt: skip

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors under our names; masses of another number of classes stay behind, as no head reads them."""
        bare = {name.removeprefix(BACKBONE): tensor for name, tensor in tensors.items() if not name.endswith(AGAIN)}
        is_other = len(bare.get(MASSES + ".bias", ())) != self.classes
        return super().read({name: bare[name] for name in bare if not (is_other and name.startswith(MASSES))})

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a model's tensors under their names: all of a fine-tuned one, or without a head a pre-trained one."""
        theirs = super().write(tensors)
        theirs[BACKBONE + AGAIN] = theirs[BACKBONE + FREQUENCIES]
        bare = BACKBONE + HEAD if any(name.startswith(HEAD) for name in tensors) else BACKBONE
        return {name.removeprefix(BACKBONE) if name.startswith(bare) else name: theirs[name] for name in theirs}


PEAKS, PRECURSOR, TARGET, MOLECULE, RETENTION = "peaks", "precursor_mz", "target", "molecule", "retention_s"
RELATED = ("positive", "negative")
OF_PRECURSOR = 1.1  # its intensity, which no peak has


class SpectraBatch(NamedTuple):
    """A batch of spectra, those of its items first, and then those that they are compared with."""

    peaks: Peaks  # [S, L]: of items, then a positive of each triplet, then a negative of each
    anchor_T: Tensor  # the items that have both
    target_BK: Tensor  # 0 where it is not known
    is_known_BK: Tensor
    precursor_B: Tensor
    molecule_S: Tensor  # a number for each molecule; 0: not known
    known: float
    is_labelled: tuple[bool, ...]  # of each item: whether any target is known
    has_targets: bool = True  # whether the reader gave any, known or not

    @property
    def own(self) -> Peaks:
        """The spectra of items alone."""
        items = len(self.target_BK)
        mz_BL, intensity_BL, real_BL = self.peaks
        return Peaks(mz_BL[:items], intensity_BL[:items], None if real_BL is None else real_BL[:items])


class SpectrumRows(NamedTuple):
    """The precursor and the peaks of one spectrum."""

    mz_P: Tensor
    intensity_P: Tensor
    molecule: Tensor  # 0: not known
    retention_s: Tensor  # NaN: not known


def own_rows(item: ItemTensors, most: int) -> SpectrumRows:
    """Return the precursor and the most intense peaks of an item's spectrum."""
    mz_P, intensity_P = most_intense(item, most)
    precursor = item.values.get(PRECURSOR, mz_P.new_zeros(())).reshape(1).to(mz_P.dtype).nan_to_num(0.0)
    molecule_1 = item.values.get(MOLECULE, torch.zeros(1)).reshape(1).long()
    retention_s = item.values.get(RETENTION, mz_P.new_tensor(math.nan))
    return _with_precursor(precursor, mz_P, intensity_P, molecule_1[0], retention_s)


def related_rows(item: ItemTensors, role: str, most: int) -> SpectrumRows | None:
    """Return one of the spectra that an item's is compared with, drawn by the item; None if it has none."""
    values, axis = item.values, f"{role}s.{PRECURSOR}"
    if axis not in values or not (count := len(values[axis])):
        return None
    drawn = int(item.rng.integers(count))
    is_drawn_P = values[f"{role}.spectrum"] == drawn
    mz_P, intensity_P = (values[f"{role}.{name}"][is_drawn_P].float() for name in ("mz", "intensity"))
    molecule_C = values.get(f"{role}s.{MOLECULE}", torch.zeros(count, dtype=torch.long))
    retention_C = values.get(f"{role}s.{RETENTION}", torch.full((count,), math.nan))
    precursor_1 = values[axis][drawn : drawn + 1].float()
    return _with_precursor(precursor_1, *highest(mz_P, intensity_P, most), molecule_C[drawn], retention_C[drawn])


def _with_precursor(precursor_1: Tensor, mz_P: Tensor, intensity_P: Tensor, *known: Tensor) -> SpectrumRows:
    intensity_P = torch.cat([intensity_P.new_tensor([OF_PRECURSOR]), intensity_P])
    return SpectrumRows(torch.cat([precursor_1, mz_P]), intensity_P, *known)


def padded_peaks(spectra: Sequence[SpectrumRows], length: int = 0) -> Peaks:
    """Pad spectra with zeros, to `length` places where it is given: then all batches have a mask."""
    mz_BL, real_BL = padded_rows([rows.mz_P for rows in spectra])
    intensity_BL, _ = padded_rows([rows.intensity_P for rows in spectra])
    if not length:
        return Peaks(mz_BL, intensity_BL, real_BL)
    whole = torch.ones_like(mz_BL, dtype=torch.bool) if real_BL is None else real_BL
    left = (0, length - mz_BL.shape[1])
    return Peaks(*(torch.nn.functional.pad(rows, left) for rows in (mz_BL, intensity_BL, whole)))


def item_target(item: ItemTensors, targets: int) -> Tensor:
    """Return the target of an item [K], NaN where unknown; raise where its size is not as configured."""
    if TARGET not in item.values:
        return torch.full((targets,), math.nan)
    target_K = item.values[TARGET].reshape(-1)
    if len(target_K) != targets:
        sizes = f"{targets} numbers a spectrum, but {item.id} has a target of {len(target_K)}"
        refuse("targets", f"the task expects {sizes}", f"--set {WHERE}.targets={len(target_K)}")
    return target_K.float()


def example_batch(sizes: Mapping[str, int], targets: int, *, masked: bool, related: bool) -> SpectraBatch:
    """Return a batch with a number of items and places; with `related`, each has a positive and a negative."""
    items, length = sizes["items"], sizes[PEAKS] + 1
    spectra = 3 * items if related else items
    real_BL = torch.ones(spectra, length, dtype=torch.bool) if masked or spectra > 1 else None
    return SpectraBatch(
        peaks=Peaks(HEAVIEST * torch.rand(spectra, length), torch.rand(spectra, length), real_BL),
        anchor_T=torch.arange(items if related else 0),
        target_BK=torch.rand(items, targets).round(),
        is_known_BK=torch.ones(items, targets, dtype=torch.bool),
        precursor_B=HEAVIEST * torch.rand(items),
        molecule_S=torch.arange(spectra),
        known=float(items),
        is_labelled=(True,) * items,
    )
