"""A trace for a card, on a machine without one: what CUDA's autocast and attention would allocate."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeline.memory.footprint import Category, MemoryChoice, Provenance, live_peak_bytes, parts_at_peak
from pipeline.memory.tracing.tracer import CannotTrace
from pipeline.planning.training_work import Work, target_of
from pipeline.training.step.optimizers import StepSettings
from tests.memory.tracing.traced import LARGE, SIZES, WIDTH, Small, of, tracer
from tests.zoo import ZOO

AMPERE = target_of((8, 0))
HALF, FULL = MemoryChoice(precision="bf16"), MemoryChoice()
N, W = LARGE["items"], WIDTH


def member(name, choice):
    found = ZOO[name]
    traced = tracer(found.build(), AMPERE, least=found.sizes[0])
    return traced.standing(choice), traced.micro(choice, found.sizes[0])


@pytest.mark.parametrize(("name", "precision"), [("contrastive", "bf16"), ("gnn", "fp16")])
def test_half_precision_keeps_less_and_its_parameters_stay_whole(name, precision):
    (full, kept), (half, halved) = member(name, FULL), member(name, MemoryChoice(precision=precision))
    assert 0.5 < halved.again.peak_bytes / kept.again.peak_bytes < 0.95
    assert half.parts == full.parts
    assert halved.first.left_bytes == kept.first.left_bytes
    assert sum(part.bytes for part in parts_at_peak(half, halved)) == live_peak_bytes(half, halved, accumulate=True)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(W, W), nn.LayerNorm(W)

    def forward(self, x):
        return self.norm(self.layer(x)).softmax(-1)


def test_activations_are_those_counted_by_hand():
    traced = tracer(Small(Chain), AMPERE)
    full, half = (of(traced.micro(choice, LARGE).parts, Category.ACTIVATIONS) for choice in (FULL, HALF))
    statistics = 2 * 4 * N
    assert sum(full.values()) == 4 * N * W + statistics + 4 * N * W  # what norm takes; what softmax returns
    # what the layer takes, in half; norm's and softmax's are in fp32 on a GPU, whatever the CPU's autocast does
    assert sum(half.values()) == 2 * N * W + 4 * N * W + statistics + 4 * N * W


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(W, 3 * W)

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(0, 1)[None] for part in self.mix(x).chunk(3, -1))
        return functional.scaled_dot_product_attention(query, key, value)


def test_flash_attention_is_linear_in_length():
    traced = tracer(Small(Attending), AMPERE)
    kept = [traced.micro(HALF, {"items": items}).again.peak_bytes for items in (2048, 4096, 8192)]
    assert kept[2] - kept[1] == pytest.approx(2 * (kept[1] - kept[0]), rel=0.05)


def test_a_card_without_a_kernel_for_it_keeps_all_scores():
    class Odd(Attending):
        """Heads of 7: none that tensor cores can take in fp32 on any card that flash attention knows."""

        def forward(self, x):
            query, key, value = (one[..., :7] for one in (self.mix(x)[None, None].chunk(3, -1)))
            return functional.scaled_dot_product_attention(query, key, value)

    traced = tracer(Small(Odd), AMPERE)
    assert traced.micro(FULL, {"items": 2048}).again.peak_bytes > 2048**2 * 4


class Written(Chain):
    """Code that thinks of nothing but CUDA."""

    def __init__(self):
        super().__init__()
        self.cuda()
        self.scale = torch.ones(W, device="cuda")

    def forward(self, x):
        with torch.autocast("cuda", torch.bfloat16):
            y = self.layer(x.cuda(non_blocking=True)) * self.scale
        torch.cuda.synchronize()
        return y + torch.zeros(len(x), W, device=torch.device("cuda", 0)).to("cuda:0")


class CudaOnly(Small):
    def example(self, sizes):
        return super().example(sizes).cuda()


def test_code_that_names_cuda_is_traced():
    traced = tracer(CudaOnly(Written), AMPERE)
    micro = traced.micro(FULL, SIZES)
    assert micro.flops == 2 * 2 * SIZES["items"] * W * W  # forward, and the weight's gradient
    assert of(traced.standing(FULL).parts, Category.PARAMETERS) == {"": 4 * (W * W + W + 2 * W)}


@pytest.mark.parametrize("early", [True, False])
def test_what_only_a_card_can_do_is_told_as_such(early):
    class Graphed(Chain):
        def __init__(self):
            super().__init__()
            if early:
                torch.cuda.CUDAGraph()

        def forward(self, x):
            torch.cuda.CUDAGraph()
            return super().forward(x)

    with pytest.raises(CannotTrace, match="CUDAGraph needs a CUDA device"):
        tracer(Small(Graphed), AMPERE).standing(FULL)


class Graded(nn.Module):
    """As timm's ViT: asks for values while it is built."""

    def __init__(self):
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 2, device="cpu")]
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(rate)) for rate in rates))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("target", [AMPERE, target_of(None)], ids=["card", "processor"])
def test_a_model_that_asks_for_values_while_it_is_built_is_traced(target):
    work = Work(Small(Graded), StepSettings(way="foreach"), device="cpu")
    micro = work.oracle(SIZES, target, padded=False).micro(FULL, LARGE)
    assert (micro.origin, micro.notes) == (Provenance.TRACED, ())
    assert of(micro.parts, Category.ACTIVATIONS)
