"""Losses through derivatives, and training bent by own code: checkpoints, hooks, withheld gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.memory.tracing.traced import WIDTH, Small


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.SiLU(), nn.Linear(128, 1))


def square() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.Tanh(), nn.Linear(128, WIDTH))


def penalised(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """A gradient penalty, as forces are matched: through a gradient."""
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return {"slope": ((slope.norm(dim=1) - 1).square().sum(), float(len(x)))}


def pulled(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """SchNet with forces: the energy of near pairs, and its slope by where the atoms are."""
    with torch.enable_grad():
        places = (2 * x.view(-1, 16, 64)[..., :3]).requires_grad_()
        apart = torch.cdist(places, places) + 10 * torch.eye(16)
        item, one, other = (apart < 3.0).nonzero().unbind(1)
        length = (places[item, one] - places[item, other]).norm(dim=-1, keepdim=True)
        energy = model((-(length - torch.linspace(0, 3, WIDTH)).square()).exp()).sum()
        (force,) = torch.autograd.grad(energy, places, create_graph=True)
    return {"force": (force.square().sum() + energy, float(len(x)))}


def slid(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Sliced score matching by derivatives in forward mode."""
    along = torch.randn_like(x)
    told, slope = torch.func.jvp(model, (x,), (along,))
    return {"score": ((told.square().sum(1) / 2 + (slope * along).sum(1)).sum(), float(len(x)))}


def withheld(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """A loss that is not finite is learned nothing from."""
    loss = model(x).square().sum()
    if not torch.isfinite(loss):
        loss = loss.detach() * 0 + sum(0 * parameter.sum() for parameter in model.parameters())
    return {"square": (loss, float(len(x)))}


class Checkpointed(nn.Module):
    """Blocks that are computed again, as their author decided."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(square() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


class Reentrant(Checkpointed):
    """The same, in the older way."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=True)
        return x


class Exponential(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        told = x.exp()
        ctx.save_for_backward(told, x)
        return told

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        told, _ = ctx.saved_tensors
        return slope * told


class Own(nn.Module):
    """Maps with such a function between, and a hook that keeps what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 128), nn.Linear(128, 8)
        self.kept: dict[str, Tensor] = {}
        self.into.register_forward_hook(lambda _, __, told: self.kept.update(into=told.detach()))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(Exponential.apply(self.into(x)))


FAMILIES: dict[str, Callable[[], Small]] = {
    "gradient penalty": lambda: Small(dense, terms=penalised),
    "radius graph, forces": lambda: Small(dense, terms=pulled),
    "forward derivative": lambda: Small(square, terms=slid),
    "loss withheld": lambda: Small(dense, terms=withheld),
    "checkpointing of its own": lambda: Small(Checkpointed),
    "checkpointing, reentrant": lambda: Small(Reentrant),
    "function of its own": lambda: Small(Own),
}
