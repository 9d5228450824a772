"""Train on 10,000 complexes in Slurm jobs of 4 GiB a rank; then load them the original's way in such a job.

    python benchmarks/training/train_memory.py [--complexes N] [--out FILE]

The complexes are made: a few hundred folds, docked, and each complex with sequences of its own, so that no embedding is
shared. `pipeline submit --stage graph` makes their graphs; embeddings of 1,280 random half-precision numbers a residue
are put where the stage embed would put them; then `pipeline submit --stage train` trains an epoch on a real Slurm
cluster on this machine, which enforces memory by cgroups: one rank, then one on each of two nodes.

The other side is a job of the same size that does what research code does before its first step: read every complex's
pickled graph, with the embeddings of all of its chains in float32, into a list. Of the pickles a quarter more are
written than fit into its memory: it never gets to the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.circumstances import write  # noqa: E402 - the project is found only now
from benchmarks.runs.slurm import pipeline  # noqa: E402 - the project is found only now
from pipeline.structures.synthetic import Fold, dock, draw_sequence, fold_chain, to_pdb  # noqa: E402
from tests.testkit.cluster import Cluster, why_not  # noqa: E402

FOLDS, WIDTH, BATCH = 200, 1280, 32
MEM_BYTES = 4 << 30
PATIENCE_S = 7200.0
CONFIG = """
data: {source: glob, path: data}
embed: {weights: esm2_wide.pt, storage: fp16}
train:
  task: "pipeline.tasks.interface:Interface"
  options: {embedding_dim: 1280, width: 16, layers: 1, pair_width: 4, pair_layers: 0}
  effective_batch: %d
  epochs: 1
  validation: {split: null}
cluster:
  executor: slurm
  scan: {mem: 1GiB}
  graph: {mem: 1GiB}
  train: {mem: 4GiB, time: 2h}
  slurm: {poll: 1s}
"""
RANKS = {"one_rank": 1, "two_ranks": 2}


# ---- the data set ----


@cache
def docked(number: int) -> tuple[Fold, Fold]:
    """Return two folds that touch; their sizes are those of real complexes."""
    rng = np.random.default_rng(number)
    lengths = (int(np.clip(rng.lognormal(mean, 0.5), 30, 1000)) for mean in (5.6, 5.0))
    receptor, ligand = (fold_chain(draw_sequence(rng, length)) for length in lengths)
    return dock(rng, receptor, ligand)


def sequences(number: int) -> tuple[str, str]:
    """Return the sequences of a complex, which no other has."""
    rng = np.random.default_rng([1, number])
    one, other = ("".join(rng.permutation(list(each.sequence))) for each in docked(number % FOLDS))
    return one, other


def write_complex(folder: Path, number: int) -> tuple[str, str]:
    """Write a complex; return its sequences."""
    texts = sequences(number)
    noise = np.random.default_rng([2, number])
    partners = [
        Fold(text, each.pos_R53 + noise.normal(0, 0.05, each.pos_R53.shape))
        for text, each in zip(texts, docked(number % FOLDS), strict=True)
    ]
    (folder / f"c{number:06d}.pdb").write_bytes(to_pdb(dict(zip("AB", partners, strict=True))))
    return texts


def embed(config: Path, texts: list[str]) -> int:
    """Put embeddings where the stage embed would put them; return their bytes."""
    from pipeline.config.load import read_config
    from pipeline.project.project import Project

    project = Project.open(read_config(config, []).config)
    recipe, store = project.encoding.recipe, project.encoding.shelves.embeddings
    numbers = np.random.default_rng(0).normal(size=(4000, WIDTH)).astype(np.float16)
    written = 0
    with store.writer() as writer:
        for number, text in enumerate(texts):
            start = number * 7 % (len(numbers) - len(text))
            rows = numbers[start : start + len(text)]
            writer.put(recipe.key(text, recipe.wanted(len(text))), {"rows": rows}, {"text": text})
            written += rows.nbytes
    store.write_index()
    return written


def make(folder: Path, complexes: int) -> dict[str, Any]:
    """Make the project: structures, their graphs, embeddings."""
    from pipeline.encoder.checkpoints.synth import write_random_checkpoint

    start = time.perf_counter()
    (folder / "data").mkdir()
    (folder / "pipeline.yaml").write_text(CONFIG % BATCH)
    write_random_checkpoint(folder / "esm2_wide.pt", layers=1, dim=WIDTH, heads=20)
    with ProcessPoolExecutor(2) as pool:
        texts = list(pool.map(partial(write_complex, folder / "data"), range(complexes), chunksize=100))
    pipeline(folder, "submit", "--stage", "graph", "--executor", "local", "--follow")
    flat = list(dict.fromkeys(text for both in texts for text in both))
    residues = sorted(sum(map(len, both)) for both in texts)
    return {
        "complexes": complexes,
        "residues_median": residues[len(residues) // 2],
        "residues": sum(residues),
        "sequences": len(flat),
        "embedding_bytes": embed(folder / "pipeline.yaml", flat),
        "made_s": round(time.perf_counter() - start),
    }


# ---- ours ----


def train(folder: Path, name: str, ranks: int) -> dict[str, Any]:
    """Train an epoch with so many ranks, one on each node; return what it took."""
    since = time.time()
    sets = {"train.models": f"models_{name}", "cluster.train.nodes": str(ranks)}
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    start = time.perf_counter()
    pipeline(folder, "submit", "--stage", "train", *words)
    submitted_s = time.perf_counter() - start
    run = max(path.name for path in (folder / "runs").iterdir() if path.name.endswith("-train"))
    state = ended(folder, run)
    assert state["state"] == "done", state["error"]
    (made,) = (folder / f"models_{name}").glob("*/epochs.jsonl")
    epoch = json.loads(made.read_text().splitlines()[-1])
    jobs = accounted(since, f"{run}-train-")
    assert jobs, "no job of the training is in the accounting"
    assert all(one["state"] == "COMPLETED" for one in jobs), jobs
    return {
        "ranks": ranks,
        "mem_per_rank_bytes": MEM_BYTES,
        "steps": epoch["steps"],
        "complexes": epoch["items"],
        "ooms": epoch["ooms"],
        "complexes_per_s": round(epoch["items_per_s"], 1),
        "wait_share": round(epoch["wait_share"], 4),
        "loss": {term: round(value, 4) for term, value in epoch["loss"].items()},
        "peak_rss_bytes": max(one["max_rss_bytes"] for one in jobs),
        "peak_epoch_bytes": epoch["peak_bytes"],
        "state": jobs[-1]["state"],
        "submit_s": round(submitted_s, 1),
        "jobs": jobs,
    }


def ended(folder: Path, run: str) -> dict[str, Any]:
    """Wait until a run has ended; return how."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        state: dict[str, Any] = json.loads(pipeline(folder, "status", run, "--json"))
        if state["state"] not in ("running", "waiting"):
            return state
        assert time.monotonic() < deadline, state["state"]
        time.sleep(5.0)


def accounted(since: float, name: str) -> list[dict[str, Any]]:
    """Return what the accounting says of jobs by a word of their names; memory is of the process that took most."""
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since))
    fields = "JobID,JobName,State,ElapsedRaw,MaxRSS,ReqMem,NNodes"
    command = ["sacct", "--noheader", "--parsable2", "--noconvert", "-S", start, "-o", fields]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split("|") for line in said.splitlines()]
    jobs = [row for row in rows if "." not in row[0] and name in row[1]]
    return [
        {
            "job": row[0],
            "state": row[2].split()[0],
            "elapsed_s": int(row[3]),
            "asked": row[5],
            "nodes": int(row[6]),
            "max_rss_bytes": max((int(one[4] or 0) for one in rows if one[0].startswith(f"{row[0]}.")), default=0),
        }
        for row in jobs
    ]


# ---- the original's way ----


def write_pickles(folder: Path, cache_root: Path, count: int) -> int:
    """Write the first complexes as the original keeps them; return their bytes."""
    import torch

    from pipeline.graphs import item_graph as graphs
    from pipeline.journal.run_folder import runs_in
    from pipeline.store.cache_folder import CacheFolder
    from pipeline.training.items.item_table import ItemTable

    folder.mkdir()
    store = CacheFolder(cache_root)
    keys = [run.table.read_text() for run in runs_in(cache_root.parent / "runs") if run.table.exists()]
    table = ItemTable.read(store.kind("sets"), bytes.fromhex(keys[-1]))
    written = 0
    for number in range(count):
        record = store.kind("graph").get(table.key(number))
        item = {"name": table.ids[number], "contacts": torch.tensor(0)}
        for place, part in enumerate(graphs.decode_graph(record.arrays, record.meta).parts):
            nodes = {name: torch.from_numpy(np.array(array)) for name, array in part.nodes.items()}
            edges = {name: torch.from_numpy(np.array(array)).long() for name, array in part.edges.items()}
            item[f"partner{place}"] = {**nodes, **edges, "x": torch.randn(len(part.nodes["pos"]), WIDTH)}
        path = folder / f"{number:06d}.pkl"
        path.write_bytes(pickle.dumps(item))
        written += path.stat().st_size
    return written


def hoard(folder: Path, said: Path) -> None:
    """Read all pickles into memory, as the original does before its first step, saying how far it is."""
    import torch  # noqa: F401 - it trains afterwards

    items, start = [], time.perf_counter()
    for path in sorted(folder.iterdir()):
        items.append(pickle.loads(path.read_bytes()))
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        told = {"complexes": len(items), "peak_rss_bytes": taken, "seconds": round(time.perf_counter() - start, 1)}
        with said.open("w") as file:
            file.write(json.dumps(told))
    said.with_suffix(".end").touch()


def load_like_the_original(folder: Path, complexes: int) -> dict[str, Any]:
    """Write a quarter more than fits, and let a job of the same memory read it; return how that ended."""
    some = min(50, complexes)
    each = write_pickles(folder / "sample", folder / "cache", some) // some
    shutil.rmtree(folder / "sample")
    count = min(complexes, 5 * MEM_BYTES // (4 * each))
    write_pickles(folder / "pickles", folder / "cache", count)
    return {**hoarded(folder), "pickles_written": count, "bytes_per_complex": each, "bytes_of_all": each * complexes}


def hoarded(folder: Path) -> dict[str, Any]:
    """Let a job read all pickles into memory; return how that ended."""
    since, said = time.time(), folder / "hoard.json"
    command = [sys.executable, __file__, "--hoard", str(folder / "pickles"), str(said)]
    asked = ["sbatch", "--wait", "--parsable", "--job-name=hoard", f"--mem={MEM_BYTES >> 20}M", "--cpus-per-task=1"]
    where = ["--no-requeue", "--output", str(folder / "hoard.log"), "--chdir", str(ROOT), "--wrap", " ".join(command)]
    done = subprocess.run([*asked, *where], capture_output=True, text=True, check=False)
    (job,) = settled(since, "hoard")
    assert said.exists(), done.stderr + (folder / "hoard.log").read_text()
    return {
        **job,
        "came_to": json.loads(said.read_text()),
        "read_all": said.with_suffix(".end").exists(),
        "exit_code": done.returncode,
        "log": (folder / "hoard.log").read_text().splitlines()[-3:],
    }


def settled(since: float, name: str) -> list[dict[str, Any]]:
    """Return what the accounting says once the jobs have ended there, too."""
    deadline = time.monotonic() + 60
    while True:
        jobs = accounted(since, name)
        if jobs and all(one["state"] not in ("PENDING", "RUNNING", "COMPLETING") for one in jobs):
            return jobs
        assert time.monotonic() < deadline, jobs
        time.sleep(0.5)


# ---- all of it ----


def measure(folder: Path, complexes: int) -> dict[str, Any]:
    """Make the data set, train, and load it the other way."""
    result: dict[str, Any] = {
        "what": "made complexes with 1,280-wide embeddings, all sequences different; jobs of a real Slurm with cgroups",
        "batch": BATCH,
        "data": make(folder, complexes),
    }
    for name, ranks in RANKS.items():
        result[name] = train(folder, name, ranks)
        print(json.dumps({name: result[name]}), flush=True)
    for shard in (folder / "cache" / "embed").rglob("*.safetensors"):
        shard.unlink()  # the disk is needed for the other side's files
    shutil.rmtree(folder / "data")
    result["original"] = load_like_the_original(folder, complexes)
    return {**result, "load": os.getloadavg(), "cores": os.cpu_count()}


def table(result: dict[str, Any]) -> str:
    """Return the figures for people."""
    lines = []
    for name in RANKS:
        one = result[name]
        lines.append(
            f"{name:12} {one['state']:14} {one['steps']:5} steps  {one['complexes']:6,} complexes"
            f"  {one['complexes_per_s']:7.1f}/s  peak {one['peak_rss_bytes'] >> 20:5,} MiB of {MEM_BYTES >> 20:,}"
        )
    one = result["original"]
    lines.append(
        f"{'original':12} {one['state']:14} {0:5} steps  {one['came_to']['complexes']:6,} complexes read,"
        f" then killed; all would take {one['bytes_of_all'] / 2**30:.1f} GiB"
    )
    return "\n".join(lines)


def main() -> int:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--complexes", type=int, default=10_000)
    parser.add_argument("--keep", action="store_true", help="leave the folder and the cluster")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--hoard", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hoard:
        hoard(*options.hoard)
        return 0
    if reason := why_not():
        sys.exit(f"no Slurm here: {reason}")
    cluster = Cluster(Path("/var/lib/pipeline-slurm-bench"))
    cluster.start()
    os.environ.update(cluster.env())
    folder = Path(tempfile.mkdtemp(prefix="train-memory-"))
    try:
        result = measure(folder, options.complexes)
    finally:
        if options.keep:
            print(folder)
        else:
            cluster.stop()
            shutil.rmtree(folder)
    text = json.dumps(result, indent=2)
    print(text)
    print(table(result))
    write(options.out, result)
    trained = all(result[name]["complexes"] == options.complexes for name in RANKS)
    within = all(result[name]["peak_rss_bytes"] <= MEM_BYTES for name in RANKS)
    return 0 if trained and within and result["original"]["state"] == "OUT_OF_MEMORY" else 1


if __name__ == "__main__":
    sys.exit(main())
