"""In what precision tasks compare, sum and report what a network returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def at_least_single(values: Tensor) -> Tensor:
    """Return numbers in single precision, or in their own where that is higher."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
