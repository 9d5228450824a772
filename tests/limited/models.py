"""Small models of several kinds, and their training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))

    def forward(self) -> Tensor:
        return self.layers(torch.randn(64, 32)).square().mean()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 5))

    def forward(self) -> Tensor:
        return self.layers(torch.randn(4, 3, 24, 24)).square().mean()


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True)

    def forward(self) -> Tensor:
        return self.layer(self.words(torch.randint(50, (2, 48)))).square().mean()


class Messages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(48, 16), nn.Linear(16, 16)

    def forward(self) -> Tensor:
        nodes, edges = torch.randn(100, 16), torch.randint(100, (2, 600))
        for _ in range(2):
            pairs = torch.cat([nodes[edges[0]], nodes[edges[1]], torch.randn(600, 16)], dim=-1)
            gathered = torch.zeros_like(nodes).index_add(0, edges[1], self.message(pairs).relu())
            nodes = nodes + self.update(gathered)
        return nodes.square().mean()


def train(model: Callable[[], nn.Module], steps: int = 2, seed: int = 0) -> list[float]:
    """Build a model and train it; return its losses."""
    torch.manual_seed(seed)
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, foreach=True)
    return [step(network, optimizer) for _ in range(steps)]


def step(network: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = network()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


MODELS = (Perceptron, Convolutions, Transformer, Messages)
