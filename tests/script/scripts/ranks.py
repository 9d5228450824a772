# ruff: noqa: T201
"""Meets the other processes as under torchrun, and adds up what all have."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
one = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(one)
print("sum", int(one), "of", dist.get_world_size(), "here", os.environ["LOCAL_RANK"])
dist.destroy_process_group()
