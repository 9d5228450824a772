"""Ranks find each other, and nobody else."""

from __future__ import annotations

import json
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.errors import JobFailed
from pipeline.records import RankPlace
from pipeline.training.ranks import rendezvous
from pipeline.training.ranks.rendezvous import JsonConnection, Meeting, meet
from tests.training.ranks.crews import await_file

if TYPE_CHECKING:
    from collections.abc import Iterator

WITHIN_S = 20.0
STEP = {
    "SLURM_JOB_ID": "41",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURMD_NODENAME": "n2",
}


def ranks(world: int, meeting: str = "m", nodes: int = 1) -> list[RankPlace]:
    return [RankPlace(rank, world, rank, nodes, meeting, f"host{rank}") for rank in range(world)]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


def part(*all_met: Meeting) -> None:
    for met in all_met:
        for connection in met.connections.values():
            connection.close()


def begin(
    pool: ThreadPoolExecutor, places: list[RankPlace], folder: Path, within_s: float = WITHIN_S
) -> list[Future[Meeting]]:
    return [pool.submit(meet, place, folder, {"store": place.meeting}, within_s) for place in places]


def test_ranks_meet_and_the_file_is_gone_afterwards(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    all_met = [one.result() for one in begin(pool, ranks(4), tmp_path)]
    assert all(met.hosts == ("host0", "host1", "host2", "host3") for met in all_met)
    assert all(met.said == {"store": "m"} for met in all_met)
    assert [sorted(met.connections) for met in all_met] == [[1, 2, 3], [0], [0], [0]]
    assert {met.address for met in all_met} == {"127.0.0.1"}
    assert list(tmp_path.iterdir()) == []
    part(*all_met)


def test_two_starts_in_one_folder_do_not_mix(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    starts = {name: begin(pool, ranks(3, name), tmp_path) for name in ("a", "b", "c")}
    for name, futures in starts.items():
        assert all(one.result().said == {"store": name} for one in futures)
        part(*(one.result() for one in futures))


def test_ranks_on_several_nodes_meet_on_an_address_that_others_reach(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    file = tmp_path / "ranks-m.json"
    keeper, *_ = begin(pool, ranks(2, nodes=2)[:1], tmp_path)
    await_file(file)
    addresses = json.loads(file.read_text())["addresses"]
    if not addresses:
        pytest.skip("this machine has no address but the loopback's")
    assert not any(address.startswith("127.") or address == "localhost" for address in addresses)
    other = meet(ranks(2, nodes=2)[1], tmp_path, {}, WITHIN_S)
    part(keeper.result(), other)


def test_a_file_that_was_left_behind_is_not_joined(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as somebody_else:
        left = {"token": "old", "answer": "old", "addresses": ["127.0.0.1"], "port": somebody_else.getsockname()[1]}
        tmp_path.joinpath("ranks-m.json").write_text(json.dumps(left))
        later = begin(pool, ranks(2)[1:], tmp_path)
        taken, _ = somebody_else.accept()
        with closing(JsonConnection(taken)) as connection:
            assert connection.next(WITHIN_S)["token"] == "old"
            connection.send({"answer": "something"})
        first = begin(pool, ranks(2)[:1], tmp_path)
        assert later[0].result().said == {"store": "m"}
        part(first[0].result(), later[0].result())


def test_whoever_does_not_know_the_word_is_sent_away(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    file = tmp_path / "ranks-m.json"
    first = begin(pool, ranks(2)[:1], tmp_path)
    await_file(file)
    assert file.stat().st_mode & 0o777 == 0o600, "nor can anyone else read it"
    port = json.loads(file.read_text())["port"]
    for said in (
        b'{"rank": 1, "token": "guessed", "host": "evil"}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1]\n",
        b'{"rank": "x"}\n',
        b"[" * 60_000 + b"\n",
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=WITHIN_S) as foreign:
            foreign.sendall(said)
            with suppress(ConnectionResetError):
                assert foreign.recv(100) == b""
    with socket.create_connection(("127.0.0.1", port)):  # says nothing, and holds nobody up
        other = meet(ranks(2)[1], tmp_path, {}, WITHIN_S)
        assert first[0].result().hosts == ("host0", "host1")
    part(first[0].result(), other)


@pytest.mark.parametrize(("limit", "most"), [("MOST_SILENT", 2), ("GREET_WITHIN_S", 0.1)])
def test_silent_connections_are_limited_in_number_and_time(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, limit: str, most: float
) -> None:
    monkeypatch.setattr(rendezvous, "GREET_WITHIN_S", 1000.0)
    monkeypatch.setattr(rendezvous, limit, most)
    first = begin(pool, ranks(2)[:1], tmp_path)
    await_file(tmp_path / "ranks-m.json")
    port = json.loads((tmp_path / "ranks-m.json").read_text())["port"]
    with ExitStack() as silent:
        oldest, *_ = [
            silent.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WITHIN_S)) for _ in range(3)
        ]
        assert oldest.recv(1) == b""
    part(meet(ranks(2)[1], tmp_path, {}, WITHIN_S), first[0].result())


def test_ranks_that_do_not_come_are_named_by_all(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    came = begin(pool, [ranks(4)[0], ranks(4)[2]], tmp_path, within_s=1.0)
    with pytest.raises(JobFailed, match="1, 3"):
        came[0].result()
    with pytest.raises(JobFailed, match="1, 3"):
        came[1].result()
    assert list(tmp_path.iterdir()) == []


def test_rank_0_that_does_not_come_is_named_with_the_file_it_should_write(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match=r"rank 0 .*ranks-m\.json"):
        meet(ranks(2)[1], tmp_path, {}, 0.1)


def test_srun_says_who_a_process_is() -> None:
    assert RankPlace.by_slurm(STEP) == RankPlace(3, 4, 1, 2, "41-2-0-1", "n2")
    again = RankPlace.by_slurm(STEP, attempt=3)
    assert again is not None
    assert again.meeting == "41-2-0-3"


def test_our_launcher_says_who_a_process_is() -> None:
    place = RankPlace.told("1/3", "name")
    assert (place.rank, place.world, place.local_rank, place.nodes, place.meeting) == (1, 3, 1, 1, "name")


@pytest.mark.parametrize("gone", ["SLURM_STEP_NUM_TASKS", "SLURM_PROCID"])
def test_a_process_that_no_srun_started_is_alone(gone: str) -> None:
    words = {name: word for name, word in STEP.items() if name != gone} | {"SLURM_NTASKS": "4"}
    assert RankPlace.by_slurm(words) is None


@pytest.mark.parametrize("word", ["", "1", "3/3", "-1/2", "a/b"])
def test_a_part_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="not a rank"):
        RankPlace.told(word, "m")
