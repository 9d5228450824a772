"""The device that computes: the CPU, or a GPU of any kind that torch.accelerator supports ("card" for short).

    device = computing("cuda:1")
    device.limit_fraction(0.9)
    with device.forked_rng():
        ...

Functions that all cards have come from torch.accelerator, others from the module of that kind.
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
    """Whether a device is a card, of any kind."""
    return torch.device(device).type not in NOT_CARDS


def on_card(tensor: Tensor) -> bool:
    """Whether a tensor is in a card's memory."""
    return tensor.device.type not in NOT_CARDS


def card_here() -> str | None:
    """Return the kind of the cards of this machine, None where torch can use none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type not in NOT_CARDS else None


def release_pinned() -> None:
    """Free unused pinned memory, which torch keeps for allocations of the same size."""
    # For a kind of card without torch's caching host allocator, torch would end the process.
    if card_here() is not None and hasattr(torch.get_device_module(), "host_memory_stats"):
        torch.accelerator.empty_host_cache()


def located(device: str) -> str | None:
    """Return the device of this machine that a planned one stands for; None if the machine has none."""
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
    """Return the backends of a process group, for tensors of a device and of the host."""
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
    """Return a phrase about the cards that torch is built for, often the reason why it sees none."""
    return f"torch {torch.__version__} is built for CUDA {torch.version.cuda or 'not at all'}"


def driver_version() -> str:
    """Return the version of the cards' driver; '' if unknown."""
    return DRIVER.read_text().strip() if DRIVER.exists() else ""


def computing(device: torch.device | str) -> ComputeDevice:
    """Return the interface of a device."""
    return Card(device) if is_card(device) else ComputeDevice(device)


class ComputeDevice:
    """The CPU: work is done when a call returns, and its memory is the host's."""

    def __init__(self, device: torch.device | str) -> None:
        self.on = torch.device(device)

    @property
    def kind(self) -> str:
        """Torch's name of the kind of device, as for autocast."""
        return self.on.type

    @property
    def name(self) -> str:
        """The hardware that can change a result: the card's model, or the CPU instructions that torch uses."""
        return f"{CPU} {torch.backends.cpu.get_cpu_capability()}"

    def synchronize(self) -> None:
        """Wait for all work."""

    def synchronize_stream(self) -> None:
        """Wait for the work of the current stream."""

    def empty_cache(self) -> None:
        """Free memory that torch keeps for reuse."""

    def limit_fraction(self, fraction: float) -> None:
        """Limit this process to a share of the memory."""

    def event(self, *, timed: bool = False) -> Any:
        """Return an event, recorded in the current stream; None on CPUs."""
        del timed

    def rng_state(self) -> Tensor | None:
        """Return the state of this device's own generator; None for the CPU."""

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
        """The compute capability, by which kernels are chosen; None for kinds without one."""
        found = self._properties()
        return (found.major, found.minor) if hasattr(found, "major") else None

    @property
    def total_bytes(self) -> int:
        """The size of its memory."""
        return int(getattr(self._properties(), "total_memory", 0)) or self.free_and_total_bytes()[1]

    def begin(self) -> None:
        """Initialise the card now instead of at first use; its memory is unknown before."""
        if (init := getattr(self._own, "init", None)) is not None:
            init()

    def memory_stats(self) -> dict[str, int]:
        """Return the allocator's counters, by torch's names; none without a card."""
        return dict(torch.accelerator.memory_stats(self.index)) if card_here() is not None else {}

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Return the free and the total memory of the card."""
        return torch.accelerator.get_memory_info(self.index)

    @property
    def allocated_bytes(self) -> int:
        """The memory of live tensors."""
        return self.memory_stats().get("allocated_bytes.all.current", 0)

    @property
    def reserved_bytes(self) -> int:
        """The memory that the allocator holds for tensors."""
        return self.memory_stats().get("reserved_bytes.all.current", 0)

    @property
    def peak_allocated_bytes(self) -> int:
        """The highest `allocated_bytes` since the peaks were reset."""
        return self.memory_stats().get("allocated_bytes.all.peak", 0)

    @property
    def peak_reserved_bytes(self) -> int:
        """The highest `reserved_bytes` since the peaks were reset."""
        return self.memory_stats().get("reserved_bytes.all.peak", 0)

    def reset_peaks(self) -> None:
        """Reset the peaks to the present use."""
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
        """The share of the memory that this process may use; 1 for kinds without such a limit."""
        fraction = getattr(self._own, "get_per_process_memory_fraction", None)
        return 1.0 if fraction is None else float(fraction(self.index))

    def limit_fraction(self, fraction: float) -> None:
        if (limit := getattr(self._own, "set_per_process_memory_fraction", None)) is not None:
            limit(fraction, self.index)  # torch refuses a device without one

    def current_stream(self) -> torch.Stream:
        """Return the stream that work goes to."""
        return torch.accelerator.current_stream(self.index)

    def new_stream(self) -> torch.Stream:
        """Return another stream; as a context, it is the one that work goes to."""
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
        properties = getattr(self._own, "get_device_properties", None)
        return None if properties is None else properties(self.index)
