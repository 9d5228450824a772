"""Equivariant fields of atoms: scalars, vectors and tensors of degree 2, and the maps between them.

Numbers of an atom lie as e3nn has them: all scalars, then the vectors, each with its 3 components, then the tensors
with 5. Weights are flat, and scaled when used so that outputs are about as large as inputs.

Shapes: N atoms, E edges, F numbers of an atom's fields, S, V and T how many scalars, vectors and tensors it has, U and
M fields of one degree in and out, D components of a field, W weights of an edge's product, H numbers of the harmonics.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from pipeline.errors import ConfigError
from pipeline.tasks.irreps import DEGREES, Irrep, ProductPath, coupling, harmonics, product_paths

if TYPE_CHECKING:
    from torch import Tensor

WHERE = "train.options.hidden_irreps"
USUAL = "32x0e+16x1o+8x2e"
# e3nn divides its activations by the root of their second moment under a normal distribution, as it draws it.
SILU_SCALE, SIGMOID_SCALE = 1.6791767923989418, 1.8467055342154763
# Factors of the harmonics, so that the mean square of each is 1.
LENGTHS = tuple(map(math.sqrt, (3, 3, 3, 15, 15, 45 / 4, 15, 15)))
SQUARED_EPS = 1e-16
TINY = 1e-5
_PART = re.compile(r"([1-9]\d*)\s*x\s*(0e|1o|2e)")


class Fields(NamedTuple):
    """How many scalars, vectors and tensors of degree 2 an atom has."""

    scalars: int
    vectors: int = 0
    tensors: int = 0

    @property
    def size(self) -> int:
        """Return how many numbers that is."""
        return sum(self.widths)

    @property
    def irreps(self) -> list[Irrep]:
        """Return a block for each degree; vectors change their sign under reflection."""
        return [Irrep(count, degree, (-1) ** degree) for degree, count in enumerate(self)]

    @property
    def widths(self) -> list[int]:
        """Return the numbers of each degree."""
        return [block.channels * block.components for block in self.irreps]

    def split(self, x_NF: Tensor) -> list[Tensor]:
        """Return the fields by degree, each [N, M, D]."""
        parts = torch.split_with_sizes(x_NF, self.widths, -1)
        return [
            part.reshape(len(x_NF), block.channels, block.components)
            for part, block in zip(parts, self.irreps, strict=True)
        ]


def fields_of(irreps: str) -> Fields:
    """Return the fields that a text such as 32x0e+16x1o+8x2e names."""
    remedy = f"--set {WHERE}={USUAL}   (32 scalars, 16 vectors, 8 of degree 2)"
    counts: dict[int, int] = {}
    for part in irreps.split("+"):
        match = _PART.fullmatch(part.strip())
        degree = int(match[2][0]) if match else -1
        if match is None or degree in counts:
            why = "is listed twice" if match else "is not COUNTx0e, COUNTx1o or COUNTx2e"
            raise ConfigError(f"{part.strip()!r} of {irreps!r} {why}", where=WHERE, remedy=remedy)
        counts[degree] = int(match[1])
    if 0 not in counts:
        problem = f"{irreps!r} has no scalars such as 32x0e, which the output needs"
        raise ConfigError(problem, where=WHERE, remedy=remedy)
    return Fields(*(counts.get(degree, 0) for degree in DEGREES))


def field_harmonics(way_E3: Tensor) -> Tensor:
    """Return the spherical harmonics of degrees 0, 1 and 2 of directions [E, 9]; the square of each has the mean 1."""
    parts = zip(LENGTHS, harmonics(way_E3).unbind(-1), strict=True)
    return torch.stack([torch.ones_like(way_E3[:, 0]), *(length * part_E for length, part_E in parts)], -1)


# ---- maps ----


class FieldLinear(nn.Module):
    """Mixes the fields of each degree among themselves; those of a degree that is not there before are 0."""

    def __init__(self, enter: Fields, leave: Fields) -> None:
        super().__init__()
        self.enter, self.leave = enter, leave
        self.counts = [before * after for before, after in zip(enter, leave, strict=True)]
        self.weight = nn.Parameter(torch.randn(sum(self.counts)))

    def forward(self, x_NF: Tensor) -> Tensor:
        weights = torch.split_with_sizes(self.weight, self.counts)
        mixed = []
        for degree, x_NUD in enumerate(self.enter.split(x_NF)):
            before, after = self.enter[degree], self.leave[degree]
            if before and after:
                weight_UM = weights[degree].view(before, after) / math.sqrt(before)
                mixed.append((weight_UM.T @ x_NUD).flatten(1) if degree else x_NUD.squeeze(-1) @ weight_UM)
            elif after:
                mixed.append(x_NF.new_zeros(len(x_NF), self.leave.widths[degree]))
        return torch.cat(mixed, -1)


class FieldProduct(nn.Module):
    """The product of an edge's fields with the harmonics of its direction, with weights for every two fields."""

    def __init__(self, enter: Fields, leave: Fields) -> None:
        super().__init__()
        self.enter, self.leave = enter, leave
        self.paths = product_paths(enter.irreps, leave.irreps)
        self.weights = sum(path.weights for path in self.paths)
        for path in self.paths:
            symbol = torch.tensor(coupling(*path.degrees) * path.scale, dtype=torch.get_default_dtype())
            self.register_buffer(_symbol_name(path), symbol, persistent=False)

    def forward(self, x_EF: Tensor, harmonics_EH: Tensor, weight_EW: Tensor) -> Tensor:
        """Return the product [E, F of what leaves]."""
        source, bend = self.enter.split(x_EF), torch.split_with_sizes(harmonics_EH, [1, 3, 5], -1)
        sums: list[Tensor | None] = [None] * len(DEGREES)
        weights = torch.split_with_sizes(weight_EW, [path.weights for path in self.paths], -1)
        for path, path_EW in zip(self.paths, weights, strict=True):
            turn_EDD = torch.einsum("ej,ijk->eik", bend[path.harmonic], self.get_buffer(_symbol_name(path)))
            weight_EMU = path_EW.view(len(path_EW), self.enter[path.source], self.leave[path.target]).transpose(1, 2)
            part_EMD = weight_EMU @ (source[path.source] @ turn_EDD)
            so_far = sums[path.target]
            sums[path.target] = part_EMD if so_far is None else so_far + part_EMD
        return torch.cat([total.flatten(1) for total in sums if total is not None], -1)


def _symbol_name(path: ProductPath) -> str:
    return f"symbol_{path.source}{path.harmonic}{path.target}"


# ---- activations ----


class FieldGate(nn.Module):
    """Scalars through SiLU; each vector and tensor times a number that a further scalar decides."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        self.gates = [fields.scalars, fields.vectors, fields.tensors]
        self.enter = fields._replace(scalars=sum(self.gates))

    def forward(self, x_NF: Tensor) -> Tensor:
        scalars, *turning = self.enter.split(x_NF)
        kept, *gates = torch.split_with_sizes(scalars.squeeze(-1), self.gates, -1)
        gated = [
            (field_NMD * (gate_NM.sigmoid() * SIGMOID_SCALE).unsqueeze(-1)).flatten(1)
            for field_NMD, gate_NM in zip(turning, gates, strict=True)
        ]
        return torch.cat([functional.silu(kept) * SILU_SCALE, *gated], -1)


class LengthActivation(nn.Module):
    """Every field, scalars too, is given the length SiLU(its length), without a gate."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        self.enter = fields

    def forward(self, x_NF: Tensor) -> Tensor:
        acted = []
        for field_NMD in self.enter.split(x_NF):
            length_NM1 = field_NMD.square().sum(-1, keepdim=True).clamp(min=SQUARED_EPS).sqrt()
            acted.append((functional.silu(length_NM1) / length_NM1 * field_NMD).flatten(1))
        return torch.cat(acted, -1)


# ---- norms ----


class FieldNorm(nn.Module):
    """LayerNorm of scalars, and vectors and tensors brought to one length; `how` says in what way.

    together: those of a kind are divided by their root mean square: relative lengths stay.
    each: each is divided by its own. published: each also loses the mean of its components, which depends on how an
    item lies in space: published weights need it.
    """

    def __init__(self, fields: Fields, how: str) -> None:
        super().__init__()
        self.fields, self.how = fields, how
        self.weight, self.bias = nn.Parameter(torch.ones(fields.scalars)), nn.Parameter(torch.zeros(fields.scalars))

    def forward(self, x_NF: Tensor) -> Tensor:
        scalars, *turning = self.fields.split(x_NF)
        normed = functional.layer_norm(scalars.squeeze(-1), (self.fields.scalars,), self.weight, self.bias, TINY)
        return torch.cat([normed, *(self._one_length(field_NMD).flatten(1) for field_NMD in turning)], -1)

    def _one_length(self, x_NMD: Tensor) -> Tensor:
        if self.how == "published":
            x_NMD = x_NMD - x_NMD.mean(-1, keepdim=True)
        over = (-2, -1) if self.how == "together" else (-1,)
        return x_NMD * (x_NMD.square().mean(over, keepdim=True) + TINY).rsqrt()


class WholeNorm(nn.Module):
    """All numbers of an atom divided by their root mean square, with a scale for each, which depends on orientation."""

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(fields.size))

    def forward(self, x_NF: Tensor) -> Tensor:
        return x_NF * (x_NF.square().mean(-1, keepdim=True) + TINY).rsqrt() * self.scale
