"""A device of limited memory, played by the CPU: a real training runs out of memory at the very byte.

    with LimitedDevice(limit_bytes=2 << 20) as device:
        train()  # torch.OutOfMemoryError, raised where the limit would be passed
    print(device.peak_bytes)

Every block counts that torch's CPU allocator gives out within the `with`, in whatever thread, what oneDNN asks it for
included. Not counted: what numpy owns (`torch.from_numpy`), shared or mapped memory, what kernels get from malloc or
MKL, and what is allocated inside `device.host()`. A storage that was made before the first device of the process, and
is resized later, is missed too.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device.cpp")
ENDLESS = (1 << 63) - 1

Told = Callable[[int, int], bool]  # a block, and its bytes: below 0 when released; False refuses it
_Told = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int64, ctypes.c_int64)
_only = threading.Lock()  # held while a device is open


@dataclass(frozen=True)
class Figures:
    """What a device has counted."""

    live_bytes: int
    peak_bytes: int
    refused: int


class LimitedDevice:
    """Counts bytes from `with` on, and raises torch.OutOfMemoryError before they pass the limit.

    `through` is called with each block and may refuse it, for example the seventh. It hears of releases before the next
    allocation, or when a figure is read.
    """

    def __init__(self, limit_bytes: int | None = None, *, through: Told | None = None) -> None:
        self._limit_bytes, self._through = limit_bytes, through
        self._told = _Told() if self._through is None else _Told(self._tell)  # kept here, for C keeps no reference
        self._failure: Exception | None = None
        self._library = library()
        self._final: Figures | None = None

    def __enter__(self) -> LimitedDevice:
        if not _only.acquire(blocking=False):
            raise RuntimeError("another limited device is open: a process has one CPU allocator")
        self._final = self._failure = None
        self._library.limited_open(_endless(self._limit_bytes), self._told)
        return self

    def __exit__(self, *raised: object) -> None:
        self._library.limited_close()
        self._final = self._figures
        _only.release()
        if self._failure is not None:
            raise self._failure

    @property
    def limit_bytes(self) -> int | None:
        """Return how much may be live; it may be set at any time."""
        return self._limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._library.limited_set_limit(_endless(limit_bytes))

    @property
    def live_bytes(self) -> int:
        """Return how much of what was allocated since `with` is in use; after it: was, at its end."""
        return self._figures.live_bytes

    @property
    def peak_bytes(self) -> int:
        """Return the most that was in use at once, since `with` or `reset_peak`."""
        return self._figures.peak_bytes

    @property
    def refused(self) -> int:
        """Return how many blocks were refused."""
        return self._figures.refused

    def reset_peak(self) -> None:
        """Let the peak be what is in use now."""
        self._library.limited_reset_peak()

    @contextmanager
    def host(self) -> Iterator[None]:
        """Count nothing that this thread allocates: it is in the host's memory."""
        before = self._library.limited_on_host(True)
        try:
            yield
        finally:
            self._library.limited_on_host(before)

    @property
    def _figures(self) -> Figures:
        if self._final:
            return self._final
        read = self._library
        read.limited_settle()  # so that the allocator knows as much
        return Figures(read.limited_live(), read.limited_peak(), read.limited_refused())

    def _tell(self, block: int, signed_bytes: int) -> bool:
        assert self._through is not None
        try:
            return self._through(block, signed_bytes)
        except Exception as failure:  # noqa: BLE001 - C++ calls this and cannot pass it on; `with` raises it
            self._failure = self._failure or failure
            return False


class RefuseOne:
    """Refuses one block, after so many more."""

    after = -1

    def __call__(self, block: int, signed_bytes: int) -> bool:
        self.after -= signed_bytes > 0
        return signed_bytes < 0 or self.after != -1


class HostCarrier:
    """Copies to memory that does not count, and back."""

    def __init__(self, device: LimitedDevice) -> None:
        self._device = device

    def away(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in the host's memory."""
        with self._device.host():
            return torch.empty_like(tensor).copy_(tensor)

    def back(self, kept: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a copy on the device."""
        return kept.to(device, copy=True)


def forget_failed_backward() -> None:
    """Release what a backward that raised has left behind; a GPU's thread does so by itself.

    On the CPU the caller's own thread works off the graph. After an error what was ready to run stays in its queue, and
    keeps what it saved, until the next backward (torch/csrc/autograd/engine.cpp: `local_ready_queue`).
    """
    torch.zeros((), requires_grad=True).clone().backward()


def why_not() -> str:
    """Return why there can be no such device here; empty: there can."""
    return "" if _compiler() else "no C++ compiler (g++, c++ or clang++) is installed"


def need() -> None:
    """Skip the test that runs where there can be no such device; where CI=true, fail it."""
    import pytest

    if reason := why_not():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no limited device here: {reason}")


@functools.cache
def library() -> ctypes.CDLL:
    """Build the C++ part if nobody has, and put it between torch and its allocator, where it stays."""
    found = ctypes.CDLL(str(built(_cache_folder())))
    integer, flag = ctypes.c_int64, ctypes.c_bool
    for name, result, arguments in (
        ("install", None, []),
        ("open", None, [integer, _Told]),
        ("close", None, []),
        ("on_host", flag, [flag]),
        ("settle", None, []),
        ("live", integer, []),
        ("peak", integer, []),
        ("refused", integer, []),
        ("reset_peak", None, []),
        ("set_limit", None, [integer]),
    ):
        function = getattr(found, f"limited_{name}")
        function.restype, function.argtypes = result, arguments
    found.limited_install()
    return found


def built(folder: Path) -> Path:
    """Return the shared library for this source, torch and compiler; make it if it is not there."""
    command = _command()
    told = "\0".join((*command, torch.__version__, sys.platform, SOURCE.read_text()))
    target = folder / f"limited-{hashlib.sha256(told.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        partial = folder / f".{target.name}.{secrets.token_hex(8)}"  # another process may be building, too
        made = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True, check=False)
        if made.returncode:
            raise RuntimeError(f"{SOURCE.name} could not be compiled:\n{made.stderr}")
        partial.replace(target)
    return target


def _command() -> list[str]:
    compiler = _compiler()
    if not compiler:
        raise RuntimeError(why_not())
    folder = Path(torch.__file__).parent  # torch.utils.cpp_extension knows it too, but wants setuptools
    return [
        *(compiler, "-std=c++17", "-O1", "-fPIC", "-shared"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{folder / 'include'}", str(SOURCE)),
        *(f"-L{folder / 'lib'}", "-lc10", f"-Wl,-rpath,{folder / 'lib'}"),
    ]


def _compiler() -> str:
    return next((found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))), "")


def _cache_folder() -> Path:
    """Return a folder of this user's alone: what is in it will run."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipeline-tests"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="pipeline-tests-"))
    return folder


def _endless(limit_bytes: int | None) -> int:
    return ENDLESS if limit_bytes is None else limit_bytes
