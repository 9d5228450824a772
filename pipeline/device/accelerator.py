"""What is asked of the device that computes: the CPU, or a card of whatever kind torch.accelerator offers here.

    device = computing("cuda:1")
    device.limit_fraction(0.9)
    with device.forked_rng():
        ...

What all cards have is asked of torch.accelerator; what only some kinds have, of the module of that kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from pipeline.device.kinds import CARD, CPU, DRIVER, NOT_CARDS
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

TorchDevice: TypeAlias = torch.device  # for rooms that do not import torch


def is_card(device: torch.device | str) -> bool:
    """Tell whether a device is a card, of whatever kind."""
    return torch.device(device).type not in NOT_CARDS


def on_card(tensor: Tensor) -> bool:
    """Tell whether a tensor is in a card's memory."""
    return tensor.device.type not in NOT_CARDS


def card_here() -> str | None:
    """Return the kind of the cards of this machine, None where torch can use none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type not in NOT_CARDS else None


def release_pinned() -> None:
    """Give back the pinned memory that nobody uses: torch keeps it for allocations of the very same size."""
    # Asked of a kind of card that does not bring torch's caching allocator for the host, torch ends the process.
    if card_here() is not None and hasattr(torch.get_device_module(), "host_memory_stats"):
        torch.accelerator.empty_host_cache()


def located(device: str) -> str | None:
    """Return the device of this machine that a planned one stands for, None where there is none of it."""
    kind, here = torch.device(device).type, card_here()
    if kind == CPU:
        return CPU
    return device if kind == here else here if kind == CARD else None


def select_card(local_rank: int) -> str | None:
    """Make a rank's card the current one; return its kind, None where torch can use no card."""
    if (kind := card_here()) is not None:
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    return kind


def numbered(device: torch.device | str) -> torch.device:
    """Return a card with its number: without one it is the current one."""
    card = torch.device(device)
    return torch.device(card.type, torch.accelerator.current_device_index()) if card.index is None else card


def collectives(device: torch.device | str) -> str:
    """Return what a process group is begun with, for tensors of a device and of the host."""
    from torch.distributed import Backend

    kind = torch.device(device).type
    if kind == CPU:
        return Backend.GLOO
    backends: dict[str, str] = Backend.default_device_backend_map
    if kind not in backends:
        what = f"torch has no collectives for tensors on {kind}: its ranks cannot add up their gradients"
        raise ConfigError(what, where="cluster.train.gpus", remedy="--set cluster.train.gpus=1")
    return f"{CPU}:{Backend.GLOO},{kind}:{backends[kind]}"


def torch_sees() -> str:
    """Say what kind of card torch is built for, which is often why it sees none."""
    return f"torch {torch.__version__} is built for CUDA {torch.version.cuda or 'not at all'}"


def driver_version() -> str:
    """Return the version of the cards' driver, '' where nobody says."""
    return DRIVER.read_text().strip() if DRIVER.exists() else ""


def computing(device: torch.device | str) -> ComputeDevice:
    """Return what there is to ask of a device."""
    return Card(device) if is_card(device) else ComputeDevice(device)


class ComputeDevice:
    """The CPU: whatever is asked of it is done when the call returns, and its memory is the host's."""

    def __init__(self, device: torch.device | str) -> None:
        self.on = torch.device(device)

    @property
    def kind(self) -> str:
        """What torch calls it, as for autocast."""
        return self.on.type

    @property
    def name(self) -> str:
        """Name what can change a result: the model of the card, or the instructions of the CPU that torch uses."""
        return f"{CPU} {torch.backends.cpu.get_cpu_capability()}"

    def synchronize(self) -> None:
        """Wait until all is done."""

    def synchronize_stream(self) -> None:
        """Wait until all is done that was asked of the current stream."""

    def empty_cache(self) -> None:
        """Give back what is kept for reuse."""

    def limit_fraction(self, fraction: float) -> None:
        """Let this process have no more than a share of the memory."""

    def event(self, *, timed: bool = False) -> Any:
        """Return an event, recorded in the current stream; None where nothing goes on after a call."""
        del timed

    def rng_state(self) -> Tensor | None:
        """Return the state of this device's own generator; None for the CPU, whose is the host's."""

    def set_rng_state(self, state: Tensor) -> None:
        """Restore the state of the device's own generator."""

    def forked_rng(self) -> AbstractContextManager[None]:
        """Return a context after which the generators of the host and of this device, of no other, are as before."""
        return cast("AbstractContextManager[None]", torch.random.fork_rng([]))


class Card(ComputeDevice):
    """A card; its memory is that of torch's caching allocator. Without an index it is the current one."""

    def __init__(self, device: torch.device | str) -> None:
        super().__init__(device)
        self._own: Any = torch.get_device_module(self.on)

    @property
    def index(self) -> int:
        """Its number among those that this process sees."""
        return torch.accelerator.current_device_index() if self.on.index is None else self.on.index

    @property
    def name(self) -> str:
        named = getattr(self._own, "get_device_name", None)
        return self.kind if named is None else str(named(self.index))

    @property
    def capability(self) -> tuple[int, int] | None:
        """What its kernels are chosen by; None where its kind has no such number."""
        told = self._properties()
        return (told.major, told.minor) if hasattr(told, "major") else None

    @property
    def total_bytes(self) -> int:
        """All of its memory."""
        return int(getattr(self._properties(), "total_memory", 0)) or self.free_and_total_bytes()[1]

    def begin(self) -> None:
        """Have torch look at the card now, which it does at first use: nothing is known of its memory before."""
        begun = getattr(self._own, "init", None)
        if begun is not None:
            begun()

    def memory_stats(self) -> dict[str, int]:
        """Return what the allocator counts, by torch's names; nothing where there is no card."""
        return dict(torch.accelerator.memory_stats(self.index)) if card_here() is not None else {}

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Return what nobody uses of the card, and all of it."""
        return torch.accelerator.get_memory_info(self.index)

    @property
    def allocated_bytes(self) -> int:
        """What live tensors take."""
        return self.memory_stats().get("allocated_bytes.all.current", 0)

    @property
    def reserved_bytes(self) -> int:
        """What the allocator holds for tensors."""
        return self.memory_stats().get("reserved_bytes.all.current", 0)

    @property
    def peak_allocated_bytes(self) -> int:
        """The most that live tensors took, since the peaks were reset."""
        return self.memory_stats().get("allocated_bytes.all.peak", 0)

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that the allocator held, since the peaks were reset."""
        return self.memory_stats().get("reserved_bytes.all.peak", 0)

    def reset_peaks(self) -> None:
        """Have the peaks begin anew, at what is used now."""
        torch.accelerator.reset_peak_memory_stats(self.index)

    def empty_cache(self) -> None:
        if card_here() is not None:  # else nothing is kept, and torch.accelerator raises
            torch.accelerator.empty_cache()

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.index)

    def synchronize_stream(self) -> None:
        self.current_stream().synchronize()

    @property
    def fraction(self) -> float:
        """The share of the card that this process may have; 1 where its kind knows no such limit."""
        told = getattr(self._own, "get_per_process_memory_fraction", None)
        return 1.0 if told is None else float(told(self.index))

    def limit_fraction(self, fraction: float) -> None:
        """Let this process have no more than a share of the memory, where cards of its kind can be limited."""
        limit = getattr(self._own, "set_per_process_memory_fraction", None)
        if limit is not None:
            limit(fraction, self.index)  # torch refuses a device without one

    def current_stream(self) -> torch.Stream:
        """Return the stream that work goes to now."""
        return torch.accelerator.current_stream(self.index)

    def new_stream(self) -> torch.Stream:
        """Return a stream beside the current one; it is a context in which work goes to it."""
        return torch.Stream(torch.device(self.kind, self.index))

    def event(self, *, timed: bool = False) -> Any:
        made = torch.Event(self.kind, enable_timing=timed)
        made.record(self.current_stream())
        return made

    def rng_state(self) -> Tensor | None:
        state: Tensor = self._own.get_rng_state(self.index)
        return state

    def set_rng_state(self, state: Tensor) -> None:
        self._own.set_rng_state(state, self.index)

    def forked_rng(self) -> AbstractContextManager[None]:
        return cast("AbstractContextManager[None]", torch.random.fork_rng([self.index], device_type=self.kind))

    def _properties(self) -> Any:
        told = getattr(self._own, "get_device_properties", None)
        return None if told is None else told(self.index)
