"""Ranks find each other, and no stranger joins them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pipeline.errors import JobFailed
from pipeline.records import RankPlace
from pipeline.training.ranks import rank_monitor
from pipeline.training.ranks.rank_monitor import JsonLink, Meeting, meet

Result = TypeVar("Result")
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


def join(place: RankPlace, folder: Path, within_s: float = WITHIN_S) -> Awaitable[Meeting]:
    return asyncio.ensure_future(meet(place, folder, {"store": place.meeting}, within_s))


async def together(*joining: Awaitable[Meeting]) -> list[Meeting]:
    """Await ranks that meet, and close what connects them."""
    meetings = [*await asyncio.gather(*joining)]
    for link in (link for met in meetings for link in met.links.values()):
        link.close()
    await asyncio.sleep(0.01)
    return meetings


def finished(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in a thread of its own, as ranks do: a browser's test may have left a loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


async def published(folder: Path) -> dict[str, Any]:
    """Return what rank 0 has written for the others, once it has."""
    while not (file := folder / "ranks-m.json").exists():
        await asyncio.sleep(0.005)
    assert file.stat().st_mode & 0o777 == 0o600, "no other user may read it"
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def test_ranks_meet_and_the_file_is_gone_afterwards(tmp_path: Path) -> None:
    async def run() -> list[Meeting]:
        return await together(*(join(place, tmp_path) for place in ranks(4)))

    meetings = finished(run())
    assert [sorted(link.host for link in met.links.values()) for met in meetings] == [
        ["host1", "host2", "host3"],
        *[["host0"]] * 3,
    ]
    assert all(met.shared == {"store": "m"} for met in meetings)
    assert [sorted(met.links) for met in meetings] == [[1, 2, 3], [0], [0], [0]]
    assert {met.address for met in meetings} == {"127.0.0.1"}
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_left_behind_is_not_joined(tmp_path: Path) -> None:
    async def answer_wrongly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = JsonLink(reader, writer)
        assert (await link.next() or {})["token"] == "old"
        link.send({"answer": "something"})
        link.close()
        asked.set()

    async def run() -> list[Meeting]:
        stranger = await asyncio.start_server(answer_wrongly, "127.0.0.1", 0)
        port = stranger.sockets[0].getsockname()[1]
        left = {"token": "old", "answer": "old", "addresses": ["127.0.0.1"], "port": port}
        tmp_path.joinpath("ranks-m.json").write_text(json.dumps(left))
        later = join(ranks(2)[1], tmp_path)
        await asked.wait()
        stranger.close()
        return await together(join(ranks(2)[0], tmp_path), later)

    asked = asyncio.Event()
    assert [met.shared for met in finished(run())] == [{"store": "m"}] * 2


@pytest.mark.parametrize(
    "greeting",
    [
        b'{"rank": 1, "token": "guessed", "host": "evil"}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1]\n",
        b'{"rank": "x"}\n',
        b"[" * 60_000 + b"\n",
        b"x" * 1_000_000,
    ],
)
def test_a_stranger_without_the_word_is_disconnected(tmp_path: Path, greeting: bytes) -> None:
    async def run() -> list[Meeting]:
        first = join(ranks(2)[0], tmp_path)
        port = (await published(tmp_path))["port"]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(greeting)
        with suppress(ConnectionResetError):
            assert await reader.read(100) == b""
        writer.close()
        with socket.create_connection(("127.0.0.1", port)):  # says nothing, and holds up no rank
            return await together(first, join(ranks(2)[1], tmp_path))

    assert [link.host for link in finished(run())[0].links.values()] == ["host1"]


@pytest.mark.parametrize(("limit", "most"), [("MOST_SILENT", 2), ("GREET_WITHIN_S", 0.1)])
def test_silent_connections_are_limited_in_number_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: float
) -> None:
    monkeypatch.setattr(rank_monitor, "GREET_WITHIN_S", 1000.0)
    monkeypatch.setattr(rank_monitor, limit, most)

    async def run() -> None:
        first = join(ranks(2)[0], tmp_path)
        port = (await published(tmp_path))["port"]
        with ExitStack() as silent:
            oldest, *_ = [
                silent.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WITHIN_S)) for _ in range(3)
            ]
            assert await asyncio.to_thread(oldest.recv, 1) == b""
        await together(first, join(ranks(2)[1], tmp_path))

    finished(run())


def test_ranks_that_do_not_come_are_named_by_all(tmp_path: Path) -> None:
    async def run() -> list[Any]:
        came = (join(ranks(4)[rank], tmp_path, within_s=1.0) for rank in (0, 2))
        return await asyncio.gather(*came, return_exceptions=True)

    errors = finished(run())
    assert all(isinstance(error, JobFailed) and "1, 3" in str(error) for error in errors)
    assert list(tmp_path.iterdir()) == []


def test_rank_0_that_does_not_come_is_named_with_the_file_it_should_write(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match=r"rank 0 .*ranks-m\.json"):
        finished(meet(ranks(2)[1], tmp_path, {}, 0.1))


def test_srun_or_our_launcher_says_who_a_process_is() -> None:
    assert RankPlace.by_slurm(STEP) == RankPlace(3, 4, 1, 2, "41-2-0-1", "n2")
    again = RankPlace.by_slurm(STEP, attempt=3)
    assert again is not None
    assert again.meeting == "41-2-0-3"
    place = RankPlace.parse("1/3", "name")
    assert (place.rank, place.world, place.local_rank, place.nodes, place.meeting) == (1, 3, 1, 1, "name")


@pytest.mark.parametrize("gone", ["SLURM_STEP_NUM_TASKS", "SLURM_PROCID"])
def test_a_process_that_no_srun_started_is_alone(gone: str) -> None:
    words = {name: word for name, word in STEP.items() if name != gone} | {"SLURM_NTASKS": "4"}
    assert RankPlace.by_slurm(words) is None


@pytest.mark.parametrize("word", ["", "1", "3/3", "-1/2", "a/b"])
def test_a_part_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="not a rank"):
        RankPlace.parse(word, "m")
