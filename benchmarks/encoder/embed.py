"""Embed against fair-esm: residues per CPU second of one thread, the same weights and sequences, in one run.

    python benchmarks/encoder/embed.py [FOLDER] [--shape 12x480|150M|650M] [--runs N] [--out FILE]

Every side starts from strings and ends with one array of each sequence's residues in memory. `fair-esm` does what its
extract.py does: FastaBatchedDataset's batches of 4,096 tokens, its own tokeniser and model (the logits included, which
nobody can turn off), a clone of the rows. Weights are random, in fair-esm's format, loaded by each side's own loader:
12 layers of width 480 as the 35M model has, or a few layers of a wider one; beside so few fair-esm's head would count
for ten times what it does, and is taken away. Results are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.circumstances import write
from pipeline.encoder.checkpoints.esm_checkpoint import EsmCheckpoint, load_esm_checkpoint
from pipeline.encoder.checkpoints.synth import write_random_checkpoint
from pipeline.encoder.embedding_recipe import BF16_PRODUCTS, ENDS, EmbeddingRecipe, tokenize
from pipeline.encoder.engine.embed_engine import Engine
from pipeline.encoder.engine.sequence_work import Embedding
from pipeline.encoder.engine.token_batches import EngineSettings
from pipeline.encoder.forward.esm2 import EsmEncoder
from pipeline.encoder.forward.linear import bf16_products_here
from pipeline.structures.parsing.read_structure import FileReading, parse_structure
from pipeline.structures.parsing.structure_files import read_file
from pipeline.structures.policy import Policy, apply_policy

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "structures" / "complexes"
LIMIT = 512 << 20
SHAPES = {"12x480": (12, 480), "150M": (2, 640), "650M": (1, 1280)}  # layers, width
WHOLE = "12x480"
HEADS = 20
BUDGET_TOKENS = 4096
CAP = 32
REACH = {"12x480": 3.3, "650M": 2.5}  # over fair-esm
REACH_COSINE, REACH_BF16, REACH_BF16_COSINE = 0.99999, 1.6, 0.999
Rows = dict[str, NDArray[np.float32]]


def chains(folder: Path) -> list[str]:
    """Return the sequence of every chain, in the order of the files."""
    structures = (
        apply_policy(parse_structure(read_file(path, LIMIT), "pdb", FileReading()), Policy())
        for path in sorted(folder.glob("*.pdb"))
    )
    return [chain.sequence for structure in structures for chain in structure.chains if chain.sequence]


class FairEsm:
    """The reference, as its users run it."""

    def __init__(self, path: Path, shape: str) -> None:
        import esm

        with torch.serialization.safe_globals([argparse.Namespace]):
            model, self._alphabet = esm.pretrained.load_model_and_alphabet_local(str(path))
        if shape != WHOLE:
            model.lm_head = torch.nn.Identity()
        self._model, self._layers = model.eval(), model.num_layers
        self._convert = self._alphabet.get_batch_converter()
        self._dataset = esm.FastaBatchedDataset

    @torch.no_grad()
    def batch(self, sequences: Sequence[str]) -> Rows:
        """Return the rows of a padded batch, as extract.py takes them."""
        _, texts, tokens = self._convert([(str(number), text) for number, text in enumerate(sequences)])
        found = self._model(tokens, repr_layers=[self._layers], return_contacts=False)["representations"][
            self._layers
        ].to("cpu")
        return {text: found[number, 1 : len(text) + 1].clone().numpy() for number, text in enumerate(texts)}

    def own_path(self, sequences: Sequence[str]) -> Rows:
        """Return the rows by fair-esm's own batches."""
        dataset = self._dataset([str(number) for number in range(len(sequences))], sequences)
        indices = dataset.get_batch_indices(BUDGET_TOKENS, extra_toks_per_seq=1)
        return joined(self.batch([sequences[at] for at in batch]) for batch in indices)

    def one_by_one(self, sequences: Sequence[str]) -> Rows:
        """Return the rows without any padding."""
        return joined(self.batch([text]) for text in sequences)

    def by_divisor(self, sequences: Sequence[str]) -> Rows:
        """Return the rows by the original's policy: file order, the largest divisor up to the cap, padded."""
        size = max(size for size in range(1, CAP + 1) if len(sequences) % size == 0)
        return joined(self.batch(sequences[at : at + size]) for at in range(0, len(sequences), size))


def joined(parts: Iterable[Rows]) -> Rows:
    """Return all rows in one mapping."""
    return {text: rows for part in parts for text, rows in part.items()}


def longest_first(sequences: Sequence[str]) -> list[list[str]]:
    """Cut sequences into batches of at most the budget."""
    batches: list[list[str]] = [[]]
    used = 0
    for text in sorted(sequences, key=len, reverse=True):
        if batches[-1] and used + len(text) + ENDS > BUDGET_TOKENS:
            batches.append([])
            used = 0
        batches[-1].append(text)
        used += len(text) + ENDS
    return batches


def ours(encoder: EsmEncoder, batches: Sequence[Sequence[str]]) -> Rows:
    """Return the rows by the packed forward pass."""
    found: Rows = {}
    for batch in batches:
        rows_RD = encoder([tokenize(text) for text in batch]).numpy()
        ends = np.cumsum([len(text) for text in batch])
        found |= {text: rows_RD[end - len(text) : end].copy() for text, end in zip(batch, ends, strict=True)}
    return found


def product(
    checkpoint: EsmCheckpoint, policy: str, sequences: Sequence[str], precision: str = "fp32"
) -> Callable[[], Rows]:
    """Return a function that embeds by the engine as a task of the stage does: reading, computing, writing behind."""
    recipe = EmbeddingRecipe("", checkpoint.architecture.layers, "chain", precision, "fp32")
    engine = Engine(checkpoint, recipe, EngineSettings(policy, cap=4, budget=BUDGET_TOKENS, device="cpu"))

    def run() -> Rows:
        found: Rows = {}
        lengths_N = np.array([len(text) for text in sequences])

        def keep(made: Embedding) -> None:
            found[made.text] = made.rows_LD.copy()

        for outcome in engine.run(lengths_N, lambda wanted: [sequences[at] for at in wanted], keep):
            assert outcome.reason is None
        return found

    return run


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of this process."""
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


def gemm_gflops(rows: int, dim: int) -> dict[str, float]:
    """Return the machine's rate for a large square product, and for the model's own products through its own layers."""
    from pipeline.encoder.forward.linear import TorchLinear, choose_linear

    weights = [
        (torch.randn(o, i), torch.randn(o)) for o, i in ((3 * dim, dim), (dim, dim), (4 * dim, dim), (dim, 4 * dim))
    ]
    kind = choose_linear(weights, rows, rows)[0]
    square = torch.randn(2048, 2048)
    layer = kind(square, torch.zeros(len(square)))
    ways = (lambda: square @ square, lambda: square.numpy() @ square.numpy(), lambda: layer(square))
    fastest = min(seconds(way) for way in ways for _ in range(3))  # some are half as fast on some processors
    best = {"square_gflops": 2 * 2048**3 / fastest / 1e9}
    flops = sum(2 * rows * weight.numel() for weight, _ in weights)
    for name, maker in (("own_shapes_gflops", kind), ("own_shapes_torch_gflops", TorchLinear)):
        layers = [(maker(weight, bias), torch.randn(rows, weight.shape[1])) for weight, bias in weights]
        spent = min(seconds(lambda layers=layers: [layer(x) for layer, x in layers]) for _ in range(9))
        best[name] = flops / spent / 1e9
    return {name: round(rate, 1) for name, rate in best.items()}


def lowest_cosine(found: Rows, wanted: Rows) -> float:
    """Return the lowest cosine between residues of both sides."""
    assert found.keys() == wanted.keys()
    lowest = 1.0
    for text, rows_LD in wanted.items():
        assert len(text) == len(rows_LD)
        assert found[text].shape == rows_LD.shape
        one, two = found[text].astype(np.float64), rows_LD.astype(np.float64)
        cosine = (one * two).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(two, axis=1)
        lowest = min(lowest, float(cosine.min()))
    return lowest


def largest_difference(encoder: EsmEncoder, batches: Sequence[Sequence[str]], wanted: Rows) -> float:
    """Return how much a result changes with its batch: alone, in two shuffles, in reverse."""
    random = np.random.default_rng(0)
    texts = [text for batch in batches for text in batch]
    shuffles = [[texts[at] for at in random.permutation(len(texts))] for _ in range(2)]
    compositions = ([[text] for text in texts], [[*one[:7]] for one in shuffles], [batch[::-1] for batch in batches])
    found = [ours(encoder, composition) for composition in compositions]
    return max(float(np.abs(rows - wanted[text]).max()) for part in found for text, rows in part.items())


def work_flops(sequences: Iterable[str], layers: int, dim: int) -> float:
    """Return the floating-point operations of the linear layers for tokens without padding."""
    return sum(2.0 * 12 * dim * dim * layers * (len(text) + ENDS) for text in sequences)


def spread(theirs: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Return how many times one side's seconds are the other's, turn by turn."""
    ratios = [one / other for one, other in zip(theirs, base, strict=False)]
    found = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    return {name: round(ratio, 2) for name, ratio in found.items()}


def measure(folder: Path, runs: int, path: Path, shape: str) -> dict[str, object]:
    """Compare, time in turns, and return the figures."""
    all_chains = chains(folder)
    unique = sorted(set(all_chains))
    batches = longest_first(unique)
    reference = FairEsm(path, shape)
    checkpoint = load_esm_checkpoint(path)
    layers, dim = checkpoint.architecture.layers, checkpoint.architecture.dim
    encoder = EsmEncoder(checkpoint, layer=layers, precision="fp32", device=torch.device("cpu"))
    sides: dict[str, Callable[[], Rows]] = {
        "ours": product(checkpoint, "tokens", unique),
        "fair_esm": lambda: reference.own_path(unique),
    }
    if shape == WHOLE:
        sides |= {
            "ours, divisor 4": product(checkpoint, "divisor", unique),
            "divisor 32": lambda: reference.by_divisor(all_chains),
            "one by one": lambda: reference.one_by_one(unique),
        }
    if bf16_products_here():
        sides["ours, bf16"] = product(checkpoint, "tokens", unique, BF16_PRODUCTS)
    wanted, found = reference.own_path(unique), sides["ours"]()
    cosine = lowest_cosine(found, wanted)
    cosine_bf16 = lowest_cosine(sides["ours, bf16"](), found) if "ours, bf16" in sides else None
    spent: dict[str, list[float]] = {name: [] for name in sides}
    rates = [gemm_gflops(1024, dim)]
    for number in range(runs):
        for name, work in sides.items():
            if number == 0 or name not in ("divisor 32", "one by one"):  # which are for show, and slow
                spent[name].append(seconds(work))
        rates.append(gemm_gflops(1024, dim))
    residues = sum(map(len, unique))
    gemm = {name: statistics.median(rate[name] for rate in rates) for name in rates[0]}
    achieved = work_flops(unique, layers, dim) / statistics.median(spent["ours"]) / 1e9
    ratios = {name: spread(spent[name], spent["ours"]) for name in sides if name != "ours"}
    return {
        "what": f"embedding {len(unique)} unique sequences, {layers} layers of {dim}, CPU time of one thread",
        "sequences": len(unique),
        "chains": len(all_chains),
        "residues": residues,
        "runs": runs,
        "residues_per_cpu_s": {name: round(residues / statistics.median(one), 1) for name, one in spent.items()},
        "ratio": ratios,
        "gemm": gemm,
        "fraction_of_square_gemm": round(achieved / gemm["square_gflops"], 3),
        "fraction_of_own_shapes_gemm": round(achieved / gemm["own_shapes_gflops"], 3),
        "min_token_cosine": cosine,
        "min_token_cosine_of_bf16_to_fp32": cosine_bf16,
        "bf16_over_fp32": spread(spent["ours"], spent["ours, bf16"]) if "ours, bf16" in spent else None,
        "largest_difference_over_batches": largest_difference(encoder, batches, found),
        "reach": {"fair_esm": REACH.get(shape), "bf16 over fp32": REACH_BF16},
        "torch": torch.__version__,
    }  # fmt: skip


def main() -> int:
    """Measure with random weights and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=SHARED)
    parser.add_argument("--shape", choices=SHAPES, default=WHOLE)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not any(options.folder.glob("*.pdb")):
        print(f"no PDB files in {options.folder}: nothing was measured", file=sys.stderr)
        return 1
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "esm2_random.pt"
        write_random_checkpoint(path, *SHAPES[options.shape], HEADS)
        result = measure(options.folder, options.runs, path, options.shape)
    rates, ratios = result["residues_per_cpu_s"], result["ratio"]
    print(f"{result['what']}, {options.runs} runs\n{'':16}{'residues/CPU s':>16}{'ours is':>10}")
    for side, rate in rates.items():
        print(f"{side:16}{rate:>16.0f}" + (f"{ratios[side]['median']:>9.2f}x" if side in ratios else ""))
    print(json.dumps(result))
    write(options.out, result)
    cosine, difference = result["min_token_cosine"], result["largest_difference_over_batches"]
    cosine_bf16 = result["min_token_cosine_of_bf16_to_fp32"]
    close = cosine >= REACH_COSINE and (cosine_bf16 is None or cosine_bf16 >= REACH_BF16_COSINE)
    return 0 if close and difference == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
