"""What only the executor of an allocation can show: which nodes it finds, what becomes of lost ones, and its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pipeline.cluster.allocation import AllocationExecutor
from pipeline.cluster.hosts import Host, find_allocation
from pipeline.cluster.job_spec import TaskState
from pipeline.config.schema_cluster import AllocationSection, SlotsSection
from pipeline.errors import AllocationEnded, ConfigError, SubmissionRefused
from tests.cluster.conftest import open_allocation
from tests.cluster.programs import AWAIT, MIB, WAITS, finish, python, step_until

SHOWS = "from os import environ; print(*(environ[f'PIPELINE_NODE{end}'] for end in ('', 'S')), environ['HOST'])"
FOUND = {
    "PBS_NODEFILE": ("n1\nn1\nn2\n", (Host("n1"), Host("n2"))),
    "LSB_DJOB_HOSTFILE": ("n1\nn1\nn2\n", (Host("n1", 2), Host("n2"))),
    "hosts": ("# ours\nn1 slots=4 gpus=2\n\nn2\n", (Host("n1", 4, 2), Host("n2"))),
}


@pytest.fixture
def three() -> Iterator[AllocationExecutor]:
    with open_allocation() as opened:
        yield opened


@pytest.mark.parametrize("source", FOUND)
def test_nodes_are_found(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, hosts = FOUND[source]
    (tmp_path / "hosts").write_text(text)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    if source != "hosts":
        monkeypatch.setenv(source, str(tmp_path / "hosts"))
    section = AllocationSection(hosts=tmp_path / "hosts" if source == "hosts" else None)
    assert find_allocation(section).hosts == hosts


def test_without_nodes_it_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(ConfigError) as refused:
        find_allocation(AllocationSection())
    assert "PBS_NODEFILE" in refused.value.what
    assert "cluster.allocation.hosts" in refused.value.remedy


def test_a_task_on_several_nodes_and_then_the_loss_of_one(three: AllocationExecutor, tmp_path: Path) -> None:
    (task,) = finish(three, three.submit(python(tmp_path, SHOWS, nodes=3, ranks=1, gpus=1)))
    assert task.state is TaskState.COMPLETED
    logs = [task.stdout, *(task.stdout.replace(".out", f"-{number}.out") for number in (1, 2))]
    said = [Path(log).read_text().split() for log in logs]
    assert [words[0] for words in said] == ["0/3", "1/3", "2/3"]
    assert {words[3] for words in said} == {"node0", "node1", "node2"}

    job = three.submit(python(tmp_path, WAITS, nodes=2, ranks=1))
    step_until(three, lambda: len([node for node in three._agents if not node.slots.fit(BOTH)]) == 2)
    lost = next(node for node in three._agents if not node.slots.fit(BOTH))
    assert lost.process is not None
    os.killpg(lost.process.pid, signal.SIGKILL)
    step_until(three, lambda: lost.starts == 2)
    three.cancel([job])
    (task,) = finish(three, job)
    assert (task.state, task.node) == (TaskState.NODE_FAIL, lost.name)
    assert finish(three, three.submit(python(tmp_path, "pass", nodes=3, ranks=1)))[0].state.ok


BOTH = python(Path("logs"), "pass", cpus=2).request


def test_a_starter_that_ends_costs_nothing_while_its_agent_answers(tmp_path: Path) -> None:
    """A server may end a connection of ssh that is idle."""
    (tmp_path / "hosts").write_text("here\n")
    start = ("sh", "-c", 'setsid "$@" & sleep 600', "{host}")
    section = AllocationSection(hosts=tmp_path / "hosts", start=start, grace="1s")
    with AllocationExecutor(section, SlotsSection(), tmp_path) as executor:
        job = executor.submit(python(tmp_path, f"{AWAIT}await_file('{tmp_path}/go')"))
        step_until(executor, lambda: executor.status([job])[0].state is TaskState.RUNNING)
        (node,) = executor._agents
        assert node.process is not None
        os.killpg(node.process.pid, signal.SIGKILL)
        node.process.wait()
        executor.step(0)
        (tmp_path / "go").touch()
        assert (finish(executor, job)[0].state, node.starts) == (TaskState.COMPLETED, 1)


def test_the_time_of_an_allocation_counts_from_the_start_of_this_process(tmp_path: Path) -> None:
    """Planning takes minutes, and opens the nodes more than once."""
    (tmp_path / "hosts").write_text("here\n")
    section = AllocationSection(hosts=tmp_path / "hosts", time="1h")
    assert find_allocation(section).ends_at == pytest.approx(psutil.Process().create_time() + 3600, abs=1)


def test_it_stops_before_the_end(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("here\n")
    section = AllocationSection(hosts=tmp_path / "hosts", start=("env", "HOST={host}"), time="1s", grace="1s")
    with AllocationExecutor(section, SlotsSection(), tmp_path) as executor:
        executor.submit(python(tmp_path, "pass"))
        with pytest.raises(AllocationEnded) as ended:
            executor.step(1)
    assert ended.value.exit_code == 75


def test_nodes_that_cannot_be_reached_are_named_with_what_was_said(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("far\n")
    section = AllocationSection(hosts=tmp_path / "hosts", start=("sh", "-c", "echo no route to {host} >&2; exit 255"))
    with (
        AllocationExecutor(section, SlotsSection(), tmp_path) as executor,
        pytest.raises(SubmissionRefused, match="no route to far"),
    ):
        executor.submit(python(tmp_path, "pass"))


@pytest.fixture
def islands(tmp_path: Path) -> Iterator[Path]:
    """Return a host file of two network namespaces with an sshd each, which reach this machine by a bridge."""
    needed = ("sshd", "ssh-keygen", "ssh", "ip")
    if os.geteuid() != 0 or not all(map(shutil.which, needed)):
        pytest.skip(f"needs root and {', '.join(needed)}")
    key, sshd, name = tmp_path / "key", shutil.which("sshd"), f"p{os.getpid() % 10_000}"
    Path("/run/sshd").mkdir(exist_ok=True)
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    daemons: list[subprocess.Popen[bytes]] = []
    _run("ip", "link", "add", name, "type", "bridge")
    try:
        _run("ip", "address", "add", "10.93.7.1/24", "dev", name)
        _run("ip", "link", "set", name, "up")
        for number in (2, 3):
            space, inner, outer = f"{name}-{number}", f"{name}i{number}", f"{name}o{number}"
            _run("ip", "netns", "add", space)
            _run("ip", "link", "add", outer, "master", name, "type", "veth", "peer", "name", inner, "netns", space)
            _run("ip", "link", "set", outer, "up")
            inside = ("ip", "netns", "exec", space)
            _run(*inside, "ip", "address", "add", f"10.93.7.{number}/24", "dev", inner)
            _run(*inside, "ip", "link", "set", inner, "up")
            options = (f"AuthorizedKeysFile={key}.pub", "StrictModes=no", "PidFile=none", "UsePAM=no")
            words = [*inside, str(sshd), "-D", "-h", str(key), *(word for each in options for word in ("-o", each))]
            daemons.append(subprocess.Popen(words))
        (tmp_path / "hosts").write_text("10.93.7.2\n10.93.7.3\n")
        yield tmp_path / "hosts"
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
        for number in (2, 3):
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "delete", f"{name}-{number}")
        _run("ip", "link", "delete", name)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@pytest.mark.nightly
def test_nodes_of_a_host_file_are_reached_by_ssh(islands: Path, tmp_path: Path) -> None:
    options = ("-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null")
    start = ("ssh", "-i", str(tmp_path / "key"), *options, "{host}")
    body = "import json, os, socket; print(json.dumps([os.environ['SSH_CONNECTION'], os.environ['ADDED']]))"
    section = AllocationSection(hosts=islands, start=start, grace="2s")
    with AllocationExecutor(section, SlotsSection(cpus=1), tmp_path / "shared") as executor:
        spec = python(tmp_path, body, nodes=2, ranks=1, env={"ADDED": "a b"}, mem_bytes=500 * MIB)
        (task,) = finish(executor, executor.submit(spec))
    logs = (task.stdout, task.stdout.replace(".out", "-1.out"))
    said = [json.loads(Path(log).read_text()) for log in logs]
    assert task.state.ok
    assert {connection.split()[2] for connection, _ in said} == {"10.93.7.2", "10.93.7.3"}
    assert {added for _, added in said} == {"a b"}
