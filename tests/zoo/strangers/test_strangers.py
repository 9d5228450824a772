"""Model families as people write them: what the ladder says of a step that is really taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pipeline.memory.footprint import MemoryChoice, Provenance, live_peak_bytes, margin_of
from pipeline.runs.model.training_work import Work, target_of
from pipeline.training.step.optimizers import StepSettings
from tests.limited import device
from tests.memory.tracing.traced import Small, true_peak

WIDTH, WORDS = 64, 16
LEAST, ROWS = {"items": 64}, {"items": 1024}
TOLD = 0.98  # of the real peak, at least, where it is called traced


@pytest.fixture(autouse=True)
def _possible(one_thread: None) -> None:
    device.need()


def words(x: Tensor) -> Tensor:
    return x.view(-1, WORDS, WIDTH)


class Recurrent(nn.Module):
    """An LSTM or GRU over padded sequences."""

    def __init__(self, kind: type[nn.Module], *, packed: bool = False) -> None:
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


class UNet(nn.Module):
    """Down, up, and a straight way between."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.low = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.up, self.out = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x.view(-1, 4, 16, 16)).relu()
        return self.out(torch.cat([high, self.up(self.low(high).relu())], 1))


class Experts(nn.Module):
    """A mixture of experts, each given all rows with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        return torch.stack([share[:, None] * one(x) for share, one in zip(shares.unbind(1), self.experts, strict=True)])


class LowRank(nn.Module):
    """LoRA by hand: the map itself is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.down = nn.Linear(WIDTH, 256), nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, 256, bias=False)
        self.map.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x) + self.up(self.down(x))


class Tied(nn.Module):
    """Words in and out by the same table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.table(torch.zeros(len(x), dtype=torch.long))) @ self.table.weight.T


class Pairs(nn.Module):
    """A block of Evoformer: the sum of outer products, and triangles."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.pair, self.a, self.b, self.norm = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left(words(x)), self.right(words(x))
        pair = self.pair(torch.einsum("bic,bjd->bijcd", left, right).flatten(-2))
        triangles = torch.einsum("bikc,bjkc->bijc", self.a(pair), self.b(pair))
        return self.norm(pair + triangles)


class Equivariant(nn.Module):
    """A layer of EGNN among all atoms of an item."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.shift = nn.Linear(2 * WIDTH + 1, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        nodes = words(x)
        places = nodes[..., :3]
        apart = places[:, :, None] - places[:, None]
        ends = [nodes[:, :, None].expand(-1, -1, WORDS, -1), nodes[:, None].expand(-1, WORDS, -1, -1)]
        message = self.message(torch.cat([*ends, apart.square().sum(-1, keepdim=True)], -1)).relu()
        return torch.cat([places + (apart * self.shift(message)).mean(2), message.sum(2)], -1)


class Mapped(nn.Module):
    """vmap over items."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: self.map(row).tanh())(x)


class Bilinear(nn.Module):
    """Pairs of features."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Bilinear(WIDTH, WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(x, x)


class Layers(nn.Module):
    """Four maps, applied in ways that depend on data or are kept."""

    def __init__(self, apply: Callable[[Layers, Tensor], Tensor]) -> None:
        super().__init__()
        self.maps, self.apply_maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), apply
        self.register_buffer("queue", torch.zeros(512, WIDTH))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        unused = sum(one.weight.sum() for one in self.maps)  # each has a gradient, whatever the way
        return self.apply_maps(self, x) + 0 * unused


def dropping_layers(model: Layers, x: Tensor) -> Tensor:
    for one in model.maps:
        if torch.rand(()) < 0.3:
            continue
        x = one(x).relu()
    return x


def leaving_early(model: Layers, x: Tensor) -> Tensor:
    for one in model.maps:
        x = one(x).relu()
        if x.mean() > 1e3:
            break
    return x


def sinkhorn(model: Layers, x: Tensor) -> Tensor:
    shares = model.maps[0](x).exp()
    for _ in range(8):
        rows = shares / shares.sum(1, keepdim=True)
        both = rows / rows.sum(0, keepdim=True)
        if (both - shares).abs().max() < 1e-6:
            break
        shares = both
    return shares


def guarding(model: Layers, x: Tensor) -> Tensor:
    told = model.maps[0](x)
    if torch.isnan(told).any():
        return told * 0
    return model.maps[1](told.exp()).exp()


def queueing(model: Layers, x: Tensor) -> Tensor:
    keys = model.maps[0](x)
    told = keys @ model.queue.T
    with torch.no_grad():
        model.queue = torch.cat([model.queue, keys.detach()])[-512:]
    return told.mean(1, keepdim=True)


def attending(model: Layers, x: Tensor) -> Tensor:
    queries, keys, values = (one(words(x)) for one in list(model.maps)[:3])
    model.kept = (queries @ keys.mT).softmax(-1)
    return (model.kept @ values).view_as(x)


def penalised(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """A gradient penalty, as forces are matched: through a gradient."""
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return {"slope": ((slope.norm(dim=1) - 1).square().sum(), float(len(x)))}


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.SiLU(), nn.Linear(128, 1))


FAMILIES: dict[str, Callable[[], Small]] = {
    "lstm": lambda: Small(lambda: Recurrent(nn.LSTM)),
    "lstm, packed": lambda: Small(lambda: Recurrent(nn.LSTM, packed=True)),
    "gru": lambda: Small(lambda: Recurrent(nn.GRU)),
    "resnet": lambda: Small(ResNet),
    "resnet, channels last": lambda: Small(lambda: ResNet(torch.channels_last)),
    "u-net": lambda: Small(UNet),
    "experts": lambda: Small(Experts),
    "lora": lambda: Small(LowRank),
    "tied": lambda: Small(Tied),
    "evoformer": lambda: Small(Pairs),
    "egnn": lambda: Small(Equivariant),
    "vmap": lambda: Small(Mapped),
    "bilinear": lambda: Small(Bilinear),
    "layer drop": lambda: Small(lambda: Layers(dropping_layers)),
    "early exit": lambda: Small(lambda: Layers(leaving_early)),
    "sinkhorn": lambda: Small(lambda: Layers(sinkhorn)),
    "guard against nan": lambda: Small(lambda: Layers(guarding)),
    "momentum queue": lambda: Small(lambda: Layers(queueing)),
    "attention kept": lambda: Small(lambda: Layers(attending)),
    "gradient penalty": lambda: Small(dense, terms=penalised),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_planned_no_lower_than_it_takes(name: str) -> None:
    task, choice = FAMILIES[name](), MemoryChoice()
    oracle = Work(task, StepSettings(way="foreach"), device="cpu").oracle(LEAST, target_of(None), padded=False)
    standing, micro = oracle.standing(choice), oracle.micro(choice, ROWS)
    planned, real = live_peak_bytes(standing, micro, accumulate=True), true_peak(task, ROWS, 2)
    if micro.origin is Provenance.TRACED:
        assert planned >= TOLD * real
    else:
        assert planned * margin_of(micro.origin, caching=False).factor >= real
