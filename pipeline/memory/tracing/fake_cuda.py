"""Runs a CUDA program on CPU tensors, real or fake: answers or ignores CUDA calls, and casts as CUDA does.

Tensors stay on the CPU and report it. Calls that cannot be answered raise `NeedsCuda`; custom kernels (Triton, CUDA
extensions) raise by themselves.

CPU's own autocast leaves softmax, norms, exp and most losses in half precision, where CUDA's takes fp32: a plan made
with it is low by up to 28%. Here the dispatcher's kernels for CPU autocast are replaced by ones that do what CUDA's do,
so that casts inside composite operators happen too.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from unittest.mock import patch

import torch
import torch._dynamo  # checkpointing and optimizers would import it, which fails once torch.cuda is changed
import torch.utils._device
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pipeline.memory.tracing.fake_mode import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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


# ---- casts ----

Operator: TypeAlias = Any  # torch._ops.OpOverload, which has no types
Kernel: TypeAlias = "Callable[..., Any]"
Policy: TypeAlias = "Callable[[Operator, Any, Any], Any]"  # of an operator, its arguments and those by name

LOWER, FP32, FP32_DTYPE, PROMOTE, BANNED = "lower", "fp32", "dtype", "promote", "banned"

# torch 2.13, aten/src/ATen/autocast_mode.h: AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32,
# AT_FORALL_FP32_SET_OPT_DTYPE, AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE, AT_FORALL_PROMOTE; autocast_mode.cpp: those
# banned, and cudnn_convolution*. `policies` skips names that the installed torch does not cast on CUDA.
POLICIES = {
    LOWER: """
        _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
        conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
        einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
        _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
        scaled_dot_product_attention""",
    FP32: """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
        pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
        nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
        hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
        multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
        dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
        _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa norm.Scalar
        norm.ScalarOpt_dim""",  # the two of torch.norm, which is deprecated, cast no input on CUDA
    FP32_DTYPE: """
        prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
        linalg_matrix_norm.str_ord sum sum.dim_IntList""",
    PROMOTE: "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    BANNED: "binary_cross_entropy",
}
_CPU_ONLY_KEPT = frozenset({"mkldnn_rnn_layer"})  # CUDA casts cuDNN's recurrent layers likewise: _cudnn_rnn
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def policies() -> dict[str, str]:
    """Return the policy of the installed torch's CUDA autocast for each operator, by the operator's name."""
    cast = _registered("AutocastCUDA")
    return {name: policy for policy, names in POLICIES.items() for name in names.split() if name in cast}


class _Cached(NamedTuple):
    weight: weakref.ref[torch.Tensor]
    cast: torch.Tensor


_CACHE: dict[int, _Cached] = {}  # casts of weights until the outermost autocast ends, by the weight's id
_ONE_AT_A_TIME = threading.RLock()  # kernels belong to the process
_is_entered = False


@contextmanager
def cuda_casts() -> Iterator[None]:
    """Let `torch.autocast("cpu", …)` cast as CUDA's does; may be nested.

    Other threads that use CPU's autocast meanwhile get the same casts.
    """
    global _is_entered
    with _ONE_AT_A_TIME:
        if _is_entered:
            yield
            return
        policy_of = policies()
        of_cpu = _registered("AutocastCPU") - set(policy_of) - _CPU_ONLY_KEPT
        kernels: dict[str, Kernel] = dict.fromkeys(sorted(of_cpu), torch.library.fallthrough_kernel)
        kernels |= {name: _kernel(_POLICIES[policy], _operator(name)) for name, policy in policy_of.items()}
        clear = torch.clear_autocast_cache

        def clear_all() -> None:
            _CACHE.clear()
            clear()

        # the outermost autocast calls it as it ends
        with replaced(kernels, "AutocastCPU"), patch.object(torch, "clear_autocast_cache", clear_all):
            _is_entered = True
            try:
                yield
            finally:
                _is_entered = False
                _CACHE.clear()


def _registered(key: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _operator(name: str) -> Operator:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _kernel(policy: Policy, operator: Operator) -> Kernel:
    """Return a kernel that casts by a policy, and runs the operator without autocast."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return policy(operator, args, kwargs)

    return kernel


def _casting(choose: Callable[[Any], torch.dtype]) -> Policy:
    """Return the policy that casts all inputs to the dtype that `choose` returns for them."""

    def policy(operator: Operator, args: Any, kwargs: Any) -> Any:
        args, kwargs = _cast_all(choose((args, kwargs)), args, kwargs)
        return operator(*args, **kwargs)

    return policy


def _lower(_: Any = None) -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _widest(inputs: Any) -> torch.dtype:
    of_tensors = (leaf.dtype for leaf in tree_leaves(inputs) if _is_eligible(leaf))
    return torch.float32 if torch.float32 in of_tensors else _lower()


def _fp32_dtype(operator: Operator, args: Any, kwargs: Any) -> Any:
    """Set dtype=float32 where the caller gave none."""
    place = _names(operator).index("dtype")  # nothing comes after it
    given = args[place] if len(args) > place else kwargs.get("dtype")
    if _is_eligible(args[0]) and given is None:
        args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
    return operator(*args, **kwargs)


@functools.cache
def _names(operator: Operator) -> list[str]:
    return [argument.name for argument in operator._schema.arguments]


def _banned(operator: Operator, *_: Any) -> Any:
    raise RuntimeError(
        f"{operator} is unsafe to autocast: CUDA refuses it. Take binary_cross_entropy_with_logits instead."
    )


_POLICIES: dict[str, Policy] = {
    LOWER: _casting(_lower),
    FP32: _casting(lambda _: torch.float32),
    FP32_DTYPE: _fp32_dtype,
    PROMOTE: _casting(_widest),
    BANNED: _banned,
}


def _cast_all(dtype: torch.dtype, args: Any, kwargs: Any) -> tuple[Any, Any]:
    # the caller's dispatch mode has already seen this call, and must not see its casts
    with torch._C.DisableTorchFunction():
        return tuple(_cast(dtype, arg) for arg in args), {name: _cast(dtype, arg) for name, arg in kwargs.items()}


def _cast(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast(dtype, part) for part in value]
    if not _is_eligible(value) or value.dtype == dtype:
        return value
    return _cached(dtype, value) if _is_cachable(dtype, value) else value.to(dtype)


def _is_cachable(dtype: torch.dtype, tensor: torch.Tensor) -> bool:
    """Tell whether autocast caches the cast of a tensor, as `cached_cast` in autocast_mode.cpp does for weights."""
    if dtype != torch.get_autocast_dtype("cpu") or not torch.is_autocast_cache_enabled():
        return False
    return tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()


def _cached(dtype: torch.dtype, weight: torch.Tensor) -> torch.Tensor:
    entry = _CACHE.get(id(weight))
    if entry is None or entry.weight() is not weight:
        entry = _CACHE[id(weight)] = _Cached(weakref.ref(weight), weight.to(dtype))
    return entry.cast


def _is_eligible(value: Any) -> bool:
    is_plain = isinstance(value, torch.Tensor) and value.is_cpu and value.is_floating_point()
    return bool(is_plain and value.dtype != torch.float64)


@contextmanager
def cuda_composites() -> Iterator[None]:
    """Decompose some composite operators on fake tensors as on CUDA; real tensors are left alone."""
    with replaced(_COMPOSITES, "CompositeImplicitAutograd"):
        yield


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: FBT001 - the operator's arguments
    if not train or p == 0 or not tensor.numel():
        return tensor
    if p == 1:
        return tensor * torch.zeros((), dtype=tensor.dtype)
    if isinstance(tensor, FakeTensor):
        dropped: torch.Tensor = torch.ops.aten.native_dropout(tensor, p, train)[0]
        return dropped
    return tensor * torch.empty_like(tensor).bernoulli_(1 - p).div_(1 - p)


def _normalised(operator: Any, tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    at_once = isinstance(tensor, FakeTensor) and (tensor.dtype, dtype) == (torch.float16, torch.float32)
    converted = tensor if dtype is None or at_once else tensor.to(dtype)
    result: torch.Tensor = operator(converted, dim, at_once)
    return result


def _rms_norm(
    tensor: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    alike = weight is None or weight.dtype == tensor.dtype
    if isinstance(tensor, FakeTensor) and alike and not tensor.is_complex():
        result: torch.Tensor = _FUSED_NORM(tensor, weight, len(shape))
        return result
    composed: torch.Tensor = torch.ops.aten._fused_rms_norm(tensor, list(shape), weight, eps)[0]
    return composed


class _FusedNorm(torch.autograd.Function):
    """Allocates as `_fused_rms_norm` does on CUDA."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, weight: torch.Tensor | None, dims: int) -> torch.Tensor:
        """Allocate the result, and one number a row."""
        wide = tensor.dtype if tensor.dtype == torch.float64 else torch.float32
        scale = tensor.new_empty(tensor.shape[:-dims], dtype=wide)
        ctx.save_for_backward(tensor, weight, scale)
        return torch.empty_like(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ARG004 - only sizes matter
        """Allocate the gradients."""
        tensor, weight, _ = ctx.saved_tensors
        return torch.empty_like(tensor), None if weight is None else torch.empty_like(weight), None


_FUSED_NORM: Any = _FusedNorm.apply  # torch gives it no types
_COMPOSITES: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "softmax.int": functools.partial(_normalised, torch.ops.aten._softmax),
    "log_softmax.int": functools.partial(_normalised, torch.ops.aten._log_softmax),
    "rms_norm": _rms_norm,
}
