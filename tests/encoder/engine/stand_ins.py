"""Encoders that are no models: they say what was asked of them, and fail where they are told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pipeline.encoder.embedding_recipe import ENDS, VOCABULARY, EmbeddingRecipe, tokenize
from pipeline.encoder.engine.embed_engine import Embedding, Engine
from pipeline.encoder.engine.token_batches import EngineSettings

DIM = 4
NO_LIMIT = 1 << 60


@dataclass
class StandIn:
    """Gives each residue a row that says its letter, its place and the length of what was encoded as one."""

    device: str
    precision: str
    limits: dict[str, int]  # tokens that fit, by device
    spoiled: frozenset[str]  # letters that are infinite in half precision
    hopeless: frozenset[str]  # letters that are not a number in any
    before: Callable[[Sequence[np.ndarray]], None]
    token_bytes: int
    calls: list[list[int]] = field(default_factory=list)  # the lengths in each forward that ended well

    dim = DIM
    fill = 1
    typical = tokenize("A" * 254)

    def tokenize(self, sequence: str) -> np.ndarray:
        return tokenize(sequence)

    def bytes_per_token(self, residues: int = 0) -> int:
        return self.token_bytes

    def __call__(self, tokens: Sequence[np.ndarray], *, cls: bool = False) -> torch.Tensor:
        self.before(tokens)
        if sum(len(one) + ENDS for one in tokens) > self.limits.get(self.device, NO_LIMIT):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        self.calls.append([len(one) for one in tokens])
        return torch.cat([rows for one in tokens for rows in (self._mark(one)[: int(cls)], self._rows(one))])

    def _mark(self, tokens_L: np.ndarray) -> torch.Tensor:
        """Return a row that says the first letter and the length of what was encoded as one."""
        return torch.tensor([[float(tokens_L[0]), -1.0, len(tokens_L), 1.0]])

    def _rows(self, tokens_L: np.ndarray) -> torch.Tensor:
        size = len(tokens_L)
        rows = np.stack([tokens_L, np.arange(size), np.full(size, size), np.ones(size)], 1).astype(np.float32)
        letters = np.array(VOCABULARY)[tokens_L]
        rows[np.isin(letters, list(self.hopeless)), 3] = np.nan
        if self.precision != "fp32":
            rows[np.isin(letters, list(self.spoiled)), 3] = np.inf
        return torch.from_numpy(rows)


class Workshop:
    """A source of stand-ins, which remembers them."""

    name, dim = "stand-in", DIM

    def __init__(
        self,
        limits: dict[str, int] | None = None,
        *,
        spoiled: str = "",
        hopeless: str = "",
        before: Callable[[Sequence[np.ndarray]], None] = lambda _: None,
        bytes_per_token: int = DIM * 4,
    ) -> None:
        self._made = limits or {}, frozenset(spoiled), frozenset(hopeless), before, bytes_per_token
        self.built: dict[tuple[str, str], StandIn] = {}

    def build(self, *, layer: int, precision: str, device: torch.device) -> StandIn:
        made = StandIn(device.type, precision, *self._made)
        self.built[device.type, precision] = made
        return made

    def calls(self, device: str = "cpu", precision: str = "fp32") -> list[list[int]]:
        return self.built[device, precision].calls


def recipe(**changes: object) -> EmbeddingRecipe:
    """Return a recipe that differs from the plainest by these choices."""
    plain = {
        "weights": "0",
        "layer": 2,
        "context": "chain",
        "precision": "fp32",
        "storage": "fp32",
        "length": 50,
        "overlap": 10,
    }
    return EmbeddingRecipe(**{**plain, **changes})


def settings(**changes: object) -> EngineSettings:
    """Return settings that differ from the plainest by these choices."""
    return EngineSettings(**{"policy": "divisor", "cap": 4, "budget": 10_000, "device": "cpu", **changes})


def texts(*lengths: int, seed: int = 0) -> list[str]:
    """Return random sequences of these lengths; they have no W."""
    random = np.random.default_rng(seed)
    return ["".join(random.choice(list("ACDEFGHIKLMNPQRSTVY"), length)) for length in lengths]


def lengths_of(sequences: Sequence[str]) -> np.ndarray:
    return np.array([len(one) for one in sequences], np.int64)


class Shelf:
    """A sink that keeps everything, and looks that nothing comes that may not."""

    def __init__(self) -> None:
        self.taken: dict[int, Embedding] = {}

    def __call__(self, made: Embedding) -> None:
        assert made.index not in self.taken
        if made.rows_LD.dtype != np.uint16:
            assert np.isfinite(made.rows_LD).all()
        self.taken[made.index] = made

    def rows(self) -> dict[int, list]:
        return {index: made.rows_LD.tolist() for index, made in self.taken.items()}


def run(engine: Engine, sequences: Sequence[str], shelf: Shelf) -> dict[int, object]:
    """Embed sequences; return what became of each, having looked that the sink had taken it before."""
    outcomes = {}
    for outcome in engine.run(lengths_of(sequences), lambda places: [sequences[at] for at in places], shelf):
        assert outcome.index not in outcomes
        assert (outcome.index in shelf.taken) == (outcome.reason is None)
        outcomes[outcome.index] = outcome
    return outcomes
