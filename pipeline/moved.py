"""Modules that documentation once told people to import: they still can, with a warning that names `pipeline.api`."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any

# module of an older version → its published names → what they are called in `pipeline.api`
MOVED = {
    "pipeline.graphs.backbone": {"LETTERS": "RESIDUE_LETTERS"},
    "pipeline.memory.governed": {"Governed": "Governed"},
    "pipeline.memory.runtime.governed": {"Governed": "Governed"},
    "pipeline.memory.runtime.lightning_callback": {"GovernorCallback": "GovernorCallback"},
    "pipeline.memory.lightning": {"GovernorCallback": "GovernorCallback"},
    "pipeline.runs.contract": {"breaches": "breaches"},
    "pipeline.runs.loading": {"open_loader": "open_loader"},
    "pipeline.training.batch": {"padded": "padded"},
    "pipeline.training.sampler": {"Settings": "SamplerSettings"},
}


class _Finder:
    """Finds the modules that have moved, after Python has looked for them in vain."""

    @staticmethod
    def find_spec(
        name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, _Finder()) if name in MOVED else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(_spec: ModuleSpec) -> None:
        """Let Python make an empty module."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        def get(name: str) -> Any:
            if name not in MOVED[module.__name__]:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            new = MOVED[module.__name__][name]
            said = f"{module.__name__}.{name} has moved: from pipeline.api import {new}"
            warnings.warn(said, DeprecationWarning, stacklevel=2)
            return getattr(import_module("pipeline.api"), new)

        module.__dict__["__getattr__"] = get


def install() -> None:
    """Let the old names be imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
