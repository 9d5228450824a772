"""The forward pass of the ESM families over packed sequences: linears, attention, positions and layers.

ESM-1b and ESM-1v differ from ESM-2 by learned positions and perhaps a norm before the layers; ESM C by norms of queries
and keys, a gate in its feed-forward part, no biases, and what a layer adds being divided by a number of its depth.

Shapes: T tokens, H heads, C columns of a head, F = C/2 frequencies, P positions, L tokens of one sequence, V letters;
M rows of a tile, D width, X three times the width, R rows, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention, silu

from pipeline.device.accelerator import is_card
from pipeline.encoder.checkpoint_files import ESMC
from pipeline.encoder.embedding_recipe import BF16_PRODUCTS, CLS, ENDS, EOS, PAD, tokenize
from pipeline.encoder.esm_checkpoint import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    from pipeline.encoder.esm_checkpoint import EsmCheckpoint

    Parameters: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]  # weight and bias
    Tokens = NDArray[np.uint8]

Norm = Callable[[torch.Tensor], torch.Tensor]
MASKED_IN_TRAINING = 0.15 * 0.8  # of the tokens; fair-esm scales embeddings by the unmasked share
EPSILON = 1e-5
_ESMC_UNSCALED = 36  # layers of the ESM C whose layers' results are added as they are
_NO_SCALARS: list[float] = []


@contextmanager
def without_tf32() -> Iterator[None]:
    """Disable TF32 in this block, whatever the environment or the process has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class TorchLinear:
    """A linear layer by torch, on any device, also followed by gelu, a gate or an addition."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        # The file that a weight is mapped from may change; on a card it is a copy already.
        self._weight_OI = weight_OI if is_card(weight_OI.device) else weight_OI.clone()
        self._bias_O = bias_O

    def __call__(self, x_RI: torch.Tensor) -> torch.Tensor:
        return linear(x_RI, self._weight_OI, self._bias_O)

    def gelu(self, x_RI: torch.Tensor) -> torch.Tensor:
        """Return gelu of the result, by the error function."""
        return gelu(self(x_RI))

    def gated(self, x_RI: torch.Tensor) -> torch.Tensor:
        """Return the second half of the result through the gate that the first half is."""
        gate_RW, passed_RW = self(x_RI).chunk(2, 1)
        return silu(gate_RW).mul_(passed_RW)

    def add(self, x_RI: torch.Tensor, other_RO: torch.Tensor) -> torch.Tensor:
        """Return the result plus something."""
        return self(x_RI).add_(other_RO)


class PackedLinear(TorchLinear):
    """A linear layer by oneDNN, with the weights reordered once.

    It reached 105–112 GFLOP/s on a core where torch's default reached 85–100. These operations belong to torch.compile
    and are not public: check `packed_works` first.
    """

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), None)  # noqa: SLF001
        self._bias_O = bias_O
        self._run = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
        self._run_add = torch.ops.mkldnn._linear_pointwise.binary  # noqa: SLF001

    def __call__(self, x_RI: torch.Tensor) -> torch.Tensor:
        return self._as_tensor(self._run(x_RI, self._weight, self._bias_O, "none", _NO_SCALARS, "none"))

    def gelu(self, x_RI: torch.Tensor) -> torch.Tensor:
        return self._as_tensor(self._run(x_RI, self._weight, self._bias_O, "gelu", _NO_SCALARS, "none"))

    def add(self, x_RI: torch.Tensor, other_RO: torch.Tensor) -> torch.Tensor:
        return self._as_tensor(self._run_add(x_RI, other_RO, self._weight, self._bias_O, "add"))

    @staticmethod
    def _as_tensor(result: object) -> torch.Tensor:
        assert isinstance(result, torch.Tensor)
        return result


class Bfloat16Linear(PackedLinear):
    """Products in bf16, twice as fast where the processor has them; results and what they are added to are in fp32."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        super().__init__(weight_OI.bfloat16(), None if bias_O is None else bias_O.bfloat16())

    def __call__(self, x_RI: torch.Tensor) -> torch.Tensor:
        return super().__call__(x_RI.bfloat16()).float()

    def gelu(self, x_RI: torch.Tensor) -> torch.Tensor:
        return super().gelu(x_RI.bfloat16())

    def add(self, x_RI: torch.Tensor, other_RO: torch.Tensor) -> torch.Tensor:
        return self(x_RI).add_(other_RO)


def choose_linear(
    weights: Sequence[Parameters], tile: int, fill: int, kind: type[TorchLinear] | None = None
) -> tuple[type[TorchLinear], int]:
    """Return the fastest linear that is right for these weights, and to what multiple its last tile is filled up.

    A row must have the same bits in a tile of `fill` rows as in a full one, at its beginning as at its end; where that
    does not hold, all tiles are full ones.
    """
    kind = kind or (PackedLinear if packed_works(weights, fill) else TorchLinear)
    for weight_OI, bias_O in weights:
        layer, (outputs, inputs) = kind(weight_OI, bias_O), weight_OI.shape
        x_RI, other_RO = _noise(tile, inputs, weight_OI), _noise(tile, outputs, weight_OI)
        ends = [slice(0, tile), slice(0, fill), slice(tile - fill, tile)]
        whole_RO, *found = (
            layer.gelu(x_RI[rows]) if outputs > inputs else layer.add(x_RI[rows], other_RO[rows]) for rows in ends
        )
        if not all(torch.equal(part_RO, whole_RO[rows]) for part_RO, rows in zip(found, ends[1:], strict=True)):
            return kind, tile
    return kind, fill


def packed_works(weights: Sequence[Parameters], rows: int) -> bool:
    """Say whether oneDNN's operations exist, take these weights and compute what torch does."""
    try:
        for weight_OI, bias_O in weights:
            x_RI, other_RO = (_noise(rows, size, weight_OI) for size in reversed(weight_OI.shape))
            packed, plain = (
                torch.stack([kind(x_RI), kind.gelu(x_RI), kind.add(x_RI, other_RO)])
                for kind in (PackedLinear(weight_OI, bias_O), TorchLinear(weight_OI, bias_O))
            )
            if not torch.allclose(packed, plain, rtol=1e-4, atol=1e-5 * float(plain.abs().max())):
                return False
    except (AttributeError, RuntimeError, NotImplementedError):  # this torch lacks them, or was built without oneDNN
        return False
    return all(weight_OI.dtype == torch.float32 for weight_OI, _ in weights)


def _noise(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(0)).sub_(0.5).to(like)


def bf16_products_here() -> bool:
    """Say whether this processor multiplies bf16 by instructions of its own: AVX512-BF16, or AMX."""
    own = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # noqa: SLF001
    return bool(own and torch._C._has_mkldnn)  # noqa: SLF001


@dataclass(frozen=True, slots=True, eq=False)
class EsmLayer:
    """One transformer layer."""

    before_attention: Norm
    qkv: TorchLinear
    attended: TorchLinear
    before_wide: Norm
    widen: TorchLinear
    narrow: TorchLinear
    of_queries_and_keys: tuple[Norm, ...] = ()  # and a gate in what widens: ESM C has both

    def project(self, x_MD: torch.Tensor, heads: int) -> torch.Tensor:
        """Return queries, keys and values."""
        qkv_MX: torch.Tensor = self.qkv(self.before_attention(x_MD))
        for part_MD, norm in zip(qkv_MX.chunk(3, 1), self.of_queries_and_keys, strict=False):
            part_MD.copy_(norm(part_MD))
        return qkv_MX.view(len(x_MD), 3, heads, -1)

    def finish(self, x_MD: torch.Tensor, context_MD: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer from its input and the attention's result."""
        x_MD = self.attended.add(context_MD, x_MD)
        y_MD = self.before_wide(x_MD)
        return self.narrow.add(self.widen.gated(y_MD) if self.of_queries_and_keys else self.widen.gelu(y_MD), x_MD)


class ParameterReader:
    """Takes parameters out of a checkpoint in the precision of the computation; those of heads as `turn` wants them."""

    def __init__(self, checkpoint: EsmCheckpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._tensors, self._shape = checkpoint.tensors, checkpoint.architecture
        self._device, self._dtype = device, dtype

    def table(self) -> torch.Tensor:
        """Return the embedding table, scaled as every sequence without masks is."""
        scale = 1 - MASKED_IN_TRAINING if self._shape.token_dropout else 1.0
        return (self._tensors["embed_tokens.weight"].float() * scale).to(self._device, self._dtype)

    def positions(self) -> torch.Tensor:
        """Return the learned positions, the first of which is that of the first token."""
        return self._copied("embed_positions.weight")[PAD + 1 :]

    def norm(self, name: str) -> Norm:
        """Return a layer norm; its sums are in fp32 whatever the precision."""
        weight_D = self._copied(f"{name}.weight")
        bias_D = self._copied(f"{name}.bias") if f"{name}.bias" in self._tensors else None
        return partial(layer_norm, normalized_shape=weight_D.shape, weight=weight_D, bias=bias_D, eps=EPSILON)

    def layer(self, number: int, kind: type[TorchLinear]) -> EsmLayer:
        name = f"layers.{number}"
        linears = (kind(weight_OI, bias_O) for weight_OI, bias_O in self.linears(number))
        more = ("q", "k") if self._shape.family == ESMC else ()
        return EsmLayer(
            self.norm(f"{name}.self_attn_layer_norm"), next(linears), next(linears),
            self.norm(f"{name}.final_layer_norm"), next(linears), next(linears),
            tuple(self.norm(f"{name}.self_attn.{part}_layer_norm") for part in more),
        )  # fmt: skip

    def linears(self, number: int) -> Iterator[Parameters]:
        """Yield weight and bias: queries, keys and values joined; attention's output; what widens; what narrows.

        What an ESM C adds is divided by a number of its layers. Weights may still be mapped from the file.
        """
        is_esmc = self._shape.family == ESMC
        scale = 1 / math.sqrt(self._shape.layers / _ESMC_UNSCALED) if is_esmc else 1.0
        attention = [f"self_attn.{part}_proj" for part in "qkv"]
        for parts in (attention, ["self_attn.out_proj"], ["gate", "fc1"] if is_esmc else ["fc1"], ["fc2"]):
            factor = scale if parts[0] in ("self_attn.out_proj", "fc2") else 1.0
            names = [f"layers.{number}.{part}" for part in parts]
            bias_O = None if is_esmc else torch.cat([self._taken(f"{name}.bias") for name in names])
            weights = [self._taken(f"{name}.weight") for name in names]
            weight_OI = weights[0] if len(weights) == 1 else torch.cat(weights)
            yield (weight_OI if factor == 1 else weight_OI.mul(factor)), bias_O

    def _taken(self, name: str) -> torch.Tensor:
        """Return a parameter, in rotary positions' pairs: within each head, columns c and c + C/2 become neighbours.

        Scores do not change when queries and keys are reordered alike.
        """
        tensor = self._tensors[name].to(self._device, self._dtype)
        if self._shape.positions or not any(f"self_attn.{part}_" in name for part in "qk"):
            return tensor
        return tensor.view(self._shape.heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

    def _copied(self, name: str) -> torch.Tensor:
        return self._taken(name).clone()


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
    room_THC[bounds.starts[-1] :] = 0  # rows that only fill a tile: never read, but computed with
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
    if dtype == torch.float32 or not (kernel or is_card(device)):
        return by_sequence
    if kernel is None:  # imported here, as it imports torch's compiler, which takes a second
        from torch.nn.attention.varlen import varlen_attn

        kernel = varlen_attn
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

    tokenize = staticmethod(tokenize)

    def __init__(self, checkpoint: EsmCheckpoint, *, layer: int, precision: str, device: torch.device) -> None:
        shape = checkpoint.architecture
        assert 0 <= layer <= shape.layers, f"layer {layer} of {shape.layers}"
        self.dim, self.longest = shape.dim, shape.longest
        self.typical = tokenize("A" * min(TYPICAL, self.longest or TYPICAL))
        self._heads, self._is_gated, self._device = shape.heads, shape.family == ESMC, device
        self._dtype = torch.float32 if precision == BF16_PRODUCTS else DTYPES[precision]
        self._tile, self.fill = 0, 1
        with torch.inference_mode(), without_tf32():
            take = ParameterReader(checkpoint, device, self._dtype)
            kind: type[TorchLinear] = TorchLinear
            if not is_card(device) and layer:
                wanted = Bfloat16Linear if precision == BF16_PRODUCTS else None
                kind, self.fill = choose_linear(list(take.linears(0)), TILE, FILL, wanted)
                self._tile = TILE
            self._table_VD = take.table()
            self._layers = [take.layer(number, kind) for number in range(layer)]
            self._last = take.norm("emb_layer_norm_after") if layer == shape.layers else None
            self._first = take.norm("emb_layer_norm_before") if shape.norm_before else None
            self._position_PD = take.positions() if shape.positions else None
            self._rotary = None if shape.positions else Rotary(checkpoint.rotary_F, device)
            self._attend: Attention = choose_attention(device, self._dtype, self._heads, self.dim // self._heads)

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
        room_T3HC = None if len(tiles_MD) == 1 else tiles_MD[0].new_empty(shape[0], 3, *shape[1:])
        for layer in self._layers:
            qkv_T3HC = self._project(layer, tiles_MD, packing, turn_T1F, room_T3HC)
            context_TD = self._attend(qkv_T3HC, packing.bounds, room_THC).flatten(1)
            del qkv_T3HC
            for number, tile in enumerate(packing.tiles):
                tiles_MD[number] = layer.finish(tiles_MD[number], context_TD[tile])
        del room_THC, room_T3HC
        if self._last is not None:
            tiles_MD = [self._last(x_MD) for x_MD in tiles_MD]
        return (tiles_MD[0] if len(tiles_MD) == 1 else torch.cat(tiles_MD))[packing.row_R]

    def _embedded(self, packing: Packing, tile: slice) -> torch.Tensor:
        """Return what the first layer is given."""
        x_MD = self._table_VD[packing.token_T[tile]]
        if self._position_PD is not None:
            x_MD = x_MD + self._position_PD[packing.position_T[tile]]
        return x_MD if self._first is None else self._first(x_MD)

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


_CLS, _EOS = np.array([CLS], np.uint8), np.array([EOS], np.uint8)
