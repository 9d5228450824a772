"""Activation checkpointing of any model: the repeated blocks of it run again in backward."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable


def recomputed(model: nn.Module) -> list[str]:
    """Let the repeated blocks of a model keep only their inputs for backward; return their names."""
    blocks = repeated(model)
    for block in blocks.values():
        block.forward = _again(block.forward)
    return list(blocks)


def repeated(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that a model has several of: children of one kind in a list, the outermost of each."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if any(path.startswith(f"{outer}.") for outer in found):
            continue
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            kinds = [type(child) for child in module]
            for name, child in module.named_children():
                if kinds.count(type(child)) > 1 and any(True for _ in child.parameters()):
                    found[f"{path}.{name}" if path else name] = child
    return found


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
