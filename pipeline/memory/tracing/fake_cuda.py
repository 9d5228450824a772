"""Lets a program written for CUDA run on CPU tensors, real or fake: CUDA calls are answered or ignored.

Tensors stay on the CPU and report it. Calls that cannot be answered raise `NeedsCuda`; custom kernels (Triton, CUDA
extensions) raise by themselves.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch._dynamo  # checkpointing and optimizers would import it, which fails once torch.cuda is changed
import torch.utils._device
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TOTAL_BYTES = 1 << 36  # what a program is told that asks for the card's memory; no plan is made from it
_SIGNS = ("not compiled with CUDA", "no attribute '_cuda", "'CUDA' backend", "No CUDA GPUs", "NVIDIA driver")
_SILENT = (
    *("init", "synchronize", "empty_cache", "ipc_collect", "set_device", "set_stream", "set_sync_debug_mode"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
    *("reset_accumulated_memory_stats", "set_per_process_memory_fraction"),
)
_TYPES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")


class NeedsCuda(RuntimeError):
    """A call cannot be answered without CUDA."""

    def __init__(self, call: str) -> None:
        super().__init__(f"{call} needs a CUDA device; a step cannot be traced through it.")
        self.call = call


@contextmanager
def cuda_calls(capability: tuple[int, int] = (8, 0)) -> Iterator[None]:
    """Answer calls to CUDA as a card of this compute capability would; undone on exit.

    `torch.cuda` is changed for the whole process, calls that name a device in this thread alone.
    """
    mode = _Mapping()
    with ExitStack() as stack:
        for place, name, value in _answers(capability, mode):
            stack.enter_context(patch.object(place, name, value, create=True))
        stack.enter_context(mode)
        try:
            yield
        except (AssertionError, AttributeError, RuntimeError) as error:
            if not isinstance(error, NeedsCuda) and any(sign in str(error) for sign in _SIGNS):
                raise NeedsCuda(str(error).splitlines()[0]) from error
            raise


class _Mapping(TorchFunctionMode):
    """Maps CUDA devices in arguments to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:
            return self._backward(*args, **kwargs)
        if func in _LEFT_OUT:
            return args[0]
        if func in _MOVING:
            args = tuple(on_cpu(arg, moving=place == 1) for place, arg in enumerate(args))
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"], moving=True)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)

    def _backward(self, loss: torch.Tensor, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
        """Run backward with the mapping on, for checkpointed layers and hooks."""
        with self:
            torch.autograd.backward(loss, gradient, *args, **kwargs)


_LEFT_OUT = frozenset({torch.Tensor.cuda, torch.Tensor.pin_memory})
_MOVING = frozenset({torch.Tensor.to, torch.Tensor.type})


def on_cpu(device: Any, *, moving: bool = False) -> Any:
    """Return an argument with CUDA devices mapped to the CPU; with `moving`, numbers and texts count as devices."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if not moving or isinstance(device, bool):
        return device
    if isinstance(device, str) and device.startswith("torch.cuda."):
        return device.replace("torch.cuda.", "torch.")
    return "cpu" if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")) else device


class Stream:
    """Stands in for streams and events: everything is done when the call returns."""

    device = torch.device("cuda", 0)
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept the arguments of CUDA's streams and events."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave."""

    def query(self) -> bool:
        """Return that all work is done."""
        return True

    def record_event(self, event: Stream | None = None) -> Stream:
        """Return the event."""
        return event or Stream()

    def elapsed_time(self, other: Stream) -> float:  # noqa: ARG002
        """Return no time."""
        return 0.0

    def record(self, *args: Any) -> None:
        """Do nothing."""

    wait = synchronize = wait_stream = wait_event = record


class _Instances(type):
    """Makes `isinstance` check against the class that is replaced."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.real)  # type: ignore[attr-defined]


class _Generator(metaclass=_Instances):
    """Makes generators of the CPU, whatever the device."""

    real = torch.Generator

    def __new__(cls, device: Any = "cpu") -> Any:
        return cls.real(device=on_cpu(device, moving=True))


def _answers(capability: tuple[int, int], mode: _Mapping) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches: object, attribute, replacement."""
    for name, value in (_queries(capability) | _left_out()).items():
        if hasattr(torch.cuda, name):
            yield torch.cuda, name, value
    for name in ("range", "range_push", "range_pop", "mark"):
        yield torch.cuda.nvtx, name, _Span
    for name in ("CUDAGraph", "graph", "make_graphed_callables"):
        yield torch.cuda, name, _refused(f"torch.cuda.{name}")
    for name in _TYPES:
        yield torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor")
    yield torch, "Generator", _Generator
    yield torch.Tensor, "record_stream", _always(None)  # it looks at the stream before any mode does
    yield from _autocast_answers()
    yield from _hook_answers(mode)
    yield from _default_answers()


def _queries(capability: tuple[int, int]) -> dict[str, Callable[..., Any]]:
    name = f"CUDA {capability[0]}.{capability[1]}"
    card = SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=_TOTAL_BYTES, multi_processor_count=1
    )
    known: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": name,
        "get_device_capability": capability,
        "get_device_properties": card,
        "get_arch_list": [f"sm_{capability[0]}{capability[1]}"],
        "mem_get_info": (_TOTAL_BYTES, _TOTAL_BYTES),
        "memory_stats": {},
        "memory_snapshot": [],
        "memory_summary": "",
        "can_device_access_peer": False,
        "initial_seed": 0,
        "utilization": 0,
    }
    answers: dict[str, Callable[..., Any]] = {name: _always(value) for name, value in known.items()}
    for kind in ("allocated", "reserved", "cached"):
        answers |= {f"memory_{kind}": _always(0), f"max_memory_{kind}": _always(0)}
    answers["is_bf16_supported"] = lambda including_emulation=True: including_emulation or capability >= (8, 0)
    answers["is_tf32_supported"] = _always(capability >= (8, 0))
    return answers


def _left_out() -> dict[str, Any]:
    return {
        **dict.fromkeys(_SILENT, _always(None)),
        "_lazy_init": _refuse_caller,
        "Stream": Stream,
        "Event": Stream,
        "ExternalStream": Stream,
        "stream": lambda stream: nullcontext(stream),
        "StreamContext": nullcontext,
        "device": _Span,
        "device_of": _Span,
        "current_stream": lambda device=None: Stream(),  # noqa: ARG005
        "default_stream": lambda device=None: Stream(),  # noqa: ARG005
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),  # noqa: ARG005
        "get_rng_state_all": lambda: [torch.get_rng_state()],
    }


def _autocast_answers() -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches that turn CUDA's autocast into the CPU's, with CUDA's dtype; `cuda_casts` does the casts."""
    autocast = torch.amp.autocast_mode
    begin, cast = torch.autocast.__init__, autocast._cast
    get_dtype, is_enabled = torch.get_autocast_dtype, torch.is_autocast_enabled

    def begin_on_cpu(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        begin(self, _kind(device_type), dtype or get_dtype(device_type), *args, **kwargs)

    def cast_on_cpu(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast(value, _kind(device_type), dtype)

    def dtype_in_use(device_type: str) -> torch.dtype:
        return get_dtype("cpu" if device_type == "cuda" and is_enabled("cpu") else device_type)

    yield torch.autocast, "__init__", begin_on_cpu
    yield autocast, "_cast", cast_on_cpu  # of custom_fwd
    for name in ("is_autocast_enabled", "set_autocast_enabled", "set_autocast_dtype"):
        yield torch, name, _for_kind(getattr(torch, name))
    yield torch, "get_autocast_dtype", dtype_in_use
    yield torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cuda")


def _hook_answers(mode: _Mapping) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches that keep the mapping on where torch turns it off: in hooks, and in autograd.grad."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    begin = hooks.__init__

    def begin_mapped(self: Any, pack_hook: Callable[[Any], Any], unpack_hook: Callable[[Any], Any]) -> None:
        begin(self, _within(mode, pack_hook), _within(mode, unpack_hook))

    yield hooks, "__init__", begin_mapped
    yield torch.autograd, "has_torch_function", _always(value=False)  # of autograd.grad, which would stop the mapping


def _default_answers() -> Iterator[tuple[Any, str, Any]]:
    context = torch.utils._device.DeviceContext
    begin = context.__init__

    def begin_on_cpu(self: Any, device: Any) -> None:
        begin(self, on_cpu(device, moving=True))

    load = torch.load

    def load_on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "map_location" in kwargs:
            kwargs["map_location"] = on_cpu(kwargs["map_location"], moving=True)
        return load(*args, **kwargs)

    to = torch.nn.Module.to

    def to_on_cpu(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        args = tuple(on_cpu(arg, moving=place == 0) for place, arg in enumerate(args))
        kwargs = {name: on_cpu(arg, moving=name == "device") for name, arg in kwargs.items()}
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        stays = device == torch.device("cpu") and dtype is None and layout is None
        return module if stays else to(module, *args, **kwargs)  # a fake parameter cannot be moved to where it is

    yield context, "__init__", begin_on_cpu
    yield torch, "load", load_on_cpu
    yield torch.nn.Module, "to", to_on_cpu
    yield torch.nn.Module, "cuda", lambda module, device=None: module  # noqa: ARG005


def _kind(device_type: str) -> str:
    return "cpu" if device_type.startswith("cuda") else device_type


def _for_kind(call: Callable[..., Any]) -> Callable[..., Any]:
    def on_kind(device_type: Any = "cuda", *args: Any) -> Any:
        if isinstance(device_type, bool):  # set_autocast_enabled(True), of old, means CUDA's
            return call("cpu", device_type)
        return call(_kind(device_type), *args)

    return on_kind


def _within(mode: _Mapping, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def mapped(value: Any) -> Any:
        with mode:
            return hook(value)

    return mapped


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value  # noqa: ARG005


class _Span(nullcontext[None]):
    """A class, as what it replaces is: it stands in annotations, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        super().__init__()


def _refused(call: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        raise NeedsCuda(call)

    is_class = isinstance(getattr(torch.cuda, call.rpartition(".")[2]), type)
    return type(call, (), {"__new__": refuse}) if is_class else refuse


def _refuse_caller() -> None:
    """Raise NeedsCuda with the name of the function that would initialise CUDA."""
    caller = sys._getframe(1)
    module = caller.f_globals.get("__name__", "")
    raise NeedsCuda(f"{module}.{caller.f_code.co_name}" if module.startswith("torch") else "a call")
