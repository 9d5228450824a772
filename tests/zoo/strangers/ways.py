"""Models whose way or shapes depend on data, on random numbers, or on what was kept from the step before."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.memory.tracing.traced import WIDTH, Small
from tests.zoo.strangers.architectures import WORDS, words


class Layers(nn.Module):
    """Four maps, applied in ways that depend on data or are kept."""

    def __init__(self, apply: Callable[[Layers, Tensor], Tensor]) -> None:
        super().__init__()
        self.maps, self.apply_maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), apply
        self.register_buffer("queue", torch.zeros(512, WIDTH))
        self.register_buffer("places", torch.zeros(1, WIDTH), persistent=False)
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


def recycling(model: Layers, x: Tensor) -> Tensor:
    """As AlphaFold: some turns, of which the last alone is learned from."""
    told = torch.zeros_like(x)
    turns = random.randint(0, 3)
    for turn in range(turns + 1):
        with torch.set_grad_enabled(turn == turns):
            told = model.maps[1](model.maps[0](x + told).relu()) + told
    return told


def remembering_places(model: Layers, x: Tensor) -> Tensor:
    """A table of places that grows to the longest sequence seen."""
    if len(model.places) < len(x):
        apart = torch.arange(len(x))[:, None] / 10 ** (torch.arange(WIDTH) / WIDTH)
        model.places = apart.sin()
    return model.maps[0](x + model.places[: len(x)])


def near(model: Layers, x: Tensor) -> Tensor:
    """SchNet: a graph of what is near, found in the model."""
    places = 2 * x.view(-1, WORDS, WIDTH)[..., :3]
    apart = torch.cdist(places, places) + 10 * torch.eye(WORDS)
    item, one, other = (apart < 3.0).nonzero().unbind(1)
    length = (places[item, one] - places[item, other]).norm(dim=-1)
    spread = (-(length[:, None] - torch.linspace(0, 3, WIDTH)).square()).exp()
    filters = model.maps[1](model.maps[0](spread).tanh())
    nodes = model.maps[2](x)
    return x + torch.zeros_like(nodes).index_add(0, item * WORDS + one, nodes[item * WORDS + other] * filters)


def masked(model: Layers, x: Tensor) -> Tensor:
    """Only the words that were masked are told of."""
    chosen = torch.rand(len(x)) < 0.15
    return model.maps[1](model.maps[0](x).relu()[chosen]).log_softmax(-1)


def routing(model: Layers, x: Tensor) -> Tensor:
    """A mixture of experts, each given its own rows."""
    share, chosen = model.maps[0](x)[:, :3].softmax(-1).max(-1)
    told = torch.zeros_like(x)
    for number, expert in enumerate(list(model.maps)[1:]):
        rows = (chosen == number).nonzero().squeeze(1)
        told = told.index_add(0, rows, expert(x[rows]) * share[rows, None])
    return told


WAYS: dict[str, Callable[[Layers, Tensor], Tensor]] = {
    "layer drop": dropping_layers,
    "early exit": leaving_early,
    "sinkhorn": sinkhorn,
    "guard against nan": guarding,
    "random recycles": recycling,
    "momentum queue": queueing,
    "attention kept": attending,
    "growing places": remembering_places,
    "radius graph": near,
    "masked words": masked,
    "routed experts": routing,
}


class Jagged(nn.Module):
    """Attention among the parts of each item, in nested tensors instead of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.maps, self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        begins = torch.tensor([0, *[16, 48] * (len(x) // 64)]).cumsum(0)
        parts = torch.nested.nested_tensor_from_jagged(x, begins)
        told = nn.functional.scaled_dot_product_attention(
            *(one(parts).unflatten(-1, (4, -1)).transpose(1, 2) for one in self.maps)
        )
        return self.out(told.transpose(1, 2).flatten(-2)).values()


FAMILIES: dict[str, Callable[[], Small]] = {"jagged": lambda: Small(Jagged)} | {
    name: lambda way=way: Small(lambda: Layers(way))
    for name, way in WAYS.items()  # type: ignore[misc]
}
