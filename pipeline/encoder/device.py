"""What the encoder runs on: its name, its memory, and how many threads it may use."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from pipeline.errors import JobFailed

if TYPE_CHECKING:
    from pipeline.encoder.settings import Settings


Device: TypeAlias = torch.device


def name_of(device: str) -> str:
    """Return what of a device can change a result: the card, or what torch uses of the processor; and torch."""
    card = torch.cuda.get_device_name() if device == "cuda" else f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return f"{card}, torch {torch.__version__}"


def memory_bytes(settings: Settings) -> int:
    """Return the memory of the card, or what the allocation gives this process on the host."""
    if settings.device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return settings.mem_bytes or 1


def prepare(settings: Settings) -> None:
    """Use as many threads as the allocation has cores, and see whether the card is there."""
    torch.set_num_threads(settings.threads)  # more than there are cores made one forward pass ten times slower
    if settings.device == "cuda" and not torch.cuda.is_available():
        built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda or 'not at all'}"
        what = f"this task was to run on a GPU, and torch sees none ({built})"
        remedy = "nvidia-smi   or   pipeline submit --stage embed --set embed.device=cpu --set cluster.embed.gpus=0"
        raise JobFailed(what, where="embed.device", remedy=remedy)
