"""The memory of a training step, to the byte, from running it on fake tensors: no data, no GPU, seconds for any size.

The step is the very one that trains; it is handed in as a callable, because training stands above memory. What a trace
cannot see (memory inside kernels, CUDA's casts, a GPU's attention) is imitated by `kernel_workspace`, `autocast` and
`sdpa_choice`.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import nn

from pipeline.errors import PipelineError, PlanInfeasible
from pipeline.memory.footprint import ALIKE, Category, MicroFootprint, Provenance, StandingFootprint, Tape, Unmeasurable
from pipeline.memory.tracing.autocast import cuda_casts, cuda_composites
from pipeline.memory.tracing.fake_cuda import cuda_calls
from pipeline.memory.tracing.fake_mode import (
    FakeMode,
    conversions,
    eagerly,
    faked,
    unlogged,
)
from pipeline.memory.tracing.guesses import FAILS, LESS, SEEDS, Draws, EndlessGuess, Guesses, told_cause
from pipeline.memory.tracing.kernel_workspace import hidden_bytes, hidden_bytes_cpu, scratch_bytes, scratch_bytes_cpu
from pipeline.memory.tracing.recorder import OnHost, Recorder, as_parts, category_of, family, outermost, shapes_unseen
from pipeline.memory.tracing.sdpa_choice import cuda_attention
from pipeline.waiting import signals_held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from pipeline.memory.footprint import MemoryChoice, MemoryPart, Sizes
    from pipeline.memory.tracing.recorder import RecordedBlock, Recording

Answer = TypeVar("Answer")
_WORTH_COLLECTING = 1 << 16  # bytes that may be garbage: to look takes longer than a small trace
_LASTING = (Category.PARAMETERS, Category.BUFFERS, Category.EMA)  # they stand before the first micro-batch
_COMPARED = 3  # runs of other sizes, after which branches are taken as before
FIRST = (1, 2, 4)  # times the smallest sizes, until a model takes them
MARKED = "pipeline: a micro-batch"  # to a profiler
_ONE_AT_A_TIME = threading.RLock()  # some of what a trace changes is the whole process's


class TracedTraining(Protocol):
    """The training step that is traced: `training.step.Step`."""

    model: nn.Module
    carrier: Any
    contrasts: bool  # a step's first micro-batch does more than later ones: it stands for what comes before them

    def accumulate(self, batch: Any) -> None:
        """Run a micro-batch forward and backward."""

    def update(self) -> object:
        """Run the optimizer, and drop the gradients."""

    def release(self) -> None:
        """Drop the gradients."""

    def evaluate(self, batch: Any) -> object:
        """Run a batch without gradients."""

    def owned(self) -> Iterable[tuple[str, str, Tensor]]:
        """Yield the tensors that may outlive a micro-batch, each after its category and name."""


class Build(Protocol):
    """Makes the training step that is traced."""

    def __call__(self, choice: MemoryChoice, watch: Recorder, model: nn.Module | None) -> TracedTraining:
        """Return a training step of the model, or of a new one, that reports its phases to the watch."""


@dataclass(frozen=True)
class Target:
    """The device that a trace imitates: a GPU, or the CPU itself."""

    imitate: Callable[[], AbstractContextManager[object]] = ExitStack
    scratch: Callable[..., int] = scratch_bytes_cpu
    hidden: Callable[..., int] = hidden_bytes_cpu


CPU = Target()


def card_target(capability: tuple[int, int]) -> Target:
    """Return what is imitated of a card of a compute capability: its calls, casts, kernels and their scratch memory."""

    @contextmanager
    def imitate() -> Iterator[None]:
        with cuda_calls(capability), cuda_casts(), cuda_composites(), cuda_attention(capability):
            yield

    return Target(imitate, scratch_bytes, hidden_bytes)


def calls_to_card() -> AbstractContextManager[None]:
    """Return a context in which code that calls a card directly finds one."""
    return cuda_calls()


class CannotTrace(Unmeasurable):
    """The code needs values that fake tensors lack, or fails on them; see the cause."""


class Tracer:
    """An `Oracle` that traces; each choice has a model of its own, made when first needed."""

    def __init__(
        self,
        build: Build,
        model: Callable[[], nn.Module],
        example: Callable[[Sizes], Any],
        smallest: Sizes,
        target: Target = CPU,
    ) -> None:
        """Take functions that make a training, its model and a batch, and the sizes of the batch for a first step."""
        self._build, self._model, self._example, self._smallest = build, model, example, smallest
        self._target = target
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
        """Return a session's answer; a tape that does not add up is none, and a lower rung is asked."""
        session = self._session(choice)
        try:
            return ask(session)
        except (LookupError, ValueError, AssertionError) as error:
            raise CannotTrace(f"its blocks do not add up: {type(error).__name__}: {error}") from error

    def _session(self, choice: MemoryChoice) -> TraceSession:
        if choice not in self._sessions:
            build = partial(self._build, choice)
            self._sessions[choice] = TraceSession(build, self._example, self._smallest, self._model, self._target)
        return self._sessions[choice]


class TraceSession:
    """A training that answers any number of questions; without a `model` to make fake, it runs on real tensors."""

    def __init__(
        self,
        build: Callable[[Recorder, nn.Module | None], TracedTraining],
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
        self._shared: dict[int, tuple[Category, str, int]] = {}  # block → what for, whose, its number in every tape
        self._numbers: dict[tuple[Category, str], int] = {}
        self._compared = 0  # runs of which both ways of each branch were traced
        self._setup: dict[int, RecordedBlock] = {}  # by their numbers: what stands before the first micro-batch
        self._building_bytes = 0  # the most that was live while the model was built
        self._joined = False  # gradients of several parameters are one block
        self._training = self._built(build, model)
        self._training.carrier = OnHost(self._recorder)

    def _built(
        self, build: Callable[[Recorder, nn.Module | None], TracedTraining], model: Callable[[], nn.Module] | None
    ) -> TracedTraining:
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
        watch = Recorder(self._target.scratch, self._target.hidden)
        try:
            with self._target.imitate(), watch:
                real = model()
        except Exception as error:
            if "CUDA" in str(error):
                raise failed from error
            raise error from failed
        self._building_bytes = _peak_bytes(watch.recording) if self._target.scratch is CPU.scratch else 0
        return real

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Enter the fake mode, if any, and the recorder; any error of fake tensors becomes CannotTrace."""
        try:
            with self._modes():
                yield
        except (CannotTrace, PipelineError):
            raise
        except Exception as error:
            if self._mode is None:
                raise
            raise CannotTrace(told_cause(error)) from error

    @contextmanager
    def _modes(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(_ONE_AT_A_TIME)
            stack.enter_context(signals_held())  # an exception within torch's engine ends in an abort
            stack.enter_context(self._target.imitate())
            stack.enter_context(eagerly())
            stack.enter_context(self._recorder.resizes())
            stack.enter_context(shapes_unseen())
            for context in (unlogged(), self._mode, conversions()) if self._mode is not None else ():
                stack.enter_context(context)
            stack.enter_context(self._recorder)
            if self._mode is not None:
                stack.enter_context(self._guesses)
            yield

    def standing(self) -> StandingFootprint:
        """Trace what does not depend on the batch: the state, the first update and later ones."""
        if self._standing is None:
            training = self._training
            blocks = self._set_up()
            setup, largest, sums = self._made(blocks), self._largest_block_bytes(blocks), self._sums(blocks)
            stood = {block.number for block in blocks}
            self._begin()
            self._draw_most()
            self._highest(lambda: self._training.accumulate(self._batch(self._smallest)))
            origin, with_gradients = self._origin, self._with_gradients()
            first_update, _ = self._taped(training.update)
            self._make_gradients(with_gradients)
            update, recording = self._taped(training.update)
            sums += self._sums(block for block in self._own() if block.number not in stood)
            update_parts = self._parts(recording)
            self._make_gradients(with_gradients)  # from now on there are some
            self._standing = StandingFootprint(
                setup=setup,
                first_update=first_update,
                update=update,
                parts=as_parts(sums),
                update_parts=update_parts,
                parameters=sum(parameter.numel() for parameter in training.model.parameters()),
                trained=sum(parameter.numel() for parameter in training.model.parameters() if parameter.requires_grad),
                origin=origin,
                largest_block_bytes=largest,
            )
        return self._standing

    def _begin(self) -> None:
        """Take a first micro-batch, of more where the model refuses so little: BatchNorm needs two values a channel."""
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

    def _set_up(self) -> list[RecordedBlock]:
        """Return the blocks that stand before the first micro-batch."""
        if self._target.scratch is CPU.scratch:  # else the host builds it, and it is copied to the GPU
            self._building_bytes = max(self._building_bytes, _peak_bytes(self._recorder.recording))
        blocks = self._own()
        self._setup = {self._shared[block.number][2]: block for block in blocks}
        return blocks

    def peaks(self, sizes: Sizes) -> list[tuple[int, int]]:
        """Run a later micro-batch with other random numbers each time; return what each takes beyond what stands.

        Beside it: how much of that the model has kept from before. Each is followed by a run that is only marked, for
        whoever profiles: some of torch's backward works in place where nobody looks on, and otherwise out of it.
        """
        if not self._setup:
            self._set_up()
            self._begin()
        peaks = []
        for self._draws.seed in (0, 1):
            tape, recording = self._repeated(lambda: self._training.accumulate(self._batch(sizes)))
            own_bytes = _peak_bytes(recording)
            peaks.append((tape.peak_bytes, tape.peak_bytes - own_bytes))
            with eagerly(), self._draws.seeded(), torch.autograd.profiler.record_function(MARKED):
                self._training.accumulate(self._batch(sizes))
        return peaks

    def micro(self, sizes: Sizes) -> MicroFootprint:
        """Trace a later micro-batch of a step, and derive from it the tape as the first micro-batch."""
        key = tuple(sorted(sizes.items()))
        if key not in self._micros:
            self.standing()
            again, recording = self._highest(lambda: self._training.accumulate(self._batch(sizes)))
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
            tape, recording = self._highest(lambda: self._training.evaluate(self._batch(sizes)))
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
            origin=self._origin,
            notes=(*self._guesses.notes, *self._draws.notes),
            host_bytes=recording.host_bytes,
        )

    @property
    def _origin(self) -> Provenance:
        return Provenance.GUESSED if self._guesses.notes or self._draws.any else Provenance.TRACED

    def _draw_most(self) -> None:
        """Keep the random numbers with which a step takes most, if the model goes its way by them."""
        if self._mode is not None and not self._draws.any:
            return
        most, kept = self._accumulate(self._smallest)[0], self._draws.seed
        for seed in range(1, len(SEEDS)):
            self._draws.seed = seed
            try:
                tape = self._accumulate(self._smallest)[0]
            except Exception:  # noqa: BLE001, S112 - a way on which nothing is learned, say: it takes no more
                continue
            if _takes_more(tape, most):
                most, kept = tape, seed
            elif not self._draws.any and not _takes_more(most, tape):
                break
        self._draws.seed = kept

    def _highest(self, run: Callable[[], object]) -> tuple[Tape, Recording]:
        """Call a function with its guesses either way, and keep those with which it takes most."""
        taped, is_last = self._repeated(run), True
        for line in self._guesses.open_lines(again=self._compared < _COMPARED):
            self._guesses.other_way(line)
            try:
                other = self._repeated(run)
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
        return taped if is_last else self._repeated(run)

    def _becomes(self) -> dict[int, int] | None:
        """Map blocks that become gradients in a step's first micro-batch to the gradients' numbers in every tape.

        They are the blocks that a later micro-batch adds to the gradients; None where that is ambiguous.
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
        batch = self._example(sizes)
        self._draws.begin()
        if self._mode is None:
            torch.manual_seed(self._draws.seed)
        return batch

    def _repeated(self, run: Callable[[], object]) -> tuple[Tape, Recording]:
        """Call a function, and once more if the model keeps something else than before: what it kept is there then."""
        before = self._kept_bytes()
        taped = self._taped(run)
        if abs(self._kept_bytes() - before) <= ALIKE * taped[0].peak_bytes:
            return taped
        gc.collect()
        return taped if abs(self._kept_bytes() - before) <= ALIKE * taped[0].peak_bytes else self._taped(run)

    def _kept_bytes(self) -> int:
        """Return the bytes of what is live and not the training's own: a model keeps it."""
        return sum(block.bytes for block in self._recorder.live if block.number not in self._shared)

    def _taped(self, run: Callable[[], object]) -> tuple[Tape, Recording]:
        """Call a function; return its tape and its recording."""
        while True:
            with_gradients = self._with_gradients()
            recording = self._begun()
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
            else:
                self._own()
                return self._tape(recording), recording

    def _with_gradients(self) -> list[nn.Parameter]:
        owned = self._training.owned()
        gradients = [self._recorder.block_of(one) for what, _, one in owned if Category(what) is Category.GRADIENTS]
        self._joined = self._joined or len({id(block) for block in gradients}) < len(gradients)
        given = {name: one for name, one in self._training.model.named_parameters() if one.grad is not None}
        if sparse := [name for name, one in given.items() if one.grad is not None and one.grad.is_sparse]:
            what = f"the gradients of {', '.join(sparse)} are sparse: the memory to add them depends on values"
            raise PlanInfeasible(what, remedy="use nn.Embedding(..., sparse=False) for dense gradients")
        return list(given.values())

    def _make_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give parameters the gradients that a micro-batch would leave."""
        if self._joined and parameters:  # in blocks that several share, as shards have them: nobody else makes such
            self._accumulate(self._smallest)
            return
        with self._open(), torch.no_grad():
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
        self._own()

    def _begun(self) -> Recording:
        """Begin a recording, after collecting garbage of the one before if there is much."""
        recording = self._recorder.begin()
        if sum(block.bytes for block in recording.before if block.number not in self._shared) > _WORTH_COLLECTING:
            gc.collect()
            recording = self._recorder.begin()
        live = {block.number for block in recording.before}
        self._shared = {number: place for number, place in self._shared.items() if number in live}
        return recording

    def _own(self) -> list[RecordedBlock]:
        """Return the blocks that the training owns, and note category, name and number in every tape of each."""
        kept: dict[int, RecordedBlock] = {}
        for category, name, tensor in self._training.owned():
            self._recorder.see(tensor)  # copies of modules are made behind its back
            block = self._recorder.block_of(tensor)
            if block is not None and block.number not in kept:  # else it is tied to one that was named before
                place = (Category(category), name)
                if self._setup and place[0] in _LASTING and block.number not in self._shared:
                    continue  # in place of what stood there before: it is the model's, as what it keeps is
                number = self._numbers.setdefault(place, -1 - len(self._numbers))
                self._shared.setdefault(block.number, (*place, number))
                kept[block.number] = block
        return list(kept.values())

    def _tape(self, recording: Recording, becomes: Mapping[int, int] | None = None) -> Tape:
        """Return the recording as a self-contained tape.

        Unowned blocks that are live before, such as a table that the model keeps for the next batch, are allocated at
        its beginning; those live afterwards are released at its end. Blocks in `becomes` have the gradients' numbers.
        Of what stood there at first and was replaced the others' tapes know nothing: it is away within this one.
        """
        becomes = becomes or {}
        before = {block.number for block in recording.before}
        away = [(number, -block.bytes) for number, block in self._setup.items() if block.number not in before]
        back = [(number, block.bytes) for number, block in self._setup.items() if block.died >= 0]
        kept = [block for block in recording.before if block.number not in self._shared]
        unreleased = [
            block for block in (*kept, *recording.blocks) if block.died < 0 and block.number not in self._shared
        ]
        numbers_E = [block.number for block in kept] + list(recording.block_E)
        bytes_E = [block.bytes for block in kept] + list(recording.bytes_E)
        events = [
            (self._number(number, becomes), size)
            for number, size in zip(numbers_E, bytes_E, strict=True)
            if size > 0 or number not in becomes
        ]
        events += [(block.number, -block.bytes) for block in unreleased if block.number not in becomes]
        block_E, bytes_E_ = np.array([*away, *events, *back], np.int64).reshape(-1, 2).T
        own = block_E >= 0
        block_E[own] = np.unique(block_E[own], return_inverse=True)[1]
        return Tape(block_E, bytes_E_)

    def _number(self, block: int, becomes: Mapping[int, int]) -> int:
        """Return a block's number in a tape: if it stays, below 0 and the same in all tapes."""
        return self._shared[block][2] if block in self._shared else becomes.get(block, block)

    def _parts(self, recording: Recording, becomes: Mapping[int, int] | None = None) -> tuple[MemoryPart, ...]:
        """Return what was live at the peak; blocks in `becomes` count as gradients, in place of earlier ones."""
        becomes = becomes or {}
        events = zip(recording.block_E, recording.bytes_E, strict=True)
        live_E = np.cumsum([0 if size < 0 and block in becomes else size for block, size in events])
        peak = int(live_E.argmax()) if live_E.max(initial=0) > 0 else -1  # else it is where it begins
        blocks = recording.blocks
        backward = next((block.born for block in blocks if block.phase == "backward"), len(recording.block_E))
        sums: Counter[tuple[Category, str]] = Counter()
        for block in (*recording.before, *blocks):
            stays = block.number in becomes
            use = (Category.GRADIENTS, "") if stays else self._what(block, backward)
            is_old = bool(becomes) and not stays and use[0] is Category.GRADIENTS
            if block.born <= peak and (stays or block.died < 0 or block.died > peak) and not is_old:
                sums[use] += block.bytes
        return as_parts(sums)

    def _what(self, block: RecordedBlock, backward: int) -> tuple[Category, str]:
        if block.number not in self._shared:
            return category_of(block, backward)
        category, name, _ = self._shared[block.number]
        return category, family(name) if category is Category.BUFFERS else ""

    def _made(self, blocks: Iterable[RecordedBlock]) -> Tape:
        """Return a tape that builds the model, of which these blocks stay."""
        passing = [(0, self._building_bytes), (0, -self._building_bytes)] if self._building_bytes else []
        pairs = [(self._shared[block.number][2], block.bytes) for block in blocks]
        return Tape(*np.array([*passing, *pairs], np.int64).reshape(-1, 2).T)

    def _sums(self, blocks: Iterable[RecordedBlock]) -> Counter[tuple[Category, str]]:
        sums: Counter[tuple[Category, str]] = Counter()
        for block in blocks:
            sums[self._shared[block.number][0], ""] += block.bytes
        return sums

    def _largest_block_bytes(self, blocks: Iterable[RecordedBlock]) -> int:
        """Return the parameter bytes of the largest module that sharding would gather as a whole."""
        sums: Counter[str] = Counter()
        for block in blocks:
            category, name, _ = self._shared[block.number]
            if category is Category.PARAMETERS:
                sums[outermost(name)] += block.bytes
        return max(sums.values(), default=0)


def _peak_bytes(recording: Recording) -> int:
    """Return the most that was live of what a recording allocated."""
    return int(np.cumsum(recording.bytes_E).max(initial=0))


def _takes_more(tape: Tape, other: Tape) -> bool:
    """Tell whether a way takes more than another: at its peak, else in what it leaves, else in all it allocates."""
    measures = [(of.peak_bytes, of.left_bytes, int(np.maximum(of.bytes_E, 0).sum())) for of in (tape, other)]
    for more, less in zip(*measures, strict=True):
        if abs(more - less) > ALIKE * max(more, less):
            return bool(more > less)
    return False
