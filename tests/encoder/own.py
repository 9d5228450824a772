"""An encoder as a user writes it, and a project that uses it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

CODE = '''\
"""An encoder with attention over every pair, as people write them."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table, self.mix = nn.Embedding(27, width), nn.Linear(width, width)

    def forward(self, token_BT, is_token_BT):
        x_BTD = self.table(token_BT)
        scores_BTT = (x_BTD @ x_BTD.transpose(1, 2)).masked_fill(~is_token_BT[:, None], -1e4)
        return x_BTD + self.mix(scores_BTT.softmax(-1) @ x_BTD)


class Encoder:
    layers, letters = 1, "ACDEFGHIKLMNPQRSTVWYX"

    def __init__(self, weights: Path, longest: int = 0, scale: float = 1.0):
        self.weights, self.longest, self.scale = weights, longest, scale
        self.width = 16

    def model(self):
        model = Attention(self.width)
        model.load_state_dict(load_file(self.weights))
        return model

    def tokenize(self, sequence):
        return [0, *(ord(letter) - 64 for letter in sequence)]

    def forward(self, model, token_BT, is_token_BT, layer):
        return self.scale * model(token_BT, is_token_BT)[:, 1:]


class Forgetful(Encoder):
    """Pays attention to padding."""

    def forward(self, model, token_BT, is_token_BT, layer):
        return model(token_BT, torch.ones_like(is_token_BT))[:, 1:]


class Apart(Forgetful):
    """Takes one at a time."""

    padded = False


class Short(Encoder):
    """Leaves a residue out."""

    def forward(self, model, token_BT, is_token_BT, layer):
        return model(token_BT, is_token_BT)[:, 2:]


class Marked(Encoder):
    """Says that its first row is that of the mark."""

    cls = True

    def forward(self, model, token_BT, is_token_BT, layer):
        return self.scale * model(token_BT, is_token_BT)


class Numbered(Encoder):
    """Calls the token of its mark so, and says nothing of rows."""

    cls = 1


class Unmarked(Encoder):
    """Says so, and leaves it out."""

    cls = True


class MarkedForgetful(Marked):
    """Pays attention to padding in the row of its mark alone."""

    def forward(self, model, token_BT, is_token_BT, layer):
        rows_BTD = super().forward(model, token_BT, is_token_BT, layer)
        return torch.cat([rows_BTD.mean(1, keepdim=True), rows_BTD[:, 1:]], 1)


class MarkedReferenced(Marked):
    """Knows how the rows of its residues should be."""

    def reference(self, sequences, layer):
        model = self.model()
        tokens = [torch.tensor([self.tokenize(text)]) for text in sequences]
        return [model(token_1T, torch.ones_like(token_1T, dtype=torch.bool))[0, 1:] for token_1T in tokens]


class Failing(Encoder):
    def forward(self, model, token_BT, is_token_BT, layer):
        raise IndexError("no such layer")


class Otherwise(Encoder):
    """Knows how its rows should be, and they are not so."""

    def reference(self, sequences, layer):
        return [torch.ones(len(text), self.width).cumsum(0) for text in sequences]


class Shorter(Encoder):
    """Knows how its rows should be, but for one."""

    def reference(self, sequences, layer):
        return [torch.ones(len(text) - 1, self.width) for text in sequences]


class Wrapped(Encoder):
    def forward(self, model, token_BT, is_token_BT, layer):
        return (model(token_BT, is_token_BT)[:, 1:],)


class Nameless(Encoder):
    letters = "acdef"


class Loaded(Encoder):
    def __init__(self, table):
        self.width, self.longest, self.table = 16, 0, table


def made(weights: Path):
    return Loaded(load_file(weights))
'''
CONFIG = """\
data: {{source: fasta, path: data.fasta}}
embed: {{weights: small.safetensors, encoder: "{encoder}", options: {{{options}}}}}
"""


def write_weights(path: Path, seed: int = 0) -> None:
    """Write the weights of the encoder above."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"table.weight": (27, 16), "mix.weight": (16, 16), "mix.bias": (16,)}
    save_file({name: torch.randn(shape, generator=random) / 4 for name, shape in shapes.items()}, path)


def write_project(folder: Path, texts: list[str], encoder: str = "own_enc:Encoder", options: str = "") -> None:
    """Write a project of these sequences, which the encoder above encodes."""
    (folder / "own_enc.py").write_text(CODE)
    write_weights(folder / "small.safetensors")
    (folder / "data.fasta").write_text("".join(f">s{at}\n{text}\n" for at, text in enumerate(texts)))
    (folder / "pipeline.yaml").write_text(CONFIG.format(encoder=encoder, options=options))


def drawn(*lengths: int, seed: int = 0) -> list[str]:
    """Return random sequences of these lengths."""
    random = np.random.default_rng(seed)
    return ["".join(random.choice(list("ACDEFGHIKLMNPQRSTVWY"), length)) for length in lengths]
