"""Embed on a CUDA card: ours in fp16 against fair-esm in fp32 and Hugging Face's SDPA in fp16, 650M at random weights.

    python benchmarks/encoder/gpu_embed.py [--sequences N] [--runs N] [--precision fp16] [--out FILE]
    python benchmarks/encoder/gpu_embed.py --smoke   # a tiny model on the CPU: proves that the script runs, no more

All sides encode the same sequences in batches of 4,096 tokens and end with each residue's row in host memory. Lengths
are drawn around 300 residues. Hugging Face's side needs `transformers`; where it is absent, it is left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.circumstances import write
from pipeline.encoder.checkpoints.esm_checkpoint import as_dtype, load_esm_checkpoint
from pipeline.encoder.checkpoints.synth import write_random_checkpoint
from pipeline.encoder.embedding_recipe import ENDS, VOCABULARY, tokenize
from pipeline.encoder.forward.esm2 import EsmEncoder
from pipeline.structures.synthetic import draw_sequence

BUDGET_TOKENS = 4096
REACH = {"fair_esm_fp32": 8.0, "hugging_face_half": 1.5}
Rows = Iterator[tuple[str, torch.Tensor]]
Side = Callable[[Sequence[str]], Rows]


@dataclass(frozen=True)
class Size:
    """A model, and how much of it is measured."""

    layers: int
    dim: int
    heads: int
    sequences: int
    longest: int


FULL, SMOKE = Size(33, 1280, 20, 2000, 2000), Size(2, 64, 4, 12, 60)


def draw(size: Size) -> list[str]:
    """Return sequences of realistic lengths."""
    random = np.random.default_rng(0)
    middle = min(300, size.longest // 2)
    lengths = np.clip(np.exp(random.normal(np.log(middle), 0.6, size.sequences)), 20, size.longest).astype(int)
    return [draw_sequence(random, int(length)) for length in lengths]


def packed(sequences: Sequence[str]) -> Iterator[list[str]]:
    """Cut sequences into batches of at most the budget, the longest first."""
    batch: list[str] = []
    for text in sorted(sequences, key=len, reverse=True):
        if batch and sum(len(one) + ENDS for one in batch) + len(text) + ENDS > BUDGET_TOKENS:
            yield batch
            batch = []
        batch.append(text)
    yield batch


def padded(sequences: Sequence[str]) -> Iterator[list[str]]:
    """Cut sequences into batches whose padded size is at most the budget, the shortest first."""
    batch: list[str] = []
    for text in sorted(sequences, key=len):
        if batch and (len(text) + ENDS) * (len(batch) + 1) > BUDGET_TOKENS:
            yield batch
            batch = []
        batch.append(text)
    yield batch


def ours(path: Path, size: Size, precision: str, device: torch.device) -> Side:
    """Return the packed forward pass."""
    encoder = EsmEncoder(load_esm_checkpoint(path), layer=size.layers, precision=precision, device=device)

    def rows(sequences: Sequence[str]) -> Rows:
        for batch in packed(sequences):
            found_RD = encoder([tokenize(text) for text in batch]).cpu()
            yield from zip(batch, found_RD.split([len(text) for text in batch]), strict=True)

    return rows


def fair_esm(path: Path, size: Size, device: torch.device) -> Side:
    """Return fair-esm's own path in fp32."""
    import esm

    with torch.serialization.safe_globals([argparse.Namespace]):
        model, alphabet = esm.pretrained.load_model_and_alphabet_local(str(path))
    model = model.eval().to(device)
    convert = alphabet.get_batch_converter()

    @torch.inference_mode()
    def rows(sequences: Sequence[str]) -> Rows:
        dataset = esm.FastaBatchedDataset([str(number) for number in range(len(sequences))], sequences)
        for indices in dataset.get_batch_indices(BUDGET_TOKENS, extra_toks_per_seq=1):
            _, texts, tokens = convert([dataset[at] for at in indices])
            found = model(tokens.to(device), repr_layers=[size.layers])["representations"][size.layers].cpu()
            yield from ((text, found[at, 1 : len(text) + 1].clone()) for at, text in enumerate(texts))

    return rows


def hugging_face(path: Path, size: Size, precision: str, device: torch.device) -> Side | None:
    """Return Hugging Face's model with SDPA in half precision, of the same weights; None where it is not there."""
    try:
        from transformers import EsmConfig, EsmModel
    except ImportError as error:
        print(f"Hugging Face is left out: {error}", file=sys.stderr)
        return None
    settings = EsmConfig(
        vocab_size=len(VOCABULARY), mask_token_id=VOCABULARY.index("<mask>"), pad_token_id=VOCABULARY.index("<pad>"),
        hidden_size=size.dim, num_hidden_layers=size.layers, num_attention_heads=size.heads,
        intermediate_size=4 * size.dim, position_embedding_type="rotary", token_dropout=True,
        emb_layer_norm_before=False, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layer_norm_eps=1e-5,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = EsmModel(settings, add_pooling_layer=False)
    fill(model, path)
    model = model.eval().to(device, as_dtype(precision))

    @torch.inference_mode()
    def rows(sequences: Sequence[str]) -> Rows:
        for batch in padded(sequences):
            longest = max(map(len, batch)) + ENDS
            token_BT = np.full((len(batch), longest), VOCABULARY.index("<pad>"), np.int64)
            for at, text in enumerate(batch):
                token_BT[at, : len(text) + ENDS] = [0, *tokenize(text), VOCABULARY.index("<eos>")]
            ids = torch.from_numpy(token_BT).to(device)
            mask = (ids != VOCABULARY.index("<pad>")).long()
            found = model(input_ids=ids, attention_mask=mask).last_hidden_state.cpu()
            yield from ((text, found[at, 1 : len(text) + 1].clone()) for at, text in enumerate(batch))

    return rows


def fill(model: torch.nn.Module, path: Path) -> None:
    """Copy a checkpoint's tensors into Hugging Face's model, whatever other buffers its version has."""
    names = {
        "self_attn_layer_norm": "attention.LayerNorm", "self_attn.q_proj": "attention.self.query",
        "self_attn.k_proj": "attention.self.key", "self_attn.v_proj": "attention.self.value",
        "self_attn.out_proj": "attention.output.dense", "final_layer_norm": "LayerNorm",
        "fc1": "intermediate.dense", "fc2": "output.dense",
    }  # fmt: skip
    checkpoint = load_esm_checkpoint(path)
    theirs = model.state_dict()
    for name, tensor in checkpoint.tensors.items():
        target = name.replace("embed_tokens", "embeddings.word_embeddings")
        target = target.replace("emb_layer_norm_after", "encoder.emb_layer_norm_after")
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            part, kind = rest.rsplit(".", 1)
            target = f"encoder.layer.{number}.{names[part]}.{kind}"
        theirs[target].copy_(tensor)  # the model's own memory; an unknown name is a KeyError
    for name, buffer in theirs.items():
        if name.endswith("inv_freq"):
            buffer.copy_(checkpoint.rotary_F)


def wait(device: torch.device) -> None:
    """Wait for the card."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(side: Side, sequences: Sequence[str], device: torch.device) -> float:
    """Return the seconds until every row is in host memory."""
    gc.collect()
    wait(device)
    start = time.perf_counter()
    for _ in side(sequences):
        pass
    wait(device)
    return time.perf_counter() - start


def lowest_cosine(side: Side, reference: Side, sequences: Sequence[str]) -> float:
    """Return the lowest cosine of a sequence's rows, all as one vector, to the reference's."""
    wanted = {text: rows_LD.flatten().double() for text, rows_LD in reference(sequences)}
    return min(
        float(torch.nn.functional.cosine_similarity(rows_LD.flatten().double(), wanted[text], dim=0))
        for text, rows_LD in side(sequences)
    )


def half_gemm_tflops(device: torch.device, dtype: torch.dtype, width: int) -> float:
    """Return the card's rate for a large square product in half precision."""
    one = torch.randn(width, width, device=device, dtype=dtype)
    spent = []
    for _ in range(10):
        wait(device)
        start = time.perf_counter()
        for _ in range(5):
            one @ one
        wait(device)
        spent.append((time.perf_counter() - start) / 5)
    return 2 * width**3 / min(spent) / 1e12


def measure_side(side: Side, sequences: Sequence[str], runs: int, device: torch.device) -> dict[str, float]:
    """Warm up, time several rounds, and return the figures of one side."""
    for _ in side(sequences):  # every shape once: allocations and choices of kernels are not timed
        pass
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    spent = [timed(side, sequences, device) for _ in range(runs)]
    residues = sum(map(len, sequences))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {
        "residues_per_s": residues / statistics.median(spent),
        "slowest_residues_per_s": residues / max(spent),
        "fastest_residues_per_s": residues / min(spent),
        "peak_bytes": peak,
    }


def measure(size: Size, sequences: list[str], runs: int, precision: str, device: torch.device) -> dict[str, object]:
    """Measure all sides, one after another, and return the figures."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "esm2_random.pt"
        write_random_checkpoint(path, size.layers, size.dim, size.heads)
        sides = {
            "ours_half": ours(path, size, precision, device),
            "fair_esm_fp32": fair_esm(path, size, device),
            "hugging_face_half": hugging_face(path, size, precision, device),
        }
    found = {name: measure_side(side, sequences, runs, device) for name, side in sides.items() if side is not None}
    sample = sequences[:: max(1, len(sequences) // 200)]
    cosine = {
        name: lowest_cosine(side, sides["fair_esm_fp32"], sample)
        for name, side in sides.items()
        if side is not None and name != "fair_esm_fp32" and sides["fair_esm_fp32"] is not None
    }
    mine = found["ours_half"]["residues_per_s"]
    gemm = half_gemm_tflops(device, as_dtype(precision), 8192 if device.type == "cuda" else 128)
    tokens = sum(len(text) + ENDS for text in sequences) / sum(map(len, sequences))
    achieved = 24.0 * size.dim**2 * size.layers * tokens * mine / 1e12
    return {
        "what": f"embedding {len(sequences)} sequences, {size.layers} layers of {size.dim}, {precision}, host to host",
        "residues": sum(map(len, sequences)),
        "runs": runs,
        "sides": found,
        "ratio": {name: mine / side["residues_per_s"] for name, side in found.items() if name != "ours_half"},
        "reach": REACH,
        "min_sequence_cosine_to_fp32": cosine,
        "half_gemm_tflops": gemm,
        "fraction_of_half_gemm": achieved / gemm,
    }


def card(device: torch.device) -> dict[str, str]:
    """Return what was measured on."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = "unknown"
    return {"card": torch.cuda.get_device_name(device), "driver": driver, "torch": torch.__version__}


def show(result: dict[str, object]) -> None:
    """Print the figures as a table."""
    print(f"{result['what']}\n{'':20}{'residues/s':>12}{'ours is':>10}{'peak MiB':>10}")
    for name, side in result["sides"].items():
        ratio = f"{result['ratio'][name]:.2f}x" if name in result["ratio"] else ""
        print(f"{name:20}{side['residues_per_s']:>12.0f}{ratio:>10}{side['peak_bytes'] / 2**20:>10.0f}")
    print(json.dumps(result))


def main() -> int:
    """Measure on the card, or prove on the CPU that the script runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=FULL.sequences)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--precision", choices=["fp16", "bf16"], default="fp16")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU; nothing is written")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.smoke:
        show(measure(SMOKE, draw(SMOKE), 1, options.precision, torch.device("cpu")))
        print("smoke: the script runs; these figures mean nothing and were not written")
        return 0
    if not torch.cuda.is_available():
        print("no CUDA card here: nothing was measured (--smoke runs a tiny model on the CPU)", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    size = Size(FULL.layers, FULL.dim, FULL.heads, options.sequences, FULL.longest)
    result = measure(size, draw(size), options.runs, options.precision, device) | card(device)
    show(result)
    write(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
