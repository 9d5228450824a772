"""A small project of items that are no structures: a reader and a task of the user's own, beside the configuration."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.testkit.project import LOCAL, settle, write_config

SPLITS = ("train",) * 6 + ("test",) * 2
CONFIG = {
    "data": {"source": "reader", "reader": "spectra:Spectra", "path": "data", "options": {"scale": 1.0}},
    **LOCAL,
    "train": {"task": "spectra:Sum", "effective_batch": 2, "micro_batch": 1, "epochs": 1},
}
CODE = '''\
"""Spectra, a file each: a line of what it is, then its peaks; and a task that predicts their sum."""

from pathlib import Path

import numpy as np
import torch

from pipeline.errors import ConfigError
from pipeline.records import Entry, Reason, Rejection


class Spectra:
    def __init__(self, path, scale=1.0):
        if scale <= 0:
            raise ConfigError(f"scale is {scale}, not above 0", where="data.options.scale")
        self.path, self.scale = Path(path), scale

    def files(self):
        return sorted(self.path.glob("*.txt"))

    def entries(self):
        for path in self.files():
            split = path.read_text().split()[0]
            if split == "bad":
                yield Rejection(path.stem, Reason.BAD_ENTRY, "it is said to be bad", path.name)
            else:
                yield Entry(path.stem, path.name, self.read(path.name), split, path.name)

    def read(self, place):
        mz_P = np.array((self.path / place).read_text().split()[1:], np.float32) * self.scale
        return {"peaks.mz": mz_P, "peaks.kept": mz_P > 1, "total": mz_P.sum()}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weigh = torch.nn.Linear(1, 1)

    def forward(self, mz_P, owner_P, total_B):
        return torch.zeros_like(total_B).index_add(0, owner_P, self.weigh(mz_P[:, None])[:, 0])


class Sum:
    def model(self):
        return Model()

    def cost(self, item):
        return {"peaks": item["peaks"]}

    def collate(self, items, rng):
        mz_B = [item.values["peaks.mz"] for item in items]
        owner_P = torch.repeat_interleave(torch.tensor([len(one) for one in mz_B]))
        return {"mz": torch.cat(mz_B), "owner": owner_P, "total": torch.stack([one.values["total"] for one in items])}

    def loss(self, model, batch):
        off_B = model(batch["mz"], batch["owner"], batch["total"]) - batch["total"]
        return {"sum": (off_B.square().sum(), float(len(off_B)))}

    def example(self, sizes):
        peaks, items = sizes["peaks"], sizes["items"]
        return {"mz": torch.ones(peaks), "owner": torch.zeros(peaks, dtype=torch.long), "total": torch.ones(items)}

    def outputs(self, model, batch):
        return {"sum": model(batch["mz"], batch["owner"], batch["total"])}

    def metrics(self, outputs):
        return {"mean": float(np.mean(outputs["sum"]))}
'''


def write_spectrum(folder: Path, number: int, split: str, *peaks: float) -> None:
    """Write a spectrum of these peaks, or of as many as its number."""
    mz = peaks or tuple(np.arange(1, number + 2) / 4)
    (folder / "data" / f"s{number}.txt").write_text(" ".join([split, *(f"{one:.3f}" for one in mz)]))


def write_project(folder: Path) -> Path:
    """Write eight spectra, the code and a configuration."""
    (folder / "data").mkdir()
    for number, split in enumerate(SPLITS):
        write_spectrum(folder, number, split)
    settle(folder / "data")
    (folder / "spectra.py").write_text(CODE)
    write_config(folder, **CONFIG)
    return folder
