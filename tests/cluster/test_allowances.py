"""Limits of QOS and associations, from the text of sacctmgr to what a task is refused for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pipeline.cluster import allowances, slurm_commands
from pipeline.cluster.accounting import CommandFailed
from pipeline.cluster.allowances import ASSOCIATION, QOS, Cap, association_caps, combined, parse_rows, qos_caps
from pipeline.cluster.job_spec import JobSpec
from pipeline.cluster.site_facts import SiteNodes
from pipeline.cluster.slurm import SlurmExecutor
from pipeline.config.schema_cluster import SlurmSection
from pipeline.errors import SubmissionRefused

GIB = 1 << 30
TINY = "tiny|00:05:00|cpu=4,mem=2000M|mem=1G||gres/gpu=3|cpu=100,gres/gpu=2|4||9|3||"
PLAIN = "normal||||||||||||"
MINE = "lab|ann||normal|normal,tiny|1-00:00:00|cpu=2|||2|||"
ALL_OF_LAB = "lab|||normal|normal,tiny||||mem=8192|10||6|"
CONFIG = (
    "AccountingStorageEnforce = associations,limits,qos\nPreemptType = preempt/partition_prio\nPreemptMode = REQUEUE\n"
)
PARTITIONS = """\
PartitionName=main Default=YES State=UP PreemptMode=OFF QoS=N/A MaxMemPerNode=UNLIMITED MaxNodes=UNLIMITED
PartitionName=spare Default=NO State=UP PreemptMode=REQUEUE QoS=tiny MaxMemPerNode=4000 MaxNodes=1
"""
NODES = [
    SiteNodes("main", True, 3, 64, 64 * GIB, (), (), 86_400, "n[1-3]"),
    SiteNodes("spare", False, 3, 64, 64 * GIB, (), (), 86_400, "n[1-3]"),
]


def qos(*lines: str) -> list[dict[str, str]]:
    return parse_rows("\n".join(lines), QOS)


def test_each_limit_is_read_with_its_name_and_of_two_on_one_thing_the_lesser() -> None:
    (row,) = qos(TINY)
    assert qos_caps(row) == {
        "time": Cap(300, "MaxWall of QOS tiny"),
        "cpus": Cap(4, "MaxTRES(cpu) of QOS tiny"),
        "mem": Cap(2000 << 20, "MaxTRES(mem) of QOS tiny"),
        "mem_on_node": Cap(1 << 30, "MaxTRESPerNode(mem) of QOS tiny"),
        "gpus": Cap(2, "GrpTRES(gres/gpu) of QOS tiny"),
        "queued": Cap(4, "MaxSubmitJobsPU of QOS tiny"),
        "running": Cap(3, "MaxJobsPU of QOS tiny"),
    }
    assert qos_caps(qos(PLAIN)[0]) == {}


def test_a_qos_overrides_the_association_but_the_least_number_in_the_queue_holds() -> None:
    own = [association_caps(row) for row in parse_rows(f"{MINE}\n{ALL_OF_LAB}", ASSOCIATION)]
    found = combined([qos_caps(qos(TINY)[0])], own)
    assert (found["time"].value, found["cpus"].value) == (300, 4)
    assert found["queued"] == Cap(2, "MaxSubmitJobs of the association lab/ann")
    alone = combined([], own)
    assert (alone["time"].value, alone["cpus"].value, alone["mem"].value) == (86_400, 2, 8192 << 20)
    assert alone["mem"].name == "GrpTRES(mem) of the association lab"


def test_a_row_or_a_limit_that_cannot_be_read_says_nothing() -> None:
    for text in ("tiny|broken", "", "a|b|c|d|e|f|g|h|i|j|k|l|m|n|o"):
        assert parse_rows(text, QOS) == []
    (row,) = qos("odd|soon|cpu=,mem=much,license/x=1,gres/gpu:a100=1||||||||||")
    assert qos_caps(row) == {}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Let the cluster answer with the texts above; return the commands that it was asked."""
    commands: list[Sequence[str]] = []
    texts = {
        ("scontrol", "show", "config"): CONFIG,
        ("scontrol", "show", "partition", "--oneliner"): PARTITIONS,
        allowances.own_limits_of("ann"): MINE,
        allowances.shared_limits_of("lab"): ALL_OF_LAB,
        allowances.every_qos(): f"{TINY}\n{PLAIN}",
    }

    def answer(words: Sequence[str], *_more: object) -> str:
        commands.append(words)
        if tuple(words) not in texts:
            raise CommandFailed("no")
        return texts[tuple(words)]

    monkeypatch.setattr(slurm_commands, "run_command", answer)
    monkeypatch.setattr(slurm_commands, "my_name", lambda: "ann")
    monkeypatch.setattr(slurm_commands, "is_there", lambda: True)
    return commands


def executor_of(**site: object) -> SlurmExecutor:
    executor = SlurmExecutor(SlurmSection(**site))  # type: ignore[arg-type]
    executor.facts.partitions = NODES
    return executor


def test_limits_of_a_partition_are_those_of_its_nodes_of_its_own_qos_and_of_mine(asked: list[Sequence[str]]) -> None:
    main, spare = (executor_of(partition=name).limits_of() for name in ("main", "spare"))
    assert (main.mem_bytes, main.time_s, main.queued_tasks, main.preempts) == (8 * GIB, 86_400, 2, False)
    assert (spare.mem_bytes, spare.time_s, spare.nodes, spare.preempts) == (1 * GIB, 300, 1, True)
    assert main.running_tasks == 6


def test_an_ask_beyond_a_limit_is_refused_by_the_limits_name_with_what_it_allows(asked: list[Sequence[str]]) -> None:
    job = JobSpec("scan", ("true",), range(1), "logs", mem_bytes=1 << 30, time_s=600)
    with pytest.raises(SubmissionRefused) as refused:
        executor_of(qos="tiny").script_for(job)
    assert "MaxWall of QOS tiny" in refused.value.what
    assert "cluster.scan.time=00:05:00" in refused.value.remedy
    with pytest.raises(SubmissionRefused, match=r"MaxTRES\(cpu\)"):
        executor_of().script_for(JobSpec("scan", ("true",), range(1), "logs", cpus=4, mem_bytes=1 << 30))
    assert executor_of().script_for(job)


def test_an_accounting_that_does_not_answer_is_asked_once_and_limits_nothing(
    asked: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = executor_of()
    monkeypatch.setattr(slurm_commands, "my_name", lambda: "nobody")
    assert executor.limits_of().time_s == 86_400
    assert [words[0] for words in asked].count("sacctmgr") == 1
