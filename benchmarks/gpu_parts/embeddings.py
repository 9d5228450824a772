"""Embeddings on the card: ours in half precision against what else there is, the 650M model at random weights.

Against fair-esm in fp32, Hugging Face's SDPA, our own layers around torch's flex attention, and FAESM, each where it is
installed. All sides encode the same sequences in batches of 4,096 tokens and end with each residue's row in host
memory. Lengths are drawn around 300 residues. Beside them: the card's rate of large matrix products, and the gate that
every encoder must pass before it is used.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_parts import cards
from benchmarks.gpu_parts.day import Asking, Cases, Part, Row, lacking
from pipeline.encoder.checkpoints.esm_checkpoint import as_dtype, load_esm_checkpoint
from pipeline.encoder.checkpoints.synth import write_random_checkpoint
from pipeline.encoder.embedding_recipe import ENDS, VOCABULARY, tokenize
from pipeline.encoder.forward.esm2 import EsmEncoder, SequenceBounds
from pipeline.encoder.forward.parity import check_parity
from pipeline.structures.synthetic import draw_sequence

BUDGET_TOKENS = 4096
PRECISION = "fp16"
SAMPLE = 200  # sequences whose rows are compared
RUNS, CASE_S, WRITE_S = 5, 240.0, 300.0
FLEX_ON = ("cuda", "cpu", "xpu", "hpu")
NEEDED = {"fair_esm_fp32": "esm", "hugging_face_half": "transformers", "faesm_half": "faesm"}
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


FULL, SMALL = Size(33, 1280, 20, 2000, 2000), Size(2, 64, 4, 12, 60)


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


def ours(path: Path, size: Size, precision: str, device: torch.device, *, flex: bool = False) -> Side:
    """Return the packed forward pass, or the same around flex attention."""
    encoder = EsmEncoder(load_esm_checkpoint(path), layer=size.layers, precision=precision, device=device)
    if flex:
        encoder._attend = Flex(compiled=device.type not in cards.NOT_CARDS)  # noqa: SLF001 - a way that we do not offer

    def rows(sequences: Sequence[str]) -> Rows:
        for batch in packed(sequences):
            found_RD = encoder([tokenize(text) for text in batch]).cpu()
            yield from zip(batch, found_RD.split([len(text) for text in batch]), strict=True)

    return rows


class Flex:
    """Attention within packed sequences by torch's flex attention, its mask made once for all layers of a batch."""

    def __init__(self, *, compiled: bool) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        self._attend: Any = torch.compile(flex_attention, dynamic=True) if compiled else flex_attention
        self._of: SequenceBounds | None = None
        self._mask: Any = None

    def __call__(self, qkv_T3HC: torch.Tensor, bounds: SequenceBounds, room_THC: torch.Tensor) -> torch.Tensor:
        del room_THC  # it brings its own
        if self._of is not bounds:
            self._of, self._mask = bounds, self._masked(bounds, len(qkv_T3HC))
        q_1HTC, k_1HTC, v_1HTC = qkv_T3HC.permute(1, 2, 0, 3).unsqueeze(1).unbind()
        context_1HTC: torch.Tensor = self._attend(q_1HTC, k_1HTC, v_1HTC, block_mask=self._mask)
        return context_1HTC[0].transpose(0, 1)

    @staticmethod
    def _masked(bounds: SequenceBounds, tokens: int) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        starts = bounds.starts_device
        sequence_T = torch.bucketize(torch.arange(tokens, device=starts.device), starts, right=True)

        def alike(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
            return sequence_T[query] == sequence_T[key]

        return create_block_mask(alike, None, None, tokens, tokens, device=starts.device.type)


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


def hugging_face(path: Path, size: Size, precision: str, device: torch.device, *, faesm: bool = False) -> Side:
    """Return Hugging Face's model with SDPA in half precision, of the same weights, or FAESM's in its place."""
    from transformers import EsmConfig, EsmModel

    settings = EsmConfig(
        vocab_size=len(VOCABULARY), mask_token_id=VOCABULARY.index("<mask>"), pad_token_id=VOCABULARY.index("<pad>"),
        hidden_size=size.dim, num_hidden_layers=size.layers, num_attention_heads=size.heads,
        intermediate_size=4 * size.dim, position_embedding_type="rotary", token_dropout=True,
        emb_layer_norm_before=False, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layer_norm_eps=1e-5,
        attn_implementation="sdpa",
    )  # fmt: skip
    if faesm:
        from faesm.esm import FAEsmModel

        settings.use_fa = True
    model = (FAEsmModel if faesm else EsmModel)(settings, add_pooling_layer=False)
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


def side_of(name: str, path: Path, size: Size, device: torch.device) -> Side:
    """Return a side by its name."""
    if name == "fair_esm_fp32":
        return fair_esm(path, size, device)
    if name in ("hugging_face_half", "faesm_half"):
        return hugging_face(path, size, PRECISION, device, faesm=name == "faesm_half")
    return ours(path, size, PRECISION, device, flex=name == "flex_half")


SIDES = ("ours_half", "fair_esm_fp32", "hugging_face_half", "flex_half", "faesm_half")


def timed(side: Side, sequences: Sequence[str], device: torch.device) -> float:
    """Return the seconds until every row is in host memory."""
    gc.collect()
    cards.wait(device.type)
    start = time.perf_counter()
    for _ in side(sequences):
        pass
    cards.wait(device.type)
    return time.perf_counter() - start


def lowest_cosine(side: Side, reference: Side, sequences: Sequence[str]) -> float:
    """Return the lowest cosine of a sequence's rows, all as one vector, to the reference's."""
    wanted = {text: rows_LD.flatten().double() for text, rows_LD in reference(sequences)}
    return min(
        float(torch.nn.functional.cosine_similarity(rows_LD.flatten().double(), wanted[text], dim=0))
        for text, rows_LD in side(sequences)
    )


# ---- one case, in a process of its own ----


def written(case: Mapping[str, Any]) -> dict[str, Any]:
    """Write the checkpoint that all sides read."""
    size = Size(**case["size"])
    write_random_checkpoint(Path(case["path"]), size.layers, size.dim, size.heads)
    return {"path": case["path"]}


def measured(case: Mapping[str, Any]) -> dict[str, Any]:
    """Warm up, time several rounds, and return the figures of one side; where there is fair-esm, compare with it."""
    size, device, path = Size(**case["size"]), torch.device(case["device"]), Path(case["path"])
    side, sequences = side_of(case["side"], path, size, device), draw(size)
    for _ in side(sequences):  # every shape once: allocations and choices of kernels are not timed
        pass
    spent = [timed(side, sequences, device) for _ in range(case["runs"])]
    residues = sum(map(len, sequences))
    found = {
        "residues_per_s": residues / statistics.median(spent),
        "slowest_residues_per_s": residues / max(spent),
        "fastest_residues_per_s": residues / min(spent),
        "peak_bytes": cards.peak_bytes(device.type),
        "residues": residues,
        "tokens": sum(len(text) + ENDS for text in sequences),
        "flops_per_token": 24.0 * size.dim**2 * size.layers,
    }
    if case["side"] != "fair_esm_fp32" and not lacking([NEEDED["fair_esm_fp32"]]):
        sample = sequences[:: max(1, len(sequences) // SAMPLE)]
        found["min_sequence_cosine"] = lowest_cosine(side, fair_esm(path, size, device), sample)
    return found


def gate(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the gate says of each precision."""
    verdicts = {
        precision: check_parity(
            load_esm_checkpoint(Path(case["path"])), precision, case["size"]["layers"], case["device"]
        )
        for precision in ("fp32", "fp16", "bf16")
    }
    return {
        name: {"lowest": one.lowest, "threshold": one.threshold, "passed": one.passed} for name, one in verdicts.items()
    }


def products(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the card's rate for a large square product in half precision."""
    width, device = case["width"], torch.device(case["device"])
    one = torch.randn(width, width, device=device, dtype=as_dtype(PRECISION))
    spent = []
    for _ in range(10):
        cards.wait(device.type)
        start = time.perf_counter()
        for _ in range(5):
            one @ one
        cards.wait(device.type)
        spent.append((time.perf_counter() - start) / 5)
    return {"tflops": 2 * width**3 / min(spent) / 1e12}


# ---- the part ----


def run(asking: Asking) -> None:
    """Measure the sides one after another."""
    size = SMALL if asking.rehearsal else FULL
    sides = [name for name in SIDES if name not in NEEDED or not lacking([NEEDED[name]])]
    if asking.about["device"] not in FLEX_ON:
        sides.remove("flex_half")
        asking.lacks.append(f"embeddings: torch has no flex attention for {asking.about['device']}: left out")
    if all(map(asking.known, ("gate", "products", *sides))):
        return
    case = {"size": vars(size), "path": str(asking.day.scratch / "esm2_random.pt")}
    asking.ask("products", f"{__name__}:products", CASE_S, width=128 if asking.rehearsal else 8192)
    if "error" in asking.ask("checkpoint", f"{__name__}:written", WRITE_S, on_card=False, keep=False, **case):
        return
    asking.ask("ours_half", f"{__name__}:measured", CASE_S, side="ours_half", runs=RUNS, **case)
    asking.ask("gate", f"{__name__}:gate", CASE_S, **case)
    for name in sides[1:]:
        asking.ask(name, f"{__name__}:measured", CASE_S, side=name, runs=1 if asking.rehearsal else RUNS, **case)


def figures(cases: Cases) -> dict[str, Any]:
    """Return ours beside the others, and as a share of what the card multiplies."""
    sides: dict[str, Row] = {name: cases[name] for name in SIDES if name in cases}
    found: dict[str, Any] = {
        "residues_per_s": {name: side["residues_per_s"] for name, side in sides.items()},
        "min_sequence_cosine": {
            name: side["min_sequence_cosine"] for name, side in sides.items() if "min_sequence_cosine" in side
        },
        "gate": (gates := {name: one for name, one in cases.get("gate", {}).items() if isinstance(one, Mapping)}),
        "refused": sum(not one["passed"] for one in gates.values()) if gates else None,
    }
    if "ours_half" in sides:
        mine = sides["ours_half"]
        found["ratio"] = {
            name: mine["residues_per_s"] / side["residues_per_s"] for name, side in sides.items() if side is not mine
        }
        if "products" in cases:
            achieved = mine["flops_per_token"] * mine["tokens"] / mine["residues"] * mine["residues_per_s"] / 1e12
            found |= {"tflops": cases["products"]["tflops"], "share": achieved / cases["products"]["tflops"]}
    return found


PART = Part(
    "embeddings",
    "residues a second and parity of the 650M model",
    0.15,
    run,
    figures,
    likes=tuple(NEEDED.values()),
)
