"""What is copied to pinned memory on a card: it takes what the host's plan counts, and arrives whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.memory.hardware.host_memory import (
    CHUNK_BYTES,
    SMALL_BYTES,
    chunked_bytes,
    pinned_bytes,
    staged_bytes,
)
from pipeline.training.checkpoints import keeper
from pipeline.training.checkpoints.keeper import StagingBuffers
from pipeline.training.step.checkpointing import Pinned, PinnedChunks, offloaded
from tests.card import card
from tests.card.on_card.planned import Counting

MIB = 1 << 20


def taken() -> int:
    return card.pinned_bytes()[0]


def trained(widths: list[int]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after a step on the card."""
    model = nn.Sequential(*(nn.Linear(width, width + 1) for width in widths)).to(card.NAME)
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("widths", [[300] * 9, [520, 60, 61, 62], [1024], [7]])
def test_copies_of_a_state_take_what_is_planned_for_them(widths: list[int]) -> None:
    model, optimizer = trained(widths)
    tensors = dict(model.named_parameters())
    for number, state in enumerate(optimizer.state.values()):
        tensors |= {f"{number}.{key}": value for key, value in state.items()}
    tensors |= {"cpu": torch.get_rng_state(), "card": torch.zeros(16, dtype=torch.uint8)}
    blocks = [parameter.nbytes for parameter in model.parameters() for _ in range(3)]  # Adam has two of each
    before, staging = taken(), StagingBuffers()
    needed = staging.missing_bytes(tensors)
    copies = staging.copied(tensors)
    pinned = taken() - before
    assert pinned == needed
    assert staging.missing_bytes(tensors) == 0
    assert sum(blocks) < pinned <= staged_bytes(blocks, pinned=True)
    by_itself = sum(pinned_bytes(block) for block in blocks if block >= SMALL_BYTES)
    assert pinned <= by_itself + 2 * sum(block for block in blocks if block < SMALL_BYTES) + MIB // 8
    assert all(torch.equal(copies[name], tensor.cpu()) for name, tensor in tensors.items())
    staging.copied(tensors)
    assert taken() - before == pinned


def test_a_state_that_has_grown_leaves_nothing_pinned_of_what_it_took_before() -> None:
    before, staging = taken(), StagingBuffers()
    for size in (3 * MIB, 5 * MIB, MIB):
        copies = staging.copied({"a": torch.full((size // 4,), float(size), device=card.NAME)})
        assert taken() - before == pinned_bytes(size)
        assert (copies["a"] == size).all()


def test_a_host_that_pins_no_more_saves_from_memory_that_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    before, bytes_on_host = taken(), keeper.bytes_on_host

    def full(size_bytes: int, *, pin: bool = True) -> torch.Tensor:
        if pin:
            raise torch.OutOfMemoryError("CUDA error: out of memory")
        return bytes_on_host(size_bytes, pin=False)

    monkeypatch.setattr(keeper, "bytes_on_host", full)
    copies = StagingBuffers().copied({"a": torch.ones(1000, device=card.NAME)})
    assert taken() == before
    assert (copies["a"] == 1).all()


class Deep(nn.Module):
    """Layers whose activations are of no power of two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(400, 400) for _ in range(3))

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x_ND = torch.tanh(layer(x_ND)).t().contiguous().t()[::1]
        return x_ND


def gradients(model: nn.Module, x_ND: torch.Tensor, carrier: Pinned | None) -> list[torch.Tensor]:
    model.zero_grad()
    if carrier is None:
        model(x_ND).square().mean().backward()
    else:
        with offloaded(model, carrier):
            loss = model(x_ND).square().mean()
        loss.backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def test_what_is_offloaded_comes_back_as_it_was_and_takes_what_is_planned_in_any_order_of_copies() -> None:
    torch.manual_seed(0)
    model = Deep().to(card.NAME)
    carrier, most = Pinned(), 0
    chunks = carrier._chunks = Counting(CHUNK_BYTES)
    for seed, rows in enumerate((5000, 7001, 300, 6999)):
        card.seed_order(seed)
        x_ND = torch.randn(rows, 400).to(card.NAME)
        plain, away = gradients(model, x_ND, None), gradients(model, x_ND, carrier)
        assert all(torch.equal(one, other) for one, other in zip(plain, away, strict=True))
        most = max(most, 4 * 400 * rows)
    saved_bytes = 7 * most  # of each layer what goes in, what tanh gave, and its copy in another order, at most
    assert 3 * most < chunks.most_bytes <= chunked_bytes(saved_bytes)


def test_a_chunk_is_not_written_to_before_it_has_been_read() -> None:
    chunks, size = PinnedChunks(1 << 16), 1 << 16
    for seed in range(60):
        card.seed_order(seed)
        (piece,) = chunks.pieces(size)
        target = torch.empty(size, dtype=torch.uint8, device=card.NAME)
        with torch.Stream(card.NAME) as side:
            target.copy_(piece.fill_(seed), non_blocking=True)
        del piece
        for piece in (*chunks.pieces(size), *chunks.pieces(size)):
            piece.fill_(255)
        del piece
        side.synchronize()
        assert (target == seed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_tensors_of_any_type_and_order_come_back(dtype: torch.dtype) -> None:
    tensor = torch.arange(6000).reshape(20, 30, 10).remainder(2).to(dtype).to(card.NAME)
    turned, expanded = tensor.permute(2, 0, 1), tensor[:1].expand(20, 30, 10)
    for one in (tensor, turned, tensor[:, ::2], expanded, tensor[:0]):
        carrier = Pinned()
        back = carrier.back(carrier.away(one), one.device)
        assert back.device == one.device
        assert torch.equal(back.cpu(), one.cpu())
        assert back.stride() == torch.empty_like(one).stride()
