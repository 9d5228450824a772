"""Measures the memory of a training step to the byte by running it on fake tensors: no data, no GPU, in seconds.

This room may not import the training room, so the caller passes the training's step as a callable. A trace cannot see
memory inside kernels, CUDA's casts and a GPU's attention: `kernels` and `fake_cuda` imitate them.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import nn

from pipeline.errors import PipelineError, PlanInfeasible
from pipeline.memory.footprint import ALIKE, Category, MicroFootprint, Provenance, StandingFootprint, Tape, Unmeasurable
from pipeline.memory.tracing.fake_cuda import cuda_calls, cuda_casts, cuda_composites
from pipeline.memory.tracing.fake_mode import (
    FAILS,
    LESS,
    SEEDS,
    Draws,
    EndlessGuess,
    FakeMode,
    Guesses,
    conversions,
    eagerly,
    failure_reason,
    faked,
    unlogged,
)
from pipeline.memory.tracing.kernels import (
    cuda_attention,
    hidden_bytes,
    hidden_bytes_cpu,
    scratch_bytes,
    scratch_bytes_cpu,
)
from pipeline.memory.tracing.recorder import Recorder, as_parts, shapes_unseen
from pipeline.waiting import signals_held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from pipeline.memory.footprint import MemoryChoice, Sizes
    from pipeline.memory.tracing.recorder import Charge, RecordedBlock, Recording

Answer = TypeVar("Answer")
_WORTH_COLLECTING = 1 << 16  # bytes of possible garbage: collecting takes longer than a small trace
_LASTING = (Category.PARAMETERS, Category.BUFFERS, Category.EMA)  # live before the first micro-batch
_COMPARED = 3  # sizes at which both ways of a branch are tried
FIRST = (1, 2, 4)  # times the smallest sizes, until the model accepts them
MARKED = "pipeline: a micro-batch"  # name of a run to a profiler
_ONE_AT_A_TIME = threading.RLock()  # a trace changes some globals of torch


# The training step that is traced is `training.step.step.Step`, which this room may not import. Its makers get the
# settings to trace, what it reports its phases to, and a model, or None to make one.
Training: TypeAlias = Any
Build: TypeAlias = "Callable[[MemoryChoice, Recorder, nn.Module | None], Training]"


@dataclass(frozen=True)
class Target:
    """The device that a trace imitates: a GPU, or the CPU itself."""

    imitate: Callable[[], AbstractContextManager[object]] = ExitStack
    scratch: Charge = scratch_bytes_cpu  # bytes that a kernel allocates while it runs
    hidden: Charge = hidden_bytes_cpu  # bytes that it keeps with its result
    builds: bool = True  # the model is built on it, not copied to it


CPU = Target()


def card_target(capability: tuple[int, int]) -> Target:
    """Return the target for a GPU of a compute capability: its calls, casts, kernels and their scratch memory."""

    @contextmanager
    def imitate() -> Iterator[None]:
        with cuda_calls(capability), cuda_casts(), cuda_composites(), cuda_attention(capability):
            yield

    return Target(imitate, scratch_bytes, hidden_bytes, builds=False)


def calls_to_card() -> AbstractContextManager[None]:
    """Return a context in which code that calls a GPU directly finds one, for rooms that name no kind of GPU."""
    return cuda_calls()


class CannotTrace(Unmeasurable):
    """The code needs values that fake tensors lack, or fails on them; see the cause."""


class Tracer:
    """An `Oracle` that traces, with a session for each choice."""

    def __init__(
        self,
        build: Build,
        model: Callable[[], nn.Module],
        example: Callable[[Sizes], Any],
        smallest: Sizes,
        target: Target = CPU,
    ) -> None:
        """Take functions that make a training, its model and a batch, and the sizes of the batch for a first step."""
        self._build, self._parts = build, (example, smallest, model, target)
        self._sessions: dict[MemoryChoice, TraceSession] = {}

    def standing(self, choice: MemoryChoice) -> StandingFootprint:
        """Return the memory that does not depend on the batch."""
        return self._answer(choice, TraceSession.standing)

    def micro(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a micro-batch of these sizes."""
        return self._answer(choice, lambda session: session.micro(sizes))

    def evaluation(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a batch without gradients."""
        return self._answer(choice, lambda session: session.evaluation(sizes))

    def _answer(self, choice: MemoryChoice, ask: Callable[[TraceSession], Answer]) -> Answer:
        if choice not in self._sessions:
            self._sessions[choice] = TraceSession(partial(self._build, choice), *self._parts)
        try:
            return ask(self._sessions[choice])
        except (LookupError, ValueError, AssertionError) as error:
            raise CannotTrace(f"its blocks do not add up: {type(error).__name__}: {error}") from error


class TraceSession:
    """A training that answers any number of questions; without a `model` to make fake, it runs on real tensors."""

    def __init__(
        self,
        build: Callable[[Recorder, nn.Module | None], Training],
        example: Callable[[Sizes], Any],
        smallest: Sizes,
        model: Callable[[], nn.Module] | None = None,
        target: Target = CPU,
    ) -> None:
        """Build the training and begin to record."""
        self._example, self._smallest, self._target = example, smallest, target
        self._recorder = Recorder(target.scratch, target.hidden)
        self._guesses, self._draws = Guesses(), Draws()
        self._mode = FakeMode(allow_non_fake_inputs=True) if model is not None else None
        self._micros: dict[tuple[object, ...], MicroFootprint] = {}
        self._standing: StandingFootprint | None = None
        self._shared: dict[tuple[Category, str], int] = {}  # numbers of owned blocks in every tape
        self._compared = 0  # runs in which branches were traced both ways
        self._setup: list[RecordedBlock] = []  # live before the first micro-batch
        self._building_bytes = 0  # the most that was live while the model was built
        self._joined = False  # gradients of several parameters are one block
        self._training = self._built(build, model)
        self._training.carrier = self._recorder

    def _built(
        self, build: Callable[[Recorder, nn.Module | None], Training], model: Callable[[], nn.Module] | None
    ) -> Training:
        """Build the model on fake tensors; if that needs values, build it for real and make its tensors fake."""
        try:
            with self._open():
                return build(self._recorder, None)
        except CannotTrace as error:
            assert model is not None
            assert self._mode is not None
            real = self._built_real(model, error)
            with self._open():
                return build(self._recorder, faked(real, self._mode, self._recorder.see))

    def _built_real(self, model: Callable[[], nn.Module], failed: CannotTrace) -> nn.Module:
        """Build the model with real tensors; its errors are the model's own, unless only CUDA is missing."""
        watch = Recorder()
        try:
            with self._target.imitate(), watch:
                real = model()
        except Exception as error:
            if "CUDA" in str(error):
                raise failed from error
            raise error from failed
        self._building_bytes = watch.recording.peak_bytes
        return real

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Enter the fake mode, if any, and the recorder; any error of fake tensors becomes CannotTrace."""
        contexts: list[Any] = [_ONE_AT_A_TIME, signals_held()]  # an exception within torch's engine ends in an abort
        contexts += [self._target.imitate(), eagerly(), self._recorder.resizes(), shapes_unseen()]
        if self._mode is None:
            contexts += [self._recorder]
        else:
            contexts += [unlogged(), self._mode, conversions(), self._recorder, self._guesses]
        try:
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                yield
        except (CannotTrace, PipelineError):
            raise
        except Exception as error:
            if self._mode is None:
                raise
            raise CannotTrace(failure_reason(error)) from error

    def standing(self) -> StandingFootprint:
        """Trace what does not depend on the batch: the state, the first update and later ones."""
        if self._standing is None:
            training, blocks = self._training, self._set_up()
            setup, state_bytes = self._building(blocks), _state_bytes(blocks)
            self._accumulate_least()
            self._draw_most()
            kernels = self._highest(lambda: training.accumulate(self._batch(self._smallest)))[1].kernels
            origin, with_gradients = self._origin, self._with_gradients()
            first_update, _ = self._taped(training.update)
            self._make_gradients(with_gradients)
            update, recording = self._taped(training.update)
            state_bytes += _state_bytes(set(self._own()) - set(blocks))
            update_parts = recording.parts()
            self._make_gradients(with_gradients)  # micro-batches of a step find some
            parameters = list(training.model.parameters())
            self._standing = StandingFootprint(
                setup=setup,
                first_update=first_update,
                update=update,
                parts=as_parts(state_bytes),
                update_parts=update_parts,
                parameters=sum(parameter.numel() for parameter in parameters),
                trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
                origin=origin,
                kernels=kernels,
            )
        return self._standing

    def _set_up(self) -> list[RecordedBlock]:
        """Return the blocks that are live before the first micro-batch."""
        self._building_bytes = max(self._building_bytes, self._recorder.recording.peak_bytes)
        self._setup = self._own()
        return self._setup

    def _building(self, blocks: Iterable[RecordedBlock]) -> Tape:
        """Return a tape that builds the model and keeps these blocks; for a GPU, the host builds it."""
        pairs = [(block.shared, block.bytes) for block in blocks]
        if self._target.builds and self._building_bytes:
            pairs = [(0, self._building_bytes), (0, -self._building_bytes), *pairs]
        return Tape(*np.array(pairs, np.int64).reshape(-1, 2).T)

    def _accumulate_least(self) -> None:
        """Run a first micro-batch, larger where the model needs more: BatchNorm needs two values a channel."""
        least = self._smallest
        for times in FIRST:
            self._smallest = {name: times * size for name, size in least.items()}
            try:
                self._accumulate(self._smallest)
            except (ValueError, CannotTrace) as error:
                if times == FIRST[-1] or not isinstance(error.__cause__ or error, ValueError):
                    raise
            else:
                return

    def _draw_most(self) -> None:
        """Keep the random numbers with which a step takes most, if the model's path depends on them."""
        if self._mode is not None and not self._draws.any:
            return
        most, kept = self._accumulate(self._smallest)[0], self._draws.seed
        for seed in range(1, len(SEEDS)):
            self._draws.seed = seed
            try:
                tape = self._accumulate(self._smallest)[0]
            except Exception:  # noqa: BLE001, S112 - a path without a gradient, for example: it takes no more
                continue
            if _takes_more(tape, most):
                most, kept = tape, seed
            elif not self._draws.any and not _takes_more(most, tape):
                break
        self._draws.seed = kept

    def peaks(self, sizes: Sizes) -> list[tuple[int, int]]:
        """Run a later micro-batch with two seeds; return for each what it takes, and how much of that was kept before.

        Each is followed by a run without the recorder, marked for a profiler: under it, some of torch's backward works
        in place that otherwise does not.
        """
        if not self._setup:
            self._set_up()
            self._accumulate_least()
        peaks = []
        for self._draws.seed in (0, 1):
            tape, recording = self._settled(lambda: self._training.accumulate(self._batch(sizes)))
            peaks.append((tape.peak_bytes, tape.peak_bytes - recording.peak_bytes))
            with eagerly(), self._draws.seeded(), torch.autograd.profiler.record_function(MARKED):
                self._training.accumulate(self._batch(sizes))
        return peaks

    def micro(self, sizes: Sizes) -> MicroFootprint:
        """Trace a later micro-batch of a step, and derive from it the tape of the first micro-batch."""
        key = tuple(sorted(sizes.items()))
        if key not in self._micros:
            self.standing()
            again, recording = self._highest(lambda: self._training.accumulate(self._batch(sizes)))
            micro = self._micro(sizes, again, recording)
            becomes = None if self._training.contrasts else self._becomes()
            if becomes is None:
                self._taped(self._training.release)
                first, alone = self._accumulate(sizes)
                first_parts = alone.parts()
            else:
                first, first_parts = recording.tape(self._setup, becomes), recording.parts(becomes)
            if self._training.contrasts:  # every item is embedded twice, once by the step's first micro-batch
                micro = replace(micro, flops=alone.flops, kernels=alone.kernels, moved_bytes=alone.moved_bytes)
            self._micros[key] = replace(micro, first=first, first_parts=first_parts)
        return self._micros[key]

    def evaluation(self, sizes: Sizes) -> MicroFootprint:
        """Trace a batch without gradients."""
        key = ("evaluation", *sorted(sizes.items()))
        if key not in self._micros:
            self.standing()
            tape, recording = self._highest(lambda: self._training.evaluate(self._batch(sizes)))
            self._micros[key] = self._micro(sizes, tape, recording)
        return self._micros[key]

    def _micro(self, sizes: Sizes, tape: Tape, recording: Recording) -> MicroFootprint:
        return MicroFootprint(
            sizes=sizes,
            first=tape,
            again=tape,
            parts=recording.parts(),
            flops=recording.flops,
            kernels=recording.kernels,
            moved_bytes=recording.moved_bytes,
            origin=self._origin,
            notes=(*self._guesses.notes, *self._draws.notes),
            host_bytes=recording.host_bytes,
        )

    @property
    def _origin(self) -> Provenance:
        return Provenance.GUESSED if self._guesses.notes or self._draws.any else Provenance.TRACED

    def _becomes(self) -> dict[RecordedBlock, int] | None:
        """Map the blocks that a later micro-batch adds to the gradients to the gradients' shared numbers.

        In a step's first micro-batch they become the gradients. None where that is ambiguous.
        """
        becomes: dict[RecordedBlock, int] = {}
        for block in self._own():
            if block.use is not None and block.use[0] is Category.GRADIENTS:
                added = self._recorder.added.get(block, [])
                if len(added) != 1 or added[0].born < 0 or added[0].bytes != block.bytes:
                    return None
                becomes[added[0]] = block.shared
        gradients = sum(1 for category, _ in self._shared if category is Category.GRADIENTS)
        return becomes if len(becomes) == gradients else None

    def _accumulate(self, sizes: Sizes) -> tuple[Tape, Recording]:
        return self._taped(lambda: self._training.accumulate(self._batch(sizes)))

    def _batch(self, sizes: Sizes) -> Any:
        self._recorder.phase("inputs")
        batch = self._example(sizes)
        self._draws.begin()
        if self._mode is None:
            torch.manual_seed(self._draws.seed)
        return batch

    def _highest(self, run: Callable[[], object]) -> tuple[Tape, Recording]:
        """Run with each guess either way, and keep those with which it takes most."""
        taped, is_last = self._settled(run), True
        for line in self._guesses.open_lines(again=self._compared < _COMPARED):
            self._guesses.flip(line)
            try:
                other = self._settled(run)
            except (CannotTrace, PipelineError) as error:
                self._guesses.decide(line, FAILS, keep=False)
                if isinstance(error.__cause__, EndlessGuess):  # it may take anything
                    raise
                is_last = False
            else:
                is_last = _takes_more(other[0], taped[0])
                self._guesses.decide(line, LESS, keep=is_last)
                taped = other if is_last else taped
        self._compared += 1
        return taped if is_last else self._settled(run)

    def _settled(self, run: Callable[[], object]) -> tuple[Tape, Recording]:
        """Run, and again if the model then keeps more or less than before: the second run finds what it keeps."""
        before = self._kept_bytes()

        def is_settled() -> bool:
            return abs(self._kept_bytes() - before) <= ALIKE * taped[0].peak_bytes

        taped = self._taped(run)
        if is_settled():
            return taped
        gc.collect()
        return taped if is_settled() else self._taped(run)

    def _kept_bytes(self) -> int:
        """Return the live bytes that are not the training's own: the model keeps them."""
        return _unowned_bytes(self._recorder.live.values())

    def _taped(self, run: Callable[[], object]) -> tuple[Tape, Recording]:
        """Run; return the tape and its recording. Where it fails, guess otherwise and run again."""
        while True:
            with_gradients = self._with_gradients()
            recording = self._recorder.begin()
            if _unowned_bytes(recording.before) > _WORTH_COLLECTING:  # probably garbage of the recording before
                gc.collect()
                recording = self._recorder.begin()
            self._guesses.begin()
            try:
                with self._open(), self._draws.seeded(), self._recorder.inside(self._training.model):
                    run()
            except Exception as error:
                self._training.release()  # gradients may be half added
                self._make_gradients(with_gradients)
                is_open = isinstance(error, (CannotTrace, PipelineError))
                if is_open and not isinstance(error.__cause__, EndlessGuess) and self._guesses.reconsider():
                    continue
                if isinstance(error, PipelineError) and self._guesses.notes:  # real values may go another way
                    raise CannotTrace("; ".join((error.what, *self._guesses.notes))) from error
                raise
            self._own()
            return recording.tape(self._setup), recording

    def _with_gradients(self) -> list[nn.Parameter]:
        owned = self._training.owned()
        gradients = [self._recorder.block_of(tensor) for use, _, tensor in owned if use == Category.GRADIENTS]
        self._joined = self._joined or len(set(gradients)) < len(gradients)
        given = {name: one for name, one in self._training.model.named_parameters() if one.grad is not None}
        if sparse := [name for name, one in given.items() if one.grad is not None and one.grad.is_sparse]:
            what = f"the gradients of {', '.join(sparse)} are sparse: the memory to add them depends on values"
            raise PlanInfeasible(what, remedy="use nn.Embedding(..., sparse=False) for dense gradients")
        return list(given.values())

    def _make_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give parameters the gradients that a micro-batch would leave."""
        if self._joined and parameters:  # in blocks that several share, as of shards: only a micro-batch makes such
            self._accumulate(self._smallest)
            return
        with self._open(), torch.no_grad():
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
        self._own()

    def _own(self) -> list[RecordedBlock]:
        """Mark the blocks that the training owns with category, name and shared number, and return them."""
        owned: dict[RecordedBlock, None] = {}
        for category, name, tensor in self._training.owned():
            self._recorder.see(tensor)  # modules may be copied outside the session
            block, use = self._recorder.block_of(tensor), (Category(category), name)
            if block is None or block in owned:  # tied to one that was named before
                continue
            if self._setup and use[0] in _LASTING and block.use is None:
                continue  # it replaced a block of the setup: the model keeps it, as it keeps anything unregistered
            if block.use is None:
                block.use, block.shared = use, self._shared.setdefault(use, -1 - len(self._shared))
            owned[block] = None
        return list(owned)


def _unowned_bytes(blocks: Iterable[RecordedBlock]) -> int:
    return sum(block.bytes for block in blocks if block.use is None)


def _state_bytes(blocks: Iterable[RecordedBlock]) -> Counter[tuple[Category, str]]:
    """Return the bytes of owned blocks by category."""
    sums: Counter[tuple[Category, str]] = Counter()
    for block in blocks:
        if block.use is not None:
            sums[block.use[0], ""] += block.bytes
    return sums


def _takes_more(tape: Tape, other: Tape) -> bool:
    """Tell whether a run takes more than another: at its peak, else in what it leaves, else in all it allocates."""
    measures = [(of.peak_bytes, of.left_bytes, int(np.maximum(of.bytes_E, 0).sum())) for of in (tape, other)]
    for more, less in zip(*measures, strict=True):
        if abs(more - less) > ALIKE * max(more, less):
            return bool(more > less)
    return False
