"""Whether the docking recipe learns: a narrow score model remembers a few complexes, and docks them from noise.

    python benchmarks/docking/learning.py [FOLDER] [--seed N] [--epochs N] [--ranks N] [--minutes N] [--samples N]
        [--keep FOLDER] [--out FILE]

FOLDER holds complexes/*.pdb and pairs/*_{r,l}_b.pdb. A project of small real complexes and some made ones is trained,
evaluated and predicted by `pipeline submit`, on the CPU; embeddings are those of random weights, so that residues are
told apart and nothing else is known of them. Noise below half an Å and a tenth of a radian is left out: the network
would spend its steps on moves that make no difference to what is measured. There is no confidence model: a complex's
first pose is the one that is ranked best, and the others only say how much that is luck. Random placement is where
sampling starts: turned at random, at a normal distance from the receptor's centre. All of it is overfitting on purpose,
and says nothing of complexes that were not trained on.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.circumstances import write
from pipeline.api import SamplerSettings, open_loader
from pipeline.structures.synthetic import complex_pdb
from pipeline.tasks.complex_docking import ComplexDocking, NoisedComplex
from pipeline.tasks.docking.rigid_diffusion import pose_draw, pose_rmsd, stacked_draws, start_poses

PIPELINE = Path(sys.executable).with_name("pipeline")
SHARED = Path(__file__).resolve().parents[3] / "shared" / "structures"
COMPLEXES, PAIRS = ("3H2V", "1LFD", "1R0R"), ("1Z0K",)  # of 220 to 325 residues
MADE, MADE_SIZES = 2, (60, 40)
WITHIN = 5.0  # Å of ligand RMSD
REACH, RANDOM_REACH, LIMIT_MINUTES = 0.75, 0.05, 30.0
DRAWS, DRAWS_AT_ONCE = 1000, 100
POINTS = 60  # of the curve, at most
SYNTH = ("weights", "synth", "--layers", "2", "--dim", "32", "--heads", "4", "--out", "weights/esm2_t2_tiny.pt")
MODEL: dict[str, Any] = {
    "embedding_dim": 32,
    "scalars": 8,
    "vectors": 4,
    "layers": 1,
    "multiplicity": 8,
    "translation_least": 0.5,
    "rotation_least": 0.1,
}
# as the original samples with its published weights
SAMPLING = {
    "steps": 20,
    "temperature": 2.439,
    "psi": 0.216,
    "data_translation": 0.593,
    "data_rotation": 0.228,
}


@dataclass(frozen=True)
class Cost:
    """What a command cost with all that it started."""

    wall_s: float
    cpu_s: float
    load: tuple[float, float]  # of the machine, before and after


def typed(folder: Path, *words: str) -> Cost:
    """Type a command of the pipeline."""
    before, start, load = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), os.getloadavg()[0]
    done = subprocess.run([str(PIPELINE), *words], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"pipeline {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Cost(round(wall_s, 1), round(cpu_s, 1), (round(load, 1), round(os.getloadavg()[0], 1)))


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    """Return the project's pipeline.yaml."""
    drawn = {"split": None, "checkpoint": "last", "options": {**SAMPLING, "samples": options.samples}}
    return {
        "data": {"source": "glob", "path": "data"},
        "embed": {"weights": SYNTH[-1]},
        "graph": {"nodes": "residue", "neighbours": 20, "contacts": 5.0},
        "train": {
            "task": "pipeline.tasks.complex_docking:ComplexDocking",
            "options": MODEL,
            "seed": options.seed,
            "split": None,
            "effective_batch": 2,
            "epochs": options.epochs,
            "optimizer": "adam",
            "learning_rate": 1e-2,
            "weight_decay": 0.0,
            "ema": 0.995,
            "schedule": {"kind": "cosine", "warmup": 20, "least": 0.02},
            "validation": {"split": None},
            "evaluate": drawn,
            "predict": drawn,
        },
        "cluster": {
            "executor": "local",
            "train": {"gpus": 0, "ranks": options.ranks},
            **{stage: {"gpus": 0} for stage in ("evaluate", "predict")},
        },
    }


def made_project(folder: Path, structures: Path, told: Mapping[str, Any]) -> None:
    """Make a project of real complexes and made ones."""
    data = folder / "data"
    data.mkdir(parents=True)
    (folder / "pipeline.yaml").write_text(yaml.safe_dump(dict(told), sort_keys=False))
    for name in COMPLEXES:
        shutil.copy(structures / "complexes" / f"{name}.pdb", data)
    for name in PAIRS:
        sides = [(structures / "pairs" / f"{name}_{side}_b.pdb").read_text().splitlines() for side in "rl"]
        lines = [line for side in sides for line in side if line.startswith(("ATOM", "HETATM", "TER"))]
        (data / f"{name}.pdb").write_text("\n".join([*lines, "END", ""]))
    for seed in range(MADE):
        (data / f"made{seed}.pdb").write_bytes(complex_pdb(seed, *MADE_SIZES))


def placed_at_random(one: NoisedComplex, task: ComplexDocking, seed: int) -> float:
    """Return the share of random placements of a complex that are near the truth."""
    rng, near = np.random.default_rng(seed), 0
    for _ in range(DRAWS // DRAWS_AT_ONCE):
        draw = stacked_draws([pose_draw(rng, 1) for _ in range(DRAWS_AT_ONCE)])
        start_PL3 = start_poses(one.noised.ligand.pos_N3, draw, task.schedule)
        near += int((pose_rmsd(start_PL3, one.true_L3, one.noised.receptor.pos_N3).ligand_P < WITHIN).sum())
    return near / DRAWS


def random_shares(folder: Path, seed: int) -> dict[str, float]:
    """Return that share for each complex of a project."""
    task = ComplexDocking(**MODEL)
    loader = open_loader(
        folder / "pipeline.yaml",
        SamplerSettings(batch=1),
        collate=lambda items, rng: (items[0].id, task.collate(items, rng).complexes[0]),
    )
    return {name: placed_at_random(one, task, seed) for name, one in loader}


def curve(epochs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean losses of equal parts of a training, each with the epoch and the time at its end."""
    rows, passed_s = [], np.cumsum([epoch["wall_s"] for epoch in epochs])
    for part in np.array_split(np.arange(len(epochs)), min(POINTS, len(epochs))):
        losses = {name: float(np.mean([epochs[at]["loss"][name] for at in part])) for name in epochs[0]["loss"]}
        row = {name: round(value, 4) for name, value in losses.items()}
        rows.append({"epoch": int(part[-1]) + 1, "seconds": round(float(passed_s[part[-1]]), 1), **row})
    return rows


def rmsds(folder: Path) -> dict[str, list[float]]:
    """Return the ligand RMSD of each complex's poses, in their order."""
    (file,) = folder.glob("predictions/*/predictions.csv")
    found: dict[str, list[float]] = {}
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            found.setdefault(row["id"].rpartition(" ")[0] or row["id"], []).append(round(float(row["ligand_rmsd"]), 2))
    return found


def told_of(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train in a project, evaluate, predict, and return what came of it."""
    typed(folder, *SYNTH)
    before = typed(folder, "submit", "--stage", "graph", "--follow")
    costs = {stage: typed(folder, "submit", "--stage", stage, "--follow") for stage in ("train", "evaluate", "predict")}
    (model,) = folder.glob("models/*")
    (evaluation,) = model.glob("evaluations/*.json")
    figures = json.loads(evaluation.read_text())["evaluation"]["figures"]
    epochs = [json.loads(line) for line in (model / "epochs.jsonl").read_text().splitlines()]
    found, at_random = rmsds(folder), random_shares(folder, options.seed)
    return {
        "top1_within_5": figures["ligand_top1_within_5"],
        "random_within_5": float(np.mean(list(at_random.values()))),
        "all_poses_within_5": float(np.mean([rmsd < WITHIN for poses in found.values() for rmsd in poses])),
        "training_minutes": round(costs["train"].wall_s / 60, 2),
        "training_cpu_minutes": round(costs["train"].cpu_s / 60, 2),
        "complexes": {
            name: {"top1_rmsd": poses[0], "rmsds": poses, "random_within_5": at_random[name]}
            for name, poses in found.items()
        },
        "figures": figures,
        "steps": epochs[-1]["step"],
        "curve": curve(epochs),
        "costs": {"graph": vars(before), **{stage: vars(cost) for stage, cost in costs.items()}},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=SHARED)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=1500)
    parser.add_argument("--ranks", type=int, default=2, help="processes that train, with a thread each")
    parser.add_argument("--minutes", type=float, default=LIMIT_MINUTES, help="of training at most, or it is a miss")
    parser.add_argument("--samples", type=int, default=10, help="poses of a complex")
    parser.add_argument("--keep", type=Path, help="where the project is made, which is not there yet, and stays")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not (options.folder / "complexes").is_dir():
        print(f"no complexes in {options.folder}: nothing was measured", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    told = configuration(options)
    with tempfile.TemporaryDirectory() as place:
        folder = (options.keep or Path(place) / "learning").absolute()
        made_project(folder, options.folder, told)
        found = told_of(folder, options)
    result = {
        "what": "a narrow score model on a few complexes: how many of them it docks again from noise",
        "seed": options.seed,
        "ranks": options.ranks,
        "is_reached": found["top1_within_5"] >= REACH
        and found["random_within_5"] < RANDOM_REACH
        and found["training_minutes"] <= options.minutes,
        **found,
        "configuration": told["train"],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name, row in result["complexes"].items():
        print(f"{name:8}{row['top1_rmsd']:8.2f} Å; at random {row['random_within_5']:.1%} within {WITHIN:g} Å")
    print(json.dumps({name: value for name, value in result.items() if not isinstance(value, dict | list)}))
    write(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
