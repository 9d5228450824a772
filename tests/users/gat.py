"""How large an interface is, from the graphs of both partners: attention along edges (PyTorch Geometric)."""

import torch
from torch import nn
from torch_geometric.data import Batch
from torch_geometric.nn import GATv2Conv, global_mean_pool

ROLES = ("receptor", "ligand")


class Net(nn.Module):
    """One number for each complex."""

    def __init__(self, embedding: int, width: int, heads: int) -> None:
        super().__init__()
        self.first = GATv2Conv(embedding, width, heads, add_self_loops=False)
        self.second = GATv2Conv(heads * width, width, heads, concat=False, add_self_loops=False)
        self.out = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, 1))

    def partner(self, x, near, owner, items):
        x = self.first(x, near).relu()
        return global_mean_pool(self.second(x, near), owner, items)

    def forward(self, batch):
        items = len(batch["size"])
        both = [self.partner(batch[f"{r}.x"], batch[f"{r}.near"], batch[f"{r}.owner"], items) for r in ROLES]
        return self.out(torch.cat(both, 1)).squeeze(1)


class Contacts:
    """The logarithm of the number of pairs of residues that touch."""

    def __init__(self, embedding: int = 1280, width: int = 16, heads: int = 2) -> None:
        self.embedding, self.width, self.heads = embedding, width, heads

    def model(self):
        return Net(self.embedding, self.width, self.heads)

    def cost(self, item):  # edges: of both partners together
        return {"receptor": item["receptor"], "ligand": item["ligand"], "edges": item["edges"]}

    def collate(self, items, rng):
        graphs = [item.pyg() for item in items]
        joined = Batch.from_data_list(graphs)
        touching = [graph["receptor", "contact", "ligand"].edge_index.shape[1] for graph in graphs]
        batch = {"size": torch.log1p(torch.tensor(touching, dtype=torch.float32))}
        for role in ROLES:
            batch[f"{role}.x"] = joined[role].x.float()
            batch[f"{role}.near"] = joined[role, "near", role].edge_index.long()
            batch[f"{role}.owner"] = joined[role].batch  # which graph a node is of
        return batch

    def loss(self, model, batch):
        off = (model(batch) - batch["size"]).square().sum()
        return {"size": (off, float(len(batch["size"])))}

    def example(self, sizes):
        batch = {"size": torch.randn(sizes["items"])}
        edges = sizes["edges"] // 2
        for role, count in zip(ROLES, (edges, sizes["edges"] - edges), strict=True):
            nodes = sizes[role]
            batch[f"{role}.x"] = torch.randn(nodes, self.embedding)
            batch[f"{role}.near"] = torch.randint(0, nodes, (2, count))
            batch[f"{role}.owner"] = torch.randint(0, sizes["items"], (nodes,))
        return batch

    def outputs(self, model, batch):
        return {"size": model(batch), "true_size": batch["size"]}

    def metrics(self, outputs):
        off = [abs(float(told) - float(true)) for told, true in zip(outputs["size"], outputs["true_size"], strict=True)]
        return {"off": sum(off) / len(off)}
