"""The task of this demo: the shipped interface model, and one complex that runs out of memory on purpose.

No plan can predict this, because nothing about the complex shows it. A micro-batch with it allocates 100 MiB for each
of its items, while the process may have only 256 MiB more. Set GREEDY to None, and no step runs out of memory.
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import psutil
import torch

from pipeline.tasks import interface

if TYPE_CHECKING:
    from torch import Tensor, nn

GREEDY = (89, 74)  # residues of the receptor and the antigen of demo-004
EACH_BYTES, LIMIT_BYTES = 100 << 20, 256 << 20


class Interface(interface.Interface):
    """Predicts interface residues and contacts."""

    def loss(self, model: nn.Module, batch: interface.InterfaceBatch) -> dict[str, tuple[Tensor, float]]:
        """Return the shipped loss; in training, allocate the extra memory of the greedy complex first."""
        if GREEDY in batch.shapes and torch.is_grad_enabled():
            allocate(EACH_BYTES * len(batch.shapes), LIMIT_BYTES)
        return super().loss(model, batch)


def allocate(size_bytes: int, limit_bytes: int) -> None:
    """Allocate memory and free it, under a limit like `ulimit -v`; torch raises where the limit is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + limit_bytes, hard))
    try:
        torch.empty(size_bytes, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
