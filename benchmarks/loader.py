"""The loader on a warm cache: against DataLoader with 0 and 2 workers, to its first batch, over epochs, beside steps.

    python benchmarks/loader.py [--items 10000] [--compared 1000] [--rounds 3] [--save]

Graphs are those of synthetic complexes with half-precision embeddings of 1,280 numbers. The peer is a
`torch.utils.data.DataLoader` over one safetensors file per item: the same tensors, with the embeddings joined already.
It collates the same batches, which are compared bit for bit before anything is timed. Items a second are wall time
within one process; CPU time counts the workers, too.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import Row, Spread, by_turns, itself, options, publish, run
from benchmarks.projects import fill_cache, loader_of

BATCH, EPOCHS, STEP_S = 16, 5, 0.1
TWO_WORKERS, NO_WORKERS, WAIT, GROWTH, FIRST_S = 4.0, 2.5, 0.02, 1.02, 1.0


# ---- the peer ----


def write_files(folder: Path, root: Path, key: bytes, compared: int) -> None:
    """Write each item's tensors as they are in a batch."""
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
    """A data set of one safetensors file per item."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, number: int) -> dict[str, Any]:
        from safetensors.torch import load_file

        return load_file(self.folder / f"{number}.safetensors")


def collate(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join items one after the other, with numbers of nodes that are the batch's."""
    import torch

    roles = ("receptor", "ligand")
    counts = {role: torch.tensor([0, *(len(item[f"{role}.node.pos"]) for item in items[:-1])]) for role in roles}
    first = {role: counts[role].cumsum(0).tolist() for role in roles}
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
            pairs = zip(first["receptor"], first["ligand"], strict=True)
            mine = [own + torch.tensor(both) for own, both in zip(mine, pairs, strict=True)]
        joined[name] = torch.cat(mine)
    return joined


def data_loader(folder: Path, batches: list[list[int]], workers: int) -> Any:
    """Return the peer over these batches."""
    from torch.utils.data import DataLoader

    more = {"persistent_workers": True} if workers else {}
    files: Any = Files(folder)
    return DataLoader(files, batch_sampler=batches, num_workers=workers, collate_fn=collate, **more)


# ---- parts, each in a process of its own ----


def compare(root: str, key: str, folder: str, compared: str, rounds: str) -> dict[str, Any]:
    """Time all sides over the same batches, by turns."""
    import torch

    where, chosen = (Path(root), bytes.fromhex(key)), range(int(compared))
    ours, forked = loader_of(*where, chosen), loader_of(*where, chosen, readers="processes")
    batches = []
    for batch in ours:
        batches.append(list(batch.numbers))
        theirs = collate([Files(Path(folder))[number] for number in batches[-1]])
        assert theirs.keys() == {name for name in batch.fields if not name.startswith("ptr.")}
        for name, tensor in theirs.items():
            assert tensor.dtype == batch[name].dtype, name
            assert torch.equal(tensor, batch[name]), name
    peers = {f"{workers} workers": data_loader(Path(folder), batches, workers) for workers in (0, 2)}
    sides = {"threads": ours, "processes": forked, **peers}

    def timed(side: Any) -> tuple[float, float]:
        if side in (ours, forked):
            side.set_epoch(1)
            side.set_epoch(0)  # the same batches again
        begun, used = time.perf_counter(), cpu_of_family()
        for _ in side:
            pass
        return time.perf_counter() - begun, cpu_of_family() - used

    spent = by_turns({name: lambda side=side: timed(side) for name, side in sides.items()}, int(rounds))
    forked.end()
    return dict(spent)


def cpu_of_family() -> float:
    """Return the CPU time so far of this process and of its living children."""
    pids = [os.getpid(), *map(int, Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())]
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split() for pid in pids]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


def first(root: str, key: str) -> float:
    """Time the first batch, all libraries being imported."""
    import torch  # noqa: F401

    import pipeline.training.items.loader  # noqa: F401

    begun = time.perf_counter()
    batches = iter(loader_of(Path(root), bytes.fromhex(key)))
    next(batches)
    took = time.perf_counter() - begun
    batches.close()
    return took


def epochs(root: str, key: str) -> float:
    """Return the memory after the last epoch over that after the second."""
    loader, rss = loader_of(Path(root), bytes.fromhex(key)), []
    for _ in range(EPOCHS):
        for _ in loader:
            pass
        rss.append(int(Path("/proc/self/statm").read_text().split()[1]))
    return rss[-1] / rss[1]


def waits(root: str, key: str, compared: str) -> float:
    """Return the share of time that steps wait for the loader: steps that sleep, as for a GPU, and that compute."""
    import torch

    torch.set_num_threads(1)
    matrix = torch.randn(256, 256)

    def some(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix).add_(1.0).tanh_()

    some(50)
    times, shares = max(1, int(200 * STEP_S / seconds(lambda: some(200)))), []
    for step in (lambda: time.sleep(STEP_S), lambda: some(times)):
        loader = loader_of(Path(root), bytes.fromhex(key), range(min(int(compared), 60 * BATCH)))
        batches = iter(loader)
        next(batches)
        steps, begun = 0.0, time.perf_counter()
        for _ in batches:
            steps += seconds(step)
        shares.append(1 - steps / (time.perf_counter() - begun))
    return max(shares)


def seconds(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


PARTS: dict[str, Callable[..., Any]] = {"compare": compare, "first": first, "epochs": epochs, "waits": waits}


def main() -> int:
    """Make a cache, measure each part, and print the ratios."""
    typed = options(
        str(__doc__), 3,
        items={"type": int, "default": 10_000, "help": "items of the cache (default: 10000)"},
        compared={"type": int, "default": 1_000, "help": "of them, read by both sides (default: 1000)"},
    )  # fmt: skip
    if typed.part:
        name, *words = typed.part
        print(json.dumps(PARTS[name](*words)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        root, files, compared = Path(scratch) / "cache", Path(scratch) / "files", min(typed.items, typed.compared)
        key = fill_cache(root, typed.items, compared)
        write_files(files, root, key, compared)
        where = (str(root), key.hex())

        def part(name: str, *words: str) -> Any:
            return run(itself(__file__, "--part", name, *where, *words)).json()

        grown = part("epochs")  # first, it warms the cache
        first_s, waited = part("first"), part("waits", str(compared))
        spent = part("compare", str(files), str(compared), str(typed.rounds))
    walls, used = ({side: [pair[at] for pair in pairs] for side, pairs in spent.items()} for at in (0, 1))
    two, none = (Spread.ratio(walls[f"{workers} workers"], walls["processes"]) for workers in (2, 0))
    own = Spread.ratio(walls["2 workers"], walls["threads"])
    ours_ms, theirs_ms = (1e3 * Spread.of(used[side]).median / compared for side in ("processes", "2 workers"))
    good = waited <= WAIT and grown <= GROWTH and first_s <= FIRST_S
    fast = two.median >= TWO_WORKERS and none.median >= NO_WORKERS
    row = Row(
        "loader",
        f"loader, items a second, warm; CPU time of an item {ours_ms:.2f} ms, theirs {theirs_ms:.2f} ms; steps of 100 "
        f"ms wait for it; memory after epoch 5 over epoch 2; open and first batch of {typed.items:,} items",
        "DataLoader with 2 workers; with none",
        f"≥ {TWO_WORKERS:g}×; ≥ {NO_WORKERS}×; ≤ {WAIT:.0%}; ≤ {GROWTH}×; ≤ {FIRST_S:.0f} s",
        f"{two:.1f×}; {none:.1f×}; by threads {own.median:.1f}×; {waited:.2%}; {grown:.3f}×; {first_s:.2f} s",
        "loader.py",
        "" if good and fast else "On two cores that others use as well.",
    )
    return publish([row], save=typed.save)


if __name__ == "__main__":
    sys.exit(main())
