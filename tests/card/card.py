"""Simulated cards, "simcard": devices of torch's own kind (PrivateUse1), so that what runs on a GPU runs in CI.

    card.load()
    with card.memory(limit_bytes=2 << 30):
        train()  # on torch.accelerator.current_accelerator()

- Their memory cannot be read by the host: a tensor's address is one where a read ends the process. What is allocated
  follows the rules of torch's caching allocator, up to a limit to the byte.
- Every operation runs a kernel of the CPU over the bytes behind the addresses, after a check that all its tensors are
  of the same card. What kernels on a GPU need besides their results is not simulated.
- Copies between pinned memory and a card really happen late: when an event or a synchronisation orders them, when a
  kernel of their stream uses the bytes, or earlier, as a seed has it.
- A process that ran a backward before `load` cannot use them: torch counts its devices then. Tests of this folder run
  in processes of their own (`test_on_card.py`); children of theirs get their cards through `environment`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.testkit.limited.device import _cache_folder, _compiler

NAME = "simcard"
SETTINGS = "SIMCARD"  # environment variable: the settings of a process's cards
INSIDE = "SIMCARD_INSIDE"  # environment variable: set in processes that are for cards alone
HERE = Path(__file__).parent
SOURCES = [HERE / name for name in ("streams.cpp", "memory.cpp", "kernels.cpp")]
COMPILED_WITHIN_S = 900
MOST = 4  # cards of a process


@dataclass(frozen=True)
class Cards:
    """The cards of a process."""

    count: int = 2
    total_bytes: int = 16 << 30
    outside_bytes: int = 0  # that others have taken
    seed: int = 0
    late: bool = True  # False: asynchronous copies happen at once
    poison: bool = True  # new memory is full of values that are no numbers
    expandable: bool = False

    def text(self) -> str:
        return ",".join(f"{name}={int(value)}" for name, value in vars(self).items())

    @classmethod
    def of(cls, text: str) -> Cards:
        values = dict(part.split("=") for part in text.split(",") if part)
        return cls(**{name: type(getattr(cls, name))(int(value)) for name, value in values.items()})


def why_not() -> str:
    """Return why there can be no simulated card here; empty: there can."""
    return "" if _compiler() else "no C++ compiler (g++, c++ or clang++) is installed"


def load(cards: Cards | None = None) -> None:
    """Give this process simulated cards; by default those that its environment says."""
    cards = cards or Cards.of(os.environ.get(SETTINGS, ""))
    if not hasattr(torch, NAME):
        library()
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _module())
        torch.distributed.Backend.default_device_backend_map[NAME] = "gloo"
        torch.utils.generate_methods_for_privateuse1_backend()
    configure(cards)


def configure(cards: Cards) -> None:
    """Change the settings of this process's cards."""
    library().card_configure(cards.count, cards.seed, cards.late, cards.poison)
    for number in range(cards.count):
        library().card_set_memory(number, cards.total_bytes, cards.outside_bytes, 1.0, cards.expandable)
    _state.cards = cards


@contextmanager
def settings(**changes: Any) -> Iterator[None]:
    """Change some settings for a while; the allocator's cache begins empty."""
    before = _state.cards
    torch.accelerator.empty_cache()
    configure(Cards(**{**vars(before), **changes}))
    try:
        yield
    finally:
        configure(before)


def environment(cards: Cards) -> dict[str, str]:
    """Return the variables that give a child process such cards as soon as it imports torch."""
    entry = Path(_cache_folder()) / f"entry-{hashlib.sha256(str(HERE).encode()).hexdigest()[:8]}"
    found = entry / "simcard-0.dist-info"
    found.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("entry_points.txt", "[torch.backends]\nsimcard = tests.card.card:load\n"),
        ("METADATA", "Metadata-Version: 2.1\nName: simcard\nVersion: 0\n"),
    ):
        partial = found / f".{name}.{secrets.token_hex(4)}"
        partial.write_text(text)
        partial.replace(found / name)
    paths = [str(entry), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    return {SETTINGS: cards.text(), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@contextmanager
def refusing(after: int, times: int = 1, card: int = 0) -> Iterator[None]:
    """Refuse a card's allocation after so many more, and those that follow it until so many were refused."""
    library().card_refuse(card, after, times)
    try:
        yield
    finally:
        library().card_refuse(card, -1, 0)


def allocations(card: int = 0) -> int:
    """Return how many blocks a card was asked for so far."""
    return int(library().card_allocations(card))


def refused(card: int = 0) -> int:
    """Return how many blocks were refused as `refusing` has it."""
    return int(library().card_refused(card))


def seed_order(seed: int) -> None:
    """Draw the order of what waits in streams anew."""
    cards = _state.cards
    library().card_configure(cards.count, seed, cards.late, cards.poison)


def pinned_bytes() -> tuple[int, int]:
    """Return the bytes of pinned blocks in use, and of all that were ever had."""
    return int(library().card_pinned_in_use()), int(library().card_pinned_reserved())


class _State:
    cards = Cards()


_state = _State()


@functools.cache
def library() -> ctypes.CDLL:
    """Build the C++ part if nobody has, and load it."""
    found = ctypes.CDLL(str(_built(_cache_folder())), mode=ctypes.RTLD_GLOBAL)
    number, whole, flag, real = ctypes.c_int, ctypes.c_int64, ctypes.c_bool, ctypes.c_double
    for name, result, arguments in (
        ("configure", None, [number, ctypes.c_uint64, flag, flag]),
        ("set_memory", None, [number, whole, whole, real, flag]),
        ("fraction", number, [number, real]),
        ("refuse", None, [number, whole, whole]),
        ("allocations", whole, [number]),
        ("refused", whole, [number]),
        ("seed", None, [number, ctypes.c_uint64]),
        ("random_state", whole, [number, ctypes.c_void_p]),
        ("set_random_state", None, [number, ctypes.c_void_p, whole]),
        ("pinned_reserved", whole, []),
        ("pinned_in_use", whole, []),
    ):
        function = getattr(found, f"card_{name}")
        function.restype, function.argtypes = result, arguments
    return found


def _built(folder: Path) -> Path:
    """Return the shared library for these sources, this torch and compiler; make it if it is not there."""
    texts = [path.read_text() for path in (*SOURCES, HERE / "card.h")]
    told = "\0".join((_compiler(), torch.__version__, sys.platform, *texts))
    target = folder / f"card-{hashlib.sha256(told.encode()).hexdigest()[:16]}.so"
    if target.exists():
        return target
    root, token = Path(torch.__file__).parent, secrets.token_hex(8)  # another process may be building, too
    flags = ["-std=c++20", "-O1", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    objects = [folder / f".card-{source.stem}-{token}.o" for source in SOURCES]
    compiling = [
        subprocess.Popen(
            [_compiler(), *flags, f"-isystem{root / 'include'}", "-c", str(source), "-o", str(made)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for source, made in zip(SOURCES, objects, strict=True)
    ]
    try:
        for process in compiling:
            told = process.communicate(timeout=COMPILED_WITHIN_S)[1]
            if process.returncode:
                raise RuntimeError(f"the simulated card could not be compiled:\n{told}")
        partial = folder / f".{target.name}.{token}"
        libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}"]
        command = [_compiler(), "-shared", *map(str, objects), "-o", str(partial), *libraries]
        subprocess.run(command, check=True, timeout=COMPILED_WITHIN_S)
        partial.replace(target)
    finally:
        for process in compiling:
            process.kill()
        for made in objects:
            made.unlink(missing_ok=True)
    return target


@dataclass(frozen=True)
class Properties:
    """What torch tells of a device."""

    name: str
    total_memory: int
    major: int = 8
    minor: int = 0
    multi_processor_count: int = 1


def _module() -> ModuleType:
    """Return what stands as `torch.simcard`, as `torch.cuda` does for GPUs."""
    made = ModuleType(f"torch.{NAME}")
    accelerator = torch.accelerator

    def index(device: Any = None) -> int:
        if device is None:
            return int(accelerator.current_device_index())
        number = device if isinstance(device, int) else torch.device(device).index
        return int(accelerator.current_device_index()) if number is None else int(number)

    def seed(number: int, device: Any = None) -> None:
        library().card_seed(index(device), number % (1 << 64))

    def seed_all(number: int) -> None:
        for card in range(MOST):
            seed(number, card)

    def random_state(device: Any = None) -> torch.Tensor:
        state = torch.empty(library().card_random_state(index(device), None), dtype=torch.uint8)
        library().card_random_state(index(device), state.data_ptr())
        return state

    def set_random_state(state: torch.Tensor, device: Any = None) -> None:
        library().card_set_random_state(index(device), state.data_ptr(), state.numel())

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **ids: Any) -> Stream:
            device = f"{NAME}:{index(device)}"
            return super().__new__(cls, device=device, priority=priority, **ids)  # type: ignore[call-overload,no-any-return]

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
            return super().__new__(cls, NAME, enable_timing=enable_timing, blocking=blocking)  # type: ignore[no-any-return]

    @contextmanager
    def stream(wanted: torch.Stream | None) -> Iterator[None]:
        if wanted is None:
            yield
            return
        with wanted:
            yield

    def set_fraction(fraction: float, device: Any = None) -> None:
        library().card_fraction(index(device), fraction)

    def total(device: Any = None) -> Properties:
        return Properties("Simulated Card", accelerator.get_memory_info(index(device))[1])

    @contextmanager
    def on(device: Any) -> Iterator[None]:
        before = index()
        accelerator.set_device_index(index(device))
        try:
            yield
        finally:
            accelerator.set_device_index(before)

    members: dict[str, Any] = {
        "is_available": lambda: True,
        "_initialized": True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: _state.cards.count,
        "current_device": accelerator.current_device_index,
        "set_device": lambda device: accelerator.set_device_index(index(device)),
        "device": on,
        "synchronize": accelerator.synchronize,
        "get_device_name": lambda device=None: total(device).name,
        "get_device_properties": total,
        "get_device_capability": lambda device=None: (total(device).major, total(device).minor),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda: True,
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": lambda device=None: accelerator.current_stream(index(device)),
        "default_stream": lambda device=None: torch.Stream(stream_id=0, device_index=index(device), device_type=20),
        "set_stream": accelerator.set_stream,
        "memory_stats": accelerator.memory_stats,
        "memory_allocated": accelerator.memory_allocated,
        "memory_reserved": accelerator.memory_reserved,
        "max_memory_allocated": accelerator.max_memory_allocated,
        "max_memory_reserved": accelerator.max_memory_reserved,
        "reset_peak_memory_stats": accelerator.reset_peak_memory_stats,
        "mem_get_info": accelerator.get_memory_info,
        "empty_cache": accelerator.empty_cache,
        "set_per_process_memory_fraction": set_fraction,
        "manual_seed": seed,
        "manual_seed_all": seed_all,
        "get_rng_state": random_state,
        "set_rng_state": set_random_state,
    }
    for name, member in members.items():
        setattr(made, name, member)
    return made
