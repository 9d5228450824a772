"""What a training step takes, to the byte, from running it on fake tensors: no data, no GPU, seconds for any size.

The step is the very one that trains; it is handed in as a callable, because training stands above memory. What a trace
cannot see (a kernel's own memory, what CUDA casts to, how a GPU's attention works) is imitated by `casts`, `attention`
and `scratch`.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn

from pipeline.errors import PipelineError
from pipeline.memory.footprint import Category, MicroFootprint, StandingFootprint, Tape, Unmeasurable
from pipeline.memory.tracing.fake_mode import FakeMode, Guesses, conversions, eagerly, faked, unlogged
from pipeline.memory.tracing.kernel_workspace import hidden_bytes, scratch_bytes_cpu
from pipeline.memory.tracing.recorder import OnHost, Recorder, as_parts, category_of, family, outermost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

    from pipeline.memory.footprint import MemoryChoice, MemoryPart, Sizes
    from pipeline.memory.tracing.recorder import RecordedBlock, Recording

_WORTH_COLLECTING = 1 << 16  # bytes that may be garbage: to look takes longer than a small trace
_ONE_AT_A_TIME = threading.RLock()  # some of what a trace changes is the whole process's


class TracedTraining(Protocol):
    """What is traced: `training.step.Step`."""

    model: nn.Module
    carrier: Any
    contrasts: bool  # a step's first micro-batch does more than later ones: it stands for what comes before them

    def accumulate(self, batch: Any) -> None:
        """Run a micro-batch forward and backward."""

    def update(self) -> object:
        """Let the optimizer take the gradients, and drop them."""

    def release(self) -> None:
        """Drop the gradients."""

    def evaluate(self, batch: Any) -> object:
        """Run a batch without gradients."""

    def owned(self) -> Iterable[tuple[str, str, Tensor]]:
        """Yield what may stay from one micro-batch to the next: what for, whose, the tensor."""


class Build(Protocol):
    """Makes what is traced."""

    def __call__(self, choice: MemoryChoice, watch: Recorder, model: nn.Module | None) -> TracedTraining:
        """Return a training of the model, or of a new one, that tells the watch of its parts."""


@dataclass(frozen=True)
class Target:
    """What a trace is of: a GPU, or the CPU itself."""

    imitate: Callable[[], AbstractContextManager[object]] = ExitStack
    scratch: Callable[..., int] = scratch_bytes_cpu


CPU = Target()


class CannotTrace(Unmeasurable):
    """The code needs values that fake tensors do not have, or fails on them; the cause says which."""


class Tracer:
    """An `Oracle` that traces; every choice has a model of its own, made when first asked for."""

    def __init__(
        self,
        build: Build,
        model: Callable[[], nn.Module],
        example: Callable[[Sizes], Any],
        smallest: Sizes,
        target: Target = CPU,
    ) -> None:
        """Take how to make a training, its model and a batch, and the sizes of a batch to make a first step with."""
        self._build, self._model, self._example, self._smallest = build, model, example, smallest
        self._target = target
        self._sessions: dict[MemoryChoice, _Session] = {}

    def standing(self, choice: MemoryChoice) -> StandingFootprint:
        """Return what the model takes whatever the batch."""
        return self._session(choice).standing()

    def micro(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return what a micro-batch of these sizes takes."""
        return self._session(choice).micro(sizes)

    def evaluation(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return what a batch without gradients takes."""
        return self._session(choice).evaluation(sizes)

    def _session(self, choice: MemoryChoice) -> _Session:
        if choice not in self._sessions:
            build = lambda watch, model: self._build(choice, watch, model)  # noqa: E731 - one line says it
            self._sessions[choice] = _Session(build, self._model, self._example, self._smallest, self._target)
        return self._sessions[choice]


class _Session:
    """A model on fake tensors, to ask again and again."""

    def __init__(
        self,
        build: Callable[[Recorder, nn.Module | None], TracedTraining],
        model: Callable[[], nn.Module],
        example: Callable[[Sizes], Any],
        smallest: Sizes,
        target: Target,
    ) -> None:
        self._example, self._smallest, self._target = example, smallest, target
        self._recorder, self._guesses = Recorder(target.scratch, hidden_bytes), Guesses()
        self._mode = FakeMode(allow_non_fake_inputs=True)
        self._micros: dict[tuple[object, ...], MicroFootprint] = {}
        self._standing: StandingFootprint | None = None
        self._shared: dict[int, tuple[Category, str, int]] = {}  # block → what for, whose, its number in every tape
        self._numbers: dict[tuple[Category, str], int] = {}
        self._training = self._built(build, model)
        self._training.carrier = OnHost(self._recorder)

    def _built(
        self, build: Callable[[Recorder, nn.Module | None], TracedTraining], model: Callable[[], nn.Module]
    ) -> TracedTraining:
        """Build the model fake; one that needs values for that is built real, and its tensors are made fake."""
        try:
            with self._open():
                return build(self._recorder, None)
        except CannotTrace as error:
            real = self._built_real(model, error)
            with self._open():
                return build(self._recorder, faked(real, self._mode, self._recorder.see))

    def _built_real(self, model: Callable[[], nn.Module], failed: CannotTrace) -> nn.Module:
        """Build the model with values; an error that it raises is the model's own, unless CUDA is all that it lacks."""
        try:
            with self._target.imitate():
                return model()
        except Exception as error:
            if "CUDA" in str(error):
                raise failed from error
            raise error from failed

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Let tensors be fake, and be seen; whatever goes wrong meanwhile means that it cannot be traced."""
        try:
            with self._modes():
                yield
        except (CannotTrace, PipelineError):
            raise
        except Exception as error:
            raise CannotTrace(str(error).strip().split("\n")[0] or type(error).__name__) from error

    @contextmanager
    def _modes(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(_ONE_AT_A_TIME)
            stack.enter_context(unlogged())
            stack.enter_context(self._target.imitate())
            stack.enter_context(eagerly())
            stack.enter_context(self._mode)
            stack.enter_context(self._recorder.resizes())
            stack.enter_context(conversions())
            stack.enter_context(self._recorder)
            stack.enter_context(self._guesses)
            yield

    def standing(self) -> StandingFootprint:
        """Trace what happens whatever the batch: the state, the first update and later ones."""
        if self._standing is None:
            training = self._training
            setup = self._own()
            self._accumulate(self._smallest)
            first_update, _ = self._taped(training.update)
            self._accumulate(self._smallest)
            with_gradients = self._with_gradients()
            update, recording = self._taped(training.update)
            standing, update_parts = self._parts_of(self._own()), self._parts(recording)
            self._make_gradients(with_gradients)  # from now on there are some
            self._standing = StandingFootprint(
                setup=self._allocated(setup),
                first_update=first_update,
                update=update,
                parts=standing,
                update_parts=update_parts,
                parameters=sum(parameter.numel() for parameter in training.model.parameters()),
                trained=sum(parameter.numel() for parameter in training.model.parameters() if parameter.requires_grad),
                largest_block_bytes=self._largest_block_bytes(setup),
            )
        return self._standing

    def micro(self, sizes: Sizes) -> MicroFootprint:
        """Trace a later micro-batch of a step, and derive from it what it is as the first."""
        key = tuple(sorted(sizes.items()))
        if key not in self._micros:
            self.standing()
            again, recording = self._accumulate(sizes)
            becomes = None if self._training.contrasts else self._becomes()
            if becomes is None:
                first, first_parts = self._traced_first(sizes)
            else:
                first, first_parts = self._tape(recording, becomes), self._parts(recording, becomes)
            micro = self._micro(sizes, first, again, recording)
            if self._training.contrasts:  # all are embedded twice, and who does it the first time is the first
                work = self._recorder.recording
                micro = replace(micro, flops=work.flops, kernels=work.kernels, moved_bytes=work.moved_bytes)
            self._micros[key] = replace(micro, first_parts=first_parts)
        return self._micros[key]

    def evaluation(self, sizes: Sizes) -> MicroFootprint:
        """Trace a batch without gradients."""
        key = ("evaluation", *sorted(sizes.items()))
        if key not in self._micros:
            self.standing()
            tape, recording = self._taped(lambda: self._training.evaluate(self._batch(sizes)))
            self._micros[key] = self._micro(sizes, tape, tape, recording)
        return self._micros[key]

    def _micro(self, sizes: Sizes, first: Tape, again: Tape, recording: Recording) -> MicroFootprint:
        return MicroFootprint(
            sizes=sizes,
            first=first,
            again=again,
            parts=self._parts(recording),
            flops=recording.flops,
            kernels=recording.kernels,
            moved_bytes=recording.moved_bytes,
            notes=self._guesses.notes,
            host_bytes=recording.host_bytes,
        )

    def _becomes(self) -> dict[int, int] | None:
        """Return what becomes the gradients in a step's first micro-batch: what is added to them in a later one.

        By block, with the number of the gradient in every tape; None where that is not plain.
        """
        becomes: dict[int, int] = {}
        for block in self._own():
            category, _, number = self._shared[block.number]
            if category is Category.GRADIENTS:
                added = self._recorder.added.get(block.number, [])
                if len(added) != 1 or added[0].born < 0 or added[0].bytes != block.bytes:
                    return None
                becomes[added[0].number] = number
        gradients = sum(1 for place in self._numbers if place[0] is Category.GRADIENTS)
        return becomes if len(becomes) == gradients else None

    def _traced_first(self, sizes: Sizes) -> tuple[Tape, tuple[MemoryPart, ...]]:
        self._taped(self._training.release)
        tape, recording = self._accumulate(sizes)
        return tape, self._parts(recording)

    def _accumulate(self, sizes: Sizes) -> tuple[Tape, Recording]:
        return self._taped(lambda: self._training.accumulate(self._batch(sizes)))

    def _batch(self, sizes: Sizes) -> Any:
        self._recorder.phase("inputs")
        return self._example(sizes)

    def _taped(self, run: Callable[[], object]) -> tuple[Tape, Recording]:
        """Run something; return its tape, and what was recorded of it."""
        while True:
            with_gradients = self._with_gradients()
            recording = self._begun()
            try:
                with self._open(), self._recorder.inside(self._training.model):
                    run()
            except CannotTrace:
                if not self._guesses.reconsider():
                    raise
            else:
                self._own()
                return self._tape(recording), recording
            self._training.release()  # gradients may be half added
            self._make_gradients(with_gradients)

    def _with_gradients(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._training.model.parameters() if parameter.grad is not None]

    def _make_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give parameters the gradients that a micro-batch would leave."""
        with self._open(), torch.no_grad():
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)

    def _begun(self) -> Recording:
        """Begin a recording, with nothing large left of the one before but what is held."""
        recording = self._recorder.begin()
        if sum(block.bytes for block in recording.before if block.number not in self._shared) > _WORTH_COLLECTING:
            gc.collect()
            recording = self._recorder.begin()
        live = {block.number for block in recording.before}
        self._shared = {number: place for number, place in self._shared.items() if number in live}
        return recording

    def _own(self) -> list[RecordedBlock]:
        """Find the blocks that stay, whose they are, and the number that each has in every tape."""
        kept: dict[int, RecordedBlock] = {}
        for what, name, tensor in self._training.owned():
            self._recorder.see(tensor)  # copies of modules are made behind its back
            block = self._recorder.block_of(tensor)
            if block is not None and block.number not in kept:  # else it is tied to one that was named before
                place = (Category(what), name)
                number = self._numbers.setdefault(place, -1 - len(self._numbers))
                self._shared.setdefault(block.number, (*place, number))
                kept[block.number] = block
        return list(kept.values())

    def _tape(self, recording: Recording, becomes: Mapping[int, int] | None = None) -> Tape:
        """Return what was recorded as a tape that stands for itself.

        What nobody owns but is live before, such as a table that the model keeps for the next batch, is allocated at
        its beginning; what is so afterwards is released at its end. Blocks that become what stays have its number.
        """
        becomes = becomes or {}
        kept = [block for block in recording.before if block.number not in self._shared]
        left = [block for block in (*kept, *recording.blocks) if block.died < 0 and block.number not in self._shared]
        numbers_E = [block.number for block in kept] + list(recording.block_E)
        bytes_E = [block.bytes for block in kept] + list(recording.bytes_E)
        events = [
            (self._number(number, becomes), size)
            for number, size in zip(numbers_E, bytes_E, strict=True)
            if size > 0 or number not in becomes
        ]
        events += [(block.number, -block.bytes) for block in left if block.number not in becomes]
        block_E, bytes_E_ = np.array(events, np.int64).reshape(-1, 2).T
        own = block_E >= 0
        block_E[own] = np.unique(block_E[own], return_inverse=True)[1]
        return Tape(block_E, bytes_E_)

    def _number(self, block: int, becomes: Mapping[int, int]) -> int:
        """Return a block's number in a tape: below 0, and the same in all of them, if it stays."""
        return self._shared[block][2] if block in self._shared else becomes.get(block, block)

    def _parts(self, recording: Recording, becomes: Mapping[int, int] | None = None) -> tuple[MemoryPart, ...]:
        """Return what was live at the peak of a recording; what becomes gradients stays, and there were none before."""
        becomes = becomes or {}
        events = zip(recording.block_E, recording.bytes_E, strict=True)
        live_E = np.cumsum([0 if size < 0 and block in becomes else size for block, size in events])
        peak = int(live_E.argmax()) if live_E.max(initial=0) > 0 else -1  # else it is where it begins
        blocks = recording.blocks
        backward = next((block.born for block in blocks if block.phase == "backward"), len(recording.block_E))
        sums: Counter[tuple[Category, str]] = Counter()
        for block in (*recording.before, *blocks):
            stays = block.number in becomes
            what = (Category.GRADIENTS, "") if stays else self._what(block, backward)
            is_old = bool(becomes) and not stays and what[0] is Category.GRADIENTS
            if block.born <= peak and (stays or block.died < 0 or block.died > peak) and not is_old:
                sums[what] += block.bytes
        return as_parts(sums)

    def _what(self, block: RecordedBlock, backward: int) -> tuple[Category, str]:
        if block.number not in self._shared:
            return category_of(block, backward)
        category, name, _ = self._shared[block.number]
        return category, family(name) if category is Category.BUFFERS else ""

    def _allocated(self, blocks: Iterable[RecordedBlock]) -> Tape:
        """Return the tape that only allocates some blocks that stay."""
        pairs = [(self._shared[block.number][2], block.bytes) for block in blocks]
        return Tape(*np.array(pairs, np.int64).reshape(-1, 2).T)

    def _parts_of(self, blocks: Iterable[RecordedBlock]) -> tuple[MemoryPart, ...]:
        sums: Counter[tuple[Category, str]] = Counter()
        for block in blocks:
            sums[self._shared[block.number][0], ""] += block.bytes
        return as_parts(sums)

    def _largest_block_bytes(self, blocks: Iterable[RecordedBlock]) -> int:
        """Return the parameters of the largest module that sharding would gather as a whole."""
        sums: Counter[str] = Counter()
        for block in blocks:
            category, name, _ = self._shared[block.number]
            if category is Category.PARAMETERS:
                sums[outermost(name)] += block.bytes
        return max(sums.values(), default=0)
