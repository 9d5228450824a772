"""Records every storage that torch allocates and frees while code runs on fake tensors: size, time, place in the code.

While a dispatch mode is active, the autograd engine does not add gradients in place; the recorder does so where the
engine would on a real device. Functions passed by the caller add the memory inside kernels.

Shapes: E events.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias
from unittest.mock import patch

import numpy as np
import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils.flop_counter import flop_registry

from pipeline.memory.footprint import Category, MemoryPart, Tape
from pipeline.memory.leak_inspection import sequence_numbers, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    Charge = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], int]

SCRATCH = "scratch"  # the phase of memory that a kernel allocates and releases itself
UNREGISTERED = "kept by the model without registration"
_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_PUT, _PUT_IN_PLACE = torch.ops.aten.index_put.default, torch.ops.aten._index_put_impl_.default
_INTO_ZEROS = {  # FunctionsManual.cpp, value_selecting_reduction_backward and gather_backward: into zeros made for it
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
}
_DEVICE = torch.ops.prim.device.default
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})
_LEARN_SHAPES = "_propagate_tensor_meta_non_cached"
_UNSAFE = True  # indices were checked in forward
_ENGINE = "_engine_run_backward"  # the Python function under which only the engine itself calls operators
_MODES = (__name__, "torch._subclasses", "torch.utils._python_dispatch", "torch._compile", "torch._dynamo")


@dataclass(slots=True, eq=False)
class RecordedBlock:
    """A storage: when and where it was allocated, and whose it is."""

    number: int
    bytes: int
    phase: str
    module: str  # the innermost running module; empty: none
    born: int  # index of the event; -1: before the recording
    died: int = -1  # -1: it is live
    node: int = -1  # of the autograd graph, where no module was running
    terms: tuple[str, ...] = ()  # of the loss that need it
    use: tuple[Category, str] | None = None  # category and name of a tensor that the training owns
    shared: int = 0  # number of an owned block in every tape, below 0


Becomes: TypeAlias = "Mapping[RecordedBlock, int]"  # blocks that become gradients, and the gradients' shared numbers


@dataclass(slots=True)
class Recording:
    """The allocations and the work of a piece of code."""

    before: tuple[RecordedBlock, ...] = ()  # live when it began
    blocks: list[RecordedBlock] = field(default_factory=list)  # allocated since
    events: list[tuple[RecordedBlock, int]] = field(default_factory=list)  # bytes above 0: allocated, below: released
    flops: float = 0.0
    kernels: int = 0
    moved_bytes: float = 0.0  # read and written by kernels
    host_bytes: int = 0  # offloaded at most

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes that were live, beyond those live before."""
        return max(accumulate((size for _, size in self.events), initial=0))

    def tape(self, setup: Sequence[RecordedBlock] = (), becomes: Becomes = MappingProxyType({})) -> Tape:
        """Return the recording as a tape that can be played after any other of the model.

        Blocks that the training does not own, such as a table that the model keeps for the next batch, are allocated
        at the start if they were live before, and released at the end if they still are. Other tapes do not know that
        the model replaced a block of `setup`: it is released at the start and allocated at the end.
        """
        before = set(self.before)
        kept = [block for block in self.before if block.use is None]
        events = [(block, -block.bytes) for block in setup if block not in before]
        events += [(block, block.bytes) for block in kept]
        events += self.events
        events += [(block, -block.bytes) for block in (*kept, *self.blocks) if block.died < 0 and block.use is None]
        numbered = [
            (block.shared or becomes.get(block, block.number), size)
            for block, size in events
            if size > 0 or block not in becomes
        ]
        numbered += [(block.shared, block.bytes) for block in setup if block.died >= 0]
        block_E, bytes_E = np.array(numbered, np.int64).reshape(-1, 2).T
        own_E = block_E >= 0
        block_E[own_E] = np.unique(block_E[own_E], return_inverse=True)[1]
        return Tape(block_E, bytes_E)

    def parts(self, becomes: Becomes = MappingProxyType({})) -> tuple[MemoryPart, ...]:
        """Return the live memory at the peak; blocks in `becomes` count as the gradients, in place of earlier ones."""
        live_E = np.cumsum([0 if size < 0 and block in becomes else size for block, size in self.events])
        peak = int(live_E.argmax()) if live_E.max(initial=0) > 0 else -1
        backward = next((block.born for block in self.blocks if block.phase == "backward"), len(self.events))
        sums: Counter[tuple[Category, str]] = Counter()
        for block in (*self.before, *self.blocks):
            stays = block in becomes
            use = (Category.GRADIENTS, "") if stays else _use_of(block, backward)
            is_earlier = bool(becomes) and use[0] is Category.GRADIENTS and not stays
            if not is_earlier and block.born <= peak and (stays or not 0 <= block.died <= peak):
                sums[use] += block.bytes
        return as_parts(sums)


def _use_of(block: RecordedBlock, backward: int) -> tuple[Category, str]:
    """Return a block's category and name: an activation if forward leaves it for backward, else a temporary."""
    if block.use is not None:
        category, name = block.use
        return category, family(name) if category is Category.BUFFERS else ""
    if block.born < 0:
        return Category.BUFFERS, UNREGISTERED
    if block.phase == SCRATCH:
        return Category.SCRATCH, ""
    if block.phase == "inputs":
        return Category.INPUTS, ""
    if block.phase == "forward" and (block.died < 0 or block.died > backward):
        if block.module:
            return Category.ACTIVATIONS, family(block.module)
        return Category.LOSS, " and ".join(block.terms)
    return Category.TEMPORARIES, block.phase


def family(name: str) -> str:
    """Return a name with the numbers of repeated blocks replaced: layers.*.attention."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def as_parts(sums: Counter[tuple[Category, str]]) -> tuple[MemoryPart, ...]:
    """Return sums of bytes as parts, in the order of categories."""
    order = list(Category)
    parts = [MemoryPart(category, name, size) for (category, name), size in sums.items() if size]
    return tuple(sorted(parts, key=lambda part: (order.index(part.category), -part.bytes, part.name)))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records storages while it is entered, inside the fake mode.

    A step reports its phases to it (`training.step.step.StepWatch`) and offloads tensors through it
    (`training.step.checkpointing.Carrier`).
    """

    def __init__(self, scratch: Charge = lambda *_: 0, hidden: Charge = lambda *_: 0) -> None:
        """Take functions for the bytes that a kernel allocates while it runs, and that it keeps with its result."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self.part = "idle"
        self.modules: list[str] = []
        self.added: dict[RecordedBlock, list[RecordedBlock]] = {}  # to each block, in backward
        self.live: dict[int, RecordedBlock] = {}
        self._scratch, self._hidden = scratch, hidden
        self._known: dict[int, tuple[weakref.ref[Any], RecordedBlock | None]] = {}  # no block: it is on the host
        self._made = 0
        self._on_host = False
        self._host_bytes = 0
        self._alone = _counts_alone()

    def begin(self) -> Recording:
        """Start a new recording; of the last one only live blocks are kept."""
        for block in self.live.values():
            block.born, block.node = -1, -1
        self.added.clear()
        self.recording = Recording(tuple(self.live.values()), host_bytes=self._host_bytes)
        return self.recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper that checks for it is slow

    def phase(self, name: str) -> None:
        """Note that a part of the step begins."""
        self.part = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and record new storages."""
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # a shortcut: torch asks for it very often
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a wrapper such as DTensor: its parts are recorded later
        with torch._C.DisableTorchFunction():  # the caller's function modes have already seen this call
            return self._recorded(func, args, kwargs or {})

    def _recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator in place where the autograd engine would, and record what it allocates."""
        if func is _ADD and _engine_adds(args, kwargs) and _counts(args[0]) == self._alone and is_dense(args[0]):
            func = _ADD_IN_PLACE  # the engine holds the only reference to this gradient
        elif func is _PUT and _engine_calls(kwargs):
            func, args = _PUT_IN_PLACE, (*args, _UNSAFE)  # FunctionsManual.cpp, index_backward: into zeros made for it
        elif func in _INTO_ZEROS and _engine_calls(kwargs):
            func = _INTO_ZEROS[func]
        if func is _ADD_IN_PLACE and self.part == "backward" and isinstance(args[1], torch.Tensor):
            target, source = self.block_of(args[0]), self.block_of(args[1])
            if target is not None and source is not None:
                self.added.setdefault(target, []).append(source)
        out = func(*args, **kwargs)
        hidden = self._hidden(func, args, kwargs, out)
        results = list(tensors_in(out))
        made = [self.see(tensor, hidden if tensor is results[-1] else 0) for tensor in results]
        if any(made) or func._schema.is_mutable:
            self._count(func, args, kwargs, out)
        return out

    def see(self, tensor: Tensor, hidden: int = 0) -> bool:
        """Record the storage of a tensor, with `hidden` further bytes; return whether it is new."""
        storage = _storage(tensor)
        if storage._cdata in self._known:
            return False
        self._note(storage, hidden)
        return True

    def _note(self, storage: Any, hidden: int = 0) -> None:
        key = storage._cdata
        block = None if self._on_host else self._born(storage.nbytes() + hidden)
        size = storage.nbytes() if self._on_host else 0
        self._host_bytes += size
        self.recording.host_bytes = max(self.recording.host_bytes, self._host_bytes)

        def gone(reference: Any) -> None:
            if self._known.get(key, (None,))[0] is reference:
                del self._known[key]
                self._host_bytes -= size
                if block is not None:
                    self._dies(block)

        self._known[key] = weakref.ref(storage, gone), block

    def _born(self, size: int, phase: str = "") -> RecordedBlock:
        recording, module = self.recording, self.modules[-1] if self.modules else ""
        block = RecordedBlock(self._made, size, phase or self.part, module, len(recording.events))
        if block.phase == "forward" and not module:
            block.node = torch._C._autograd._get_sequence_nr() - 1  # that of the operator, or of the one before
        self._made += 1
        self.live[block.number] = block
        recording.blocks.append(block)
        recording.events.append((block, size))
        return block

    def _dies(self, block: RecordedBlock) -> None:
        del self.live[block.number]
        block.died = len(self.recording.events)
        self.recording.events.append((block, -block.bytes))

    def block_of(self, tensor: Tensor) -> RecordedBlock | None:
        """Return the block of a tensor; None if it is on the host, or was not recorded."""
        return self._known.get(_storage(tensor)._cdata, (None, None))[1]

    @contextmanager
    def resizes(self) -> Iterator[None]:
        """Follow storages that are resized while they live, as those of sharded parameters are."""
        resize = torch.UntypedStorage.resize_

        def follow(storage: Any, size: int) -> Any:
            done = resize(storage, size)
            alive, block = self._known.get(storage._cdata, (None, None))
            if alive is not None and block is not None and block.bytes != size:
                self._dies(block)
                del self._known[storage._cdata]
                self._note(storage)
            return done

        with patch.object(torch.UntypedStorage, "resize_", follow):
            yield

    def away(self, tensor: Tensor) -> Tensor:
        """Offload a tensor: return a copy that counts as host memory."""
        self._on_host = True
        try:
            return torch.empty_like(tensor)
        finally:
            self._on_host = False

    def back(self, kept: Tensor, _: torch.device) -> Tensor:
        """Return a copy of an offloaded tensor that counts on the device."""
        return torch.empty_like(kept)

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Count a kernel's work and its internal memory."""
        recording = self.recording
        recording.kernels += 1
        recording.moved_bytes += sum(tensor.nbytes for tensor in (*tensors_in(args), *tensors_in(out)))
        if func.overloadpacket in flop_registry:
            recording.flops += float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out))
        if size := self._scratch(func, args, kwargs, out):
            self._dies(self._born(size, SCRATCH))

    def terms(self, terms: Mapping[str, Tensor]) -> None:
        """Attribute blocks made outside modules to the terms of the loss that need them."""
        blocks = {block.node: block for block in self.recording.blocks if block.node >= 0 and block.died < 0}
        lowest = min(blocks, default=0)
        needed: dict[int, list[str]] = {}
        for name, total in terms.items():
            for node in sequence_numbers(total.grad_fn, lowest):
                needed.setdefault(node, []).append(name)
        for block in self.recording.blocks:
            block.terms, block.node = block.terms or tuple(needed.get(block.node, ())), -1

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """Attribute allocations to the running module of a model, or to an operation of the loss."""
        names = {id(module): name or _class_name(module) for name, module in model.named_modules()}
        here = threading.get_ident()  # hooks belong to the whole process

        def enter(module: nn.Module, _: Any) -> None:
            if threading.get_ident() == here:
                self.modules.append(names.get(id(module), self.modules[-1] if self.modules else ""))

        def leave(*_: Any) -> None:
            if threading.get_ident() == here and self.modules:
                self.modules.pop()

        before = hooks.register_module_forward_pre_hook(enter)
        after = hooks.register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            self.modules.clear()


@contextmanager
def shapes_unseen() -> Iterator[None]:
    """Hide from every mode the operators that DTensor runs once a process to learn shapes: they take no memory."""
    sharding = sys.modules.get("torch.distributed.tensor._sharding_prop")  # imported only where a model is sharded
    kind = getattr(sharding, "ShardingPropagator", None)
    if (learn := getattr(kind, _LEARN_SHAPES, None)) is None:
        yield
        return

    def learn_unseen(propagator: Any, schema: Any) -> Any:
        with _disable_current_modes():
            return learn(propagator, schema)

    with patch.object(kind, _LEARN_SHAPES, learn_unseen):
        yield


def _storage(tensor: Any) -> Any:
    """Return a tensor's storage; of a wrapper such as DTensor, that of the local tensor."""
    while is_traceable_wrapper_subclass(tensor):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return (tensor._values() if tensor.is_sparse else tensor).untyped_storage()


def _class_name(module: nn.Module) -> str:
    """Return the name of a module's class: of the user's own, which FSDP replaces by one of both."""
    return next(kind.__name__ for kind in type(module).__mro__ if not kind.__name__.startswith("FSDP"))


def _engine_adds(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether the autograd engine is adding two gradients, which it does in place where no mode is active."""
    gradient, added = args[:2]
    alike = isinstance(added, torch.Tensor) and gradient.shape == added.shape and gradient.dtype == added.dtype
    return alike and _engine_calls(kwargs)


def _engine_calls(kwargs: Mapping[str, Any]) -> bool:
    """Tell whether the autograd engine itself calls an operator, no Python function within a backward."""
    if kwargs or torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
        return False
    return _caller() == _ENGINE


def _counts(tensor: Any) -> tuple[int, int]:
    """Return the reference counts of a tensor and of its storage."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@functools.cache
def _counts_alone() -> tuple[int, int]:
    """Return the reference counts of a gradient that only the engine holds: only to such a one it adds in place.

    torch 2.13, csrc/autograd/input_buffer.cpp: `can_accumulate_inplace`. The counts of a fake one depend on torch.
    """
    observed: list[tuple[int, int]] = []

    class Probe(TorchDispatchMode):  # type: ignore[no-untyped-call]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is _ADD and _engine_adds(args, kwargs):
                observed.append(_counts(args[0]))
            return func(*args, **kwargs)

    with FakeTensorMode(), Probe():  # type: ignore[no-untyped-call]
        leaf = torch.ones(2, requires_grad=True)
        (leaf.exp().exp() + leaf.exp().exp()).sum().backward()  # type: ignore[no-untyped-call]
    return observed[0]


def _caller() -> str:
    """Return the name of the Python function that calls the operator, outside the modes."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_MODES):
        frame = frame.f_back
    return frame.f_code.co_name
