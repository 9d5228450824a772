"""What a user implements to train a model here: plain torch, nothing of ours to inherit from.

`train.task: "mylab.docking:Task"` names a class like this; `data.reader` and `embed.encoder` name others. The
methods of `Task` are needed; those of the others are looked for by name, and what they are for is left out where a task
has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from pipeline.records import Entry, Item, Rejection

Batch: TypeAlias = Any  # whatever `collate` returns and `loss` takes
Sizes: TypeAlias = "Mapping[str, int]"  # what drives memory, by name

ITEMS = "items"  # among the sizes of a batch: how many items it has
PICTURES = "pictures.json"  # curves that a task publishes of its predictions, for the page of a run


def item_of(row: str) -> str:
    """Return the id of the item that a row is drawn for, where a task draws several: "1ABC 7" is the eighth of 1ABC."""
    return row.partition(" ")[0]  # no id has white space


class Task(Protocol):
    """A model and what it is trained for.

    A task whose loss compares the items of a batch, and which is not `Contrastive`, says so with `in_batch = True`:
    `pipeline plan` then warns where micro-batches would give it fewer to compare.
    """

    def model(self) -> nn.Module:
        """Return the model, with fresh parameters."""

    def cost(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the sizes of an item that drive memory, such as nodes, edges, pairs = n_rec * n_lig.

        The item is told by the sizes of its graph: nodes, edges, receptor, ligand, pairs, cross, residues, contacts.
        They may be whole arrays, one number an item, and so the answers.
        """

    def collate(self, items: Sequence[Any], rng: np.random.Generator) -> Batch:
        """Make a batch of items, which carry graphs and embeddings as tensors, and data.labels as `item.values`.

        What is drawn for an item must come from the item's own `rng`: a batch may be cut in two, and each of its items
        then still draws the same. `rng` is the batch's, and other halves draw otherwise.
        """

    def loss(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, Tensor | float]]:
        """Return each term's sum over the batch and its weight: the loss is the sum of their quotients."""


@runtime_checkable
class Example(Protocol):
    """A task that can be planned without data."""

    def example(self, sizes: Sizes) -> Batch:
        """Return a batch of these sizes, its values anything.

        Sizes are sums over the batch where items are concatenated, those of the largest item where they are padded;
        `items` is how many there are.
        """


@runtime_checkable
class Weights(Protocol):
    """A task whose terms have weights of different kinds, known before the model runs."""

    def weights(self, batch: Batch) -> Mapping[str, Tensor | float]:
        """Return the weights that `loss` will return."""


@runtime_checkable
class ParameterGroups(Protocol):
    """A task that trains its parameters differently."""

    def parameter_groups(self, model: nn.Module) -> Iterable[Any]:
        """Return what an optimizer takes: parameters, or groups of them."""


@runtime_checkable
class Outputs(Protocol):
    """A task that can be evaluated."""

    def outputs(self, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
        """Return predictions of each item."""

    def metrics(self, outputs: Mapping[str, Any]) -> Mapping[str, float]:
        """Return figures of a whole split, from all its outputs."""


@runtime_checkable
class Samples(Protocol):
    """A task that draws several answers for an item where its model is applied, such as poses.

    Each is a row of its own, with an `ItemTensors` named after its item and its number (`item_of` tells the item), and
    so with random numbers of its own: `collate` finds the rows of an item one after the other.
    """

    @property
    def rows_per_item(self) -> int:
        """Return how many answers it draws for an item."""


@runtime_checkable
class Publishes(Protocol):
    """A task whose predictions are also files for people, such as structures."""

    def publish(self, folder: Path, outputs: Mapping[str, Any], items: Iterable[Item], reading: Any) -> Iterable[Path]:
        """Write such files into the folder of the predictions, and return them, a table (CSV) for people to see first.

        `outputs` are those of all rows; `items` are the data set's, and `reading` how their files are read
        (a `ScanRecipe`, or the reader that gave them).
        """


@runtime_checkable
class ReadsFiles(Protocol):
    """A task that reads files besides its items, such as another model's weights; or an encoder, besides its own."""

    def files_read(self) -> Iterable[Path]:
        """Return files and folders whose content decides what the task says; files, of an encoder."""


class PublishedForm(Protocol):
    """Names, and layouts, under which a model's weights were published (see `encoder.published_weights.Form`)."""

    @property
    def left(self) -> tuple[str, ...]:
        """Return which of theirs this model does not need: patterns, as of file names."""

    @property
    def fresh(self) -> tuple[str, ...]:
        """Return which of ours need not be in their file, such as a new head: patterns."""

    def knows(self, names: Collection[str]) -> bool:
        """Say whether tensors of these names are in this form."""

    def read(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return their tensors under this model's names; unknown ones stay, to be refused."""

    def write(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return this model's tensors under their names, whole, to the bit what `read` was given."""


@runtime_checkable
class HasFilesBeside(Protocol):
    """A published form that is a folder: beside its weights there are files that say what they are."""

    def beside(self) -> Mapping[str, str]:
        """Return their texts by name; the weights are `model.safetensors`."""


@runtime_checkable
class HasPublishedForms(Protocol):
    """A model of a system whose weights are published: they come in, and go out, under its names."""

    def published_forms(self) -> Mapping[str, PublishedForm]:
        """Return each form by its name, which `train.pretrained_as` and `pipeline model export --as` say: "dreams"."""


@runtime_checkable
class FitsOptions(Protocol):
    """A model that reads its sizes off published weights."""

    def fitting_options(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Return the task's options that the shapes of published tensors call for; KeyError where names are missing."""


@runtime_checkable
class Contrastive(Protocol):
    """A task whose loss compares every item of a step with every other, such as in-batch negatives.

    Its step makes two passes: all items are embedded, the loss of them all is taken, and its gradients go back through
    each micro-batch. So 8 micro-batches of 16 have the 128 negatives of one batch of 128, over all ranks.
    """

    def embed(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return tensors with a row for each item of a batch."""

    def contrast(self, model: nn.Module, embedded: Mapping[str, Tensor]) -> Mapping[str, tuple[Tensor, Tensor | float]]:
        """Return each term's sum and weight, of all items of a step; the model may hold a temperature.

        It draws no random numbers: every rank takes the loss of the same rows, and all must find the same.
        """


class Reader(Protocol):
    """Items that are no structures: spectra, pairs, whatever files hold.

    `data: {source: reader, reader: "mylab.spectra:Spectra", path: …, options: {…}}` names a class like this, which is
    called with `path` and the options. It yields `pipeline.records.Entry(id, place, arrays, split="", origin="")`: an
    id of its own for each item, where it is (JSON data, which `read` is given), arrays of numbers by name, and where
    people find it; or `Rejection(id, Reason.BAD_ENTRY, why)` in the place of an item that cannot be used: what it
    raises ends the scan. An array `peaks.mz` is as long as all `peaks.…` of its item; `mass`, without a dot, is one
    value or vector an item. Tasks find them as tensors, `item.values["peaks.mz"]`; `cost` is told the rows along each
    axis, `peaks`, and all numbers together, `numbers`.
    """

    def files(self) -> Iterable[Path]:
        """Return the files that the items are read from."""

    def entries(self) -> Iterator[Entry | Rejection]:
        """Yield every item in order, or why there is none in its place; nothing may grow with the number of items."""

    def read(self, place: Any) -> Mapping[str, NDArray[Any]]:
        """Return the arrays of an item, the same as before; several threads ask at once."""


class Encoder(Protocol):
    """Sequences in, a row of numbers for each residue out.

    `embed: {encoder: "mylab.enc:Encoder", options: {…}}` names a class like this. It is called with the options, and
    with `weights`, the path `embed.weights`, where it takes that: what these files hold is then part of the keys, as
    its own code is. On a CPU sequences are encoded one by one, on a card in padded batches.

    Three attributes may say more: `padded = False`, that it takes one sequence at a time everywhere; `version`, a
    number of what decides the rows and is neither in its code nor in its weights; and `cls = True`, that the rows begin
    with that of the mark before the sequence: row i + 1 is residue i. `embed.cls` keeps it.
    """

    @property
    def width(self) -> int:
        """Return how many numbers a row has."""

    @property
    def layers(self) -> int:
        """Return how many layers there are; `embed.layer` chooses one of them, or 0."""

    @property
    def longest(self) -> int:
        """Return how many residues it takes as one, 0 for any number; longer sequences go in windows."""

    @property
    def letters(self) -> str:
        """Return the letters of residues that it reads; items with others are rejected."""

    def model(self) -> nn.Module:
        """Return the model with its weights, on the CPU; it is moved and converted here."""

    def tokenize(self, sequence: str) -> Sequence[int]:
        """Return the tokens of a sequence, with the marks that the model wants around them."""

    def forward(self, model: nn.Module, token_BT: Tensor, is_token_BT: Tensor, layer: int) -> Tensor:
        """Return the rows of a layer [sequences, residues, width]: row i is residue i, marks have none.

        Shorter sequences end early: what their last rows hold does not matter. `is_token_BT` is False there.
        """


def has_cls(encoder: Encoder) -> bool:
    """Tell whether an encoder's rows begin with that of the mark before the sequence."""
    return getattr(encoder, "cls", False) is True  # a number would be that of the mark's token


@runtime_checkable
class Referenced(Protocol):
    """An encoder that knows how its rows should be, as another implementation makes them."""

    def reference(self, sequences: Sequence[str], layer: int) -> Sequence[Any]:
        """Return the rows [residues, width] of each sequence, in full precision, to be compared before any is kept."""
