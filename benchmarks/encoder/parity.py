"""Compare our rows with those of each encoder's reference: every family, several shapes, in fp32 and in bf16.

    python benchmarks/encoder/parity.py [--only FAMILY …] [--out FILE]

Weights are random, in each family's own files: read by our loader on one side, by the reference's on the other. That is
fair-esm for ESM-2, ESM-1b and ESM-1v, transformers for its models, and for ESM C, whose authors' package cannot live
beside fair-esm, the model written out plainly. Our rows are of one packed batch, or of one that is padded as on a card
where a model is transformers' own; theirs are of one sequence at a time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.circumstances import write
from pipeline.encoder.checkpoints.checkpoint_files import ESM1B, ESMC
from pipeline.encoder.checkpoints.esm_checkpoint import Architecture, load_esm_checkpoint
from pipeline.encoder.checkpoints.synth import write_random_checkpoint, write_random_relative
from pipeline.encoder.embedding_recipe import BF16_PRODUCTS, LETTERS, tokenize
from pipeline.encoder.engine.encoder_source import OwnForward
from pipeline.encoder.engine.hugging_face import HuggingFace
from pipeline.encoder.forward.esm2 import EsmEncoder
from pipeline.encoder.forward.linear import bf16_products_here
from pipeline.encoder.forward.parity import Reference, sample_sequences
from tests.encoder.own import drawn
from tests.encoder.test_hugging_face import prot_t5, saprot

Rows = list[NDArray[np.float64]]
Shape = tuple[int, int, int]  # layers, width, heads
Ours = Callable[[str, Sequence[str]], Sequence[torch.Tensor]]  # a precision and sequences → the rows of each
CPU = torch.device("cpu")
SHORT, LONG = 1, 1022  # residues: the least there is, and the most that ESM-1b takes
READABLE = "ACDEFGHIKLMNPQRSTVWYX"  # by the tokenisers that come with these
REACH, REACH_BF16 = 0.99999, 0.999  # of a token in fp32, of a sequence in bf16
NARROW, WIDE = ((3, 32, 4), (12, 480, 20), (2, 640, 20)), (2, 1280, 20)


@dataclass(frozen=True)
class Family:
    """Encoders of one kind: their shapes, and what makes both sides of one in a folder."""

    shapes: Sequence[Shape]
    sides: Callable[[Path, Shape], tuple[Ours, Callable[[str], torch.Tensor]]]
    letters: str = LETTERS
    products: bool = True  # may have bf16 in its products alone


def fair_esm(path: Path) -> Callable[[str], torch.Tensor]:
    """Return the rows of a sequence, by fair-esm's own loader, tokeniser and model."""
    import esm

    with torch.serialization.safe_globals([argparse.Namespace]):
        data = torch.load(path, weights_only=True)
    model, alphabet = esm.pretrained.load_model_and_alphabet_core(path.stem, data)
    convert, layer = alphabet.get_batch_converter(), model.eval().num_layers

    def rows(text: str) -> torch.Tensor:
        _, _, token_1T = convert([("", text)])
        return model(token_1T, repr_layers=[layer])["representations"][layer][0, 1:-1]

    return rows


def packed(path: Path) -> Ours:
    """Return our rows of sequences, by the packed encoder of a file."""
    checkpoint = load_esm_checkpoint(path)

    def rows(precision: str, texts: Sequence[str]) -> Sequence[torch.Tensor]:
        encoder = EsmEncoder(checkpoint, layer=checkpoint.architecture.layers, precision=precision, device=CPU)
        return encoder([tokenize(text) for text in texts]).split([*map(len, texts)])

    return rows


def esm2(folder: Path, shape: Shape) -> Any:
    write_random_checkpoint(path := folder / "esm2_random.pt", *shape)
    return packed(path), fair_esm(path)


def esm1(folder: Path, shape: Shape, *, norm_before: bool) -> Any:
    architecture = Architecture(*shape, token_dropout=True, family=ESM1B, positions=1024, norm_before=norm_before)
    write_random_relative(path := folder / "esm1_random.pt", architecture)
    return packed(path), fair_esm(path)


def esmc(folder: Path, shape: Shape) -> Any:
    write_random_relative(path := folder / "esmc_random.pth", Architecture(*shape, token_dropout=False, family=ESMC))
    theirs = Reference(load_esm_checkpoint(path), shape[0], CPU)
    return packed(path), lambda text: torch.from_numpy(theirs([text])[0])


def prot_t5_sides(folder: Path, shape: Shape) -> Any:
    layers, width, heads = shape
    sizes = {"num_layers": layers, "d_model": width, "num_heads": heads, "d_kv": width // heads, "d_ff": 4 * width}
    return transformers_sides(prot_t5(folder / "t5", **sizes), "{} ", "T5EncoderModel", slice(0, -1))


def esm_model_sides(folder: Path, shape: Shape) -> Any:
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    sizes = dict(zip(names, shape, strict=True)) | {"intermediate_size": 4 * shape[1]}
    return transformers_sides(saprot(folder / "esm", **sizes), "{}#", "AutoModel", slice(1, -1))


def transformers_sides(folder: Path, residue: str, kind: str, residues: slice) -> Any:
    """Return our encoder of a folder of theirs, and theirs with its own tokeniser."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    encoder = HuggingFace(folder, residue=residue)
    model = getattr(transformers, kind).from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def rows(text: str) -> torch.Tensor:
        coded = tokenizer("".join(residue.format(letter) for letter in text), return_tensors="pt")
        return model(**coded).last_hidden_state[0, residues]

    def ours(precision: str, texts: Sequence[str]) -> Sequence[torch.Tensor]:
        forward = OwnForward(encoder, kind, layer=encoder.layers, precision=precision, device=CPU)
        return forward.together([forward.tokenize(text) for text in texts])

    return ours, rows


FAMILIES = {
    "ESM-2": Family((*NARROW, WIDE), esm2),
    "ESM-1b": Family((*NARROW, WIDE), partial(esm1, norm_before=True)),
    "ESM-1v": Family((*NARROW, WIDE), partial(esm1, norm_before=False)),
    "ESM C": Family(((3, 64, 1), (30, 64, 1), (2, 960, 15), (2, 1152, 18)), esmc),
    "T5EncoderModel": Family(((2, 24, 3), (6, 512, 8), (2, 1024, 32)), prot_t5_sides, READABLE, products=False),
    "EsmModel": Family(((2, 32, 4), (12, 480, 20), (2, 1280, 20)), esm_model_sides, READABLE, products=False),
}


def compared(family: Family, shape: Shape, texts: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return how close our rows come to the reference's in each precision that there is."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        ours, reference = family.sides(Path(folder), shape)
        wanted = [reference(text).double().numpy() for text in texts]
        found = {}
        for precision in ("fp32", "bf16", *([BF16_PRODUCTS] if family.products and bf16_products_here() else [])):
            found[precision] = closeness([rows_LD.double().numpy() for rows_LD in ours(precision, texts)], wanted)
        return found


def closeness(found: Rows, wanted: Rows) -> dict[str, float]:
    """Return the lowest cosine of a token and of a sequence, and by how much of its length a token's row is off."""
    pairs = [*zip(found, wanted, strict=True)]
    off = (np.linalg.norm(mine - theirs, axis=1) / np.linalg.norm(theirs, axis=1) for mine, theirs in pairs)
    return {
        "token": min(cosine(mine, theirs) for mine, theirs in pairs),
        "sequence": min(cosine(mine.reshape(1, -1), theirs.reshape(1, -1)) for mine, theirs in pairs),
        "relative": max(float(off_L.max()) for off_L in off),
    }


def cosine(mine_LD: NDArray[np.float64], theirs_LD: NDArray[np.float64]) -> float:
    """Return the lowest cosine of two rows."""
    norms_L = np.linalg.norm(mine_LD, axis=1) * np.linalg.norm(theirs_LD, axis=1)
    return float(((mine_LD * theirs_LD).sum(1) / norms_L).min())


def of_all(shapes: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the worst of a family's shapes, in each precision."""
    worst = {"token": min, "sequence": min, "relative": max}
    return {
        precision: {name: choose(shape[precision][name] for shape in shapes) for name, choose in worst.items()}
        for precision in shapes[0]
    }


def main() -> int:
    """Compare every shape of every family; fail where a row is not the reference's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # fair-esm: there is no regression for contacts
    texts = [*sample_sequences(), *drawn(SHORT, LONG)]
    families, reached = {}, True
    for name in options.only:
        family = FAMILIES[name]
        readable = [text for text in texts if set(text) <= set(family.letters)]
        found = []
        for shape in family.shapes:
            found.append(compared(family, shape, readable))
            for precision, close in found[-1].items():
                told = "{token:.9f} of a token, {sequence:.9f} of a sequence, {relative:.1e} off".format(**close)
                print(f"{name:15}{shape!s:>14} {precision:14} {told}", flush=True)
        families[name] = {"shapes": ["{} × {}".format(*shape) for shape in family.shapes], **of_all(found)}
        reached &= families[name]["fp32"]["token"] >= REACH and families[name]["bf16"]["sequence"] >= REACH_BF16
    what = f"rows of {len(texts)} sequences of {SHORT} to {LONG} residues, random weights, against the references"
    write(options.out, {"what": what, "families": families, "torch": torch.__version__})
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
