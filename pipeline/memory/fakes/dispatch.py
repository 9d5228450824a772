"""Puts kernels of ours into torch's dispatcher for a while: what calls an operator from C++ gets them, too."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_LIBRARY: Any = torch.library.Library  # torch gives it no types


@contextmanager
def replaced(kernels: Mapping[str, Callable[..., Any]], key: str) -> Iterator[None]:
    """Let these operators of `aten` run these kernels under a dispatch key, in the whole process."""
    library = _LIBRARY("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # that it replaces one: meant so
            for name, kernel in kernels.items():
                library.impl(name, kernel, key)
        yield
    finally:
        library._destroy()
