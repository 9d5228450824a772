# ruff: noqa: T201
"""A plain training loop: argparse, gradient accumulation, a file of weights at the end."""

import argparse
import json

import torch
from safetensors.torch import save_file

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, required=True)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--out", required=True)
given = parser.parse_args()

torch.manual_seed(given.seed)
items = torch.randn(64, 4, dtype=torch.float64)
wanted = items.sum(1, keepdim=True)
model = torch.nn.Linear(4, 1, dtype=torch.float64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
at = 0
for step in range(1, given.steps + 1):
    total = 0.0
    for _ in range(given.accumulate):
        rows = [(at + row) % 64 for row in range(given.batch_size)]
        at += given.batch_size
        loss = torch.nn.functional.mse_loss(model(items[rows]), wanted[rows]) / given.accumulate
        loss.backward()
        total += float(loss)
    optimizer.step()
    optimizer.zero_grad()
    print("pipeline:", json.dumps({"step": step, "loss": total}))
save_file(model.state_dict(), f"{given.out}/weights.safetensors")
