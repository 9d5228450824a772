"""How many tokens one forward pass may have: measured, not guessed."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from pipeline.cluster.machine import find_mem_bytes
from pipeline.cluster.processes import used_bytes
from pipeline.encoder.embedding_recipe import ENDS, tokenize
from pipeline.encoder.forward.esm2 import TILE
from pipeline.errors import JobFailed
from pipeline.memory.runtime.meters import highest_resident_bytes
from pipeline.memory.runtime.out_of_memory import free_caches, unless_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from pipeline.encoder.engine.sequence_work import EngineSettings, Forward

CPU_TOKENS, CUDA_TOKENS = 8_192, 65_536  # beyond these a batch is not faster, only larger
SHARE = 0.8  # of what is free; the rest is for fragments, for rows on their way, and for what was not foreseen
QUEUE_BYTES = 128 << 20  # rows that may wait to be written
_PROBES = (512, 2_048)  # tokens
_PROBE_RESIDUES = 254


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of the host that is left for computing.

    The CPU must not try what does not fit: where memory is limited by a cgroup, or by whoever watches the process, no
    allocation ever fails, and the process is killed.
    """

    free_bytes: int
    token_bytes: int

    @classmethod
    def beside(cls, encoder: Forward, mem_bytes: int | None) -> Room:
        """Return what is left beside an encoder that has just been built."""
        free_caches("cpu")
        return cls(host_free_bytes(mem_bytes), encoder.bytes_per_token())

    def tokens(self, taken_bytes: int = 0) -> int:
        """Return how many tokens can be computed at once beside so much else; none if it is not more than 0."""
        # At width 1,280, 1,022 tokens took 12 rows of fp32 a token, and 9,000 took 8, where 7 are told: a tile is more.
        return int(SHARE * (self.free_bytes - taken_bytes)) // max(1, self.token_bytes) - TILE


def measured(encoder: Forward, device: str, room: Room | None) -> int:
    """Return the budget that the free memory of the device allows: on the CPU, what there is room for."""
    if room is not None:
        return max(1, min(CPU_TOKENS, room.tokens(QUEUE_BYTES)))
    encode_made_up(encoder, 64)  # what is set up once does not belong to a batch
    per_token = bytes_per_token(lambda tokens: card_peak_bytes(encoder, tokens)) or encoder.bytes_per_token()
    free_caches(device)
    return tokens_that_fit(torch.cuda.mem_get_info()[0] - QUEUE_BYTES, per_token, CUDA_TOKENS)


def tokens_that_fit(free_bytes: int, per_token_bytes: int, most: int) -> int:
    """Return how many tokens fit a share of the free memory; at least one."""
    return max(1, min(most, int(SHARE * free_bytes) // max(1, per_token_bytes)))


def bytes_per_token(peak_of: Callable[[int], int | None]) -> int | None:
    """Return what one more token takes, from the peaks at two sizes; None when they cannot be had."""
    small, large = (peak_of(tokens) for tokens in _PROBES)
    if small is None or large is None or large <= small:
        return None
    return -(-(large - small) // (_PROBES[1] - _PROBES[0]))


def card_peak_bytes(encoder: Forward, tokens: int) -> int | None:
    """Return the most memory a forward pass of that many tokens had on the card; None if it did not fit."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fits = unless_out_of_memory(lambda: encode_made_up(encoder, tokens))
    return None if fits is None else torch.cuda.max_memory_allocated() - before


def encode_made_up(encoder: Callable[[Sequence[NDArray[np.uint8]]], torch.Tensor], tokens: int) -> float:
    """Encode made-up sequences of that many tokens in all, to the end."""
    sequence = tokenize("A" * min(_PROBE_RESIDUES, tokens - ENDS))
    rows_RD = encoder([sequence] * (tokens // (len(sequence) + ENDS)))
    return float(rows_RD[-1, -1])  # asking for a number waits for the card


def host_free_bytes(mem_bytes: int | None) -> int:
    """Return what this process may still take of the host's memory: of its allocation, and of its address space.

    Files that are mapped, weights above all, are not counted as taken: the executor does not, and the kernel drops them
    before it kills.
    """
    taken = used_bytes([os.getpid()]) or device_peak_bytes("cpu")  # without /proc, the peak stands for it
    left = (find_mem_bytes() if mem_bytes is None else mem_bytes) - taken
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return left if limit == resource.RLIM_INFINITY else min(left, limit - _address_space_bytes())


def _address_space_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return device_peak_bytes("cpu")


def device_peak_bytes(device: str) -> int:
    """Return the most memory that was ever taken, of the host or of the card."""
    if device == "cpu":
        return highest_resident_bytes()
    return torch.cuda.max_memory_allocated()


Device: TypeAlias = torch.device


def device_name(device: str) -> str:
    """Return what of a device can change a result: the card, or what torch uses of the processor; and torch."""
    card = torch.cuda.get_device_name() if device == "cuda" else f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return f"{card}, torch {torch.__version__}"


def memory_bytes(settings: EngineSettings) -> int:
    """Return the memory of the card, or what the allocation gives this process on the host."""
    if settings.device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return settings.mem_bytes or 1


def prepare_device(settings: EngineSettings) -> None:
    """Use as many threads as the allocation has cores, and see whether the card is there."""
    torch.set_num_threads(settings.threads)  # more than there are cores made one forward pass ten times slower
    if settings.device == "cuda" and not torch.cuda.is_available():
        built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda or 'not at all'}"
        what = f"this task was to run on a GPU, and torch sees none ({built})"
        remedy = "nvidia-smi   or   pipeline submit --stage embed --set embed.device=cpu --set cluster.embed.gpus=0"
        raise JobFailed(what, where="embed.device", remedy=remedy)
