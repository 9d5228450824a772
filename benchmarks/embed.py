"""Embed a FASTA file, the whole command, against Hugging Face's SDPA sorted by length and fair-esm's own batches.

    python benchmarks/embed.py [--sequences 200] [--layers 12] [--dim 480] [--rounds 2] [--save]
    python benchmarks/embed.py --first [--layers 33] [--dim 1280] [--save]

All sides read the same weights from disk (random ones, in fair-esm's format and in Hugging Face's), embed the same
sequences in fp32 with batches of 4,096 tokens, and write each sequence's rows. Ours is `pipeline submit embed
--follow` into an empty cache. fair-esm does what its extract.py does; Hugging Face is a script that sorts by length.
In the end every token is compared with fair-esm's. `--first` measures what a large encoder costs before and with its
first sequence, in an empty cache, and a second run with another one.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import Cost, Row, Spread, by_turns, cpu, itself, options, pipeline, publish, run
from pipeline.structures.synthetic import draw_sequence

if TYPE_CHECKING:
    import torch

    Rows = Iterator[tuple[str, torch.Tensor]]  # a sequence, and its rows in the host's memory
    Side = Callable[[Sequence[str]], Rows]

START = "Of few sequences: starting, and the check against fair-esm, take a third of ours."
TOKENS, ENDS, HEADS = 4096, 2, 20
HUGGING_FACE, FAIR_ESM, COSINE = 1.25, 2.2, 0.99999
FIRST_S, SECOND_S = 20.0, 10.0
CONFIG = """\
data: {source: fasta, path: data.fasta}
embed: {weights: ../esm2_weights.pt, precision: fp32, storage: fp32}
cluster: {executor: local}
"""
NAMES = {  # of a layer, fair-esm's and Hugging Face's
    "self_attn_layer_norm": "attention.LayerNorm", "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key", "self_attn.v_proj": "attention.self.value",
    "self_attn.out_proj": "attention.output.dense", "final_layer_norm": "LayerNorm",
    "fc1": "intermediate.dense", "fc2": "output.dense",
}  # fmt: skip


def draw(count: int, middle: int = 250, longest: int = 1000, seed: int = 0) -> list[str]:
    """Return sequences of realistic lengths."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(np.log(middle), 0.6, count), 20, longest).astype(int)
    return [draw_sequence(random, int(length)) for length in lengths]


# ---- the peers ----


def fair_esm(weights: Path, device: str = "cpu") -> Side:
    """Return fair-esm as its extract.py runs it: the logits are computed too, which cannot be turned off."""
    import esm
    import torch

    with torch.serialization.safe_globals([argparse.Namespace]):
        model, alphabet = esm.pretrained.load_model_and_alphabet_local(str(weights))
    model, layers = model.eval().to(device), model.num_layers
    convert = alphabet.get_batch_converter()

    @torch.no_grad()
    def rows(sequences: Sequence[str]) -> Rows:
        data = esm.FastaBatchedDataset([str(number) for number in range(len(sequences))], sequences)
        for indices in data.get_batch_indices(TOKENS, extra_toks_per_seq=1):
            _, texts, tokens = convert([data[at] for at in indices])
            found = model(tokens.to(device), repr_layers=[layers])["representations"][layers].cpu()
            yield from ((text, found[at, 1 : len(text) + 1].clone()) for at, text in enumerate(texts))

    return rows


def hugging_face(folder: Path, device: str = "cpu", dtype: str = "float32") -> Side:
    """Return transformers' EsmModel with SDPA, batches sorted by length."""
    import torch
    from transformers import EsmModel, EsmTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = EsmTokenizer.from_pretrained(folder)
    model = EsmModel.from_pretrained(folder, attn_implementation="sdpa", add_pooling_layer=False)
    model = model.eval().to(device, getattr(torch, dtype))

    @torch.inference_mode()
    def rows(sequences: Sequence[str]) -> Rows:
        for batch in padded(sequences):
            tokens = tokenizer(batch, return_tensors="pt", padding=True).to(device)
            found = model(**tokens).last_hidden_state.cpu()
            yield from ((text, found[at, 1 : len(text) + 1].clone()) for at, text in enumerate(batch))

    return rows


def packed(weights: Path, device: str, precision: str) -> Side:
    """Return our forward pass over packed batches, longest first; `gpu.py` times it without the command around it."""
    import torch

    from pipeline.encoder.embedding_recipe import tokenize
    from pipeline.encoder.esm2 import EsmEncoder
    from pipeline.encoder.esm_checkpoint import load_esm_checkpoint

    checkpoint = load_esm_checkpoint(weights)
    layers = checkpoint.architecture.layers
    encoder = EsmEncoder(checkpoint, layer=layers, precision=precision, device=torch.device(device))

    def rows(sequences: Sequence[str]) -> Rows:
        batch: list[str] = []
        for text in [*sorted(sequences, key=len, reverse=True), ""]:
            if batch and (not text or sum(len(one) + ENDS for one in (*batch, text)) > TOKENS):
                found_RD = encoder([tokenize(one) for one in batch]).cpu()
                yield from zip(batch, found_RD.split([*map(len, batch)]), strict=True)
                batch = []
            batch.append(text)

    return rows


def padded(sequences: Sequence[str]) -> Iterator[list[str]]:
    """Cut sequences, sorted by length, into batches whose padded size is at most the budget."""
    batch: list[str] = []
    for text in sorted(sequences, key=len):
        if batch and (len(text) + ENDS) * (len(batch) + 1) > TOKENS:
            yield batch
            batch = []
        batch.append(text)
    yield batch


def convert(weights: str, folder: str) -> None:
    """Write fair-esm's checkpoint as a folder of Hugging Face's, with its tokenizer."""
    from transformers import EsmConfig, EsmModel, EsmTokenizer

    from pipeline.encoder.embedding_recipe import VOCABULARY
    from pipeline.encoder.esm_checkpoint import load_esm_checkpoint

    checkpoint = load_esm_checkpoint(Path(weights))
    shape = checkpoint.architecture
    model = EsmModel(
        EsmConfig(
            vocab_size=len(VOCABULARY), hidden_size=shape.dim, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, intermediate_size=4 * shape.dim, pad_token_id=VOCABULARY.index("<pad>"),
            mask_token_id=VOCABULARY.index("<mask>"), position_embedding_type="rotary", token_dropout=True,
            emb_layer_norm_before=False, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layer_norm_eps=1e-5,
        ),
        add_pooling_layer=False,
    )  # fmt: skip
    theirs = model.state_dict()
    for name, tensor in checkpoint.tensors.items():
        target = name.replace("embed_tokens", "embeddings.word_embeddings")
        target = target.replace("emb_layer_norm_after", "encoder.emb_layer_norm_after")
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            part, kind = rest.rsplit(".", 1)
            target = f"encoder.layer.{number}.{NAMES[part]}.{kind}"
        theirs[target].copy_(tensor)  # the model's own memory; an unknown name is a KeyError
    model.save_pretrained(folder)
    (vocabulary := Path(folder) / "vocab.txt").write_text("\n".join(VOCABULARY))
    EsmTokenizer(str(vocabulary)).save_pretrained(folder)


def texts_of(fasta: str) -> list[str]:
    """Return the sequences of a FASTA file."""
    return Path(fasta).read_text().splitlines()[1::2]


def peer(name: str, weights: str, fasta: str, out: str) -> None:
    """Embed a FASTA file, and write each sequence's rows as a file."""
    side = (fair_esm if name == "fair_esm" else hugging_face)(Path(weights))
    shutil.rmtree(out, ignore_errors=True)
    Path(out).mkdir(parents=True)
    for number, (_, rows_LD) in enumerate(side(texts := texts_of(fasta))):
        np.save(f"{out}/{number}.npy", rows_LD.numpy())
    assert number + 1 == len(texts)


# ---- what is measured ----


def ours(folder: Path) -> Cost:
    """Embed the data set into an empty cache."""
    for name in ("cache", "runs"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return run(pipeline("submit", "--stage", "embed", "--follow"), folder)


def first_sequence(layers: int, dim: int, rounds: int) -> list[Row]:
    """Embed one sequence with a new checkpoint, then another one."""
    first, second = list[Cost](), list[Cost]()
    with tempfile.TemporaryDirectory() as scratch:
        root, project = Path(scratch), Path(scratch) / "project"
        project.mkdir()
        (project / "pipeline.yaml").write_text(CONFIG)
        weights = root / "esm2_weights.pt"
        sizes = ("--layers", str(layers), "--dim", str(dim), "--heads", str(HEADS))
        run(pipeline("weights", "synth", *sizes, "--out", weights), root)
        texts = draw(2, middle=30, longest=40)  # what they cost themselves is less than a second
        for _ in range(rounds):
            (project / "data.fasta").write_text(f">s0\n{texts[0]}\n")
            first.append(ours(project))
            (project / "data.fasta").write_text(f">s0\n{texts[0]}\n>s1\n{texts[1]}\n")
            second.append(run(pipeline("submit", "--stage", "embed", "--follow"), project))
    costs = Spread.of(cpu(first)), Spread.of(cpu(second))
    peak_bytes = max(cost.peak_bytes for cost in (*first, *second))
    what = f"the first sequence of a new encoder, {layers} × {dim}, fp32, CPU time of the process tree; a second run"
    return [
        Row("embed first", what, "", f"≤ {FIRST_S:.0f} s; ≤ {SECOND_S:.0f} s",
            f"{costs[0]:.1f s}; {costs[1]:.1f s}; {peak_bytes / 2**30:.1f} GiB with the mapped weights",
            "embed.py --first", "" if costs[0].median <= FIRST_S and costs[1].median <= SECOND_S else START),
    ]  # fmt: skip


def lowest_cosine(folder: str, weights: str, fasta: str) -> None:
    """Print the lowest cosine of a token of ours to fair-esm's."""
    from pipeline.store.cache_folder import CacheFolder

    store = CacheFolder(Path(folder) / "cache").kind("embed")
    found = {record.meta["text"]: record.arrays["rows"] for record in store.read(list(store.keys()))}
    texts = texts_of(fasta)
    assert found.keys() == set(texts)
    print(min(cosine(found[text], rows_LD.numpy()) for text, rows_LD in fair_esm(Path(weights))(texts)))


def cosine(ours_LD: NDArray[Any], theirs_LD: NDArray[Any]) -> float:
    """Return the lowest cosine of two rows."""
    assert ours_LD.shape == theirs_LD.shape
    one, two = ours_LD.astype(np.float64), theirs_LD.astype(np.float64)
    return float(((one * two).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(two, axis=1)).min())


def products() -> None:
    """Print the rate of large matrix products, in operations a CPU second."""
    import torch

    square, fastest = torch.randn(2048, 2048), float("inf")
    for _ in range(8):
        begun = time.process_time()
        square @ square
        fastest = min(fastest, time.process_time() - begun)
    print(2 * 2048**3 / fastest)


PARTS: dict[str, Callable[..., None]] = {
    "convert": convert,
    "peer": peer,
    "cosine": lowest_cosine,
    "products": products,
}


def main() -> int:
    """Time all sides by turns, compare, and print the ratios."""
    typed = options(
        str(__doc__), 2,
        sequences={"type": int, "default": 200, "help": "sequences (default: 200)"},
        layers={"type": int, "default": None, "help": "layers (default: 12; with --first 33)"},
        dim={"type": int, "default": None, "help": "width (default: 480, as the 35M model; with --first 1280)"},
        first={"action": "store_true", "help": "measure the first sequence of a large encoder"},
    )  # fmt: skip
    typed.layers, typed.dim = typed.layers or (33 if typed.first else 12), typed.dim or (1280 if typed.first else 480)
    if typed.part:
        name, *words = typed.part
        PARTS[name](*words)
        return 0
    if typed.first:
        return publish(first_sequence(typed.layers, typed.dim, typed.rounds), save=typed.save)
    with tempfile.TemporaryDirectory() as scratch:
        root, project = Path(scratch), Path(scratch) / "project"
        project.mkdir()
        (project / "pipeline.yaml").write_text(CONFIG)
        fasta, weights, folder = project / "data.fasta", root / "esm2_weights.pt", root / "hugging_face"
        texts = draw(typed.sequences)
        fasta.write_text("".join(f">s{number}\n{text}\n" for number, text in enumerate(texts)))
        sizes = ("--layers", str(typed.layers), "--dim", str(typed.dim), "--heads", str(HEADS))
        run(pipeline("weights", "synth", *sizes, "--out", weights), root)
        run(itself(__file__, "--part", "convert", weights, folder))
        peers = {"hugging_face": folder, "fair_esm": weights}
        ways = {"ours": partial(ours, project)} | {
            name: partial(run, itself(__file__, "--part", "peer", name, place, fasta, root / "rows" / name))
            for name, place in peers.items()
        }
        spent = {name: cpu(costs) for name, costs in by_turns(ways, typed.rounds, warm=False).items()}
        lowest = float(run(itself(__file__, "--part", "cosine", project, weights, fasta)).out.split()[-1])
        rate = float(run(itself(__file__, "--part", "products")).out.split()[-1])
    operations = 24.0 * typed.dim**2 * typed.layers * sum(len(text) + ENDS for text in texts)
    share = operations / Spread.of(spent["ours"]).median / rate
    faster = {name: Spread.ratio(spent[name], spent["ours"]) for name in peers}
    what = f"embed {len(texts)} sequences, {typed.layers} × {typed.dim}, fp32, CPU time of the process tree"
    command = "embed.py"
    rows = [
        Row("embed", f"{what}; {share:.0%} of the rate of matrix products; lowest cosine of a token",
            "Hugging Face SDPA, sorted by length; fair-esm's own batches; fair-esm in fp32",
            f"≥ {HUGGING_FACE}×; ≥ {FAIR_ESM}× faster; ≥ {COSINE}",
            f"{faster['hugging_face']:.2f×}; {faster['fair_esm']:.2f×}; {lowest:.13f}", command,
            "" if faster["hugging_face"].median >= HUGGING_FACE and faster["fair_esm"].median >= FAIR_ESM else START),
    ]  # fmt: skip
    code = publish(rows, save=typed.save)
    return code if lowest >= COSINE else 1


if __name__ == "__main__":
    sys.exit(main())
