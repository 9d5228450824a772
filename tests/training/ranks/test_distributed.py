"""Ranks talk, add up, and notice who is gone: real processes, really killed."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # they are documented there

from pipeline.cluster.verdict import HUNG
from pipeline.records import RankPlace
from pipeline.training.ranks import LOST
from pipeline.training.ranks.process_group import MESSAGE_BYTES, MonitoredRanks, ProcessGroup
from pipeline.training.ranks.rank_monitor import Activity, HangLimits, WatchedRank, addresses_of, stuck_rank
from tests.training.ranks.crews import DEADLINE_S, await_file, crew

pytestmark = pytest.mark.nightly
QUICK = HangLimits(hang_s=2.0, slow_s=120.0, grace_s=3.0)
SHORT = HangLimits(hang_s=4.0, slow_s=120.0)  # a loaded machine may stop a process for a second
WORLD = 3
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "complex64")
SHAPES = ((), (5,), (3, 7), (0, 4), (2, 3, 4))
SAID = {"a": 0.1 + 0.2, "nan": math.nan, "inf": -math.inf, "tiny": 5e-324, "text": "Å\n", "list": [1, None, True]}


def reaches_store() -> bool:
    """Return whether a new connection to torch's store is accepted."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    assert isinstance(store, TCPStore)
    try:
        socket.create_connection(("127.0.0.1", store.port)).close()
    except ConnectionRefusedError:
        return False
    return True


def everything(group: ProcessGroup) -> dict[str, Any]:
    """Exchange and add up all kinds of things; return what came of it."""
    rank = group.rank
    long = "x" * (rank * MESSAGE_BYTES)
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
        "store": reaches_store(),
        "listens": [one.laddr.ip for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"],
    }


def test_ranks_talk_and_add_up_bitwise_alike_and_leave_in_order(tmp_path: Path) -> None:
    """Three ranks, twice at the same time and in the same folder."""
    crews = [crew(tmp_path / name, WORLD, everything, meeting=name, meeting_folder=tmp_path) for name in ("a", "b")]
    results = [result for one in crews for result in one.results()]
    for result in results:
        heard, long, nothing = result["said"]
        assert [one.pop("rank") for one in heard] == [0, 1, 2]
        assert [json.dumps(one) for one in heard] == [json.dumps(SAID)] * WORLD, "the very words"
        assert [len(one["long"]) for one in long] == [0, MESSAGE_BYTES, 2 * MESSAGE_BYTES]
        assert nothing == [{}, {}, {}]
        assert set(result["listens"]) <= {"127.0.0.1"}, "on one node nothing is open to others"
        assert not result["store"], "not even to those on this node"
        assert result["alike"] == [[6.0] * math.prod(shape) for _ in DTYPES for shape in SHAPES]
        assert result["strided"] == (torch.arange(12.0).reshape(3, 4) * 6).tolist(), "layout does not matter"
        assert result["many"] == results[0]["many"]
    drawn = [torch.Generator().manual_seed(rank) for rank in (0, 2)]  # rank 1 adds zeros
    for number, shape in enumerate(((301, 7), (1000,), ())):
        parts = [torch.randn(shape, generator=one, dtype=torch.float64) for one in drawn]
        got = torch.tensor(results[0]["many"][number], dtype=torch.float64)
        torch.testing.assert_close(got, (parts[0] + parts[1]).flatten(), rtol=1e-15, atol=1e-15)
    assert [one.err(rank) for one in crews for rank in range(WORLD)] == [""] * 2 * WORLD
    assert not [*tmp_path.glob("ranks-*")]


def await_word_of(group: ProcessGroup, rank: int, what: str) -> None:
    """Wait until the monitor of this rank has heard what another does, where it hears of it directly."""
    peer = next((peer for peer in group._monitor._peers.values() if peer.rank == rank), None)
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


@pytest.mark.parametrize(("victim", "doing"), [(0, "waits"), (1, "waits"), (0, "computes"), (1, "is stuck")])
def test_a_killed_rank_is_named_by_all_others(tmp_path: Path, victim: int, doing: str) -> None:
    started = crew(tmp_path, 3, lose, tmp_path, victim, doing, limits=QUICK)
    for rank in range(3):
        await_file(tmp_path / f"ready-{rank}")
    os.kill(started.pid(victim), signal.SIGKILL)
    assert started.wait() == [-signal.SIGKILL if rank == victim else LOST for rank in range(3)]
    name = (
        f"rank {victim} ({socket.gethostname()}) died without an error message; its last action: step 7, micro-batch 2"
    )
    for rank in {0, 1, 2} - {victim}:
        assert f"stops: {name}" in started.err(rank)
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


def test_a_child_that_outlives_a_killed_rank_does_not_hide_its_death(tmp_path: Path) -> None:
    started = crew(tmp_path, 2, be_survived, tmp_path, limits=QUICK)
    await_file(tmp_path / "child")
    os.kill(started.pid(1), signal.SIGKILL)
    codes = started.wait()
    os.kill(int(tmp_path.joinpath("child").read_text()), signal.SIGKILL)  # it was there until now
    assert codes == [LOST, -signal.SIGKILL]
    assert f"rank 1 ({socket.gethostname()}) died without an error message" in started.err(0)


def add_one(group: ProcessGroup) -> list[float]:
    """Add something up."""
    ones = torch.ones(3)
    group.add_up([ones])
    return [*ones.tolist(), len(group.exchange({}))]


def test_ranks_on_several_nodes_reach_each_other_by_an_address_that_is_no_loopback(tmp_path: Path) -> None:
    if not list(addresses_of(RankPlace(0, 2, nodes=2))):
        pytest.skip("this machine has no address but the loopback's")
    assert crew(tmp_path, 2, add_one, nodes=2).results() == [[2.0, 2.0, 2.0, 2]] * 2


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


@pytest.mark.parametrize("victim", [0, 1])
def test_a_hung_rank_shows_where_it_is_and_is_named(tmp_path: Path, victim: int) -> None:
    started = crew(tmp_path, 2, hang, victim, limits=QUICK)
    assert started.wait() == [HUNG if rank == victim else LOST for rank in range(2)]
    for rank in range(2):
        assert f"rank {victim} ({socket.gethostname()}) made no progress for 2 s" in started.err(rank)
        assert "its last action: step 2, micro-batch 1" in started.err(rank)
    assert "in fall_asleep" in started.err(victim)
    assert "Thread 0x" in started.err(victim)
    assert "fall_asleep" not in started.err(1 - victim)


def hang_alone(group: MonitoredRanks) -> None:
    """Be slow where that is known, make a step; then do nothing any more, as where a `collate` hangs."""
    with group.patient("validation"):
        time.sleep(QUICK.hang_s + 1)
    group.progress("step 2")
    fall_asleep()


def test_a_training_in_one_process_that_hangs_shows_where_it_is_and_ends(tmp_path: Path) -> None:
    started = crew(tmp_path, 1, hang_alone, limits=QUICK)
    assert started.wait() == [HUNG]
    assert "made no progress for 2 s; its last action: step 2" in started.err(0)
    assert "in fall_asleep" in started.err(0)


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


def test_a_process_of_which_no_thread_runs_is_named_by_the_others(tmp_path: Path) -> None:
    started = crew(tmp_path, 2, stop, tmp_path, limits=QUICK)
    await_file(tmp_path / "ready")
    await_file(tmp_path / "heard")
    os.kill(started.pid(1), signal.SIGSTOP)
    started.processes[0].join(DEADLINE_S)
    code = started.processes[0].exitcode
    started.end()
    assert code == LOST
    assert f"rank 1 ({socket.gethostname()}) has not answered for 2 s; its last action: step 2" in started.err(0)


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


def test_what_is_slow_is_not_a_hang(tmp_path: Path) -> None:
    assert crew(tmp_path, 2, be_slow, limits=SHORT).results()[0] == [{}, {}]


def give_up(group: ProcessGroup, why: str) -> None:
    """Have rank 1 leave, with a reason or without, while the others wait for it."""
    group.exchange({})
    if group.rank == 1:
        group.close(why)
    else:
        group.exchange({})


@pytest.mark.parametrize(
    ("why", "how"), [("the disk is full", "gave up: the disk is full"), ("", "ended while others")]
)
def test_who_leaves_others_alone_is_named(tmp_path: Path, why: str, how: str) -> None:
    started = crew(tmp_path, 3, give_up, why, limits=QUICK)
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


def test_a_signal_is_handled_while_others_are_waited_for(tmp_path: Path) -> None:
    started = crew(tmp_path, 2, interrupt, tmp_path, limits=QUICK)
    await_file(tmp_path / "ready")
    os.kill(started.pid(0), signal.SIGUSR1)
    assert started.wait() == [0, 0]
    assert started.result(0) == "interrupted"


def test_ranks_that_wait_for_each_other_are_stuck_and_the_one_behind_is_named() -> None:
    ahead, behind = Activity("step 4", 10.0, calls=12, waits=True), Activity("step 3", 10.0, calls=11, waits=True)
    first, second = WatchedRank(0, "n1", ahead, 11.0), WatchedRank(1, "n2", behind, 11.0)
    how = "waits for the others, which wait for it: it is in call 11, others in call 12"
    assert stuck_rank([first, second]) == f"rank 1 (n2) {how}; its last action: step 3"
    assert stuck_rank([first, WatchedRank(1, "n2", behind, 9.0)]) is None
    assert stuck_rank([first, WatchedRank(1, "n2", Activity("step 3", 10.0, 11), 11.0)]) is None
