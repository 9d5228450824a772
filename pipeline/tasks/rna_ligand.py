"""The equivariant task: a vector for each RNA pocket and its ligand that does not change when they are rotated.

    graph: {nodes: atom, cross_radius: 5.0}
    structures: {ligands: keep}
    train: {task: "pipeline.tasks.rna_ligand:RnaLigand", options: {targets: /data/targets.h5}}

It reads atom graphs. The atoms of both partners are in one graph; what runs between the two are the graph's cross
edges, so that partners that are not in one frame do not see each other. A pocket alone is an item of one partner. Edges
are bonds, pairs two and three bonds apart (`use_multi_hop`) and all others (`use_nonbonded`); each kind can be left
out, and then takes nothing. Memory goes by atoms and by edges of the kinds that are used.

Shapes: N atoms of all items, E edges, B items, D numbers of an embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from pipeline.errors import ConfigError, DataError
from pipeline.graphs.bonds import HOPS
from pipeline.graphs.item_graph import ROLES
from pipeline.protocol import ITEMS
from pipeline.readers.entry import Opened
from pipeline.readers.hdf5 import open_hdf5
from pipeline.tasks.rna_ligand_model import (
    CLOSEST,
    KINDS,
    RnaLigandBatch,
    RnaLigandNetwork,
    RnaLigandSizes,
    checked_irreps,
)
from pipeline.tasks.task_parts import WHERE, at_least, at_least_single

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from pipeline.protocol import Sizes
    from pipeline.training.items.batch import ItemTensors, PartnerTensors

BOND, *MULTI_HOP = HOPS
NEAR = KINDS[-1]
TARGET, EMBEDDING = "target", "embedding"
ID = "id"
NAMED = 3  # ids in a message
SIDES = [role.value for role in ROLES]
LEAST = {"layers": 1, "output_dim": 1, "radial_width": 1, "head_width": 1, "cosine": 0}


@dataclass(frozen=True)
class RnaLigand(RnaLigandSizes):
    """The task: predict for each item a given embedding, such as that of its ligand."""

    use_multi_hop: bool = True  # edges between atoms two and three bonds apart
    use_nonbonded: bool = True  # edges between atoms that are near each other, the partners' too
    targets: str | None = None  # HDF5, an absolute path: a dataset for each id, or `id` and `embedding`
    targets_missing: str = "error"  # skip: items without a target have no weight
    cosine: float = 0.0  # how much 1 - cosine counts beside the mean squared error

    def __post_init__(self) -> None:
        checked_irreps(self.hidden_irreps)
        at_least(self, LEAST)
        if not CLOSEST < self.reach < math.inf:
            raise ConfigError(f"reach is {self.reach}: it must be more than {CLOSEST} Å", where=f"{WHERE}.reach")
        for name, known in (("product", ("depthwise", "full")), ("targets_missing", ("error", "skip"))):
            if getattr(self, name) not in known:
                problem = f"{name} is {getattr(self, name)!r}: it must be {' or '.join(known)}"
                raise ConfigError(problem, where=f"{WHERE}.{name}")
        if self.targets is not None:
            object.__setattr__(self, "targets", _absolute(self.targets))

    def model(self) -> nn.Module:
        return RnaLigandNetwork(self)

    @property
    def kinds(self) -> tuple[str, ...]:
        return (BOND, *(MULTI_HOP if self.use_multi_hop else ()), *((NEAR,) if self.use_nonbonded else ()))

    def cost(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sizes that decide how much memory an item takes; edges of a graph with one kind are bonds."""
        if "edges" not in item:
            problem = "the edges of graphs are not known before they are built: --set graph.cache=true"
            raise ConfigError(problem, where="graph.cache", remedy="--set graph.cache=true")
        cross = 2 * item["cross"] if self.use_nonbonded else 0
        edges = item.get(BOND, item["edges"]) + sum(item.get(kind, 0) for kind in self.kinds[1:])
        return {"nodes": item["nodes"], "edges": edges + cross}

    def collate(self, items: Sequence[ItemTensors], rng: np.random.Generator) -> RnaLigandBatch:  # noqa: ARG002 - the protocol has it
        sides = [side for item in items for side in _sides(item)]
        sizes = [sum(len(side.nodes["pos"]) for side in item.sides.values()) for item in items]
        edges = [torch.cat(columns, -1) for columns in zip(*self._edges(items, sizes), strict=True)]
        targets = [self._target(item.id) for item in items]
        nothing_D = np.zeros(self.output_dim, np.float32)
        return RnaLigandBatch(
            pos_N3=torch.cat([_positions(item) for item in items]),
            element_N=torch.cat([side.nodes["element"] for side in sides]).long(),
            type_N=torch.cat([side.residues["type"][side.nodes["residue"].long()] for side in sides]).long(),
            side_N=torch.cat([torch.full((len(side.nodes["pos"]),), SIDES.index(side.role)) for side in sides]),
            item_N=torch.cat([torch.full((size,), place) for place, size in enumerate(sizes)]),
            from_E=edges[0][0],
            to_E=edges[0][1],
            kind_E=edges[1],
            target_BD=torch.from_numpy(np.stack([nothing_D if target is None else target for target in targets])),
            has_target_B=torch.tensor([target is not None for target in targets]),
            known=tuple(target is not None for target in targets),
        )

    def _edges(self, items: Sequence[ItemTensors], sizes: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield edges of one kind, within a partner or between two, numbered by the batch's atoms, and their kinds."""
        first = 0
        for item, size in zip(items, sizes, strict=True):
            within = first
            for side in item.sides.values():
                for kind in self.kinds:
                    if kind in side.edges:
                        yield _told(side.edges[kind] + within, kind)
                within += len(side.nodes["pos"])
            if self.use_nonbonded and NEAR in item.cross:
                yield _told(_both_ways(item) + first, NEAR)
            first += size

    def _target(self, name: str) -> Any:
        """Return an item's target vector; None if it has none and is allowed to have none."""
        if self.targets is None:
            return None
        targets = targets_of(Path(self.targets))
        target = targets.get(name, self.output_dim)
        if target is None and self.targets_missing == "error":
            raise targets.missing(name)
        return target

    def loss(self, model: nn.Module, batch: RnaLigandBatch) -> dict[str, tuple[Tensor, float]]:
        """Return the summed distance of the items' vectors from their targets, and how many have one."""
        if self.targets is None and not any(batch.known):
            problem = "there is nothing to learn: no targets are named"
            raise ConfigError(problem, where=f"{WHERE}.targets", remedy="write it from / on, such as /data/targets.h5")
        vector_BD = at_least_single(model(batch))
        target_BD = batch.target_BD.to(vector_BD.dtype)
        far_B = (vector_BD - target_BD).square().mean(-1)
        if self.cosine:
            far_B = far_B + self.cosine * (1 - functional.cosine_similarity(vector_BD, target_BD, -1))
        return {TARGET: ((far_B * batch.has_target_B).sum(), float(sum(batch.known)))}

    def outputs(self, model: nn.Module, batch: RnaLigandBatch) -> dict[str, list[Tensor]]:
        """Return each item's vector [D], its target, empty where it has none, and the cosine of both, then NaN."""
        pairs = zip(batch.target_BD.unbind(), batch.known, strict=True)
        targets = [target if known else target[:0] for target, known in pairs]
        predicted_BD = at_least_single(model(batch))
        cosine_B = torch.cosine_similarity(predicted_BD, batch.target_BD.to(predicted_BD.dtype))
        cosines = [
            value if known else torch.full_like(value, math.nan)
            for value, known in zip(cosine_B, batch.known, strict=True)
        ]
        return {EMBEDDING: list(predicted_BD.unbind()), TARGET: targets, "cosine": cosines}

    def metrics(self, outputs: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Return the figures of a split: means over the items that have a target."""
        pairs = zip(outputs[EMBEDDING], outputs[TARGET], strict=True)
        figures = [_figures(np.float64(vector), np.float64(target)) for vector, target in pairs if target.size]
        return {} if not figures else dict(zip(("cosine", "mse"), np.mean(figures, axis=0).tolist(), strict=True))

    def example(self, sizes: Sizes) -> RnaLigandBatch:
        """Return a batch of these sizes; how they are spread over its items makes no difference."""
        nodes, edges, items = (sizes[name] for name in ("nodes", "edges", ITEMS))
        return RnaLigandBatch(
            pos_N3=torch.randn(nodes, 3),
            element_N=torch.zeros(nodes, dtype=torch.long),
            type_N=torch.zeros(nodes, dtype=torch.long),
            side_N=torch.zeros(nodes, dtype=torch.long),
            item_N=torch.arange(nodes) * items // max(nodes, 1),
            from_E=torch.randint(nodes, (edges,)),
            to_E=torch.randint(nodes, (edges,)),
            kind_E=torch.zeros(edges, dtype=torch.long),
            target_BD=torch.randn(items, self.output_dim),
            has_target_B=torch.ones(items, dtype=torch.bool),
            known=(True,) * items,
        )


def _absolute(path: str) -> str:
    """Expand ~ in a path; raise if it is relative, which would be another file in each job."""
    expanded = Path(path).expanduser()
    if not expanded.is_absolute():
        problem = f"{path!r} is relative, and options are read by jobs that run elsewhere"
        raise ConfigError(problem, where=f"{WHERE}.targets", remedy="--set train.options.targets=$PWD/targets.h5")
    return str(expanded)


def _sides(item: ItemTensors) -> list[PartnerTensors]:
    """Return the partners of an item, whose nodes must be atoms."""
    sides = list(item.sides.values())
    if not all(side.residues for side in sides):
        problem = f"the task reads atom graphs; the nodes of {item.id} are residues"
        raise ConfigError(problem, where="graph.nodes", remedy="--set graph.nodes=atom")
    return sides


def _positions(item: ItemTensors) -> Tensor:
    """Return the coordinates of an item's atoms relative to the first partner's centre."""
    sides = list(item.sides.values())
    ways = [(side.centre - sides[0].centre).to(side.nodes["pos"].dtype) for side in sides]
    return torch.cat([side.nodes["pos"] + way_3 for side, way_3 in zip(sides, ways, strict=True)])


def _told(edges_2E: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return edges, and the index of their kind for each."""
    return edges_2E.long(), torch.full((edges_2E.shape[1],), KINDS.index(kind))


def _both_ways(item: ItemTensors) -> Tensor:
    """Return the edges between the partners in both directions, numbered by the item's atoms, receptor first."""
    ligand_E, receptor_E = item.cross[NEAR].long()
    receptor = next(iter(item.sides.values()))
    across_2E = torch.stack([ligand_E + len(receptor.nodes["pos"]), receptor_E])
    return torch.cat([across_2E, across_2E.flip(0)], -1)


def _figures(one_D: Any, target_D: Any) -> tuple[float, float]:
    """Return the cosine of two vectors and their mean squared difference."""
    lengths = float(np.linalg.norm(one_D) * np.linalg.norm(target_D))
    return float(one_D @ target_D) / lengths if lengths else 0.0, float(np.square(one_D - target_D).mean())


class RnaTargets:
    """An open HDF5 file of each item's target vector; several threads may read at once, as h5py has a lock.

    It has a dataset for each item, by its id, or two: `id` [N] and `embedding` [N, D].
    """

    def __init__(self, path: Path) -> None:
        path.stat()  # h5py's own message hides that there is no such file
        self.path, self._file = path, open_hdf5(path)
        self._rows = self._by_id() if {ID, EMBEDDING} <= set(self._file) else None

    def _by_id(self) -> Mapping[str, int]:
        """Return the row of each id."""
        ids = self._file[ID][()]
        if len(ids) != len(self._file[EMBEDDING]):
            problem = f"{self.path} has {len(ids)} ids and {len(self._file[EMBEDDING])} embeddings"
            raise DataError(problem, where=f"{WHERE}.targets", remedy="write a row of `embedding` for each `id`")
        return {name.decode() if isinstance(name, bytes) else str(name): row for row, name in enumerate(ids)}

    def __len__(self) -> int:
        return len(self._file if self._rows is None else self._rows)

    def get(self, name: str, width: int) -> NDArray[np.float32] | None:
        """Return the target of an item, None where the file has none."""
        stored = self._found(name)
        if stored is None:
            return None
        if stored.size != width:
            problem = f"the target of {name} in {self.path} has {stored.size} numbers, the model gives {width}"
            raise ConfigError(
                problem, where="train.options.output_dim", remedy=f"--set train.options.output_dim={stored.size}"
            )
        target_D = stored.reshape(width).astype(np.float32)
        if not np.isfinite(target_D).all():
            problem = f"the target of {name} in {self.path} has numbers that are not finite"
            raise DataError(
                problem, where=f"{WHERE}.targets", remedy="make it anew, or leave it out with targets_missing: skip"
            )
        return target_D

    def _found(self, name: str) -> NDArray[Any] | None:
        if self._rows is not None:
            row = self._rows.get(name)
            return None if row is None else np.asarray(self._file[EMBEDDING][row])
        data_set = self._file.get(name)
        return np.asarray(data_set[()]) if hasattr(data_set, "shape") else None

    def missing(self, name: str) -> DataError:
        """Return the error for an item without a target."""
        names = ", ".join(list(self._file if self._rows is None else self._rows)[:NAMED])
        problem = f"{name} has no target in {self.path}, which has {len(self):,} ids: {names} …"
        return DataError(
            problem, where=f"{WHERE}.targets", remedy="--set train.options.targets_missing=skip, or add it to the file"
        )


targets_of = Opened(RnaTargets)
