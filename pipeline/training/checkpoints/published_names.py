"""Names under which other programs publish a model's weights, as a table: read and written again to the bit."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass(frozen=True)
class NameTable:
    """Our name → theirs, of parameters or of modules with all that is in them; "*" is a number, the same in both.

    The longest name that fits decides. What the table does not know stays as it is.
    """

    names: Mapping[str, str]
    signs: tuple[str, ...]  # names of theirs that only a file of this system has
    left: tuple[str, ...] = ()  # theirs that no model here needs: patterns, as of file names
    fresh: tuple[str, ...] = ()  # ours that their files lack: patterns of what may stay as it begins
    _back: Mapping[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_back", {theirs: ours for ours, theirs in self.names.items()})

    def knows(self, names: Collection[str]) -> bool:
        """Say whether tensors of these names are of this system."""
        return all(sign in names for sign in self.signs)

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors under our names."""
        return {renamed(name, self._back): tensor for name, tensor in tensors.items()}

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors under their names."""
        return {renamed(name, self.names): tensor for name, tensor in tensors.items()}


def renamed(name: str, names: Mapping[str, str]) -> str:
    """Return a parameter's other name by a table of names and modules, or the one that it has."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module, rest = ".".join(parts[:length]), parts[length:]
        for known, numbers in ((module, []), (LAYER.sub("*", module), LAYER.findall(module))):
            if known in names:
                other = names[known]
                for number in numbers:
                    other = other.replace("*", number, 1)
                return ".".join([other, *rest])
    return name
