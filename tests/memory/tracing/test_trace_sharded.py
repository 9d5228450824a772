"""Parameters in shards, as FSDP2 makes them: a trace plays one rank of a group that does not exist."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn

from pipeline.memory.footprint import Category, MemoryChoice, live_peak_bytes
from tests.limited import device
from tests.memory.tracing.traced import Small, of, tracer, true_peak

RANKS, WIDTH, SIZES = 4, 256, {"items": 64}


@pytest.fixture
def _group(one_thread):
    device.need()
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def blocks():
    def block():
        return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    return nn.Sequential(*(block() for _ in range(4)))


def sharded():
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    model, mesh = blocks(), dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    for block in model:
        fsdp.fully_shard(block, mesh=mesh)
    return fsdp.fully_shard(model, mesh=mesh)


@pytest.mark.usefixtures("_group")
@pytest.mark.filterwarnings("ignore")  # of torch's, about CPU meshes
def test_the_peak_of_a_sharded_step_is_that_of_a_real_one():
    traced = tracer(Small(sharded, width=WIDTH))
    standing, micro = traced.standing(MemoryChoice()), traced.micro(MemoryChoice(), SIZES)
    for times in (1, 2):
        truth = true_peak(Small(sharded, width=WIDTH), SIZES, times)
        assert live_peak_bytes(standing, micro, accumulate=times > 1) == pytest.approx(truth, rel=0.005)
    whole = sum(one.nbytes for one in blocks().parameters())
    assert of(standing.parts, Category.PARAMETERS) == {"": whole // RANKS}
    assert micro.first.left_bytes == whole // RANKS
