"""A recipe on this machine: its configuration, made items that its own reader or builder has read, and real steps.

Shapes: N items.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_map_only

from pipeline.config.load import read_config
from pipeline.graphs.build_graph import build_graph
from pipeline.graphs.item_graph import ItemGraph
from pipeline.project.project import graph_recipe
from pipeline.project.run_code import load_reader
from pipeline.protocol import ITEMS
from pipeline.readers import made
from pipeline.records import Role
from pipeline.runs.model.training_work import Work, least_of, sizes_of, target_of
from pipeline.stages.read_entries import EntriesTaken, take_entries
from pipeline.structures.synthetic import complex_pdb
from pipeline.tasks.rna.made_pockets import BASES, coordinates, made_pocket, topology
from pipeline.training.items.item_source import ReaderItems
from pipeline.training.items.item_table import ItemTable
from pipeline.training.sampling.sampler import Sampler
from pipeline.training.step.contrastive import ContrastiveStep
from pipeline.training.step.step import Step
from tests.graphs.complexes import examined, side
from tests.tasks import items as graph_items
from tests.tasks import reader_items
from tests.tasks.rna.made import by_key
from tests.testkit.limited.device import HostCarrier, LimitedDevice, forget_failed_backward

if TYPE_CHECKING:
    from pipeline.config.schema import Config
    from pipeline.memory.footprint import MemoryChoice, Oracle

RECIPES = Path(__file__).resolve().parents[2] / "configs" / "recipes"
FOLDER = Path(tempfile.mkdtemp(prefix="recipes-"))  # of made files; gone with the machine's temporary files
NAMES = ("rna_ligand", "spectra_finetune", "complex_docking", "contrastive_pair", "denovo_recursive")
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Graphs:
    """Made structures, built as the recipe says; embeddings are drawn."""

    graphs: Sequence[ItemGraph]
    dim: int | None

    @property
    def sizes(self) -> dict[str, Integers]:
        """Return the sizes of each graph."""
        told = [graph.sizes() for graph in self.graphs]
        return {name: np.array([one.get(name, 0) for one in told]) for name in told[0]}

    def items(self, numbers: Sequence[int]) -> Sequence[Any]:
        """Return some graphs."""
        ids = [f"item{number}" for number in numbers]
        return graph_items.batch_of([self.graphs[number] for number in numbers], self.dim, ids).items[:]


@dataclass(frozen=True)
class Entries:
    """What the recipe's reader gives of a made file."""

    source: ReaderItems
    table: ItemTable

    @property
    def sizes(self) -> Mapping[str, Integers]:
        """Return the sizes of each item."""
        return self.table.sizes

    def items(self, numbers: Sequence[int]) -> Sequence[Any]:
        """Return some items, read anew."""
        found: list[Any] = list(self.source.read([int(number) for number in numbers]))
        return reader_items.batch_of([one.arrays for one in found], [one.id for one in found]).items[:]


Data = Graphs | Entries


class OnDevice(Step):
    """A step whose batches come from the host, as they do to a GPU."""

    def moved(self, batch: Any, *, on_host: bool = False) -> Any:
        """Return a copy, which counts."""
        return batch if on_host else tree_map_only(torch.Tensor, torch.clone, batch)


class ContrastiveOnDevice(OnDevice, ContrastiveStep):
    """The same, of a loss that compares all items."""


@dataclass(frozen=True)
class Bench:
    """A recipe, its items, and who answers for its memory."""

    name: str
    config: Config
    work: Work
    data: Data

    @classmethod
    def of(cls, name: str, sets: Sequence[str], what: Any) -> Bench:
        """Read a recipe, with some settings laid over it, and make items: see `made_items`."""
        config = read_config(RECIPES / f"{name}.yaml", [*sets, *_targets(name, sets)]).config
        work = replace(Work.of(config), device="cpu")
        return cls(name, config, work, made_items(name, config, what))

    @property
    def padded(self) -> bool:
        """Say whether items are padded to the largest of a batch."""
        return self.config.train.batching == "padded"

    @property
    def sizes(self) -> dict[str, Integers]:
        """Return what drives memory, of each item."""
        return sizes_of(self.work.task, self.data.sizes)

    def oracle(self) -> Oracle:
        """Return who answers."""
        return self.work.oracle(least_of(self.sizes), target_of(None), padded=self.padded)

    def batch_sizes(self, numbers: Sequence[int]) -> dict[str, int]:
        """Return the sizes of some items as one batch."""
        fold = np.max if self.padded else np.sum
        return {ITEMS: len(numbers), **{name: int(fold(one[list(numbers)])) for name, one in self.sizes.items()}}

    def step(self, choice: MemoryChoice, device: LimitedDevice) -> OnDevice:
        """Build a step whose batches, and what it offloads, are in the host's memory."""
        kind = ContrastiveOnDevice if self.work.is_contrastive else OnDevice
        step = kind(self.work.task, self.work.under(choice))
        step.carrier = HostCarrier(device)
        return step


class Fetched(Sequence[Any]):
    """The batches of a step, each collated when its turn comes, in memory that does not count."""

    def __init__(self, bench: Bench, cuts: Sequence[Sequence[int]], device: LimitedDevice) -> None:
        self._bench, self._cuts, self._device = bench, cuts, device

    def __len__(self) -> int:
        return len(self._cuts)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return Fetched(self._bench, self._cuts[place], self._device)
        with self._device.host():
            items = self._bench.data.items(list(self._cuts[place]))
            return self._bench.work.task.collate(items, np.random.default_rng(place))


@dataclass(frozen=True)
class Trained:
    """What came of some steps."""

    ooms: int
    peak_bytes: int
    worst: int  # the step with the highest peak
    steps: int
    micros: int


def train(
    bench: Bench, choice: MemoryChoice, steps: Sequence[Sequence[Sequence[int]]], limit: int | None = None
) -> Trained:
    """Make real steps of micro-batches of items, from the making of the model on."""
    torch.manual_seed(0)
    gc.collect()
    peaks, ooms = list[int](), 0
    with LimitedDevice(limit) as device:
        step = bench.step(choice, device)
        made_bytes = device.peak_bytes
        for cuts in steps:
            device.reset_peak()
            try:
                step.run(Fetched(bench, cuts, device))
            except torch.OutOfMemoryError:
                ooms += 1
                step.release()
                forget_failed_backward()
            peaks.append(device.peak_bytes)
        del step
    return Trained(ooms, max(made_bytes, *peaks), int(np.argmax(peaks)), len(steps), sum(map(len, steps)))


def cuts_of(sampler: Sampler) -> list[list[list[int]]]:
    """Return the items of each micro-batch of each step of the first epoch."""
    return [[micro.items.tolist() for micro in sampler.micros(0, step)] for step in range(sampler.steps)]


def made_items(name: str, config: Config, what: Any) -> Data:
    """Make items: complexes and pockets by their numbers of residues or nucleotides, others by how many there are."""
    if name == "complex_docking":
        dim = config.train.options["embedding_dim"]
        pdbs = [complex_pdb(seed, *sides) for seed, sides in enumerate(what)]
        return Graphs([_graph(pdb, config, ("A", "B")) for pdb in pdbs], dim)
    if name == "rna_ligand":
        return Entries(*entered(config, made_pockets(what)))
    kind = "captions" if name == "contrastive_pair" else "spectra"
    return Entries(*entered(config, made_file(kind, what)))


def _graph(pdb: bytes, config: Config, chains: tuple[str, str]) -> ItemGraph:
    parts = [side(role, *of_role) for role, of_role in zip((Role.RECEPTOR, Role.LIGAND), chains, strict=True)]
    inventory, found = examined(pdb, *parts)
    assert found is not None, inventory
    return build_graph(found, graph_recipe(config))


def made_pockets(nucleotides: Sequence[int]) -> Path:
    """Write made pockets of about so many nucleotides each, all of one ligand."""
    folder = FOLDER / f"pockets-{'-'.join(map(str, nucleotides))}"
    folder.mkdir(exist_ok=True)
    for seed, count in enumerate(nucleotides):
        rng = np.random.default_rng(seed)
        pocket, stem = made_pocket(rng, "".join(rng.choice(list(BASES), size=count // 2))), f"p{seed:03d}_LIG_model0"
        (folder / f"{stem}_rna.prmtop").write_bytes(topology(pocket))
        (folder / f"{stem}_rna.inpcrd").write_bytes(coordinates(pocket))
    return folder


def made_file(kind: str, count: int) -> Path:
    """Write made items to a file of the recipe's kind."""
    path = FOLDER / f"{kind}-{count}" / ("captions.csv" if kind == "captions" else "spectra.mgf")
    if not path.exists():
        {"captions": made.captions, "spectra": made.spectra}[kind](path, count)
    return path


def entered(config: Config, path: Path) -> tuple[ReaderItems, ItemTable]:
    """Let the recipe's reader read a file."""
    options = config.data.options
    if "target" in options:
        options = {**options, "target": ["target"]}  # as made spectra name it
    reader, taken = load_reader(str(config.data.reader), path, options), EntriesTaken()
    refused = list(take_entries(reader.entries(), taken))
    assert not refused, refused[0]
    table = taken.table.table()
    return ReaderItems(reader, table), table


def _targets(name: str, sets: Sequence[str]) -> list[str]:
    """Return where the target of the pockets is, drawn at random."""
    if name != "rna_ligand":
        return []
    dim = read_config(RECIPES / f"{name}.yaml", sets).config.train.options["output_dim"]
    path = FOLDER / f"targets-{dim}.h5"
    if not path.exists():
        by_key(path, {"LIG": np.random.default_rng(0).normal(size=dim).astype(np.float32)})
    return [f"train.options.targets={path}"]
