"""Linear layers whose rows do not depend on their neighbours: by oneDNN with packed weights where that works.

Shapes: R rows, I inputs, O outputs.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import gelu, linear, silu

from pipeline.device.accelerator import is_card

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TypeAlias

    Parameters: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]  # weight and bias

_NO_SCALARS: list[float] = []


@contextmanager
def without_tf32() -> Iterator[None]:
    """Keep products in fp32 from TF32, whatever a container's environment, or the process, allows itself."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class TorchLinear:
    """A linear layer by torch, on any device, also followed by gelu, a gate or an addition."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self._weight_OI = weight_OI
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
    """By oneDNN, with the weights reordered once: 105–112 GFLOP/s on a core where torch's default reached 85–100.

    These operations are torch.compile's own, not public: whoever wants them asks `packed_works` first.
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
    """Products in bf16, twice as fast where the processor has them; what is added to comes and goes in fp32."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        super().__init__(weight_OI.bfloat16(), None if bias_O is None else bias_O.bfloat16())

    def __call__(self, x_RI: torch.Tensor) -> torch.Tensor:
        return super().__call__(x_RI.bfloat16())

    def gelu(self, x_RI: torch.Tensor) -> torch.Tensor:
        return super().gelu(x_RI.bfloat16())

    def add(self, x_RI: torch.Tensor, other_RO: torch.Tensor) -> torch.Tensor:
        return torch.add(other_RO, self(x_RI))


def choose_linear(
    weights: Sequence[Parameters], tile: int, fill: int, kind: type[TorchLinear] | None = None
) -> tuple[type[TorchLinear], int]:
    """Return the fastest linear that is right for these weights, and to what multiple its last tile is filled up.

    A row must have the same bits in a tile of `fill` rows as in a full one, at its beginning as at its end; where that
    does not hold, all tiles are full ones.
    """
    kind = kind or (PackedLinear if packed_works(weights, fill) else TorchLinear)
    alike = all(_rows_alike(kind(weight_OI, bias_O), weight_OI, tile, fill) for weight_OI, bias_O in weights)
    return kind, fill if alike else tile


def bf16_products_here() -> bool:
    """Say whether this processor multiplies bf16 by instructions of its own: AVX512-BF16, or AMX."""
    own = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # noqa: SLF001
    return bool(own and torch._C._has_mkldnn)  # noqa: SLF001


def packed_works(weights: Sequence[Parameters], rows: int) -> bool:
    """Say whether oneDNN's operations exist, take these weights and compute what torch does."""
    try:
        return all(_agrees(weight_OI, bias_O, rows) for weight_OI, bias_O in weights)
    except (AttributeError, RuntimeError, NotImplementedError):  # this torch lacks them, or was built without oneDNN
        return False


def _agrees(weight_OI: torch.Tensor, bias_O: torch.Tensor | None, rows: int) -> bool:
    """Say whether both kinds compute the same with these weights."""
    if is_card(weight_OI.device) or weight_OI.dtype != torch.float32:
        return False
    x_RI = _noise(rows, weight_OI.shape[1], weight_OI)
    other_RO = _noise(rows, weight_OI.shape[0], weight_OI)
    packed, plain = PackedLinear(weight_OI, bias_O), TorchLinear(weight_OI, bias_O)
    pairs = (
        (packed(x_RI), plain(x_RI)),
        (packed.gelu(x_RI), plain.gelu(x_RI)),
        (packed.add(x_RI, other_RO), plain.add(x_RI, other_RO)),
    )
    return all(torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max())) for ours, theirs in pairs)


def _rows_alike(layer: TorchLinear, weight_OI: torch.Tensor, tile: int, fill: int) -> bool:
    """Say whether rows have the same bits in tiles of both sizes."""
    outputs, inputs = weight_OI.shape
    x_RI, other_RO = _noise(tile, inputs, weight_OI), _noise(tile, outputs, weight_OI)

    def compute(rows: slice) -> torch.Tensor:
        return layer.gelu(x_RI[rows]) if outputs > inputs else layer.add(x_RI[rows], other_RO[rows])

    whole_RO = compute(slice(None))
    ends = (slice(0, fill), slice(tile - fill, tile))
    return all(torch.equal(compute(rows), whole_RO[rows]) for rows in ends)


def _noise(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(like)
