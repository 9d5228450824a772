"""The device that computes: the CPU, or a GPU of any kind that torch.accelerator supports ("card" for short).

    device = computing("cuda:1")
    device.limit_fraction(0.9)
    with RngState.preserved("cuda:1"):
        ...

Functions that all cards have come from torch.accelerator, others from the module of that kind.
"""

from __future__ import annotations

import gc
import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch

from pipeline.device.host import trim_heap
from pipeline.device.kinds import CARD, CARD_IS_FULL, CPU, DRIVER, HOST_IS_FULL, NOT_CARDS
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

TorchDevice: TypeAlias = torch.device  # for rooms that do not import torch
Result = TypeVar("Result")
_KEPT_CHARACTERS = 500  # of an error's text


def is_card(device: torch.device | str) -> bool:
    """Whether a device is a card, of any kind."""
    return torch.device(device).type not in NOT_CARDS


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
        self.kind = self.on.type  # torch's name of the kind of device, as for autocast

    @property
    def name(self) -> str:
        """The hardware that can change a result: the card's model, or the CPU instructions that torch uses."""
        return f"{CPU} {torch.backends.cpu.get_cpu_capability()}"

    def synchronize(self) -> None:
        """Wait for all work."""

    def empty_cache(self) -> None:
        """Free memory that torch keeps for reuse."""

    def limit_fraction(self, fraction: float) -> None:
        """Limit this process to a share of the memory."""

    def rng_state(self) -> Tensor | None:
        """Return the state of this device's own generator; None for the CPU."""

    def set_rng_state(self, state: Tensor) -> None:
        """Restore the state of the device's own generator."""


class Card(ComputeDevice):
    """A card; its memory is that of torch's caching allocator. Without an index it is the current one.

    Not all kinds of cards have every function of torch.cuda.
    """

    def __init__(self, device: torch.device | str) -> None:
        super().__init__(device)
        self._own: Any = torch.get_device_module(self.on)

    @property
    def index(self) -> int:
        """Its number among those that this process sees."""
        return torch.accelerator.current_device_index() if self.on.index is None else self.on.index

    @property
    def numbered(self) -> torch.device:
        return torch.device(self.kind, self.index)

    @property
    def name(self) -> str:
        return str(self._asked("get_device_name", self.index) or self.kind)

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability, by which kernels are chosen; None for kinds without one."""
        found = self._asked("get_device_properties", self.index)
        return (found.major, found.minor) if hasattr(found, "major") else None

    @property
    def total_bytes(self) -> int:
        """The size of its memory."""
        return self.free_and_total_bytes()[1]

    def begin(self) -> None:
        """Initialise the card now instead of at first use; its memory is unknown before."""
        self._asked("init")

    def memory_stats(self) -> dict[str, int]:
        """Return the allocator's counters, by torch's names; none without a card."""
        return dict(torch.accelerator.memory_stats(self.index)) if card_here() is not None else {}

    def memory(self, of: Literal["allocated", "reserved"], when: Literal["current", "peak"] = "current") -> int:
        """Return the bytes of live tensors, or of all that the allocator holds, now or at most since `reset_peaks`."""
        return self.memory_stats().get(f"{of}_bytes.all.{when}", 0)

    def free_and_total_bytes(self) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(self.index)

    def reset_peaks(self) -> None:
        """Reset the peaks to the present use."""
        torch.accelerator.reset_peak_memory_stats(self.index)

    def empty_cache(self) -> None:
        if card_here() is not None:  # else nothing is kept, and torch.accelerator raises
            torch.accelerator.empty_cache()

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.index)

    @property
    def fraction(self) -> float:
        """The share of the memory that this process may use; 1 for kinds without such a limit."""
        return float(self._asked("get_per_process_memory_fraction", self.index) or 1.0)

    def limit_fraction(self, fraction: float) -> None:
        self._asked("set_per_process_memory_fraction", fraction, self.index)  # torch refuses a device without one

    def current_stream(self) -> torch.Stream:
        """Return the stream that work goes to."""
        return torch.accelerator.current_stream(self.index)

    def new_stream(self) -> torch.Stream:
        """Return another stream; as a context, it is the one that work goes to."""
        return torch.Stream(self.numbered)

    def event(self, *, timed: bool = False) -> Any:
        """Return an event, recorded in the current stream."""
        made = torch.Event(self.kind, enable_timing=timed)
        made.record(self.current_stream())
        return made

    def rng_state(self) -> Tensor | None:
        state: Tensor = self._own.get_rng_state(self.index)
        return state

    def set_rng_state(self, state: Tensor) -> None:
        self._own.set_rng_state(state, self.index)

    def _asked(self, function: str, *arguments: Any) -> Any:
        """Return what a function of this kind's module says; None if it has no such function."""
        found = getattr(self._own, function, None)
        return None if found is None else found(*arguments)


@dataclass(frozen=True, eq=False)
class RngState:
    """The state of the random number generators that a model draws from: Python's, NumPy's, torch's, its device's.

    States are equal if they would draw the same numbers. Generators that were not captured stay as they are.
    """

    state: Mapping[str, Any]  # arrays and tensors
    device: torch.device | str = CPU

    @classmethod
    def capture(cls, device: torch.device | str = CPU) -> RngState:
        """Return the present state without synchronising; asking other devices would allocate memory there."""
        own, kind = computing(device).rng_state(), torch.device(device).type
        of_device = {} if own is None else {f"rng.{kind}": own}
        return cls({**_of_libraries(), "rng.torch": torch.get_rng_state(), **of_device}, device)

    @classmethod
    def capture_without_torch(cls) -> RngState:
        """Return the present state of Python's and NumPy's generators alone, as within torch's dispatch modes."""
        return cls(_of_libraries())

    def restore(self) -> None:
        """Make the generators continue from this state."""
        version, *words = self.state["rng.python"].tolist()
        gauss = self.state["rng.python.gauss"].tolist()
        random.setstate((version, tuple(words), gauss[0] if gauss else None))
        *keys, position, has_gauss = self.state["rng.numpy"].tolist()
        cached = self.state["rng.numpy.gauss"].item()
        np.random.set_state(("MT19937", keys, position, has_gauss, cached))  # noqa: NPY002 - users' code draws from it
        if (of_torch := self.state.get("rng.torch")) is not None:
            torch.set_rng_state(of_torch)
        if (own := self.state.get(f"rng.{torch.device(self.device).type}")) is not None:
            computing(self.device).set_rng_state(own)

    @classmethod
    @contextmanager
    def preserved(cls, device: torch.device | str) -> Iterator[None]:
        """Restore the present state on exit, so that a loss that is computed again draws the same numbers."""
        state = cls.capture(device)
        try:
            yield
        finally:
            state.restore()

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as tensors by name, which can be captured states again."""
        return {name: torch.as_tensor(values) for name, values in self.state.items()}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RngState) or self.state.keys() != other.state.keys():
            return False
        return all(np.array_equal(values, other.state[name]) for name, values in self.state.items())

    __hash__ = None  # type: ignore[assignment]  # it holds arrays


def _of_libraries() -> dict[str, Any]:
    """Return the states of Python's and NumPy's global generators."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - users' code draws from it
    return {
        "rng.python": np.array([version, *words], np.int64),
        "rng.python.gauss": np.array([] if gauss is None else [gauss], np.float64),
        "rng.numpy": np.append(keys, [position, has_gauss]).astype(np.int64),
        "rng.numpy.gauss": np.array([cached], np.float64),
    }


# Out of memory


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return type(error) in (RuntimeError, torch.AcceleratorError) and any(
        text in str(error) for text in HOST_IS_FULL + CARD_IS_FULL
    )


def out_of_memory_error(run: Callable[..., object], *arguments: object) -> str | None:
    """Call a function; return the first line of the error if memory ran out, else None; other errors are raised.

    The error is gone when this returns: its traceback holds the tensors of the call, and a retry needs their memory.
    """
    try:
        run(*arguments)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return (str(error).strip().partition("\n")[0] or type(error).__name__)[:_KEPT_CHARACTERS]
    return None


def unless_out_of_memory(call: Callable[[], Result]) -> Result | None:
    """Return what the call returns, or None if memory ran out."""
    results: list[Result] = []
    return results.pop() if out_of_memory_error(lambda: results.append(call())) is None else None


def after_freeing_caches(call: Callable[[], Result], device: str) -> Result:
    """Call a function; if memory runs out, free all caches and call it once more."""
    results: list[Result] = []
    if out_of_memory_error(lambda: results.append(call())) is None:
        return results.pop()
    free_caches(device)
    return call()


def free_caches(device: str) -> None:
    """Release the memory that Python, the C library and torch keep for reuse."""
    gc.collect()
    trim_heap()
    computing(device).empty_cache()
