"""When memory ends: less at a time, then another way, then a refusal; never the end of the run."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.device.accelerator import is_out_of_memory, unless_out_of_memory
from pipeline.encoder.embedding_recipe import SequenceCut, Variant
from pipeline.encoder.engine import memory_ladder
from pipeline.encoder.engine.embed_engine import Done, Engine
from pipeline.encoder.esm2 import TILE
from pipeline.records import Reason
from tests.encoder.engine.stand_ins import Shelf, Workshop, recipe, run, settings, texts

WINDOWS = SequenceCut("windows", 50, 10)
ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", RuntimeError)


def stood_in(workshop, the_recipe=None, **changes):
    return Engine(workshop, the_recipe or recipe(), settings(**changes))


def test_a_batch_that_does_not_fit_is_halved_and_so_is_the_budget():
    workshop, shelf = Workshop({"cpu": 130}), Shelf()
    engine = stood_in(workshop, cap=8)
    outcomes = run(engine, texts(*[48] * 20), shelf)
    assert len(shelf.taken) == len(outcomes) == 20
    assert {len(call) for call in workshop.calls()} <= {1, 2}
    assert engine.figures.splits == 2
    assert engine.figures.budget_tokens == 100  # half of 8 · 50 tokens, then half of 4 · 50


@pytest.mark.nightly
def test_results_after_an_oom_are_those_without_one_longest_first_and_well_cut():
    sequences = texts(*range(1, 60))
    plain = Shelf()
    run(stood_in(Workshop()), sequences, plain)
    for policy, limit in (("divisor", 75), ("divisor", 300), ("tokens", 300)):
        workshop, squeezed = Workshop({"cpu": limit}), Shelf()
        run(stood_in(workshop, policy=policy, cap="auto", budget=2000), sequences, squeezed)
        assert squeezed.rows() == plain.rows()
        assert [length for call in workshop.calls() for length in call] == list(range(59, 0, -1))
        sizes = [sum(length + 2 for length in call) for call in workshop.calls()]
        assert max(sizes) <= limit
        assert sum(size > limit / 3 for size in sizes) >= 5  # the rest of the run is cut well, not one by one


# device, limits, recipe → what becomes of 131 residues (None: refused), and the calls that the CPU gets for them
WAYS_DOWN = [
    ("cpu", {"cpu": 60}, {}, Variant("fp32", WINDOWS), [[50]] * 4),
    ("cpu", {"cpu": 45}, {}, None, []),
    ("cpu", {"cpu": 60}, {"on_oom": "cpu"}, None, []),
    ("cuda", {"cuda": 60}, {"precision": "fp16"}, Variant("fp16", WINDOWS), None),
    ("cuda", {"cuda": 45}, {"precision": "fp16"}, Variant("fp32", WINDOWS), [[50]] * 4),
    ("cuda", {"cuda": 45}, {"precision": "fp16", "half_fallback": False}, None, None),
    ("cuda", {"cuda": 60}, {"precision": "fp16", "on_oom": "cpu"}, Variant("fp32"), [[131]]),
    ("cuda", {"cuda": 45, "cpu": 45}, {}, None, None),
]


@pytest.mark.parametrize(("device", "limits", "changes", "variant", "calls"), WAYS_DOWN)
def test_what_does_not_fit_goes_down_as_the_recipe_allows_and_the_rest_goes_on(device, limits, changes, variant, calls):
    workshop, shelf, plain = Workshop(limits), Shelf(), Shelf()
    sequences = texts(131, 30, 20)
    run(stood_in(Workshop()), sequences, plain)
    outcomes = run(stood_in(workshop, recipe(**changes), device=device), sequences, shelf)
    assert getattr(outcomes[0], "variant", None) == variant
    assert outcomes[0].reason is (None if variant else Reason.DOES_NOT_FIT)
    assert {outcomes[index].reason for index in (1, 2)} == {None}
    if variant:
        assert shelf.taken[0].rows_LD[:, 0].tolist() == plain.taken[0].rows_LD[:, 0].tolist()
    elif device == "cpu":
        assert "cluster.embed.mem" in outcomes[0].detail
    if calls is not None:
        assert [call for call in workshop.calls("cpu") if max(call) > 30] == calls


def test_an_encoder_that_cannot_be_built_beside_another_is_tried_once_and_leaves_the_budget():
    attempts = []

    class Cramped(Workshop):
        def build(self, *, precision, device, **more):
            if (device.type, precision) == ("cuda", "fp32"):
                attempts.append(precision)
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().build(precision=precision, device=device, **more)

    workshop = Cramped(spoiled="W")
    engine = stood_in(workshop, recipe(precision="fp16"), device="cuda")
    outcomes = run(engine, ["AAWAA", "WA", "AW", *texts(30)], Shelf())
    assert [outcomes[index].variant.precision for index in range(4)] == ["fp32"] * 3 + ["fp16"]
    assert sorted(workshop.calls("cpu", "fp32")) == [[2], [2], [5]]
    assert (len(attempts), engine.figures.budget_tokens) == (1, 10_000)


class CountingShelf(Shelf):
    """A shelf that says when the second batch is being stored: the engine can know the outcome of the first then."""

    def __init__(self):
        super().__init__()
        self.second_batch = threading.Event()

    def __call__(self, made):
        super().__call__(made)
        if len(self.taken) == 4:  # the first batch gives three rows and a spoiled one
            self.second_batch.set()


class Neighbours(Workshop):
    """A GPU on which the main encoder has less room while another is loaded.

    Its third batch waits for the writer, so that the spoiled sequence is computed again before the fourth.
    """

    def __init__(self, shelf):
        super().__init__(spoiled="W")
        self.shelf = shelf

    def build(self, *, precision, device, **more):
        made = super().build(precision=precision, device=device, **more)
        self.standing = getattr(self, "standing", weakref.WeakValueDictionary())
        self.standing[device.type, precision] = made
        if precision == "fp16":
            made.before = self._crowd
        return made

    def _crowd(self, tokens):
        if len(self.calls("cuda", "fp16")) == 2:
            assert self.shelf.second_batch.wait(60)
        self.built.pop(("cuda", "fp32"), None)  # so that whether it stands is for the engine to say
        if ("cuda", "fp32") in self.standing and len(tokens) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")


def test_an_oom_beside_another_encoder_drops_it_and_leaves_the_budget():
    shelf = CountingShelf()
    workshop = Neighbours(shelf)
    engine = stood_in(workshop, recipe(precision="fp16"), device="cuda", cap=4)
    sequences = ["A" * 20 + "W", *texts(*[20] * 30)]
    outcomes = run(engine, sequences, shelf)
    assert outcomes[0] == Done(0, Variant("fp32"))
    assert len(shelf.taken) == 31
    assert engine.figures.splits == 1
    assert engine.figures.budget_tokens == 10_000
    assert {len(call) for call in workshop.calls("cuda", "fp16")} == {4, 3}
    assert list(workshop.standing) == [("cuda", "fp16")]


def room_for(tokens):
    """Return the memory of a process that has room for so many tokens of a MiB each, beside what it has already."""
    return round((tokens + TILE) * (1 << 20) / memory_ladder.SHARE) - memory_ladder.host_free_bytes(0)


def costly(room, **changes):
    """Return an engine on the CPU, with room for so many tokens, that never says that it lacks memory."""
    return stood_in(workshop := Workshop(bytes_per_token=1 << 20), mem_bytes=room_for(room), **changes), workshop


@pytest.mark.parametrize("budget_tokens", ["auto", 10_000])
def test_on_the_cpu_what_there_is_no_room_for_is_not_tried(budget_tokens):
    engine, workshop = costly(300, budget=budget_tokens)
    shelf = Shelf()
    outcomes = run(engine, texts(600, 131, 40), shelf)
    assert outcomes[0] == Done(0, Variant("fp32", WINDOWS))
    assert outcomes[1] == Done(1, Variant("fp32"))
    assert max(sum(length + 2 for length in call) for call in workshop.calls()) <= 300
    assert engine.figures.splits == 0
    engine, workshop = costly(300, the_recipe=recipe(length=500), budget=budget_tokens)
    outcomes = run(engine, texts(600, 131, 40), Shelf())
    assert outcomes[0].reason is Reason.DOES_NOT_FIT  # in windows, which are not tried, either
    assert "cluster.embed.mem" in outcomes[0].detail
    assert workshop.calls() == [[131, 40]]


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("no"), KeyError("k")])
def test_other_errors_are_not_taken_for_a_lack_of_memory(error):
    def fail(_tokens):
        raise error

    with pytest.raises(type(error)):
        run(stood_in(Workshop(before=fail)), texts(3, 4), Shelf())


def test_the_tensors_of_a_failed_attempt_are_gone_before_the_next():
    alive = []

    def attempt():
        held = torch.zeros(8)
        alive.append(weakref.ref(held))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    assert unless_out_of_memory(attempt) is None
    assert alive[0]() is None


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (MemoryError(), True),
        (np._core._exceptions._ArrayMemoryError((1,), np.dtype("f4")), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000 bytes."), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (ACCELERATOR_ERROR("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in"), True),
        (ACCELERATOR_ERROR("CUDA error: device-side assert triggered"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`"), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(handle)`"), False),
        (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), True),
        (RuntimeError("cuFFT error: CUFFT_EXEC_FAILED"), False),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"), True),
        (OSError(12, "Cannot allocate memory"), False),
        (NotImplementedError("can't allocate memory"), False),
    ],
)
def test_what_counts_as_a_lack_of_memory(error, verdict):
    assert is_out_of_memory(error) is verdict


@pytest.mark.nightly
def test_memory_that_really_ends_halves_batches_and_cuts_what_is_long(tmp_path):
    program = Path(__file__).with_name("squeezed.py")
    done = subprocess.run([sys.executable, program, tmp_path], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["same"] == 41
    assert told["budget"] < 1 << 20
    assert told["cuts"] == [{"policy": "windows", "length": 1022, "overlap": 256}, *[None] * 40]
