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

_TOTAL_BYTES = 1 << 36  # of the GPU, to a program that asks; no plan uses it
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
            with self:  # for checkpointed layers and hooks
                return torch.autograd.backward(args[0], kwargs.pop("gradient"), **kwargs)
        if func in _LEFT_OUT:
            return args[0]
        if func in _MOVING:
            args = tuple(on_cpu(arg, moving=place == 1) for place, arg in enumerate(args))
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"], moving=True)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


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

    wait = synchronize = wait_stream = wait_event = __exit__ = record


class _Instances(type):
    """Makes `isinstance` check against the class that is replaced."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _REAL_GENERATOR)


class _Generator(metaclass=_Instances):
    """Makes generators of the CPU, whatever the device."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _REAL_GENERATOR(device=on_cpu(device, moving=True))


_REAL_GENERATOR = torch.Generator


def _answers(capability: tuple[int, int], mode: _Mapping) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches: object, attribute, replacement."""
    for name, value in {**_queries(capability), **_commands()}.items():
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
    yield from _device_answers()


def _queries(capability: tuple[int, int]) -> dict[str, Callable[..., Any]]:
    major, minor = capability
    name = f"CUDA {major}.{minor}"
    card = SimpleNamespace(name=name, major=major, minor=minor, total_memory=_TOTAL_BYTES, multi_processor_count=1)
    values: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_tf32_supported": capability >= (8, 0),
        "device_count": 1,
        "current_device": 0,
        "get_device_name": name,
        "get_device_capability": capability,
        "get_device_properties": card,
        "get_arch_list": [f"sm_{major}{minor}"],
        "mem_get_info": (_TOTAL_BYTES, _TOTAL_BYTES),
        "memory_stats": {},
        "memory_snapshot": [],
        "memory_summary": "",
        "can_device_access_peer": False,
        "initial_seed": 0,
        "utilization": 0,
        **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached"), 0),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), 0),
    }
    answers: dict[str, Callable[..., Any]] = {name: _always(value) for name, value in values.items()}
    answers["is_bf16_supported"] = lambda including_emulation=True: including_emulation or capability >= (8, 0)
    return answers


def _commands() -> dict[str, Any]:
    return {
        **dict.fromkeys(_SILENT, _always(None)),
        **dict.fromkeys(("Stream", "Event", "ExternalStream"), Stream),
        **dict.fromkeys(("stream", "StreamContext"), nullcontext),
        **dict.fromkeys(("device", "device_of"), _Span),
        **dict.fromkeys(("current_stream", "default_stream"), lambda device=None: Stream()),  # noqa: ARG005
        "_lazy_init": _refuse_caller,
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

    def within(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def mapped(value: Any) -> Any:
            with mode:
                return hook(value)

        return mapped

    def begin_mapped(self: Any, pack_hook: Callable[[Any], Any], unpack_hook: Callable[[Any], Any]) -> None:
        begin(self, within(pack_hook), within(unpack_hook))

    yield hooks, "__init__", begin_mapped
    yield torch.autograd, "has_torch_function", _always(value=False)  # of autograd.grad, which would stop the mapping


def _device_answers() -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches of calls that name a device without a function mode seeing it."""
    context = torch.utils._device.DeviceContext
    begin, load, to = context.__init__, torch.load, torch.nn.Module.to

    def begin_on_cpu(self: Any, device: Any) -> None:
        begin(self, on_cpu(device, moving=True))

    def load_on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "map_location" in kwargs:
            kwargs["map_location"] = on_cpu(kwargs["map_location"], moving=True)
        return load(*args, **kwargs)

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
        if isinstance(device_type, bool):  # the old set_autocast_enabled(True) means CUDA's
            return call("cpu", device_type)
        return call(_kind(device_type), *args)

    return on_kind


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value  # noqa: ARG005


class _Span(nullcontext[None]):
    """Stands in for context managers that are classes in torch, since annotations name them."""

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
