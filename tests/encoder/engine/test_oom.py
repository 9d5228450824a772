"""When memory ends: less at a time, then another way, then a refusal; never the end of the run."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.device.out_of_memory import is_out_of_memory, unless_out_of_memory
from pipeline.encoder.embedding_recipe import SequenceCut, Variant
from pipeline.encoder.engine import memory_ladder
from pipeline.encoder.engine.embed_engine import Engine
from pipeline.encoder.engine.io_threads import Fetch
from pipeline.encoder.engine.sequence_work import ComputeStep, Done, below, full_precision
from pipeline.encoder.forward.esm2 import TILE
from pipeline.records import Reason
from tests.encoder.engine.stand_ins import CHECKPOINT, Shelf, Workshop, recipe, run, settings, texts

WINDOWS = SequenceCut("windows", 50, 10)
ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", RuntimeError)


def stood_in(workshop, the_recipe=None, learned=lambda _: None, **changes):
    return Engine(CHECKPOINT, the_recipe or recipe(), settings(**changes), learned=learned, build=workshop)


def test_a_batch_that_does_not_fit_is_halved_and_the_budget_is_learned():
    workshop, shelf, learned = Workshop({"cpu": 130}), Shelf(), []
    engine = stood_in(workshop, learned=learned.append, cap=8)
    outcomes = run(engine, texts(*[48] * 20), shelf)
    assert len(shelf.taken) == len(outcomes) == 20
    assert learned == [200, 100]  # half of 8 · 50, then half of 4 · 50
    assert {len(call) for call in workshop.calls()} <= {1, 2}
    assert engine.figures.splits == 2
    assert engine.figures.budget_tokens == 100


def test_the_longest_still_comes_first_after_an_oom():
    workshop = Workshop({"cpu": 130})
    run(stood_in(workshop, cap=8), texts(*range(20, 49)), Shelf())
    assert [length for call in workshop.calls() for length in call] == list(range(48, 19, -1))


def test_results_after_an_oom_are_those_without_one():
    sequences = texts(*range(1, 60))
    plain, squeezed = Shelf(), Shelf()
    run(stood_in(Workshop()), sequences, plain)
    run(stood_in(Workshop({"cpu": 75})), sequences, squeezed)
    assert squeezed.rows() == plain.rows()


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["divisor", "tokens"])
def test_later_batches_keep_the_learned_budget(policy):
    workshop = Workshop({"cpu": 300})
    run(stood_in(workshop, policy=policy, cap="auto", budget=2000), texts(*range(1, 50)), Shelf())
    sizes = [sum(length + 2 for length in call) for call in workshop.calls()]
    assert max(sizes) <= 300
    assert sum(size > 100 for size in sizes) >= 5  # the rest of the run is cut well, not one by one


def test_a_single_sequence_that_does_not_fit_goes_to_windows():
    workshop, shelf = Workshop({"cpu": 60}), Shelf()
    outcomes = run(stood_in(workshop), texts(131, 40), shelf)
    assert outcomes[0] == Done(0, Variant("fp32", WINDOWS))
    assert outcomes[1] == Done(1, Variant("fp32"))
    assert shelf.taken[0].rows_LD[:, 2].tolist() == [50.0] * 131
    assert shelf.taken[0].rows_LD[:, 0].tolist() == run_whole(texts(131, 40)[0])


def run_whole(text):
    shelf = Shelf()
    run(stood_in(Workshop()), [text], shelf)
    return shelf.taken[0].rows_LD[:, 0].tolist()


def test_on_the_cpu_a_window_that_does_not_fit_is_refused_and_the_rest_goes_on():
    shelf = Shelf()
    outcomes = run(stood_in(Workshop({"cpu": 45})), texts(131, 30, 20), shelf)
    assert outcomes[0].reason is Reason.DOES_NOT_FIT
    told = "131 residues in windows of 50 do not fit the memory of this process (cluster.embed.mem)"
    assert outcomes[0].detail == told
    assert sorted(shelf.taken) == [1, 2]


def test_on_a_card_a_window_that_does_not_fit_goes_to_the_cpu():
    workshop, shelf = Workshop({"cuda": 45}), Shelf()
    outcomes = run(stood_in(workshop, recipe(precision="fp16"), device="cuda"), texts(131, 30), shelf)
    assert outcomes[0] == Done(0, Variant("fp32", WINDOWS))
    assert outcomes[1] == Done(1, Variant("fp16"))
    assert workshop.calls("cpu", "fp32") == [[50]] * 4


def test_what_does_not_fit_a_card_goes_to_the_cpu_as_one_where_that_is_asked_for():
    workshop, shelf = Workshop({"cuda": 60}), Shelf()
    outcomes = run(stood_in(workshop, recipe(precision="fp16", on_oom="cpu"), device="cuda"), texts(131, 30), shelf)
    assert outcomes[0] == Done(0, Variant("fp32"))
    assert workshop.calls("cpu", "fp32") == [[131]]
    assert workshop.calls("cuda", "fp16") == [[30]]


def test_what_fits_neither_card_nor_host_is_refused():
    outcomes = run(stood_in(Workshop({"cuda": 45, "cpu": 45}), device="cuda"), texts(131, 30), Shelf())
    assert outcomes[0].reason is Reason.DOES_NOT_FIT
    assert outcomes[1].reason is None


def test_an_oom_while_repeating_in_full_precision_leaves_the_budget_alone():
    class Cramped(Workshop):
        def __call__(self, checkpoint, *, precision, device, **more):
            if (device.type, precision) == ("cuda", "fp32"):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().__call__(checkpoint, precision=precision, device=device, **more)

    workshop, shelf, learned = Cramped(spoiled="W"), Shelf(), []
    engine = stood_in(workshop, recipe(precision="fp16"), learned.append, device="cuda")
    outcomes = run(engine, ["AAWAA", *texts(30, 20)], shelf)
    assert outcomes[0] == Done(0, Variant("fp32"))
    assert workshop.calls("cpu", "fp32") == [[5]]
    assert learned == []


class Neighbours(Workshop):
    """A card on which the main encoder has less room while another stands beside it."""

    def __call__(self, checkpoint, *, precision, device, **more):
        made = super().__call__(checkpoint, precision=precision, device=device, **more)
        self.standing = getattr(self, "standing", weakref.WeakValueDictionary())
        self.standing[device.type, precision] = made
        if precision == "fp16":
            made.before = self._crowd
        return made

    def _crowd(self, tokens):
        self.built.pop(("cuda", "fp32"), None)  # so that whether it stands is for the engine to say
        if ("cuda", "fp32") in self.standing and len(tokens) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")


def test_an_oom_beside_another_encoder_drops_it_and_teaches_nothing():
    workshop, shelf, learned = Neighbours(spoiled="W"), Shelf(), []
    engine = stood_in(workshop, recipe(precision="fp16"), learned.append, device="cuda", cap=4)
    sequences = ["A" * 20 + "W", *texts(*[20] * 30)]
    outcomes = run(engine, sequences, shelf)
    assert outcomes[0] == Done(0, Variant("fp32"))
    assert len(shelf.taken) == 31
    assert engine.figures.splits == 1
    assert learned == []
    assert {len(call) for call in workshop.calls("cuda", "fp16")} == {4, 3}
    assert list(workshop.standing) == [("cuda", "fp16")]


def test_an_encoder_that_could_not_be_built_is_not_built_for_every_sequence():
    attempts = []

    class Cramped(Workshop):
        def __call__(self, checkpoint, *, precision, device, **more):
            if (device.type, precision) == ("cuda", "fp32"):
                attempts.append(precision)
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().__call__(checkpoint, precision=precision, device=device, **more)

    workshop, shelf = Cramped(spoiled="W"), Shelf()
    outcomes = run(stood_in(workshop, recipe(precision="fp16"), device="cuda"), ["AAWAA"] * 1 + ["WA", "AW"], shelf)
    assert {one.variant for one in outcomes.values()} == {Variant("fp32")}
    assert sorted(workshop.calls("cpu", "fp32")) == [[2], [2], [5]]
    assert len(attempts) == 1


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


def test_on_the_cpu_a_window_without_room_is_refused_without_being_tried():
    engine, workshop = costly(300, the_recipe=recipe(length=500))
    outcomes = run(engine, texts(600, 131, 40), Shelf())
    assert outcomes[0].reason is Reason.DOES_NOT_FIT
    assert "(cluster.embed.mem)" in outcomes[0].detail
    assert workshop.calls() == [[131, 40]]


def test_finished_rows_need_room_too():
    room = memory_ladder.Room(free_bytes=10 << 30, token_bytes=1 << 20)
    assert room.tokens() == int(memory_ladder.SHARE * 10 * 1024) - TILE
    assert room.tokens(5 << 30) == int(memory_ladder.SHARE * 5 * 1024) - TILE
    assert room.tokens(11 << 30) < 0


def test_rows_take_another_way_where_no_memory_can_be_pinned():
    def refuse(size_bytes):
        raise ACCELERATOR_ERROR("CUDA error: out of memory")

    rows_RD = torch.zeros(5, 3, dtype=torch.bfloat16)
    for pin in (refuse, lambda size_bytes: torch.empty(size_bytes, dtype=torch.uint8)):
        place_RD = Fetch(pin).place(rows_RD)
        assert (place_RD.shape, place_RD.dtype) == (rows_RD.shape, rows_RD.dtype)


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


def test_steps_down_are_only_those_the_recipe_accepts():
    whole, cpu = ComputeStep("cuda", Variant("fp16")), ComputeStep("cpu", Variant("fp32"))
    strict = recipe(precision="fp16", half_fallback=False)
    assert below(strict, 131, whole) == ComputeStep("cuda", Variant("fp16", WINDOWS))
    assert below(strict, 131, ComputeStep("cuda", Variant("fp16", WINDOWS))) is None
    assert below(strict, 30, whole) is None
    assert below(recipe(precision="fp16"), 30, whole) == cpu
    assert below(recipe(precision="fp16"), 30, cpu) is None
    truncated = ComputeStep("cuda", Variant("fp16", SequenceCut("truncate", 50)))
    assert below(recipe(precision="fp16", long="truncate"), 131, truncated) == ComputeStep(
        "cpu", Variant("fp32", SequenceCut("truncate", 50))
    )
    assert full_precision(strict, whole) is None
    assert full_precision(recipe(precision="fp16"), whole) == ComputeStep("cuda", Variant("fp32"))
    assert full_precision(recipe(), ComputeStep("cuda", Variant("fp32"))) is None


@pytest.mark.nightly
def test_memory_that_really_ends_halves_batches_and_cuts_what_is_long(tmp_path):
    program = Path(__file__).with_name("squeezed.py")
    done = subprocess.run([sys.executable, program, tmp_path], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["same"] == told["sequences"] == 25
    assert told["learned"] == sorted(told["learned"], reverse=True) != []
    assert told["long"] == {"policy": "windows", "length": 1022, "overlap": 256}
    assert told["whole"] == 24
