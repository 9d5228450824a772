"""The knobs of the docking guide, in ratios: what is planned against what is taken, and what each knob is worth.

    python benchmarks/docking/knobs.py [--out FILE]

The recipe's task in narrow (8 scalars, 2 vectors, 3 layers), on a CPU, with complexes of ../shared/structures; two
minutes of a processor. Plans are held against a byte-accurate allocator at three complexes; what a knob is worth is the
planned live peak of the middle one against that without it, or CPU seconds against CPU seconds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.circumstances import write
from benchmarks.recipes_parts.bench import RECIPES, Bench, Fetched, Graphs, train
from pipeline.config.load import read_config
from pipeline.encoder.engine.token_batches import largest_divisor, plan_batches
from pipeline.memory.footprint import MemoryChoice
from pipeline.memory.planning.oracle_cache import OracleCache
from pipeline.runs.dataset.loading import open_loader
from pipeline.runs.model.training_work import Work
from pipeline.training.sampling.epoch_order import SamplerSettings
from tests.conftest import SHARED
from tests.tasks.items import real
from tests.testkit.limited.device import LimitedDevice
from tests.testkit.projects import settle

COMPLEXES = SHARED / "complexes"
THREE = ("3H2V", "1FSK", "1AHW")  # small, middle, large
LOADED = ("1AHW", "1FSK", "1H9D", "1JZD", "1LFD", "1R0R", "2A9K", "3H2V")
LIMIT = 2
DIM = 16
PIPELINE = Path(sys.executable).with_name("pipeline")
NARROW = (f"embedding_dim={DIM}", "scalars=8", "vectors=2", "layers=3")
AGAIN = MemoryChoice(checkpointing=True)
SEQUENCES, CAPS = 251, (32, 4, 2, 1)  # a prime number of them, as the guide met it
TOKENS = 200


def bench_of(*options: str) -> Bench:
    """Return the recipe in narrow, over three real complexes."""
    sets = [f"train.options.{option}" for option in (*NARROW, *options)]
    config = read_config(RECIPES / "complex_docking.yaml", sets).config
    graphs = [real(COMPLEXES / f"{name}.pdb") for name in THREE]
    return Bench("complex_docking", config, replace(Work.of(config), device="cpu"), Graphs(graphs, DIM))


def planned(bench: Bench, numbers: Sequence[int], choice: MemoryChoice = MemoryChoice()) -> int:  # noqa: B008
    """Return the planned live peak of a step of one micro-batch."""
    sizes = bench.batch_sizes(numbers)
    return OracleCache(bench.oracle(), tuple(sizes)).peak_bytes(choice, tuple(sizes.values()), accumulate=False)


def accuracy() -> list[dict[str, Any]]:
    """Compare plans with what real steps take, complex by complex."""
    bench, rows = bench_of(), []
    for number, name in enumerate(THREE):
        sizes = bench.batch_sizes([number])
        told, taken = planned(bench, [number]), train(bench, MemoryChoice(), [[[number]]] * 2).peak_bytes
        rows.append({"complex": name, "nodes": sizes["nodes"], "pairs": sizes["pairs"], "ratio": told / taken})
    return rows


def knobs() -> dict[str, float]:
    """Return planned peaks of the middle complex over that of one noise without remedies."""
    bench, middle = bench_of(), [1]
    plain = planned(bench, middle)
    two = OracleCache(bench.oracle(), tuple(bench.batch_sizes(middle)))
    doubled = {name: 2 * size for name, size in bench.batch_sizes(middle).items()}
    peaks = {
        "train.checkpointing": planned(bench, middle, AGAIN),
        "two complexes at once": two.peak_bytes(MemoryChoice(), tuple(doubled.values()), accumulate=False),
        "multiplicity: 2": planned(bench_of("multiplicity=2"), middle),
        "multiplicity: 4": planned(bench_of("multiplicity=4"), middle),
        "layers: 2": planned(bench_of("layers=2"), middle),
        "scalars: 4, vectors: 1": planned(bench_of("scalars=4", "vectors=1"), middle),
    }
    return {name: peak / plain for name, peak in peaks.items()}


def seconds(act: Callable[[], Any]) -> float:
    """Return the CPU seconds of the second time."""
    act()
    began = time.process_time()
    act()
    return time.process_time() - began


def pace() -> dict[str, float]:
    """Return the CPU seconds of a noise of the middle complex, over those where each is a step's only one."""
    spent = {}
    for noises in (1, 4):
        bench = bench_of(f"multiplicity={noises}")
        with LimitedDevice(None) as device:
            step = bench.step(MemoryChoice(), device)
            spent[noises] = seconds(partial(step.run, Fetched(bench, [[1]], device))) / noises
    return {"multiplicity: 4": spent[4] / spent[1]}


def reading() -> dict[str, float]:
    """Return the CPU seconds of an epoch of reading, over those with graphs from the cache."""
    with tempfile.TemporaryDirectory(prefix="knobs-") as name:
        folder, before = Path(name), Path.cwd()
        for complex_name in LOADED:
            (folder / f"{complex_name}.pdb").write_bytes((COMPLEXES / f"{complex_name}.pdb").read_bytes())
        (folder / "pipeline.yaml").write_text("data: {source: glob, path: .}\ncluster: {executor: local}\n")
        settle(folder)
        os.chdir(folder)
        try:
            settings = "graph.cache=true", "graph.cache=false", f"data.limit={LIMIT}"
            for sets in settings:
                words = [PIPELINE, "submit", "--stage", "graph", "--follow", "--set", sets]
                subprocess.run(words, check=True, capture_output=True)
            spent = {sets: seconds(partial(_read, sets)) for sets in settings}
        finally:
            os.chdir(before)
    return {sets: took / spent[settings[0]] for sets, took in spent.items() if sets != settings[0]}


def _read(sets: str) -> None:
    loader = open_loader("pipeline.yaml", SamplerSettings(batch=4, padding=None), sets=[sets], embed=False)
    for batch in loader:
        assert batch.items


def batches() -> list[dict[str, Any]]:
    """Return how a prime number of equal sequences is cut under each cap, and as the guide's code cut it."""
    lengths_N = np.full(SEQUENCES, TOKENS)
    rows = []
    for cap in CAPS:
        cuts = plan_batches(lengths_N, policy="divisor", cap=cap, budget=1 << 20)
        theirs = largest_divisor(SEQUENCES, cap)
        rows.append({"cap": cap, "batches": len(cuts), "largest": max(map(len, cuts)), "guides": SEQUENCES // theirs})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    if not COMPLEXES.is_dir():
        sys.exit("real complexes (../shared/structures) are not beside this checkout")
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "accuracy": accuracy(),
        "peak": knobs(),
        "noise_s": pace(),
        "reading_s": reading(),
        "encoder_batches": batches(),
    }
    for row in result["accuracy"]:
        sizes = f"{row['nodes']} residues, {row['pairs']:,} pairs"
        print(f"{row['complex']}: {sizes}: planned over taken {row['ratio']:.4f}", flush=True)
    for what in ("peak", "noise_s", "reading_s"):
        for name, ratio in result[what].items():
            print(f"{what}: {name}: × {ratio:.2f}")
    for row in result["encoder_batches"]:
        told = f"{row['batches']} batches of at most {row['largest']}; by divisors alone {row['guides']}"
        print(f"{SEQUENCES} sequences, cap {row['cap']}: {told}")
    write(out, {"complexes": list(THREE), **result})


if __name__ == "__main__":
    main()
