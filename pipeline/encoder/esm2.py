"""The forward pass of the ESM families over packed sequences: attention, positions and layers.

ESM-1b and ESM-1v differ from ESM-2 by learned positions and perhaps a norm before the layers; ESM C by norms of queries
and keys, a gate in its feed-forward part, no biases, and what a layer adds being divided by a number of its depth.

Shapes: T tokens, H heads, C columns of a head, F = C/2 frequencies, P positions, L tokens of one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from pipeline.device.accelerator import is_card
from pipeline.encoder.checkpoint_files import ESMC
from pipeline.encoder.embedding_recipe import BF16_PRODUCTS, CLS, ENDS, EOS, PAD, tokenize
from pipeline.encoder.esm_checkpoint import as_dtype
from pipeline.encoder.esm_layer import EsmLayer, ParameterReader
from pipeline.encoder.linear import Bfloat16Linear, TorchLinear, choose_linear, without_tf32

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from pipeline.encoder.esm_checkpoint import EsmCheckpoint


@dataclass(frozen=True, slots=True, eq=False)
class SequenceBounds:
    """The first token of each packed sequence, and the end of the last one."""

    starts: tuple[int, ...]
    starts_device: torch.Tensor  # int32, the same numbers where the computation is
    longest: int

    def spans(self) -> Iterator[tuple[int, int]]:
        return pairwise(self.starts)


# qkv_T3HC, bounds, room_THC → context_THC, in the room given or elsewhere
Attention = Callable[[torch.Tensor, SequenceBounds, torch.Tensor], torch.Tensor]
Kernel = Callable[..., Any]


def by_sequence(qkv_T3HC: torch.Tensor, bounds: SequenceBounds, room_THC: torch.Tensor) -> torch.Tensor:
    """Attend within one sequence at a time; no kernel that torch picks here makes an L x L matrix."""
    for first, last in bounds.spans():
        q_1HLC, k_1HLC, v_1HLC = qkv_T3HC[first:last].permute(1, 2, 0, 3).unsqueeze(1).unbind()
        context_1HLC = scaled_dot_product_attention(q_1HLC, k_1HLC, v_1HLC)
        room_THC[first:last] = context_1HLC[0].transpose(0, 1)
    room_THC[bounds.starts[-1] :] = 0  # rows that only fill a tile: nobody reads them, but they are computed on
    return room_THC


def by_sequence_watched(
    highest: list[float], qkv_T3HC: torch.Tensor, bounds: SequenceBounds, room_THC: torch.Tensor
) -> torch.Tensor:
    """Do the same, and keep how far each sequence's scores have been from those of even attention."""
    for number, (first, last) in enumerate(bounds.spans()):
        q_1HLC, k_1HLC, v_1HLC = qkv_T3HC[first:last].permute(1, 2, 0, 3).unsqueeze(1).unbind()
        context_1HLC, sums_1HL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_1HLC, k_1HLC, v_1HLC)  # noqa: SLF001
        room_THC[first:last] = context_1HLC[0].transpose(0, 1)
        highest[number] = max(highest[number], float((sums_1HL - math.log(last - first)).abs().max()))
    room_THC[bounds.starts[-1] :] = 0
    return room_THC


def all_at_once(
    kernel: Kernel, options: dict[str, int], qkv_T3HC: torch.Tensor, bounds: SequenceBounds, room_THC: torch.Tensor
) -> torch.Tensor:
    """Attend within all sequences by one call of torch's packed kernel."""
    del room_THC  # the kernel brings its own
    q_THC, k_THC, v_THC = qkv_T3HC.unbind(1)
    starts, longest = bounds.starts_device, bounds.longest
    context_THC: torch.Tensor = kernel(q_THC, k_THC, v_THC, starts, starts, longest, longest, **options)
    return context_THC


def choose_attention(
    device: torch.device, dtype: torch.dtype, heads: int, columns: int, kernel: Kernel | None = None
) -> Attention:
    """Return the fastest attention that works for these shapes on this device; it is tried, not guessed."""
    kernel = kernel or (varlen_attn if is_card(device) else None)
    if kernel is None or dtype == torch.float32:
        return by_sequence
    # One split makes a sequence's result independent of its batch; not every backend or version knows the word.
    for options in ({"num_splits": 1}, {}):
        attention: Attention = partial(all_at_once, kernel, options)
        if _works(attention, device, dtype, heads, columns):
            return attention
    return by_sequence


def _works(attention: Attention, device: torch.device, dtype: torch.dtype, heads: int, columns: int) -> bool:
    """Say whether an attention runs here and agrees with the plain one."""
    random = torch.Generator().manual_seed(0)
    qkv_T3HC = torch.randn(40, 3, heads, columns, generator=random).to(device, dtype)
    starts = (0, 7, 40)
    bounds = SequenceBounds(starts, torch.tensor(starts, dtype=torch.int32, device=device), 33)
    try:
        found_THC = attention(qkv_T3HC, bounds, torch.empty_like(qkv_T3HC[:, 0]))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False  # a card, a head width or a version that the kernel does not take
    wanted_THC = by_sequence(qkv_T3HC, bounds, torch.empty_like(qkv_T3HC[:, 0]))
    return bool(torch.allclose(found_THC.float(), wanted_THC.float(), atol=0.02))


class Rotary:
    """Rotary positions as unit complex numbers, in fp32 whatever the precision; the table grows as needed."""

    def __init__(self, frequency_F: torch.Tensor, device: torch.device) -> None:
        self._frequency_F = frequency_F.float()
        self._device = device
        self._table_PF = torch.empty(0, len(frequency_F), dtype=torch.complex64, device=device)

    def at(self, position_T: torch.Tensor, longest: int) -> torch.Tensor:
        """Return the rotation of each token, for every head."""
        if longest > len(self._table_PF):
            angle_PF = torch.outer(torch.arange(longest, dtype=torch.float32), self._frequency_F)
            self._table_PF = torch.polar(torch.ones_like(angle_PF), angle_PF).to(self._device)
        return self._table_PF[position_T].unsqueeze(1)


def turn(qk_THC: torch.Tensor, turn_T1F: torch.Tensor, out_THC: torch.Tensor) -> None:
    """Rotate queries and keys by their positions; the two columns of a rotation are neighbours."""
    if out_THC.dtype == torch.float32:
        torch.mul(_complex(qk_THC.float()), turn_T1F, out=_complex(out_THC))
        return
    turned_THC = qk_THC.float()
    _complex(turned_THC).mul_(turn_T1F)
    out_THC.copy_(turned_THC)


def _complex(x_THC: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x_THC.view(*x_THC.shape[:-1], -1, 2))


@dataclass(frozen=True, slots=True)
class Strain:
    """How hard sequences are on bf16: it fails where attention is sharp, and where large rows cancel each other."""

    scores: float  # the farthest that the logarithm of a query's summed scores is from even attention's
    growth: float  # the largest norm that a token's row had on its way, over its last one

    def within(self, sampled: Strain) -> bool:
        """Say whether a sequence is like a sample whose errors are a fourth of what is allowed.

        Scores larger by half made errors 20 to 60 times as large, so they may grow by a quarter; errors of rows add up
        as squares, so growth may double; scores of 1 are rounded by less than a hundredth.
        """
        return self.scores <= 1.25 * sampled.scores + 1 and self.growth <= 2 * sampled.growth


TILE = 1024  # rows: weights are read from the outer cache once a tile; 128 was 5% slower, more than 1024 no faster
FILL = 32  # rows; the last tile is filled up to a multiple of it
TYPICAL = 254  # residues of a sequence that is made up to try an encoder


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Packed sequences: tokens and positions as tensors, and how they are divided."""

    token_T: torch.Tensor
    position_T: torch.Tensor
    row_R: torch.Tensor  # where the residues are, and the marks before them where they are wanted
    bounds: SequenceBounds
    tiles: tuple[slice, ...]


class EsmEncoder:
    """A checkpoint made ready to encode on one device, in one precision, up to one layer."""

    def __init__(self, checkpoint: EsmCheckpoint, *, layer: int, precision: str, device: torch.device) -> None:
        architecture = checkpoint.architecture
        assert 0 <= layer <= architecture.layers, f"layer {layer} of {architecture.layers}"
        self.dim, self.longest = architecture.dim, architecture.longest
        self.typical = tokenize("A" * min(TYPICAL, self.longest or TYPICAL))
        self._heads, self._is_gated = architecture.heads, architecture.family == ESMC
        self._device = device
        self._mixed = mixed = precision == BF16_PRODUCTS
        self._dtype = torch.float32 if mixed else as_dtype(precision)
        self._tile, self.fill = 0, 1
        self.sampled: Strain | None = None  # what the gate saw; sequences beyond it come out as NaN
        self.strains: list[Strain] = []  # of the sequences of the last call, where products are in bf16
        with torch.inference_mode(), without_tf32():
            take = ParameterReader(checkpoint, device, self._dtype)
            self._table_VD = take.table(token_dropout=architecture.token_dropout)
            kind: type[TorchLinear] = TorchLinear
            if not is_card(device) and layer:
                sample = ParameterReader(checkpoint, device, self._dtype)
                kind, self.fill = choose_linear(sample.pairs(0), TILE, FILL, Bfloat16Linear if mixed else None)
                self._tile = TILE
            self._layers = [take.layer(number, kind) for number in range(layer)]
            self._last = take.norm("emb_layer_norm_after") if layer == architecture.layers else None
            self._first = take.norm("emb_layer_norm_before") if architecture.norm_before else None
            self._position_PD = take.positions() if architecture.positions else None
            self._rotary = None if architecture.positions else Rotary(checkpoint.rotary_F, device)
            self._attend: Attention = choose_attention(device, self._dtype, self._heads, self.dim // self._heads)

    def tokenize(self, sequence: str) -> NDArray[np.uint8]:
        return tokenize(sequence)

    def bytes_per_token(self, residues: int = TYPICAL) -> int:  # noqa: ARG002 - no kernel here makes an L x L matrix
        """Return the working memory that a token of a batch needs, beside the weights and a constant."""
        # Rows of the width: state, queries, keys, values, context and one sequence's; without tiles, the wide ones too,
        # which are the widest where they are gated.
        return self.dim * self._dtype.itemsize * (7 if self._tile else 16 if self._is_gated else 13)

    @torch.inference_mode()
    @without_tf32()
    def __call__(self, tokens: Sequence[NDArray[np.uint8]], *, cls: bool = False) -> torch.Tensor:
        """Return the rows of all residues, in order; where `cls`, before those of each sequence that of its mark."""
        packing = self._pack(tokens, cls=cls)
        turn_T1F = self._rotary.at(packing.position_T, packing.bounds.longest) if self._rotary else None
        tiles_MD = [self._embedded(packing, tile) for tile in packing.tiles]
        # One room for all layers: fresh memory for each cost 2% of the time in page faults.
        shape = len(packing.token_T), self._heads, self.dim // self._heads
        room_THC = tiles_MD[0].new_empty(shape if self._attend is by_sequence else 0)
        alone = len(tiles_MD) == 1 and not self._mixed
        room_T3HC = None if alone else tiles_MD[0].new_empty(shape[0], 3, *shape[1:])
        highest = [0.0] * len(tokens)
        attend = partial(by_sequence_watched, highest) if self._mixed else self._attend
        norms = [_norms(tiles_MD)] if self._mixed else []
        for layer in self._layers:
            qkv_T3HC = self._project(layer, tiles_MD, packing, turn_T1F, room_T3HC)
            context_TD = attend(qkv_T3HC, packing.bounds, room_THC).flatten(1)
            del qkv_T3HC
            for number, tile in enumerate(packing.tiles):
                tiles_MD[number] = layer.finish(tiles_MD[number], context_TD[tile])
            if self._mixed:
                norms.append(_norms(tiles_MD))
        del room_THC, room_T3HC
        rows_RD = self._residues(tiles_MD, packing.row_R)
        if self._mixed:
            self._refuse_strained(rows_RD, packing.bounds, highest, norms)
        return rows_RD

    def _embedded(self, packing: Packing, tile: slice) -> torch.Tensor:
        """Return what the first layer is given."""
        x_MD = self._table_VD[packing.token_T[tile]]
        if self._position_PD is not None:
            x_MD = x_MD + self._position_PD[packing.position_T[tile]]
        return x_MD if self._first is None else self._first(x_MD)

    def _refuse_strained(
        self, rows_RD: torch.Tensor, bounds: SequenceBounds, highest: list[float], norms_T: list[torch.Tensor]
    ) -> None:
        """Note how hard each sequence was, and spoil the rows of those that are unlike what the gate saw."""
        growth_T = torch.stack(norms_T).amax(0) / norms_T[-1]
        spans = list(bounds.spans())
        growths = [float(growth_T[slice(*span)].max()) for span in spans]
        self.strains = [Strain(*pair) for pair in zip(highest, growths, strict=True)]
        rowless = (spans[-1][1] - len(rows_RD)) // len(spans)  # tokens of each sequence
        for number, ((first, last), strain) in enumerate(zip(spans, self.strains, strict=True)):
            if self.sampled is not None and not strain.within(self.sampled):
                rows_RD[first - rowless * number : last - rowless * (number + 1)] = math.nan

    def _project(
        self,
        layer: EsmLayer,
        tiles_MD: list[torch.Tensor],
        packing: Packing,
        turn_T1F: torch.Tensor | None,
        room_T3HC: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return queries and keys, turned by rotary positions, and values; a tile that is alone needs no room."""
        for x_MD, tile in zip(tiles_MD, packing.tiles, strict=True):
            qkv_M3HC = layer.project(x_MD, self._heads)
            out_M3HC = qkv_M3HC if room_T3HC is None else room_T3HC[tile]
            if turn_T1F is not None:
                turn(qkv_M3HC[:, :2].flatten(1, 2), turn_T1F[tile], out_M3HC[:, :2].flatten(1, 2))
            if room_T3HC is not None:
                rest = slice(0 if turn_T1F is None else 2, 3)
                out_M3HC[:, rest] = qkv_M3HC[:, rest]
        return qkv_M3HC if room_T3HC is None else room_T3HC

    def _residues(self, tiles_MD: list[torch.Tensor], row_R: torch.Tensor) -> torch.Tensor:
        if self._last is not None:
            tiles_MD = [self._last(x_MD) for x_MD in tiles_MD]
        x_TD = tiles_MD[0] if len(tiles_MD) == 1 else torch.cat(tiles_MD)
        return x_TD[row_R]

    def _pack(self, tokens: Sequence[NDArray[np.uint8]], *, cls: bool) -> Packing:
        """Concatenate the sequences, each between its two marks."""
        lengths = np.array([len(tokens_L) + ENDS for tokens_L in tokens], np.int64)
        assert not self.longest or lengths.max() <= self.longest + ENDS, (
            f"a sequence is longer than {self.longest} residues"
        )
        starts = np.concatenate([[0], np.cumsum(lengths)])
        total = int(starts[-1])
        filled = -(-total // self.fill) * self.fill
        token_T = np.full(filled, PAD, np.int64)
        token_T[:total] = np.concatenate([part for tokens_L in tokens for part in (_CLS, tokens_L, _EOS)])
        position_T = np.zeros(filled, np.int64)
        position_T[:total] = np.arange(total) - np.repeat(starts[:-1], lengths)
        without = starts[1:] - 1 if cls else np.concatenate([starts[:-1], starts[1:] - 1])
        row_R = np.delete(np.arange(total), without)
        step = self._tile or filled
        return Packing(
            self._send(token_T), self._send(position_T), self._send(row_R),
            SequenceBounds(tuple(starts.tolist()), self._send(starts.astype(np.int32)), int(lengths.max())),
            tuple(slice(first, min(first + step, filled)) for first in range(0, filled, step)),
        )  # fmt: skip

    def _send(self, numbers: NDArray[np.int64] | NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self._device)


def _norms(tiles_MD: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.linalg.vector_norm(x_MD, dim=1) for x_MD in tiles_MD])


_CLS, _EOS = np.array([CLS], np.uint8), np.array([EOS], np.uint8)
