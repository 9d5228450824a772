"""Where a ligand lies, and which residues touch it: messages that turn with the structure (e3nn)."""

import torch
from e3nn import o3
from e3nn.math import soft_one_hot_linspace
from e3nn.nn import FullyConnectedNet, Gate
from torch import nn

NEIGHBOURS = 20.0  # graph.neighbours: messages to a residue
REACH = 12.0  # angstrom, the longest edges that are told apart
RADIAL = 8  # functions of the distance
ANGLES = o3.Irreps.spherical_harmonics(2)
UNIT = 10.0  # angstrom; displacements are learned in it


class Messages(nn.Module):
    """Sums over the neighbours of each residue, weighted by distance, turned by direction."""

    def __init__(self, enter: o3.Irreps, leave: o3.Irreps) -> None:
        super().__init__()
        self.keep = o3.Linear(enter, leave)
        self.product = o3.FullyConnectedTensorProduct(enter, ANGLES, leave, shared_weights=False)
        self.weigh = FullyConnectedNet([RADIAL, 16, self.product.weight_numel], torch.nn.functional.silu)

    def forward(self, x, ends, angles, distances):
        source, target = ends
        told = self.product(x[source], angles, self.weigh(distances))
        return self.keep(x).index_add(0, target, told / NEIGHBOURS**0.5)


class Net(nn.Module):
    """A number and a vector for each residue."""

    def __init__(self, embedding: int, width: int) -> None:
        super().__init__()
        scalars, vectors = f"{width}x0e", f"{width // 2}x1o"
        self.gate = Gate(scalars, [torch.nn.functional.silu], f"{width // 2}x0e", [torch.sigmoid], vectors)
        self.enter = nn.Linear(embedding, width)
        self.first = Messages(o3.Irreps(scalars), self.gate.irreps_in)
        self.second = Messages(self.gate.irreps_out, o3.Irreps("1x0e + 1x1o"))

    def forward(self, x, pos, ends):
        along = pos[ends[0]] - pos[ends[1]]
        angles = o3.spherical_harmonics(ANGLES, along, normalize=True, normalization="component")
        distances = soft_one_hot_linspace(along.norm(dim=1), 0.0, REACH, RADIAL, basis="gaussian", cutoff=False)
        x = self.gate(self.first(self.enter(x), ends, angles, distances))
        return self.second(x, ends, angles, distances).split([1, 3], 1)


class Placement:
    """Which residues touch the partner, and how far the ligand's centre is from the receptor's."""

    def __init__(self, embedding: int = 1280, width: int = 16) -> None:
        self.embedding, self.width = embedding, width

    def model(self):
        return Net(self.embedding, self.width)

    def cost(self, item):
        return {"nodes": item["nodes"], "edges": item["edges"]}

    def collate(self, items, rng):
        x, pos, ends, touches, sizes, first = [], [], [], [], [], 0
        for item in items:
            for row, side in enumerate((item.sides["receptor"], item.sides["ligand"])):
                x.append(side.embedding.float())
                pos.append(side.nodes["pos"][:, 1])  # CA
                ends.append(side.edges["near"] + first)
                touches.append(torch.zeros(len(x[-1])).index_fill(0, item.labels["contact_pairs"][:, row].long(), 1))
                sizes.append(len(x[-1]))
                first += sizes[-1]
        away = [item.sides["ligand"].centre - item.sides["receptor"].centre for item in items]
        return {
            "x": torch.cat(x),
            "pos": torch.cat(pos),
            "ends": torch.cat(ends, 1),
            "side": torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),  # 2 an item
            "touches": torch.cat(touches),
            "away": torch.stack(away).float(),
        }

    def answer(self, model, batch):
        """Return a number for each residue, and the ligand's displacement in each item, in angstrom."""
        logits, vectors = model(batch["x"], batch["pos"], batch["ends"])
        items = len(batch["away"])
        summed = vectors.new_zeros(2 * items, 3).index_add(0, batch["side"], vectors).view(items, 2, 3)
        return logits.squeeze(1), UNIT * (summed[:, 0] - summed[:, 1])

    def loss(self, model, batch):
        logits, away = self.answer(model, batch)
        wrong = nn.functional.binary_cross_entropy_with_logits(logits, batch["touches"], reduction="sum")
        missed = ((away - batch["away"]) / UNIT).square().sum()
        return {"contact": (wrong, float(len(logits))), "away": (missed, float(len(away)))}

    def weights(self, batch):  # residues, items: different kinds
        return {"contact": float(len(batch["touches"])), "away": float(len(batch["away"]))}

    def example(self, sizes):
        nodes, edges, items = sizes["nodes"], sizes["edges"], sizes["items"]
        return {
            "x": torch.randn(nodes, self.embedding),
            "pos": torch.randn(nodes, 3),
            "ends": torch.randint(0, nodes, (2, edges)),
            "side": torch.randint(0, 2 * items, (nodes,)),
            "touches": torch.ones(nodes),
            "away": torch.randn(items, 3),
        }

    def outputs(self, model, batch):
        logits, away = self.answer(model, batch)
        sizes = torch.bincount(batch["side"], minlength=2 * len(away)).view(-1, 2).sum(1).tolist()
        return {
            "score": list(torch.sigmoid(logits).split(sizes)),
            "touches": list(batch["touches"].split(sizes)),
            "away": away,
            "true_away": batch["away"],
        }

    def metrics(self, outputs):
        right = [
            ((score > 0.5) == touches).mean()
            for score, touches in zip(outputs["score"], outputs["touches"], strict=True)
        ]
        off = [((a - b) ** 2).sum() ** 0.5 for a, b in zip(outputs["away"], outputs["true_away"], strict=True)]
        return {"accuracy": sum(right) / len(right), "off_angstrom": sum(off) / len(off)}
