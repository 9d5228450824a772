"""The protocols that user code implements: plain torch classes, without a base class of ours.

`train.task: "mylab.docking:Task"` names such a class; so do `data.reader` and `embed.encoder`. A task must have the
methods of `Task`. The other protocols of tasks are optional: pipeline looks for their methods by name.
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

Batch: TypeAlias = Any  # what `collate` returns and `loss` takes
Sizes: TypeAlias = "Mapping[str, int]"  # name of a size that drives memory → value

ITEMS = "items"  # among the sizes of a batch: its number of items
PICTURES = "pictures.json"  # curves of predictions that a task publishes for the HTML report


def item_of(row: str) -> str:
    """Return the id of the item of a row, if a task draws several rows for an item: "1ABC 7" is the eighth of 1ABC."""
    return row.partition(" ")[0]  # ids have no white space


class Task(Protocol):
    """A model and its loss.

    Set `in_batch = True` if the loss compares the items of a batch and the task is not `Contrastive`: `pipeline plan`
    then warns if micro-batches give it fewer items to compare.
    """

    def model(self) -> nn.Module:
        """Return the model, with fresh parameters."""

    def cost(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the sizes of an item that drive memory, such as nodes, edges, pairs = n_rec * n_lig.

        `item` has the sizes of its graph: nodes, edges, receptor, ligand, pairs, cross, residues, contacts. They may be
        arrays with a number for each item; then return arrays, too.
        """

    def collate(self, items: Sequence[Any], rng: np.random.Generator) -> Batch:
        """Make a batch of items, which carry graphs and embeddings as tensors, and data.labels as `item.values`.

        Draw random numbers for an item from its own `rng`, so that the item draws the same numbers if the batch is
        split. The argument `rng` belongs to the batch, and the parts of a split batch draw other numbers from it.
        """

    def loss(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, Tensor | float]]:
        """Return the sum over the batch and the weight of each term; the loss is the sum of their quotients."""


@runtime_checkable
class Example(Protocol):
    """A task that can be planned without data: it makes example batches."""

    def example(self, sizes: Sizes) -> Batch:
        """Return a batch of these sizes with arbitrary values.

        Sizes are sums over the batch if items are concatenated, those of the largest item if they are padded; `items`
        is the number of items.
        """


@runtime_checkable
class Weights(Protocol):
    """A task that knows the weights of its terms before the model runs."""

    def weights(self, batch: Batch) -> Mapping[str, Tensor | float]:
        """Return the weights that `loss` will return."""


@runtime_checkable
class ParameterGroups(Protocol):
    """A task with parameter groups, such as different learning rates."""

    def parameter_groups(self, model: nn.Module) -> Iterable[Any]:
        """Return parameters, or groups of them, for the optimizer."""


@runtime_checkable
class Outputs(Protocol):
    """A task that can be evaluated."""

    def outputs(self, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
        """Return the predictions for each item."""

    def metrics(self, outputs: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the metrics of a split from all its outputs."""


@runtime_checkable
class Samples(Protocol):
    """A task that draws several answers for an item in evaluations and predictions, such as poses.

    Each answer is a row with its own `ItemTensors`, named after the item and the number of the row (`item_of` returns
    the item), and with its own random numbers. `collate` gets the rows of an item one after the other.
    """

    @property
    def rows_per_item(self) -> int:
        """The number of answers that it draws for an item."""


@runtime_checkable
class Publishes(Protocol):
    """A task that writes its predictions as files for people, too, such as structures."""

    def publish(self, folder: Path, outputs: Mapping[str, Any], items: Iterable[Item], reading: Any) -> Iterable[Path]:
        """Write files into the folder of the predictions, and return them; the first is a table (CSV) to look at.

        `outputs` are those of all rows, `items` the items of the data set; `reading` (a `ScanRecipe`, or the reader)
        says how to read their files.
        """


@runtime_checkable
class ReadsFiles(Protocol):
    """A task or an encoder that reads more files, such as another model's weights."""

    def files_read(self) -> Iterable[Path]:
        """Return the files and folders whose content affects the results; an encoder returns only files."""


class PublishedForm(Protocol):
    """The names and layouts of a model's published weights (see `encoder.published_weights.Form`)."""

    @property
    def left(self) -> tuple[str, ...]:
        """Return patterns (as of file names) of published tensors that this model does not need."""

    @property
    def fresh(self) -> tuple[str, ...]:
        """Return patterns of this model's tensors that a published file may lack, such as a new head."""

    def knows(self, names: Collection[str]) -> bool:
        """Tell whether tensors of these names have this form."""

    def read(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return published tensors under this model's names; keep unknown ones, which are then refused."""

    def write(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return this model's tensors under their published names: the exact inverse of `read`."""


@runtime_checkable
class HasFilesBeside(Protocol):
    """A published form that is a folder, with files that describe the weights."""

    def beside(self) -> Mapping[str, str]:
        """Return file name → text; the weights are `model.safetensors`."""


@runtime_checkable
class HasPublishedForms(Protocol):
    """A model whose weights can be imported and exported in published forms."""

    def published_forms(self) -> Mapping[str, PublishedForm]:
        """Return name → form, for `train.pretrained_as` and `pipeline model export --as`, such as "dreams"."""


@runtime_checkable
class FitsOptions(Protocol):
    """A model that infers its sizes from published weights."""

    def fitting_options(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Return the task's options for the shapes of published tensors; raise KeyError if names are missing."""


@runtime_checkable
class Contrastive(Protocol):
    """A task whose loss compares every item of a step with every other, such as with in-batch negatives.

    A step makes two passes: embed all items and take their loss, then send its gradients back through each micro-batch.
    So 8 micro-batches of 16 have the same negatives as one batch of 128, over all ranks.
    """

    def embed(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return tensors with one row for each item of a batch."""

    def contrast(self, model: nn.Module, embedded: Mapping[str, Tensor]) -> Mapping[str, tuple[Tensor, Tensor | float]]:
        """Return the sum and the weight of each term over all items of a step; the model may hold a temperature.

        Do not draw random numbers: every rank computes this loss of the same rows, and all must get the same result.
        """


class Reader(Protocol):
    """Reads items that are not structures, such as spectra or pairs.

    `data: {source: reader, reader: "mylab.spectra:Spectra", path: …, options: {…}}` names such a class. pipeline calls
    it with `path` and the options. It yields an `Entry(id, place, arrays, split="", origin="")` for each item: a unique
    id, the place of the item (JSON data, which `read` gets), arrays of numbers by name, and the place that people see.
    For an unusable item it yields `Rejection(id, Reason.BAD_ENTRY, why)`; an exception ends the scan.

    All arrays `peaks.…` of an item have the same length; a name without a dot, such as `mass`, is one value or vector.
    Tasks get them as tensors: `item.values["peaks.mz"]`. `cost` gets the length of each axis, such as `peaks`, and the
    count of all numbers, `numbers`.
    """

    def files(self) -> Iterable[Path]:
        """Return the files that hold the items."""

    def entries(self) -> Iterator[Entry | Rejection]:
        """Yield every item in order, or a rejection in its place; memory must not grow with the number of items."""

    def read(self, place: Any) -> Mapping[str, NDArray[Any]]:
        """Return the arrays of an item, always the same; several threads call this at once."""


class Encoder(Protocol):
    """Turns a sequence into a row of numbers for each residue.

    `embed: {encoder: "mylab.enc:Encoder", options: {…}}` names such a class. pipeline calls it with the options and, if
    it takes that argument, with `weights`, the path `embed.weights`. The content of the weights and the code of the
    class are part of the keys. On a CPU sequences are encoded one by one, on a GPU in padded batches.

    Optional attributes: `padded = False` for one sequence at a time everywhere; `version`, a number to change when
    something else than code and weights changes the rows; `cls = True` if the rows begin with that of a CLS token, so
    that row i + 1 is residue i. `embed.cls` keeps that row.
    """

    @property
    def width(self) -> int:
        """The number of columns of a row."""

    @property
    def layers(self) -> int:
        """The number of layers; `embed.layer` chooses one of them, or 0."""

    @property
    def longest(self) -> int:
        """The longest sequence, 0: any length; longer sequences are cut into windows."""

    @property
    def letters(self) -> str:
        """The letters of residues that it reads; items with other letters are rejected."""

    def model(self) -> nn.Module:
        """Return the model with its weights, on the CPU; pipeline moves and converts it."""

    def tokenize(self, sequence: str) -> Sequence[int]:
        """Return the tokens of a sequence, including the model's special tokens."""

    def forward(self, model: nn.Module, token_BT: Tensor, is_token_BT: Tensor, layer: int) -> Tensor:
        """Return the rows of a layer [sequences, residues, width]: row i is residue i; special tokens have no rows.

        Rows beyond the end of a shorter sequence may hold anything; `is_token_BT` is False there.
        """


def has_cls(encoder: Encoder) -> bool:
    """Tell whether an encoder's rows begin with that of a CLS token."""
    return getattr(encoder, "cls", False) is True  # an integer `cls` is the id of the token


@runtime_checkable
class Referenced(Protocol):
    """An encoder with a reference implementation to compare its rows with."""

    def reference(self, sequences: Sequence[str], layer: int) -> Sequence[Any]:
        """Return the rows [residues, width] of each sequence in full precision, to compare them before any is kept."""
