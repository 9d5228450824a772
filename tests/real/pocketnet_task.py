"""A user's module: PocketNet as its package publishes it, trained on which surface of a protein another one covers."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from pocketnet import feat
from pocketnet.model import PocketNet
from torch.nn import functional

from pipeline.api import Entry

NEAR = 6.0  # Å
SHARE = 16  # of the points of a surface, one in so many


class Surfaces:
    """Pairs of files ID_l_b.pdb.gz and ID_r_b.pdb.gz: the atoms of a protein, and those of the other one."""

    def __init__(self, path, names=("1Z0K", "1HIA", "1KKL")) -> None:
        self.path, self.names = Path(path), names

    def files(self):
        return [self.path / f"{name}_{side}_b.pdb.gz" for name in self.names for side in "lr"]

    def entries(self):
        for name in self.names:
            yield Entry(name, name, self.read(name))

    def read(self, place):
        residues, names, xyz = self.atoms(f"{place}_l_b.pdb.gz")
        types, elements = feat.atom_types(residues, names)
        return {
            "atom.type": types,
            "atom.element": elements,
            "atom.xyz": xyz,
            "other.xyz": self.atoms(f"{place}_r_b.pdb.gz")[2],
        }

    def atoms(self, file):
        lines = gzip.decompress((self.path / file).read_bytes()).decode().splitlines()
        kept = [
            line for line in lines if line.startswith("ATOM") and line[16] in " A" and line[12:14].strip()[:1] != "H"
        ]
        xyz = np.array([[line[at : at + 8] for at in (30, 38, 46)] for line in kept], np.float32)
        return [line[17:20].strip() for line in kept], [line[12:16].strip() for line in kept], xyz


class Pockets:
    """Which points of a protein's surface lie near the other one."""

    def __init__(self, hidden: int = 128, layers: int = 6) -> None:
        self.hidden, self.layers = hidden, layers
        self.geometry = PocketNet(hidden, layers)

    def model(self):
        return PocketNet(self.hidden, self.layers)

    def cost(self, item):
        return {"atoms": item["atom"]}

    def collate(self, items, rng):
        graphs, touches = [], []
        for item in items:
            xyz, element = item.values["atom.xyz"], item.values["atom.element"]
            points, normals = (of_point[::SHARE] for of_point in feat.sas_points(xyz, element))
            features = feat.point_feats(points, normals, xyz, element)
            graphs.append(self.geometry.graph(item.values["atom.type"], xyz, points, features))
            touches.append((torch.cdist(points, item.values["other.xyz"]).min(1).values < NEAR).float())
        return {**self.geometry.collate(graphs), "touches": torch.cat(touches)}

    def loss(self, model, batch):
        logits, _ = model.forward_graph(batch)
        total = functional.binary_cross_entropy_with_logits(logits, batch["touches"], reduction="sum")
        return {"touches": (total, float(len(logits)))}

    def outputs(self, model, batch):
        logits, _ = model.forward_graph(batch)
        return {"score": list(torch.sigmoid(logits).split(batch["sizes"]))}
