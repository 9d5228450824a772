"""Ranks talk, add up, and notice who is gone: real processes, really killed."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.cluster.peers import PEER_LOST
from pipeline.device.accelerator import is_card
from pipeline.memory.planning.memory_plan import REDUCED_BYTES
from pipeline.records import RankPlace
from pipeline.training.ranks import process_group
from pipeline.training.ranks.gradient_sums import PIECE_BYTES, reduce_in_pieces, tensor_pieces
from pipeline.training.ranks.process_group import LETTER_BYTES, ProcessGroup, WatchedSingleRank, interface_of
from pipeline.training.ranks.rank_protocol import HUNG, LOST, SingleRank
from pipeline.training.ranks.rendezvous import _addresses
from pipeline.training.ranks.watchdog import Activity, HangLimits, LostRank, stuck_rank
from tests.testkit.limited.device import LimitedDevice
from tests.training.ranks.crews import Crew, await_file, crew

SOON_S = 20.0
QUICK = HangLimits(hang_s=2.0, slow_s=120.0, grace_s=3.0)
SHORT = HangLimits(hang_s=1.2, slow_s=120.0)
WORLD = 3
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "complex64")
SHAPES = ((), (5,), (3, 7), (0, 4), (2, 3, 4))
SAID = {"a": 0.1 + 0.2, "nan": math.nan, "inf": -math.inf, "tiny": 5e-324, "text": "Å\n", "list": [1, None, True]}


def everything(group: ProcessGroup) -> dict[str, Any]:
    """Exchange and add up all kinds of things; return what came of it."""
    rank = group.rank
    long = "x" * (rank * LETTER_BYTES)
    alike = [torch.full(shape, rank + 1).to(getattr(torch, dtype)) for dtype in DTYPES for shape in SHAPES]
    group.add_up(alike)
    generator = torch.Generator().manual_seed(rank)
    many = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((301, 7), (1000,), ())]
    if rank == 1:
        many = [torch.zeros_like(one) for one in many]
    strided = torch.arange(12.0).reshape(3, 4) * (rank + 1)
    strided = strided.t().contiguous().t() if rank == 1 else strided  # the same values otherwise laid out
    group.add_up([*many, strided])
    return {
        "said": [group.exchange({**SAID, "rank": rank}), group.exchange({"long": long}), group.exchange({})],
        "alike": [one.to(torch.complex128).real.flatten().tolist() for one in alike],
        "many": [one.flatten().tolist() for one in many],
        "strided": strided.tolist(),
    }


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> list[Crew]:
    """Three ranks that have done everything, twice, at the same time and in the same folder."""
    folder = tmp_path_factory.mktemp("done")
    crews = [crew(folder / name, WORLD, everything, meeting=name, meeting_folder=folder) for name in ("a", "b")]
    for one in crews:
        assert one.wait() == [0] * WORLD, [one.err(rank) for rank in range(WORLD)]
    return crews


@pytest.mark.nightly
def test_every_rank_hears_the_very_words_of_every_rank(done: list[Crew]) -> None:
    for rank in range(WORLD):
        heard = done[0].result(rank)["said"][0]
        assert [one.pop("rank") for one in heard] == [0, 1, 2]
        assert [json.dumps(one) for one in heard] == [json.dumps(SAID)] * WORLD


@pytest.mark.nightly
def test_words_may_be_long_on_some_ranks_alone(done: list[Crew]) -> None:
    assert [len(one["long"]) for one in done[0].result(0)["said"][1]] == [0, LETTER_BYTES, 2 * LETTER_BYTES]
    assert done[0].result(2)["said"][2] == [{}, {}, {}]


@pytest.mark.nightly
def test_tensors_of_all_types_and_shapes_are_added_up(done: list[Crew]) -> None:
    expected = [[6.0] * math.prod(shape) for _ in DTYPES for shape in SHAPES]
    assert [done[0].result(rank)["alike"] for rank in range(WORLD)] == [expected] * WORLD


@pytest.mark.nightly
def test_a_rank_with_zeros_adds_nothing_and_others_lose_nothing(done: list[Crew]) -> None:
    drawn = [torch.Generator().manual_seed(rank) for rank in (0, 2)]
    for number, shape in enumerate(((301, 7), (1000,), ())):
        parts = [torch.randn(shape, generator=one, dtype=torch.float64) for one in drawn]
        got = torch.tensor(done[0].result(0)["many"][number], dtype=torch.float64)
        torch.testing.assert_close(got, (parts[0] + parts[1]).flatten(), rtol=1e-15, atol=1e-15)


@pytest.mark.nightly
def test_sums_are_bitwise_the_same_on_all_ranks_and_when_repeated(done: list[Crew]) -> None:
    sums = [one.result(rank)["many"] for one in done for rank in range(WORLD)]
    assert all(one == sums[0] for one in sums)


@pytest.mark.nightly
def test_layout_in_memory_does_not_matter(done: list[Crew]) -> None:
    assert done[0].result(1)["strided"] == (torch.arange(12.0).reshape(3, 4) * 6).tolist()


@pytest.mark.nightly
def test_ranks_that_leave_in_order_say_nothing(done: list[Crew]) -> None:
    assert [one.err(rank) for one in done for rank in range(WORLD)] == [""] * 2 * WORLD
    assert not list(done[0].folder.parent.glob("ranks-*"))
    assert not list(done[0].folder.glob("*.told"))


@pytest.mark.nightly
def test_pieces_are_what_the_plan_has_room_for() -> None:
    assert 2 * PIECE_BYTES == REDUCED_BYTES


@pytest.mark.nightly
def test_the_exit_code_is_the_one_that_verdicts_know() -> None:
    assert LOST == PEER_LOST


@pytest.mark.nightly
@pytest.mark.parametrize("piece_bytes", [1, 8, 100, 1000, 10**6])
def test_pieces_hold_every_value_once_and_no_more_than_fits(piece_bytes: int) -> None:
    tensors = [torch.ones(3, 5, 7), torch.ones(40), torch.ones(2, 9).t(), torch.ones(6, dtype=torch.float64)]
    for piece in tensor_pieces(tensors, piece_bytes):
        assert sum(part.nbytes for part in piece) <= max(piece_bytes, 8)
        assert len({part.dtype for part in piece}) == 1
    reduce_in_pieces(tensors, lambda flat: flat.mul_(2), piece_bytes)
    assert all(bool((one == 2).all()) for one in tensors)


@pytest.mark.nightly
def test_adding_up_takes_no_more_than_one_piece_of_memory() -> None:
    piece_bytes = 1 << 20
    with LimitedDevice() as device:
        tensors = [torch.zeros(300, 300) for _ in range(40)] + [torch.zeros(3 << 20), torch.zeros(2000, 600).t()]
        before = device.peak_bytes
        assert before > 10 * piece_bytes
        reduce_in_pieces(tensors, lambda flat: flat.add_(1), piece_bytes)
        assert device.peak_bytes - before <= piece_bytes
    assert all(bool((one == 1).all()) for one in tensors)


@pytest.mark.nightly
def test_one_process_hears_itself_as_others_would() -> None:
    assert SingleRank().exchange({"pair": (1, 2)}) == [{"pair": [1, 2]}]


@pytest.mark.nightly
def test_gloo_is_told_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None


def await_word_of(group: ProcessGroup, rank: int, what: str) -> None:
    """Wait until the watchdog of this rank has heard what another does, where it hears of it directly."""
    peer = group._watchdog._peers.get(rank)
    while peer is not None and peer.doing.what != what:
        time.sleep(0.005)


def lose(group: ProcessGroup, folder: Path, victim: int, doing: str) -> None:
    """Wait to be killed, or for who is, which comes in three ways: in a call, between calls, or stuck in a library."""
    group.exchange({})
    group.progress("step 7, micro-batch 2")
    if group.rank != victim:
        await_word_of(group, victim, "step 7, micro-batch 2")
    folder.joinpath(f"ready-{group.rank}").touch()
    if group.rank == victim:
        signal.pause()
    while doing == "computes":
        group.progress("step 7, micro-batch 3")
    if doing == "is stuck":
        signal.pause()
    group.exchange({})


@pytest.mark.nightly
@pytest.mark.parametrize(("victim", "doing"), [(0, "waits"), (1, "waits"), (0, "computes"), (1, "is stuck")])
def test_a_killed_rank_is_named_by_all_others(tmp_path: Path, victim: int, doing: str) -> None:
    started = crew(tmp_path, 3, lose, tmp_path, victim, doing, patience=QUICK)
    for rank in range(3):
        await_file(tmp_path / f"ready-{rank}")
    os.kill(started.pid(victim), signal.SIGKILL)
    assert started.wait() == [-signal.SIGKILL if rank == victim else LOST for rank in range(3)]
    name = f"rank {victim} ({socket.gethostname()}) died without a word; the last it did: step 7, micro-batch 2"
    for rank in {0, 1, 2} - {victim}:
        assert f"ends: {name}" in started.err(rank)
        assert name in started.told(rank)
        assert (f"error: one of 3 ranks is lost: {name}" in started.err(rank)) == (doing != "is stuck")


def be_survived(group: ProcessGroup, folder: Path) -> None:
    """Have rank 1 fork a child that outlives it, as loaders' workers may."""
    group.exchange({})
    if group.rank == 1:
        child = os.fork()
        if child == 0:
            signal.pause()
        folder.joinpath("partial").write_text(str(child))
        folder.joinpath("partial").rename(folder / "child")
        signal.pause()
    group.exchange({})


@pytest.mark.nightly
def test_a_child_that_outlives_a_killed_rank_does_not_hide_its_death(tmp_path: Path) -> None:
    started = crew(tmp_path, 2, be_survived, tmp_path, patience=QUICK)
    await_file(tmp_path / "child")
    os.kill(started.pid(1), signal.SIGKILL)
    codes = started.wait()
    os.kill(int(tmp_path.joinpath("child").read_text()), signal.SIGKILL)  # it was there until now
    assert codes == [LOST, -signal.SIGKILL]
    assert f"rank 1 ({socket.gethostname()}) died without a word" in started.told(0)


def add_one(group: ProcessGroup) -> list[float]:
    """Add something up."""
    ones = torch.ones(3)
    group.add_up([ones])
    return [*ones.tolist(), len(group.exchange({}))]


@pytest.mark.nightly
def test_ranks_on_several_nodes_reach_each_other_by_an_address_that_is_no_loopback(tmp_path: Path) -> None:
    if not list(_addresses(RankPlace(0, 2, nodes=2))):
        pytest.skip("this machine has no address but the loopback's")
    started = crew(tmp_path, 2, add_one, nodes=2)
    assert started.wait() == [0, 0], started.err(1)
    assert started.result(1) == [2.0, 2.0, 2.0, 2]


def warmed(group: ProcessGroup, folder: Path, sharded: bool) -> dict[str, Any]:
    """Join once more, as if on a card; return what was told and called by then."""
    group.exchange({})  # both have joined: the store of the first goes with it
    group.close()
    calls: list[list[Any]] = []
    begun: dict[str, Any] = {}
    dist, init = process_group.dist, process_group.dist.init_process_group

    def note(name: str) -> None:
        call = getattr(dist, name)

        def noted(first: torch.Tensor, *others: Any, **named: Any) -> Any:
            calls.append([name, first.nbytes])
            return call(first, *others, **named)

        setattr(dist, name, noted)

    for name in ("all_reduce", "all_gather_single", "reduce_scatter_single"):
        note(name)

    def begin(*words: Any, device_id: Any = None, **named: Any) -> None:
        begun["card"] = str(device_id)
        init(*words, **named)

    dist.init_process_group = begin
    process_group.is_card = lambda _: True  # type: ignore[assignment]
    place = replace(group.place, meeting="again")
    again = process_group.join_process_group(place, folder, device="cpu:0", sharded=sharded)
    process_group.is_card = is_card
    before = list(calls)
    total = torch.ones(2)
    again.add_up([total])
    again.close()
    return {"card": begun["card"], "calls": before, "total": total.tolist()}


@pytest.mark.nightly
@pytest.mark.parametrize("sharded", [False, True])
def test_what_collectives_take_of_a_card_is_taken_before_anything_is_measured(tmp_path: Path, *, sharded: bool) -> None:
    started = crew(tmp_path, 2, warmed, tmp_path, sharded)
    assert started.wait() == [0, 0], started.err(0)
    kinds = ["all_reduce", *(["all_gather_single", "reduce_scatter_single"] if sharded else [])]
    for rank in range(2):
        told = started.result(rank)
        assert told["card"] == "cpu:0", "the number of the card is told: else the first collective guesses it"
        assert [name for name, _ in told["calls"]] == kinds * 2
        assert max(size for _, size in told["calls"]) == PIECE_BYTES
        assert told["total"] == [2.0, 2.0]


def hang(group: ProcessGroup, victim: int) -> None:
    """Make the first step; then one of all does nothing any more, and the others wait for it."""
    group.add_up([torch.zeros(1)])
    group.progress("step 2, micro-batch 1")
    if group.rank == victim:
        fall_asleep()
    group.exchange({})


def fall_asleep() -> None:
    """Hang."""
    time.sleep(60)


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
def test_a_hung_rank_shows_where_it_is_and_is_named(tmp_path: Path, victim: int) -> None:
    started = crew(tmp_path, 2, hang, victim, patience=QUICK)
    assert started.wait() == [HUNG if rank == victim else LOST for rank in range(2)]
    for rank in range(2):
        assert f"rank {victim} ({socket.gethostname()}) made no progress for 2 s" in started.told(rank)
        assert "the last it did: step 2, micro-batch 1" in started.told(rank)
    assert "in fall_asleep" in started.err(victim)
    assert "Thread 0x" in started.err(victim)
    assert "fall_asleep" not in started.err(1 - victim)


def hang_alone(group: WatchedSingleRank) -> None:
    """Be slow where that is known, make a step; then do nothing any more, as where a `collate` hangs."""
    with group.patient("validation"):
        time.sleep(QUICK.hang_s + 1)
    group.progress("step 2")
    fall_asleep()


@pytest.mark.nightly
def test_a_training_in_one_process_that_hangs_shows_where_it_is_and_ends(tmp_path: Path) -> None:
    started = crew(tmp_path, 1, hang_alone, patience=QUICK)
    assert started.wait() == [HUNG]
    assert "made no progress for 2 s; the last it did: step 2" in started.told(0)
    assert "in fall_asleep" in started.err(0)


def part_alone(group: WatchedSingleRank) -> list[str]:
    """End in order: nothing watches any more."""
    group.progress("step 2")
    group.close()
    group.close()
    return [thread.name for thread in threading.enumerate() if thread.name == "watchdog"]


@pytest.mark.nightly
def test_a_training_in_one_process_that_ends_leaves_no_watchdog(tmp_path: Path) -> None:
    started = crew(tmp_path, 1, part_alone, patience=QUICK)
    assert started.wait() == [0]
    assert started.result(0) == []


def stop(group: ProcessGroup, folder: Path) -> None:
    """Make the first step; then no thread of rank 1 runs any more."""
    group.add_up([torch.zeros(1)])
    group.progress("step 2")
    if group.rank == 1:
        folder.joinpath("ready").touch()
        signal.pause()
    await_word_of(group, 1, "step 2")
    folder.joinpath("heard").touch()
    group.exchange({})


@pytest.mark.nightly
def test_a_process_of_which_no_thread_runs_is_named_by_the_others(tmp_path: Path) -> None:
    started = crew(tmp_path, 2, stop, tmp_path, patience=QUICK)
    await_file(tmp_path / "ready")
    await_file(tmp_path / "heard")
    os.kill(started.pid(1), signal.SIGSTOP)
    started.processes[0].join(SOON_S)
    code = started.processes[0].exitcode
    started.end()
    assert code == LOST
    assert f"rank 1 ({socket.gethostname()}) has not been heard for 2 s; the last it did: step 2" in started.told(0)


def be_slow(group: ProcessGroup) -> list[Any]:
    """Let rank 1 be slow in all ways that are allowed, each longer than a hang may be."""
    passed = threading.Event()
    if group.rank == 1:
        passed.wait(2 * SHORT.hang_s)  # the first step
    group.add_up([torch.zeros(1)])
    if group.rank == 1:
        with group.patient("compiling"):
            passed.wait(2 * SHORT.hang_s)
        for number in range(6):
            group.progress(f"step 2, micro-batch 1, part {number}")
            passed.wait(SHORT.hang_s / 4)
    return group.exchange({})


@pytest.mark.nightly
def test_what_is_slow_is_not_a_hang(tmp_path: Path) -> None:
    started = crew(tmp_path, 2, be_slow, patience=SHORT)
    assert started.wait() == [0, 0], started.err(1)
    assert started.result(0) == [{}, {}]


def give_up(group: ProcessGroup, why: str) -> None:
    """Have rank 1 leave, with a reason or without, while the others wait for it."""
    group.exchange({})
    if group.rank == 1:
        group.close(why)
    else:
        group.exchange({})


@pytest.mark.nightly
@pytest.mark.parametrize(("why", "how"), [("the disk is full", "gave up: the disk is full"), ("", "left while others")])
def test_who_leaves_others_alone_is_named(tmp_path: Path, why: str, how: str) -> None:
    started = crew(tmp_path, 3, give_up, why, patience=QUICK)
    assert started.wait() == [LOST, 0, LOST]
    for rank in (0, 2):
        assert f"rank 1 ({socket.gethostname()}) {how}" in started.err(rank)


def interrupt(group: ProcessGroup, folder: Path) -> str:
    """Wait for another until a signal comes."""
    group.exchange({})
    if group.rank == 1:
        await_file(folder / "interrupted")
        return ""
    signal.signal(signal.SIGUSR1, stop_waiting)
    try:
        folder.joinpath("ready").touch()  # the signal may come before this returns
        group.exchange({})
    except InterruptedError:
        folder.joinpath("interrupted").touch()
        return "interrupted"
    return ""


def stop_waiting(*_: Any) -> None:
    raise InterruptedError


@pytest.mark.nightly
def test_a_signal_is_handled_while_others_are_waited_for(tmp_path: Path) -> None:
    started = crew(tmp_path, 2, interrupt, tmp_path, patience=QUICK)
    await_file(tmp_path / "ready")
    os.kill(started.pid(0), signal.SIGUSR1)
    assert started.wait() == [0, 0]
    assert started.result(0) == "interrupted"


@pytest.mark.nightly
def test_ranks_that_wait_for_each_other_are_stuck_and_the_one_behind_is_named() -> None:
    ahead, behind = Activity("step 4", 10.0, calls=12, waits=True), Activity("step 3", 10.0, calls=11, waits=True)
    found = stuck_rank({0: ("n1", ahead, 11.0), 1: ("n2", behind, 11.0)})
    how = "waits for the others, and they for it: it is in call 11, others in call 12"
    assert found == LostRank(1, "n2", how, "step 3")
    assert str(found) == f"rank 1 (n2) {how}; the last it did: step 3"
    assert stuck_rank({0: ("n1", ahead, 11.0), 1: ("n2", behind, 9.0)}) is None
    assert stuck_rank({0: ("n1", ahead, 11.0), 1: ("n2", Activity("step 3", 10.0, 11), 11.0)}) is None
