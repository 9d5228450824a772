"""Names under which other programs publish a model's weights: read as ours, and written again to the bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from pipeline.errors import ConfigError
from pipeline.protocol import HasFilesBeside, HasPublishedForms

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch import Tensor, nn

    from pipeline.config.schema_train import TrainSection
    from pipeline.protocol import PublishedForm

AS = "train.pretrained_as"


@dataclass(frozen=True)
class WeightsReading:
    """How a file of weights is to be read."""

    form: str | None = None  # the published form; None: recognized by the names
    names: Mapping[str, str] = field(default_factory=dict)  # of the file's → the model's, before all else
    entry: str | None = None  # of a checkpoint with several, such as ema_state_dict

    @classmethod
    def of(cls, train: TrainSection) -> WeightsReading:
        """Return what a configuration says."""
        return cls(train.pretrained_as, train.pretrained_map, train.pretrained_entry)


USUAL = WeightsReading()


@dataclass(frozen=True)
class NamedWeights:
    """Tensors under a model's own names, and what was left behind for it."""

    tensors: Mapping[str, Tensor]
    form: str = ""  # the published form that they came in
    left: tuple[str, ...] = ()  # names of the file that this model does not need
    fresh: tuple[str, ...] = ()  # patterns of the model's names that need not be in the file

    def may_be_fresh(self, name: str) -> bool:
        """Say whether a tensor of the model may stay as it begins."""
        return any(fnmatchcase(name, pattern) for pattern in self.fresh)


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
    """Return a parameter's other name by a table of names and modules, or the one that it has.

    Of several that fit the longest decides, and among those that with the fewest "*".
    """
    parts = name.split(".")
    fitting = [(-len(signs), signs.count("*"), signs) for known in names if _fits(signs := known.split("."), parts)]
    if not fitting:
        return name
    _, _, signs = min(fitting)
    other = names[".".join(signs)]
    for sign, part in zip(signs, parts, strict=False):
        other = other.replace("*", part, 1) if sign == "*" else other
    return ".".join([other, *parts[len(signs) :]])


def _fits(signs: Sequence[str], parts: Sequence[str]) -> bool:
    """Tell whether a name begins with these parts; "*" stands for a number."""
    pairs = zip(signs, parts, strict=False)
    return len(signs) <= len(parts) and all(sign == part or (sign == "*" and part.isdigit()) for sign, part in pairs)


def in_own_names(model: nn.Module, tensors: Mapping[str, Tensor], reading: WeightsReading, place: str) -> NamedWeights:
    """Return a file's tensors under the names of a model, which may know them under published ones."""
    if reading.names:
        tensors = {renamed(name, reading.names): tensor for name, tensor in tensors.items()}
    forms = published_forms(model)
    if reading.form is not None and reading.form not in forms:
        known = f"it supports {', '.join(forms)}" if forms else "it supports no published weights"
        remedy = f"leave out {AS}, or choose one of these" if forms else f"leave out {AS}; names: train.pretrained_map"
        raise ConfigError(f"the model does not support weights of {reading.form!r}; {known}", where=AS, remedy=remedy)
    asked = forms if reading.form is None else {reading.form: forms[reading.form]}
    for name, form in asked.items():
        if (prefix := wrapping_prefix(tensors, form.knows)) is not None:
            theirs = without_prefix(tensors, prefix)
            left = tuple(name for name in theirs if any(fnmatchcase(name, pattern) for pattern in form.left))
            kept = {name: tensor for name, tensor in theirs.items() if name not in left}
            return NamedWeights(form.read(kept), name, left, form.fresh)
    if reading.form is not None:
        first = ", ".join(list(tensors)[:4])
        problem = f"these are not weights of {reading.form}: their names begin with {first}"
        raise ConfigError(problem, where=f"{AS}: {place}", remedy=f"leave out {AS}, or name the file of {reading.form}")
    return NamedWeights(tensors)


def files_beside(network: nn.Module, form: str) -> Mapping[str, str]:
    """Return the text files that belong to weights in a published form, where it has any."""
    known = published_forms(network).get(form)
    return known.beside() if isinstance(known, HasFilesBeside) else {}


def in_form(network: nn.Module, weights: Mapping[str, Tensor], form: str) -> Mapping[str, Tensor]:
    """Return weights as a published system names them; raise where the model knows no such system."""
    forms = published_forms(network)
    if form not in forms:
        known = f"its task supports {', '.join(forms)}" if forms else "its task supports no published names"
        remedy = f"--as {next(iter(forms))}" if forms else "leave out --as   (docs/how-to/model.md: published_forms)"
        raise ConfigError(f"no names of {form!r} for this model; {known}", where="--as", remedy=remedy)
    return forms[form].write(weights)


def published_forms(model: nn.Module) -> Mapping[str, PublishedForm]:
    """Return the published forms that a model knows, by name."""
    return model.published_forms() if isinstance(model, HasPublishedForms) else {}


def wrapping_prefix(names: Iterable[str], fits: Callable[[Collection[str]], bool]) -> str | None:
    """Return the prefix of what wraps a whole model, such as `module.` of DDP, without which names fit; None: none."""
    prefix, names = "", list(names)
    while not fits(names):
        first = names[0].partition(".")[0] + "." if names else ""
        if not first or not all(name.startswith(first) and name != first for name in names):
            return None
        prefix, names = prefix + first, [name.removeprefix(first) for name in names]
    return prefix


def without_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return tensors by names without a prefix that all have."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
