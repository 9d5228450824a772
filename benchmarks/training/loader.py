"""The loader on a warm cache: against a DataLoader, to its first batch, over epochs, and beside a step.

    python benchmarks/training/loader.py [--items N] [--compared N] [--runs N] [--out FILE]

A cache of made complexes is generated: real graphs of a hundred structures, shaken so that each item's differs, and
random embeddings of 1,280 half-precision numbers. The items that are compared have sequences, so embeddings, of their
own; the others share those of the hundred. The other side is a `torch.utils.data.DataLoader` with two workers, one
safetensors file per item (the same arrays, decoded, with the embeddings joined already), joining the same batches;
both sides' tensors are compared bit for bit before anything is timed. Our side reads in two threads, and in two
processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.circumstances import write
from pipeline.encoder.embedding_recipe import EmbeddingRecipe, Variant
from pipeline.graphs import item_graph as graphs
from pipeline.graphs.build_graph import build_graph
from pipeline.graphs.item_graph import GraphRecipe as GraphRecipe
from pipeline.keys import content_digest, recipe_key
from pipeline.records import Item, Part, Role
from pipeline.store.cache_folder import CacheFolder
from pipeline.structures import inventory
from pipeline.structures.parsing import structure_files
from pipeline.structures.synthetic import complex_pdb
from pipeline.training.items.item_table import ItemTable, TableBuilder

STRUCTURES = 100
WIDTH = 1280
BATCH = 16
EPOCHS = 5
STEP_S = 0.1
PRECISION = Variant("fp16")
ENCODER = EmbeddingRecipe(weights="made", layer=33, context="chain", precision="fp16", storage="fp16")
GRAPH = GraphRecipe()
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
REACH = {"ratio": 4.0, "first_batch_s": 1.0, "wait_share": 0.02}


def structure(number: int) -> graphs.ItemGraph:
    """Return the graph of a made complex."""
    rng = np.random.default_rng(number)
    receptor, ligand = (np.clip(rng.lognormal(mean, 0.5), 30, 1000) for mean in (5.6, 5.0))
    data = complex_pdb(number, int(receptor), int(ligand))
    file = structure_files.File(data, content_digest(data).hex())
    item = Item("x", parts=(Part(Role.COMPLEX, "x.pdb"),))
    taken, read = inventory.examine_item(item, {"x.pdb": file}, inventory.ScanRecipe())
    assert read is not None, taken
    return build_graph(read, GRAPH)


def shaken(graph: graphs.ItemGraph, number: int, *, own_sequences: bool) -> graphs.ItemGraph:
    """Return a graph with other coordinates, and with other sequences if they are to be its own."""
    rng = np.random.default_rng(number)
    parts = []
    for part in graph.parts:
        nodes = {
            **part.nodes,
            "pos": part.nodes["pos"] + rng.normal(0, 0.1, part.nodes["pos"].shape).astype(np.float32),
        }
        chains = part.chains
        if own_sequences:
            chains = tuple(replace(one, sequence="".join(rng.permutation(list(one.sequence)))) for one in chains)
        parts.append(replace(part, nodes=nodes, chains=chains))
    return replace(graph, parts=tuple(parts))


def generate(root: Path, items: int, compared: int) -> bytes:
    """Fill a cache, and return the key of its table."""
    cache, builder, texts = CacheFolder(root), TableBuilder(), {}
    made = [structure(number) for number in range(STRUCTURES)]
    with cache.kind("graph").writer() as writer:
        for number in range(items):
            graph = shaken(made[number % STRUCTURES], number, own_sequences=number < compared)
            key = GRAPH.key(recipe_key("made", {"number": number}))
            writer.put(key, *graphs.encode_graph(graph))
            builder.add(f"item{number:06d}", key, "train", graph.sizes())
            texts |= {text: None for part in graph.parts for text in part.texts}
    numbers = np.random.default_rng(0).normal(size=(2000, WIDTH)).astype(np.float16)
    with cache.kind("embed").writer() as writer:
        for number, text in enumerate(texts):
            rows = np.roll(numbers, number, axis=0)[: len(text)]
            writer.put(ENCODER.key(text, PRECISION), {"rows": rows}, {"text": text})
    for kind in ("graph", "embed"):
        cache.kind(kind).write_index()
    return builder.write(cache.kind("sets"))


def loader_of(root: Path, key: bytes, numbers: range | None = None, **options: Any) -> Any:
    """Return the loader of a cache, or of some of its items in order."""
    from pipeline.training.items.item_source import CachedGraphs
    from pipeline.training.items.loader import Loader
    from pipeline.training.items.residue_embeddings import Embeddings
    from pipeline.training.sampling.epoch_order import SamplerSettings
    from pipeline.training.sampling.sampler import Sampler

    cache = CacheFolder(root)
    table = ItemTable.read(cache.kind("sets"), key)
    if numbers is not None:
        table = table.take(np.array(numbers))
    sampler = Sampler(table.sizes, SamplerSettings(batch=BATCH, padding=None))
    return Loader(
        CachedGraphs(cache.kind("graph"), table), Embeddings(cache.kind("embed"), ENCODER), sampler, **options
    )


def write_files(folder: Path, root: Path, key: bytes, compared: int) -> None:
    """Write the other side's files: each item's tensors as they are in a batch."""
    from safetensors.torch import save_file

    folder.mkdir()
    for batch in loader_of(root, key, range(compared)):
        for place in range(len(batch)):
            save_file(flat(batch.items[place]), folder / f"{batch.numbers[place]}.safetensors")


def flat(item: Any) -> dict[str, Any]:
    """Return the tensors of an item under the names of a batch's fields."""
    found = {}
    for role, side in item.sides.items():
        for kind, mine in (("node", side.nodes), ("edge", side.edges)):
            found |= {f"{role}.{kind}.{name}": tensor for name, tensor in mine.items()}
        found |= {f"{role}.{name}": getattr(side, name) for name in ("centre", "embedding", "encoded")}
    found |= {f"label.{name}": tensor for name, tensor in item.labels.items()}
    return {name: tensor.contiguous() for name, tensor in found.items()}


class Files:
    """The other side: a data set of one safetensors file per item."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, number: int) -> dict[str, Any]:
        from safetensors.torch import load_file

        return load_file(self.folder / f"{number}.safetensors")


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Join items as the loader does: one after the other, with numbers of nodes that are the batch's."""
    import torch

    first = {}
    for role in ("receptor", "ligand"):
        counts = [len(item[f"{role}.node.pos"]) for item in items]
        first[role] = np.concatenate([[0], np.cumsum(counts)[:-1]]).tolist()
    joined = {}
    for name in items[0]:
        mine = [item[name] for item in items]
        if name.endswith(".centre"):
            joined[name] = torch.stack(mine)
            continue
        if ".edge." in name:
            starts = first[name.partition(".")[0]]
            joined[name] = torch.cat([edges + start for edges, start in zip(mine, starts, strict=True)], dim=1)
            continue
        if name == "label.contact_pairs":
            starts = zip(first["receptor"], first["ligand"], strict=True)
            mine = [pairs + torch.tensor(both) for pairs, both in zip(mine, starts, strict=True)]
        joined[name] = torch.cat(mine)
    return joined


def data_loader(folder: Path, batches: list[list[int]]) -> Any:
    """Return the other side over these batches."""
    from torch.utils.data import DataLoader

    return DataLoader(Files(folder), batch_sampler=batches, num_workers=2, collate_fn=collate, persistent_workers=True)  # type: ignore[type-var]


def compare(root: Path, key: bytes, folder: Path, compared: int, runs: int) -> dict[str, Any]:
    """Time both sides over the same batches, in turns."""
    import torch

    loader = loader_of(root, key, range(compared))
    batches = []
    for batch in loader:
        batches.append(list(batch.numbers))
        one_by_one = collate([Files(folder)[number] for number in batches[-1]])
        assert one_by_one.keys() == {name for name in batch.fields if not name.startswith("ptr.")}
        for name, tensor in one_by_one.items():
            assert tensor.dtype == batch[name].dtype, name
            assert torch.equal(tensor, batch[name]), name
    other = data_loader(folder, batches)
    read_bytes = sum(tensor.nbytes for batch in other for tensor in batch.values())
    workers = [worker.pid for worker in other._iterator._workers]  # noqa: SLF001 - nothing public names them
    forked = loader_of(root, key, range(compared), readers="processes")
    seconds(forked)  # as many turns as the workers of the other side have had
    readers = [child.pid for child in psutil.Process().children() if child.pid not in workers]
    sides = {"threads": (loader, []), "processes": (forked, readers), "data_loader": (other, workers)}
    wall: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(runs):
        for name, (batches_of, pids) in sides.items():
            if batches_of is not other:
                batches_of.set_epoch(1)
                batches_of.set_epoch(0)  # the same batches again
            begun = cpu_s([os.getpid(), *pids])
            wall[name].append(seconds(batches_of))
            cpu[name].append(cpu_s([os.getpid(), *pids]) - begun)
    own_bytes = [psutil.Process(pid).memory_full_info().uss for pid in readers]
    forked.end()
    found: dict[str, Any] = {
        "items": compared,
        "bytes_per_item": read_bytes // compared,
        "items_per_s": {name: round(compared / statistics.median(walls)) for name, walls in wall.items()},
        "gb_per_s": round(read_bytes / statistics.median(wall["processes"]) / 1e9, 2),
        "cpu_ms_per_item": {name: round(1e3 * statistics.median(cpus) / compared, 2) for name, cpus in cpu.items()},
        "own_bytes_of_a_process": max(own_bytes),
    }
    for name in ("threads", "processes"):
        ratios = [theirs / ours for ours, theirs in zip(wall[name], wall["data_loader"], strict=True)]
        found[name] = {"ratio_median": round(statistics.median(ratios), 2), "ratio_min": round(min(ratios), 2)}
    return found


def seconds(batches: Any) -> float:
    """Return the time that a loop which does nothing takes."""
    start = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - start


def cpu_s(pids: list[int]) -> float:
    """Return the processor time that some processes have taken so far: other work on the machine changes it less."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split() for pid in pids]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


def first_batch(root: Path, key: bytes) -> dict[str, float]:
    """Time the first batch, in a process that has imported nothing but this file."""
    marks = [("", time.perf_counter())]

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter()))

    import torch  # noqa: F401

    mark("import_torch_s")
    import pipeline.training.items.loader  # noqa: F401

    mark("import_loader_s")
    loader = loader_of(root, key)
    mark("open_s")
    batches = iter(loader)
    next(batches)
    mark("first_batch_s")
    found = {name: round(at - before, 4) for (_, before), (name, at) in pairwise(marks)}
    found["open_and_first_batch_s"] = round(found["open_s"] + found["first_batch_s"], 4)
    batches.close()
    return found


def epochs(root: Path, key: bytes) -> dict[str, Any]:
    """Loop over epochs, and see how memory and speed stay."""
    loader = loader_of(root, key)
    rss, rates, items = [], [], 0
    for _ in range(EPOCHS):
        taken_s = seconds(loader)
        rates.append(round((loader.stats.items - items) / taken_s))
        items = loader.stats.items
        rss.append(int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES)
    return {
        "items": items,
        "rss_bytes": rss,
        "last_to_second": round(rss[-1] / rss[1], 4),
        "items_per_s": rates,
        "slots_bytes": loader.stats.slots_bytes,
        "largest_batch_bytes": loader.stats.largest_bytes,
        "grown": loader.stats.grown,
    }


def beside_a_step(root: Path, key: bytes, compared: int) -> dict[str, Any]:
    """Feed steps of a length: some that wait, as for a GPU, and some that compute, on one thread."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, Any] = {"step_s": STEP_S}
    for name, step in (("waiting", lambda: time.sleep(STEP_S)), ("computing", computing())):
        loader = loader_of(root, key, range(min(compared, 60 * BATCH)))
        alone = statistics.median(timed(step) for _ in range(20))
        batches = iter(loader)
        next(batches)
        loader.stats.wait_s = 0.0
        steps = [timed(step) for _ in batches]
        found[name] = {
            "wait_share": round(loader.stats.wait_s / (sum(steps) + loader.stats.wait_s), 4),
            "step_to_step_alone": round(statistics.median(steps) / alone, 3),
        }
    return found


def computing() -> Callable[[], None]:
    """Return a step of many small operations that takes its time."""
    import torch

    matrix = torch.randn(256, 256)

    def some(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix).add_(1.0).tanh_()

    some(50)
    times = int(200 * STEP_S / timed(lambda: some(200)))
    return lambda: some(times)


def timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "first": first_batch,
    "epochs": epochs,
    "step": beside_a_step,
    "compare": compare,
}


def in_a_process(part: str, **given: Any) -> dict[str, Any]:
    """Measure a part in a process of its own."""
    start = time.perf_counter()
    command = [sys.executable, __file__, "--part", json.dumps([part, {name: str(one) for name, one in given.items()}])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"process_s": round(time.perf_counter() - start, 2)}


def run_part(part: str, given: dict[str, str]) -> None:
    """Do what `in_a_process` asked for."""
    kinds: dict[str, Callable[[str], Any]] = {"root": Path, "folder": Path, "key": bytes.fromhex}
    print(json.dumps(PARTS[part](**{name: kinds.get(name, int)(one) for name, one in given.items()})))


def measure(scratch: Path, items: int, compared: int, runs: int) -> dict[str, Any]:
    """Generate and measure everything."""
    start = time.perf_counter()
    root, folder = scratch / "cache", scratch / "files"
    key = generate(root, items, compared)
    write_files(folder, root, key, compared)
    generated_s = round(time.perf_counter() - start, 1)
    where = {"root": root, "key": key.hex()}
    return {
        "what": "the loader on a warm cache: batches of 16 complexes with joined 1,280-wide fp16 embeddings",
        "items": items,
        "batch": BATCH,
        "generated_s": generated_s,
        "epochs": in_a_process("epochs", **where),  # first, it warms the cache
        "first_batch": in_a_process("first", **where),
        "compare": in_a_process("compare", **where, folder=folder, compared=compared, runs=runs),
        "beside_a_step": in_a_process("step", **where, compared=compared),
        "reach": REACH,
    }


def main() -> int:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--compared", type=int, default=1_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        run_part(*options.part)
        return 0
    scratch = Path(tempfile.mkdtemp(prefix="loader-"))
    try:
        result = measure(scratch, options.items, min(options.items, options.compared), options.runs)
    finally:
        shutil.rmtree(scratch)
    print(json.dumps(result, indent=2))
    write(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
