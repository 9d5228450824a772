"""The variable domains of real antibodies, and a trained and a random encoder for them, from public packages.

The structures are those of PRODIGY's data set, and one of this project's. Each is cut to its heavy and light variable
domain (about 120 and 110 residues), which is what the encoder, AntiBERTy, was trained on.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path

import gemmi
import yaml

from tests.real.packages import fetched, unpack

STRUCTURES = Path(__file__).resolve().parents[1] / "reference/structures"
NAMES = ("1BJ1", "1BVK", "1DQJ", "1E6J", "1FSK", "1JPS", "1MLC", "1P2C", "1VFB", "1WEJ", "2VIR", "2VXT")
ENDS = {"H": re.compile(r"WG.G..[VL]TVS"), "L": re.compile(r"FG.GT.[LV].[IVL]")}  # of a variable domain
LETTERS = "ACDEFGHIKLMNPQRSTVWY"
SAME = 90  # %; domains with as many equal residues are of one group
FAR = 20.0  # Å between the last CA of a chain and the first of the next one, where a file joined them


ENCODER = {
    "encoder": "pipeline.encoder.engine.hugging_face:HuggingFace",
    "options": {"residue": "{} ", "letters": LETTERS},
}
WIDTH = 512
ARMS = ("trained", "random", "none")  # AntiBERTy, the same with random weights, and no embedding at all
FOLDS, METRIC = 4, "contact_auprc"


@dataclass(frozen=True)
class Domain:
    """A variable domain: its sequence, and its lines of the PDB file."""

    sequence: str
    lines: list[str]


def domains(name: str) -> dict[str, Domain]:
    """Return the heavy and the light variable domain of an antibody."""
    if name == "2VXT":
        text = gzip.decompress((STRUCTURES / "pairs/2VXT_r_b.pdb.gz").read_bytes()).decode()
    else:
        text = (prodigy() / f"{name}.pdb").read_text()
    found: dict[str, Domain] = {}
    for residues in chains(text):
        sequence = "".join(gemmi.find_tabulated_residue(lines[0][17:20]).one_letter_code for lines in residues)
        for chain, end in ENDS.items():
            if match := end.search(sequence):
                cut = residues[: match.end()]
                lines = [f"{line[:21]}{chain}{line[22:]}" for lines in cut for line in lines]
                found[chain] = Domain(sequence[: match.end()], lines)
    return found


def prodigy() -> Path:
    """Return the folder of PRODIGY's 81 complexes."""
    package = fetched("prodigy-prot==2.4.0 sdist")
    folder = package / "structures"
    if not folder.exists():
        (archive,) = package.glob("*/tests/test_data/dataset.tgz")
        unpack(archive, folder.with_suffix(".part"))
        folder.with_suffix(".part").rename(folder)
    return folder / "PRODIGYdataset"


def chains(text: str) -> list[list[list[str]]]:
    """Return the lines of a PDB file by chain and residue. The data set has joined the chains of an antibody."""
    found: list[list[list[str]]] = []
    last, last_ca = "", None
    for line in text.splitlines():
        if not line.startswith("ATOM"):
            continue
        if line[21:27] != last:
            if line[21] != last[:1]:
                found.append([])
                last_ca = None
            found[-1].append([])
            last = line[21:27]
        if line[12:16] == " CA ":
            ca = gemmi.Position(*(float(line[at : at + 8]) for at in (30, 38, 46)))
            if last_ca is not None and ca.dist(last_ca) > FAR:
                found.append([found[-1].pop()])
            last_ca = ca
        found[-1][-1].append(line)
    return found


def write_project(folder: Path, seeds: int, epochs: int) -> None:
    """Write a project of these antibodies: partners H and L, and as encoders AntiBERTy and a random one a seed."""
    (folder / "structures").mkdir(parents=True)
    known = {name: domains(name) for name in NAMES}
    for name, pair in known.items():
        text = "".join("\n".join(pair[chain].lines) + "\nTER\n" for chain in "HL")
        (folder / f"structures/{name}.pdb").write_text(f"{text}END\n")
    sequences = {f"{name}_{chain}": pair[chain].sequence for name, pair in known.items() for chain in "HL"}
    pairs = combinations_with_replacement(sequences, 2)
    alike = [pair for pair in pairs if identity(*(sequences[name] for name in pair)) >= SAME]
    (folder / "clusters.tsv").write_text("".join(f"{first}\t{second}\n" for first, second in alike))
    write_encoder(folder / "weights/antiberty")
    for seed in range(seeds):
        write_encoder(folder / f"weights/random{seed}", seed)
    random = {f"random{seed}": {**ENCODER, "weights": f"weights/random{seed}"} for seed in range(seeds)}
    settings = {
        "data": {
            "splits": "splits.csv",
            "source": "glob",
            "path": "structures",
            "receptor_chains": ["H"],
            "ligand_chains": ["L"],
        },
        "embed": {**ENCODER, "weights": "weights/antiberty", "also": random},
        "train": {
            "task": "pipeline.tasks.interface:Interface",
            "options": {"embedding_dim": WIDTH, "width": 64, "layers": 2, "pair_width": 32, "pair_layers": 1},
            "effective_batch": 1,
            "learning_rate": 1e-3,
            "epochs": epochs,
            "validation": {"split": "test", "every": epochs, "monitor": METRIC},  # nothing is chosen by it
        },
        "cluster": {"executor": "local", "slots": {"cpus": 2}},
    }
    (folder / "pipeline.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))


def identity(first: str, second: str) -> float:
    """Return the share of equal residues of two aligned sequences, in %."""
    return gemmi.align_string_sequences(list(first), list(second), []).calculate_identity()


def write_encoder(folder: Path, seed: int | None = None) -> None:
    """Write AntiBERTy as a folder that pipeline reads; with a seed, the same architecture with random weights."""
    import torch
    import transformers

    source = fetched("antiberty==0.1.3") / "antiberty/trained_models"
    config = transformers.BertConfig.from_pretrained(source / "AntiBERTy_md_smooth")
    if seed is None:
        model = transformers.BertModel.from_pretrained(source / "AntiBERTy_md_smooth", add_pooling_layer=False)
    else:
        torch.manual_seed(seed)
        model = transformers.BertModel(config, add_pooling_layer=False)
    model.save_pretrained(folder)
    shutil.copy(source / "vocab.txt", folder)
    transformers.BertTokenizer.from_pretrained(folder, do_lower_case=False).save_pretrained(folder)


def write_points(folder: Path, fold: int, seeds: int) -> str:
    """Write the points of a sweep and the splits of a fold, in which all that is not held out is trained on."""
    table = (folder / f"cv.fold{fold}.csv").read_text().replace(",val,", ",train,")
    (folder / "splits.csv").write_text(table)
    rows = [
        f"{seed},[{'random' + str(seed) if arm == 'random' else 'main'}],{0 if arm == 'none' else WIDTH}\n"
        for arm in ARMS
        for seed in range(seeds)
    ]
    header = "train.seed,train.embeddings,train.options.embedding_dim\n"
    (folder / "points.csv").write_text(header + "".join(rows))
    return "points.csv"


def results(document: str) -> dict[tuple[str, int], float]:
    """Return the held-out metric by arm and seed, of the models that `pipeline compare --json` lists."""
    found: dict[tuple[str, int], float] = {}
    for model in json.loads(document)["models"]:
        settings, weights = model["differing"], " ".join(model["names"].values())
        arm = "random" if "random" in weights else "trained" if settings["options.embedding_dim"] else "none"
        found[arm, settings.get("seed", 0)] = model["curves"][METRIC][-1][1]
    return found
