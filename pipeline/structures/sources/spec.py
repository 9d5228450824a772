"""What the adapters are told about a data source: plain values, so that no configuration reaches this room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """One data source, as the `data` section of the configuration describes it."""

    source: str
    path: Path
    pattern: tuple[str, ...] = ()
    structures_dir: Path | None = None
    splits: Path | None = None
    state: Literal["bound", "unbound"] = "bound"
    receptor_chains: tuple[str, ...] = ()
    ligand_chains: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()  # columns of numbers
    partners: Literal["auto", "none"] = "auto"
    limit: int | None = None
