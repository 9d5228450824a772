"""Kill an embedding task with SIGKILL at random moments until it is done, and look at what it left.

    python benchmarks/encoder/prove_embed.py [--kills N] [--out FILE]

Each time the same task is started again, as a requeue does. In the end every sequence must be in the store, right and
whole, and none that had been published may have been computed again: it would lie in the shards twice.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from benchmarks.circumstances import write
from pipeline.config.load import read_config
from pipeline.encoder.checkpoints.esm_checkpoint import load_esm_checkpoint as load_weights
from pipeline.encoder.checkpoints.synth import write_random_checkpoint
from pipeline.encoder.forward.parity import Reference
from pipeline.journal.run_folder import RunFolder
from pipeline.project.project import Project
from pipeline.project.run_code import WORKER, module_command
from pipeline.runs.engine.lifecycle import new_run
from pipeline.runs.workflow.embed_stage import EmbedStage
from pipeline.store.maintenance import scrub
from pipeline.structures.synthetic import draw_sequence

PIPELINE = Path(sys.executable).with_name("pipeline")
CONFIG = """\
data: {source: fasta, path: data.fasta}
embed: {weights: esm2_small.pt, batch: {cap: 2}}
cache: {shard_bytes: 2MiB}
cluster: {embed: {items_per_task: 1000000}}
"""
SEQUENCES, LAYERS, DIM = 6000, 6, 128
COMPARED = 20  # of the embeddings, with fair-esm


def make_project(folder: Path) -> tuple[Project, RunFolder]:
    """Write sequences and weights, scan, and cut the work into one task."""
    (folder / "pipeline.yaml").write_text(CONFIG)
    write_random_checkpoint(folder / "esm2_small.pt", layers=LAYERS, dim=DIM, heads=4)
    draw = np.random.default_rng(1)
    texts = [draw_sequence(draw, int(draw.integers(50, 300))) for _ in range(SEQUENCES)]
    (folder / "data.fasta").write_text("".join(f">s{number}\n{text}\n" for number, text in enumerate(texts)))
    subprocess.run([PIPELINE, "submit", "--stage", "scan", "--follow"], cwd=folder, check=True, capture_output=True)
    config = read_config(folder / "pipeline.yaml").config
    project, run = Project.open(config), new_run(config, ["embed"])
    EmbedStage().survey(project, run, at_once=1).write_shards(run, "embed")
    return project, run


def published(folder: Path) -> list[str]:
    """Return the keys of the embeddings in all shards, copies included."""
    names = []
    for shard in (folder / "cache/embed/shards").glob("*.safetensors"):
        with safe_open(shard, "np") as file:
            names += [name.split("/")[0] for name in file.keys() if name.endswith("/rows")]  # noqa: SIM118
    return names


def kill_until_done(folder: Path, run: RunFolder, kills: int, chance: random.Random) -> dict[str, Any]:
    """Start the task again and again, killing it at a random moment of its work, then let it finish."""
    task = [*module_command(WORKER), str(run.path), "embed", "0"]
    killed, published_at_kills = 0, []
    while killed < kills:
        worker = subprocess.Popen(task)
        started = run.events / "embed-000000.jsonl"
        before = started.stat().st_size if started.exists() else 0
        while worker.poll() is None and not _works(started, before):
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 0.6))
        worker.send_signal(signal.SIGKILL)
        if worker.wait() == 0:
            return {"kills": killed, "finished_early": True}
        killed += 1
        published_at_kills.append(len(published(folder)))
    assert subprocess.run(task, check=False).returncode == 0
    return {"kills": killed, "published_at_kills": published_at_kills}


def _works(events: Path, before: int) -> bool:
    """Say whether the task has begun to compute: figures of the forward pass come with the first embedding."""
    return events.exists() and '"forward_s"' in events.read_text()[before:]


def check(folder: Path, project: Project) -> dict[str, int]:
    """Look at every record, and compare some with the reference."""
    store, recipe = project.encoding.shelves.embeddings, project.encoding.recipe
    store.refresh()
    texts = (folder / "data.fasta").read_text().splitlines()[1::2]
    keys = [recipe.key(text, recipe.wanted(len(text))) for text in texts]
    copies = published(folder)
    records = list(store.read([key for key in keys if key not in set(store.missing(keys))]))
    some = texts[:: len(texts) // COMPARED]
    wanted = Reference(load_weights(folder / "esm2_small.pt"), LAYERS, torch.device("cpu"))(some)
    rows = [store.get(recipe.key(text, recipe.wanted(len(text)))).arrays["rows"] for text in some]
    return {
        "sequences": len(texts),
        "missing": len(store.missing(keys)),
        "wrong_shape": sum(len(one.arrays["rows"]) != len(one.meta["text"]) for one in records),
        "not_finite": sum(not np.isfinite(one.arrays["rows"]).all() for one in records),
        "damaged_shards": sum(bool(checked.findings) for checked in scrub.full(store)),
        "published_twice": len(copies) - len(set(copies)),
        "unlike_the_reference": sum(not np.allclose(*pair, atol=1e-4) for pair in zip(rows, wanted, strict=True)),
    }


def main() -> int:
    """Kill, check, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        project, run = make_project(Path(name))
        kills = kill_until_done(Path(name), run, options.kills, random.Random(options.seed))
        found = check(Path(name), project)
    faults = sum(count for what, count in found.items() if what != "sequences")
    progressed = len(set(kills.get("published_at_kills", ())))  # kills between which something was published
    result = {
        "what": "one embedding task, killed with SIGKILL while it computes and started again",
        **kills,
        "kills_after_progress": progressed,
        **found,
        "python": platform.python_version(),
    }
    print(json.dumps(result, indent=2))
    write(options.out, result)
    return 0 if faults == 0 and kills["kills"] >= options.kills and progressed > options.kills // 2 else 1


if __name__ == "__main__":
    sys.exit(main())
