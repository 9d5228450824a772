"""Peak memory of batches of 4,096 tokens at several lengths, ours and fair-esm's, each in a process of its own.

    python benchmarks/encoder/embed_memory.py [--out FILE]

Random weights, 12 layers of width 480. The peak is the process's largest resident size, weights and libraries included.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.circumstances import write

LENGTHS = (256, 512, 1024, 2048, 4096)
TOKENS = 4096
LAYERS, DIM, HEADS = 12, 480, 20
REACH = 1.25  # the largest peak over the smallest


def sequences(length: int) -> list[str]:
    """Return the sequences of a batch; a length counts the two marks."""
    import numpy as np

    from pipeline.structures.synthetic import draw_sequence

    return [draw_sequence(np.random.default_rng(seed), length - 2) for seed in range(TOKENS // length)]


def run(side: str, path: Path, length: int) -> None:
    """Encode one batch twice in this process, and print its peak."""
    import torch

    torch.set_num_threads(1)
    texts = sequences(length)
    if side == "ours":
        from pipeline.encoder.checkpoints.esm_checkpoint import load_esm_checkpoint
        from pipeline.encoder.embedding_recipe import tokenize
        from pipeline.encoder.forward.esm2 import EsmEncoder

        encoder = EsmEncoder(load_esm_checkpoint(path), layer=LAYERS, precision="fp32", device=torch.device("cpu"))
        for _ in range(2):
            assert torch.isfinite(encoder([tokenize(text) for text in texts])).all()
    else:
        import esm

        with torch.serialization.safe_globals([argparse.Namespace]):
            model, alphabet = esm.pretrained.load_model_and_alphabet_local(str(path))
        model.eval()
        with torch.no_grad():
            _, _, tokens = alphabet.get_batch_converter()([("", text) for text in texts])
            assert torch.isfinite(model(tokens, repr_layers=[LAYERS])["representations"][LAYERS]).all()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def peak_bytes(side: str, path: Path, length: int) -> int:
    """Return the peak of a process that encodes such a batch."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        __file__,
        "--side",
        side,
        "--weights",
        str(path),
        "--length",
        str(length),
    ]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> int:
    """Measure every length and print the peaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--side", choices=["ours", "fair_esm"], help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run(options.side, options.weights, options.length)
        return 0
    with tempfile.TemporaryDirectory() as name:
        from pipeline.encoder.checkpoints.synth import write_random_checkpoint

        path = Path(name) / "esm2_t12_random.pt"
        write_random_checkpoint(path, LAYERS, DIM, HEADS)
        peaks = {side: {length: peak_bytes(side, path, length) for length in LENGTHS} for side in ("ours", "fair_esm")}
    spread = {side: round(max(found.values()) / min(found.values()), 3) for side, found in peaks.items()}
    result = {
        "what": f"peak RSS of a process that encodes {TOKENS} tokens, {LAYERS} layers of {DIM}, one thread",
        "peak_bytes": peaks,
        "largest_over_smallest": spread,
        "reach": REACH,
    }
    print(f"{'length':>8}{'ours MiB':>12}{'fair-esm MiB':>14}")
    for length in LENGTHS:
        print(f"{length:>8}{peaks['ours'][length] / 2**20:>12.0f}{peaks['fair_esm'][length] / 2**20:>14.0f}")
    print(json.dumps(result))
    write(options.out, result)
    return 0 if spread["ours"] <= REACH else 1


if __name__ == "__main__":
    sys.exit(main())
