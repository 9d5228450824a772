"""A graph as PyTorch Geometric sees it: `Data` for one partner of residues, `HeteroData` for all else.

Residue graphs  A node type per partner, named by its role, with every array of the nodes under its own name. Edge types
                (receptor, near, receptor) and (ligand, near, ligand), across (ligand, near, receptor), and the native
                contacts (receptor, contact, ligand) with `atoms` and `nearest`.
Atom graphs     The same with each kind of edge under its name. Residues are nodes as well, of type ROLE_residue; the
                edge type (ROLE, in, ROLE_residue) says whose an atom is. Paths of bonds are not in the view: a batch
                of PyG counts on nothing but pairs.
Whole graphs    ROLE_centre, and `bound_centre`: a row for each graph of a batch.
Edge fields     `pae` of the edge types `near`, where structures.pae asks for it; `edge_pae` of a single partner.
Embeddings      `x`, where they are given; of a residue that is not encoded (`row` is -1) it is zero.

Indices become int64, because torch takes uint8 for a mask and has little support for uint16. All else shares the memory
of the arrays, except read-only ones: torch has no read-only tensors, and in-place changes by a model would alter a
verified record. They are copied, unless the caller accepts that risk with `share`.

Shapes: N nodes, L rows of embeddings, E edges, P contacts.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pipeline.command_line import install_extra
from pipeline.errors import ConfigError
from pipeline.graphs.item_graph import ItemGraph, PartnerGraph
from pipeline.records import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from pipeline.graphs.item_graph import Array

    Embeddings: TypeAlias = Mapping[Role, torch.Tensor]  # of a partner's protein chains one after the other, [L, D]

REMEDY = install_extra("pyg")
NEAR, CONTACT, IN = "near", "contact", "in"
INDICES = frozenset({"type", "chain", "kind", "element", "row"})


def data(graph: ItemGraph | PartnerGraph, embeddings: Embeddings | None = None, *, share: bool = False) -> Any:
    """Return a single partner of residues as `Data`, any other graph as `HeteroData`."""
    _require()
    parts = graph.parts if isinstance(graph, ItemGraph) else (graph,)
    view = _View(embeddings or {}, share=share)
    if len(parts) == 1 and not parts[0].residues:
        return view.homogeneous(parts[0])
    return view.heterogeneous(graph if isinstance(graph, ItemGraph) else ItemGraph(parts))


def _require() -> None:
    """Raise with how to install PyG where it is missing."""
    try:
        import torch_geometric.data  # type: ignore[import-untyped]  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise ConfigError("a view for PyTorch Geometric needs the extra torch_geometric", remedy=REMEDY) from error


class _View:
    """Makes PyG data from the parts of a graph."""

    def __init__(self, embeddings: Embeddings, *, share: bool) -> None:
        self._embeddings, self._share = embeddings, share

    def homogeneous(self, part: PartnerGraph) -> Any:
        """Return a partner of residues as `Data`."""
        from torch_geometric.data import Data

        view = Data(centre=self._tensor(part.centre_3[None]), **self._columns(part.nodes))
        view.edge_index = self._tensor(part.edges[NEAR])
        for name, array in part.edge_fields.items():
            view[f"edge_{name.partition('.')[2]}"] = self._tensor(array)
        view.update(self._embedded(part))
        return view

    def heterogeneous(self, graph: ItemGraph) -> Any:
        """Return partners and the edges between them as `HeteroData`."""
        from torch_geometric.data import HeteroData

        whole = HeteroData()
        for part in graph.parts:
            self._add(whole, part)
        for name, edges in graph.cross.items():
            whole[Role.LIGAND.value, name, Role.RECEPTOR.value].edge_index = self._tensor(edges)
        for name, array in graph.cross_fields.items():
            kind, _, field = name.partition(".")
            whole[Role.LIGAND.value, kind, Role.RECEPTOR.value][field] = self._tensor(array)
        labels = dict(graph.labels)
        if "bound_centre" in labels:
            whole["bound_centre"] = self._tensor(labels.pop("bound_centre")[None])
        if f"{CONTACT}_pairs" in labels:
            store = whole[Role.RECEPTOR.value, CONTACT, Role.LIGAND.value]
            store.edge_index = self._index(labels.pop(f"{CONTACT}_pairs").T)
            for name, array in labels.items():
                store[name.removeprefix(f"{CONTACT}_")] = self._tensor(array)
        return whole

    def _add(self, whole: Any, part: PartnerGraph) -> None:
        """Add a partner's nodes and edges, and the residues of an atom graph."""
        role = part.role.value
        whole[f"{role}_centre"] = self._tensor(part.centre_3[None])
        nodes = dict(part.nodes)
        if part.residues:
            residues = f"{role}_residue"
            inside = np.stack([np.arange(part.size), nodes.pop("residue").astype(np.int64)])
            whole[role, IN, residues].edge_index = self._tensor(inside)
            whole[residues].update({**self._columns(part.residues), "num_nodes": len(part.row_R)})
        whole[role].update(self._columns(nodes))
        whole[f"{role}_residue" if part.residues else role].update(self._embedded(part))
        for name, edges in part.edges.items():
            whole[role, name, role].edge_index = self._tensor(edges)
        for name, array in part.edge_fields.items():
            kind, _, field = name.partition(".")
            whole[role, kind, role][field] = self._tensor(array)

    def _columns(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Return arrays as tensors, indices as int64."""
        return {name: self._index(array) if name in INDICES else self._tensor(array) for name, array in arrays.items()}

    def _embedded(self, part: PartnerGraph) -> dict[str, torch.Tensor]:
        """Return the embedding of each residue as `x`, if embeddings were given."""
        if part.role not in self._embeddings:
            return {}
        rows_LD, wanted = self._embeddings[part.role], sum(map(len, part.texts))
        if len(rows_LD) != wanted:
            raise ValueError(f"the embeddings of the {part.role.value} have {len(rows_LD)} rows, not {wanted}")
        row_R = self._index(part.row_R)
        x_RD = (
            rows_LD.index_select(0, row_R.clamp(min=0)) if wanted else rows_LD.new_zeros(len(row_R), *rows_LD.shape[1:])
        )
        x_RD[row_R < 0] = 0
        return {"x": x_RD}

    def _index(self, array: Array) -> torch.Tensor:
        return self._tensor(array.astype(np.int64, copy=False))

    def _tensor(self, array: Array) -> torch.Tensor:
        """Return an array as a tensor, sharing its memory where allowed."""
        import torch

        if array.dtype in (np.uint16, np.uint32):
            array = array.astype(np.int32 if array.dtype == np.uint16 else np.int64)
        if not array.flags.writeable and not self._share:
            array = array.copy()
        if array.flags.writeable:
            return torch.from_numpy(array)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
            return torch.from_numpy(array)
