"""The sampler on the sizes of real complexes: padding, balance over ranks, and the time it takes.

    python benchmarks/training/sampler.py [FOLDER] [--items N] [--out FILE]

The complexes' sizes are repeated to 10,000 items. Since repeated sizes flatter whatever sorts, everything is measured
again with each size varied at random by about 15% (the line `varied`). The reference is batches of as many items as a
micro-batch may have, in file order and shuffled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.circumstances import write
from pipeline.keys import content_digest
from pipeline.records import Item, Part, Role
from pipeline.structures.inventory import ScanRecipe, examine_item
from pipeline.structures.parsing.structure_files import File, read_file
from pipeline.training.sampling.epoch_order import SamplerSettings
from pipeline.training.sampling.sampler import Sampler

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "structures" / "complexes"
LIMIT = 512 << 20
PADDING, BALANCE = 1.03, 1.05
BATCH, MICRO = 24, 8
NEIGHBOURS = 20
WAYS = {"nodes": ("nodes",), "pairs": ("receptor", "ligand")}
Sizes = dict[str, NDArray[np.int64]]


def partner_nodes(path: Path) -> tuple[int, int]:
    """Return the nodes of both partners of a complex."""
    data = read_file(path, LIMIT)
    item = Item(path.stem, parts=(Part(Role.COMPLEX, str(path)),))
    inventory, _ = examine_item(item, {str(path): File(data, content_digest(data).hex())}, ScanRecipe())
    nodes = {partner.role: partner.nodes for partner in inventory.partners}
    return nodes[Role.RECEPTOR], nodes[Role.LIGAND]


def sizes_of(receptor: NDArray[np.int64], ligand: NDArray[np.int64]) -> Sizes:
    nodes = receptor + ligand
    return {"receptor": receptor, "ligand": ligand, "nodes": nodes, "edges": NEIGHBOURS * nodes}


def repeated(real: NDArray[np.int64], items: int) -> Sizes:
    """Repeat the sizes of the real complexes."""
    return sizes_of(*real[np.arange(items) % len(real)].T)


def varied(real: NDArray[np.int64], items: int) -> Sizes:
    """Repeat them, each varied at random, so that hardly two are alike."""
    factors = np.exp(0.15 * np.random.default_rng(0).standard_normal((items, 2)))
    return sizes_of(*np.maximum(2, real[np.arange(items) % len(real)] * factors).astype(np.int64).T)


def padding(sizes: Sizes, by: tuple[str, ...], batches: Iterable[NDArray[np.int64]]) -> float:
    """Return padded/real over all batches."""
    padded = real = 0
    for items in batches:
        values = [sizes[name][items] for name in by]
        padded += len(items) * int(np.prod([value.max() for value in values]))
        real += int(np.prod(values, axis=0).sum())
    return padded / real


def padding_row(sizes: Sizes, by: tuple[str, ...]) -> dict[str, float]:
    """Return padded/real of the sampler and of plain batches, and how many items a micro-batch had."""
    items = len(sizes["nodes"])
    micros = [micro.items for micro in Sampler(sizes, SamplerSettings(batch=BATCH, by=by, micro_batch=MICRO))]
    assert np.array_equal(np.sort(np.concatenate(micros)), np.arange(items))
    plain = np.arange(items)
    shuffled = np.random.default_rng(0).permutation(items)
    cuts = range(MICRO, items, MICRO)
    return {
        "sampler": round(padding(sizes, by, micros), 4),
        "items_per_micro_batch": round(items / len(micros), 2),
        "file_order": round(padding(sizes, by, np.split(plain, cuts)), 3),
        "shuffled": round(padding(sizes, by, np.split(shuffled, cuts)), 3),
    }


def balance_row(sizes: Sizes, by: tuple[str, ...], ranks: int) -> dict[str, float]:
    """Return the cost of the costliest rank over the mean of all: of an epoch's whole steps, and of shuffled ones."""
    items = len(sizes["nodes"])
    cost = np.prod([sizes[name] for name in by], axis=0)
    sampler = Sampler(sizes, SamplerSettings(batch=BATCH, by=by, drop_last=True), ranks=ranks)
    loads = np.array([
        [sum(int(cost[part].sum()) for part in share) for share in sampler.shares(0, step)]
        for step in range(sampler.steps)
    ])  # fmt: skip
    whole = np.random.default_rng(0).permutation(items)[: sampler.steps * BATCH]
    plain = cost[whole].reshape(sampler.steps, ranks, -1).sum(axis=2)
    ours, theirs = (table.max(axis=1) / table.mean(axis=1) for table in (loads, plain))
    return {
        "mean": round(float(ours.mean()), 4),
        "p99": round(float(np.quantile(ours, 0.99)), 4),
        "shuffled_mean": round(float(theirs.mean()), 3),
    }


def times(real: NDArray[np.int64], items: int) -> dict[str, float]:
    """Return the time of construction, of an epoch's order, and of a step's cut on one of several ranks."""
    sizes = varied(real, items)
    begin = time.perf_counter()
    sampler = Sampler(sizes, SamplerSettings(batch=BATCH, micro_batch=MICRO, budget={"nodes": MICRO * 3000}))
    built = time.perf_counter() - begin
    begin = time.perf_counter()
    sampler.step_items(0, 0)
    result = {"construct_ms": round(1e3 * built, 2), "order_ms": round(1e3 * (time.perf_counter() - begin), 2)}
    for name, by in WAYS.items():
        for ranks in (1, 8):
            sampler = Sampler(sizes, SamplerSettings(batch=BATCH, by=by, micro_batch=MICRO), ranks=ranks)
            sampler.step_items(0, 0)
            spent = []
            for step in range(400):
                begin = time.perf_counter()
                sampler.micros(0, step)
                spent.append(time.perf_counter() - begin)
            result[f"step_{name}_{ranks}_ranks_ms"] = round(1e3 * statistics.mean(spent), 3)
    return result


def main() -> int:
    """Measure, print tables and JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=SHARED)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    files = sorted(options.folder.glob("*.pdb"))
    if not files:
        print(f"no PDB files in {options.folder}: nothing was measured", file=sys.stderr)
        return 1
    real = np.array([partner_nodes(path) for path in files])
    kinds = {"repeated": repeated(real, options.items), "varied": varied(real, options.items)}
    result: dict[str, Any] = {
        "what": f"sampler, the sizes of real complexes as {options.items:,} items, steps of {BATCH}",
        "files": len(files),
        "padding_reach": PADDING,
        "balance_reach": BALANCE,
        "padding": {
            f"{kind} {name}": padding_row(sizes, by) for kind, sizes in kinds.items() for name, by in WAYS.items()
        },
        "balance": {
            f"{kind} {name} {ranks} ranks": balance_row(sizes, by, ranks)
            for kind, sizes in kinds.items()
            for name, by in WAYS.items()
            for ranks in (2, 3, 8)
        },
        "times": {f"{items:,} items": times(real, items) for items in (10_000, 1_000_000)},
    }
    for title in ("padding", "balance", "times"):
        rows = result[title]
        print(f"{title:26}" + "".join(f"{column:>24}" for column in next(iter(rows.values()))))
        for name, row in rows.items():
            print(f"{name:26}" + "".join(f"{value:>24}" for value in row.values()))
    print(json.dumps(result))
    write(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
