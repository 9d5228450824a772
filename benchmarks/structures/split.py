"""Divide complexes of up to 100,000 chains into splits that share no cluster, and check them: time of the CPU, memory.

    python benchmarks/structures/split.py [--chains N ...] [--whole N] [--out FILE]

Each size is a process of its own: a table of clusters is read, every chain is looked up in it by name, components are
found and distributed, and what the splits share is counted. `--whole` times the command on so many scanned sequences.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.circumstances import write
from pipeline.records import ChainSummary, Inventory, Item, Kind, Part, Partner, Role
from pipeline.runs.dataset.chain_clusters import ClusterTable, chain_names
from pipeline.runs.dataset.item_splits import ChainLinks, text_digest
from pipeline.runs.dataset.split_data import SharedItems, divide_items, shared_levels
from pipeline.structures.synthetic import draw_sequence

SIZES = (1_000, 10_000, 100_000)
REACH_S = 10.0
FRACTIONS = {"train": 0.8, "val": 0.1, "test": 0.1}
PIPELINE = Path(sys.executable).with_name("pipeline")


def cluster_of(rng: np.random.Generator, chains: int) -> int:
    """Draw a cluster: a few are large, as families of antibodies are, and most have a chain or two."""
    return int(chains * rng.random() ** 3) if rng.random() < 0.01 else int(rng.integers(chains))


def table_of(folder: Path, chains: int) -> Path:
    """Write the clusters of the two chains of each complex."""
    rng = np.random.default_rng(1)
    path = folder / "found_cluster.tsv"
    with path.open("w") as file:
        for chain in range(chains):
            print(f"r{cluster_of(rng, chains)}", f"c{chain // 2}_{'AB'[chain % 2]}", sep="\t", file=file)
    return path


def complexes(chains: int) -> Any:
    """Yield items with their inventories."""
    for number in range(chains // 2):
        parts = (Part(Role.RECEPTOR, f"/d/c{number}.pdb", ("A",)), Part(Role.LIGAND, f"/d/c{number}.pdb", ("B",)))
        partners = tuple(
            Partner(role, "", (ChainSummary(name, Kind.PROTEIN, f"MKV{number}{name}", 50 + number % 400, 50, 400),))
            for role, name in ((Role.RECEPTOR, "A"), (Role.LIGAND, "B"))
        )
        yield Item(f"c{number}", parts), Inventory(partners)


def collected(path: Path, chains: int) -> SharedItems:
    """Look every chain up in the table."""
    table = ClusterTable(path)
    shared = SharedItems(levels={"clusters": ChainLinks()})
    for item, inventory in complexes(chains):
        number = shared.add(item, inventory)
        for partner, side in enumerate(inventory.partners):
            for chain in side.chains:
                shared.sequences.add(number, partner, text_digest(chain.sequence))
                names = chain_names(item.id, item.parts[0].path, chain.name, None, alone=False)
                for cluster in table.clusters_of(names):
                    shared.levels["clusters"].add(number, partner, cluster)
    return shared


def measure(chains: int) -> dict[str, Any]:
    """Divide and check complexes of so many chains, and say what that took."""
    with tempfile.TemporaryDirectory() as made:
        path = table_of(Path(made), chains)
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.process_time()
        shared = collected(path, chains)
        read = time.process_time()
        division = divide_items(shared, FRACTIONS)
        divided = time.process_time()
        names = np.array(["", *FRACTIONS])
        shared.names = {name: number for number, name in enumerate(names.tolist())}
        for number, split in enumerate(division.split_N.tolist()):
            shared.splits[number] = split + 1
        leaks = shared_levels(shared)
        checked = time.process_time()
    told = division.to_json()
    return {
        "what": f"{chains:,} chains",
        "chains": chains,
        "cpu_s": round(checked - start, 3),
        "read_s": round(read - start, 3),
        "divide_s": round(divided - read, 3),
        "check_s": round(checked - divided, 3),
        "grown_bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) << 10,
        "components": told["components"],
        "largest": told["largest"][0],
        "shares": [split["share"] for split in told["splits"].values()],
        "leaks": len(leaks),
    }


def whole(sequences: int) -> dict[str, Any]:
    """Time the command on scanned sequences, half of which are copies."""
    with tempfile.TemporaryDirectory() as made:
        folder, rng = Path(made), np.random.default_rng(0)
        lines = (
            f">s{n}\n{draw_sequence(rng, 60 + n % 200) if n % 2 else 'MKV' * (20 + n % 60)}\n" for n in range(sequences)
        )
        (folder / "s.fasta").write_text("".join(lines))
        (folder / "pipeline.yaml").write_text("data: {source: fasta, path: s.fasta}\n")
        scan = [str(PIPELINE), "submit", "--stage", "scan", "--executor", "local", "--follow"]
        subprocess.run(scan, cwd=folder, check=True, capture_output=True)
        before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        words = [str(PIPELINE), "split", "--out", "new.csv", "--json"]
        subprocess.run(words, cwd=folder, check=True, capture_output=True)
        took_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before_s
        return {"sequences": sequences, "command_cpu_s": round(took_s, 2)}


def main() -> int:
    """Measure each size and print a line of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, nargs="+", default=SIZES)
    parser.add_argument("--whole", type=int, default=0)
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child)))
        return 0
    rows = []
    for chains in options.chains:
        words = [sys.executable, __file__, "--child", str(chains)]
        rows.append(json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout))
        print(rows[-1], flush=True)
    result = {"what": "complexes divided by clusters of their chains", "reach_s": REACH_S, "rows": rows}
    if options.whole:
        result["whole"] = whole(options.whole)
        print(result["whole"])
    write(options.out, result)
    last = rows[-1]
    return int(last["leaks"] > 0 or last["cpu_s"] > REACH_S)


if __name__ == "__main__":
    sys.exit(main())
