"""Ranks are started on this machine, told of signals, and all ended when one fails: real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.device.kinds import VISIBLE
from pipeline.training.ranks.launch import launch_ranks
from tests.cluster.programs import await_true, is_running

ROOT = Path(__file__).resolve().parents[3]
RANK = """
import os, pathlib, signal, sys
folder, what, part, meeting = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[4], sys.argv[6]
rank = int(part.partition("/")[0])
assert sys.argv[3] == "--part" and sys.argv[5] == "--meeting"
def end(number, _):
    folder.joinpath(f"{rank}.{number}").touch()
    sys.exit(143 if number == signal.SIGTERM else 75)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, end)
if "deaf" in what and rank != 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder.joinpath(f"{rank}.partial").write_text(f"{os.getpid()} {part} {meeting} {os.environ['CUDA_VISIBLE_DEVICES']}")
folder.joinpath(f"{rank}.partial").rename(folder / f"{rank}.up")
"""
WAIT_FOR_ALL = """
import time
while len(list(folder.glob("*.up"))) < int(part.partition("/")[2]):
    time.sleep(0.005)
"""
SHORT = {"alone_s": 0.2, "term_s": 0.3}


def command(folder: Path, then: str, what: str = "-") -> list[str]:
    return [sys.executable, "-S", "-c", RANK + WAIT_FOR_ALL + then, str(folder), what]


def up(folder: Path, rank: int) -> list[str]:
    return folder.joinpath(f"{rank}.up").read_text().split()


def are_gone(folder: Path, world: int) -> bool:
    return not any(is_running(int(up(folder, rank)[0])) for rank in range(world))


def test_every_rank_knows_which_it_is_and_has_a_gpu_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4,GPU-5,6")
    assert launch_ranks(command(tmp_path, ""), 3) == 0
    told = [up(tmp_path, rank)[1:] for rank in range(3)]
    assert [words[0] for words in told] == ["0/3", "1/3", "2/3"]
    assert [words[2] for words in told] == ["4", "GPU-5", "6"]
    assert len({words[1] for words in told}) == 1


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("sys.exit(9)", 9, "ended with exit code 9"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
    ],
)
@pytest.mark.parametrize("what", ["-", "deaf"])
def test_the_first_that_fails_is_named_and_the_others_are_ended(
    tmp_path: Path, how: str, code: int, said: str, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    then = f"if rank == 1: {how}\nwhile True: signal.pause()"
    graces = SHORT if what == "deaf" else {"alone_s": 0.2, "term_s": 300.0}
    assert launch_ranks(command(tmp_path, then, what), 3, **graces) == code
    assert f"process 1 of 3 ({up(tmp_path, 1)[0]}) {said}" in capfd.readouterr().err
    assert are_gone(tmp_path, 3)
    assert tmp_path.joinpath("0.15").exists() == (what == "-")


def test_a_fault_counts_before_those_who_ended_for_its_sake(tmp_path: Path) -> None:
    then = """
if rank == 1:
    first = int(folder.joinpath("0.up").read_text().split()[0])
    while pathlib.Path(f"/proc/{first}").exists(): time.sleep(0.005)  # until the launcher has taken it off
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(76)
"""
    assert launch_ranks(command(tmp_path, then), 3, alone_s=300.0, term_s=1.0) == 137


def test_a_finished_rank_does_not_end_the_others(tmp_path: Path) -> None:
    then = """
if rank == 1:
    first = int(folder.joinpath("0.up").read_text().split()[0])
    while pathlib.Path(f"/proc/{first}").exists(): time.sleep(0.005)  # until the launcher has taken it off
    time.sleep(1.0)  # longer than all graces
    folder.joinpath("done").touch()
"""
    assert launch_ranks(command(tmp_path, then), 2, **SHORT) == 0
    assert tmp_path.joinpath("done").exists()


@pytest.mark.parametrize("code", [75, 76])
def test_ranks_that_all_want_to_go_on_or_lost_another_say_so(tmp_path: Path, code: int) -> None:
    assert launch_ranks(command(tmp_path, f"sys.exit({code})"), 2) == code


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 75), (signal.SIGUSR2, 75)])
def test_signals_reach_every_rank(tmp_path: Path, number: signal.Signals, code: int) -> None:
    program = (
        "import sys; from pipeline.training.ranks.launch import launch_ranks; sys.exit(launch_ranks(sys.argv[1:], 3))"
    )
    words = command(tmp_path, "while True: signal.pause()")
    with subprocess.Popen([sys.executable, "-c", program, *words], cwd=ROOT, stderr=subprocess.PIPE) as launcher:
        await_true(lambda: len(list(tmp_path.glob("*.up"))) == 3)
        launcher.send_signal(number)
        _, said = launcher.communicate(timeout=300)
    assert launcher.returncode == code
    assert [path.name for path in sorted(tmp_path.glob(f"*.{int(number)}"))] == [
        f"{rank}.{int(number)}" for rank in range(3)
    ]
    assert said == b""


def test_nothing_is_left_where_a_rank_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        launch_ranks([str(tmp_path / "no-such-program")], 2)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
