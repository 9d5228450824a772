"""Architectures as people write them: recurrent, convolutional, of attention, of structures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.memory.tracing.traced import WIDTH, Small

WORDS = 16


def words(x: Tensor) -> Tensor:
    return x.view(-1, WORDS, WIDTH)


class Recurrent(nn.Module):
    """An LSTM or GRU over padded sequences."""

    def __init__(self, kind: Callable[..., nn.Module], *, packed: bool = False) -> None:
        super().__init__()
        self.layer, self.packed = kind(WIDTH, 96, 2, batch_first=True), packed

    def forward(self, x: Tensor) -> Tensor:
        given: Any = words(x)
        if not self.packed:
            return self.layer(given)[0]
        lengths = torch.full((len(given),), WORDS)
        out, _ = self.layer(pack_padded_sequence(given, lengths, batch_first=True))
        return pad_packed_sequence(out, batch_first=True)[0]


class ResNet(nn.Module):
    """Residual convolutions with batch norm."""

    def __init__(self, order: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.order, self.lift = order, nn.Conv2d(4, 32, 3, padding=1, bias=False)
        self.convolutions = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(32) for _ in range(4))
        self.out = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        image = self.lift(x.view(-1, 4, 16, 16).contiguous(memory_format=self.order))
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            image = functional.relu(image + norm(convolution(image)))
        return self.out(image.mean((2, 3)))


class LooksUp(nn.Module):
    """A table of which each batch touches few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(500, WIDTH, sparse=True), nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.table(torch.arange(len(x)) % 500))


class Mapped(nn.Module):
    """vmap over items."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: self.map(row).tanh())(x)


class InvariantPoints(nn.Module):
    """Invariant point attention, as in AlphaFold 2, over frames of its own."""

    def __init__(self, heads: int = 4, points: int = 4) -> None:
        super().__init__()
        self.heads, self.points, both = heads, points, 3 * heads * (16 + 3 * points)
        self.given, self.bias, self.pair = nn.Linear(WIDTH, both), nn.Linear(8, heads), nn.Linear(2 * WIDTH, 8)
        self.out = nn.Linear(heads * (16 + 8 + 4 * points), WIDTH)
        self.weight = nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor) -> Tensor:
        nodes = words(x)
        frames, places = torch.linalg.qr(nodes[..., :9].unflatten(-1, (3, 3)))[0], nodes[..., 9:12]
        ends = [nodes[:, :, None].expand(-1, -1, WORDS, -1), nodes[:, None].expand(-1, WORDS, -1, -1)]
        pair = self.pair(torch.cat(ends, -1))
        parts = self.given(nodes).unflatten(-1, (3, self.heads, -1))
        scalars, local = parts[..., :16], parts[..., 16:].unflatten(-1, (self.points, 3))
        points = torch.einsum("bnij,bnkhpj->bnkhpi", frames, local) + places[:, :, None, None, None]
        queries, keys, values = scalars.unbind(2)
        query_points, key_points, value_points = points.unbind(2)
        apart = (query_points[:, :, None] - key_points[:, None]).square().sum((-1, -2))
        scores = torch.einsum("bihc,bjhc->bijh", queries, keys) / 4 + self.bias(pair)
        shares = (scores - apart * functional.softplus(self.weight) / 2).softmax(2)
        seen = torch.einsum("bijh,bjhpc->bihpc", shares, value_points) - places[:, :, None, None]
        seen = torch.einsum("bnji,bnhpj->bnhpi", frames, seen)
        told = torch.cat([seen.flatten(-2), seen.norm(dim=-1)], -1)
        scalar = torch.einsum("bijh,bjhc->bihc", shares, values)
        return self.out(torch.cat([scalar, torch.einsum("bijh,bijc->bihc", shares, pair), told], -1).flatten(-2))


class Waves(nn.Module):
    """A layer of a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, 5, dtype=torch.cfloat) * 0.1)
        self.straight = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        told = torch.fft.rfft(words(x), dim=1)[:, :5]
        waves = torch.einsum("bkc,cdk->bkd", told, self.weight)
        return functional.gelu(torch.fft.irfft(waves, n=WORDS, dim=1) + self.straight(words(x)))


FAMILIES: dict[str, Callable[[], Small]] = {
    "lstm": lambda: Small(lambda: Recurrent(nn.LSTM)),
    "lstm, packed": lambda: Small(lambda: Recurrent(nn.LSTM, packed=True)),
    "resnet": lambda: Small(ResNet),
    "resnet, channels last": lambda: Small(lambda: ResNet(torch.channels_last)),
    "sparse table": lambda: Small(LooksUp),
    "invariant points": lambda: Small(InvariantPoints),
    "vmap": lambda: Small(Mapped),
    "fourier": lambda: Small(Waves),
}
