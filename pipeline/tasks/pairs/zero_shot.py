"""Classes told by texts alone: each class is the mean of what a text tower makes of it in prompts.

Shapes: C classes, T templates, K shared features.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional

from pipeline.errors import ConfigError
from pipeline.readers.byte_pairs import BytePairs, TooLong
from pipeline.tasks.pairs.pair_towers import TextBatch
from pipeline.tasks.task_parts import WHERE, at_least_single, padded_rows

if TYPE_CHECKING:
    from torch import Tensor

AT_ONCE = 64  # prompts
_MADE: WeakKeyDictionary[nn.Module, tuple[Any, Tensor]] = WeakKeyDictionary()  # with what it was made of


class _Sides(NamedTuple):
    """A batch of texts alone."""

    left: None
    right: TextBatch


@dataclass(frozen=True)
class Prompts:
    """The names of classes in templates, and the vectors that a model makes of them."""

    names: tuple[str, ...]
    templates: tuple[str, ...]
    merges: str
    most: int  # tokens

    def check(self, vocabulary: int) -> None:
        """Refuse templates without a place for the name, and prompts that the model cannot read."""
        for template in self.templates:
            if "{}" not in template:
                problem = f"the template {template!r} has no {{}}, where the name of a class goes"
                raise ConfigError(problem, where=f"{WHERE}.templates", remedy='such as "a photo of a {}."')
        largest = max(max(tokens) for tokens in self._tokens())
        if largest >= vocabulary:
            problem = f"a token of a prompt is {largest}, the model knows {vocabulary:,}"
            raise ConfigError(problem, where=f"{WHERE}.merges", remedy="the file that the reader has")

    def _tokens(self) -> list[list[int]]:
        """Return the tokens of every class in every template, class by class."""
        pairs = BytePairs.read(Path(self.merges) if self.merges else None, where=f"{WHERE}.merges")
        texts = [template.replace("{}", name) for name in self.names for template in self.templates]
        try:
            return [pairs.encoded(text, self.most) for text in texts]
        except TooLong as error:
            raise ConfigError(f"a prompt is too long: {error}", where=f"{WHERE}.templates") from error

    def vectors(self, model: nn.Module, like: Tensor) -> Tensor:
        """Return the vector of each class [C, K]; made once, until the model changes."""
        device = like.device
        stamp = (self, device, like.dtype, *((id(one), one._version) for one in model.parameters()))  # noqa: SLF001 - no other name counts changes in place
        made = _MADE.get(model)
        if made is None or made[0] != stamp:
            made = _MADE[model] = (stamp, self._vectors(model, device).to(like.dtype))
        return made[1]

    def _vectors(self, model: nn.Module, device: torch.device) -> Tensor:
        tokens = [torch.tensor(numbers) for numbers in self._tokens()]
        parts = [_read(model, tokens[start : start + AT_ONCE], device) for start in range(0, len(tokens), AT_ONCE)]
        mean_CK = torch.cat(parts).view(len(self.names), len(self.templates), -1).mean(1)
        return functional.normalize(mean_CK, dim=-1)


def _read(model: nn.Module, tokens: list[Tensor], device: torch.device) -> Tensor:
    ends_B = torch.tensor([len(numbers) - 1 for numbers in tokens], device=device)
    texts = TextBatch(padded_rows(tokens)[0].to(device), ends_B)
    vectors_BK: Tensor = model(_Sides(None, texts))[1]
    return at_least_single(vectors_BK)
