"""What a cluster grants: limits of QOS and associations, kinds of nodes, and what a job is refused for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.cluster import slurm_commands
from pipeline.cluster.accounting import CommandFailed
from pipeline.cluster.job_spec import Request
from pipeline.cluster.refusals import refusal_of
from pipeline.cluster.site import ASSOCIATION, EVERY_QOS, QOS, SACCTMGR, Cap, NodeKind, combined, parse_caps, parse_rows
from pipeline.cluster.slurm import SlurmExecutor
from pipeline.config.load import read_config
from pipeline.config.schema_cluster import SlurmSection
from pipeline.errors import QueueFull, SubmissionRefused
from pipeline.planning.offers import Question, offers_of
from pipeline.project.project import Project
from pipeline.stages import table
from pipeline.stages.jobs import limits_of
from tests.cluster.programs import job_of

GIB = 1 << 30
TINY = "tiny|00:05:00|cpu=4,mem=2000M|mem=1G||gres/gpu=3|cpu=100,gres/gpu=2|4||9|3||"
PLAIN = "normal||||||||||||"
MINE = "plain|lab|ann||normal|normal,tiny|1-00:00:00|cpu=2|||2|||"
ALL_OF_LAB = "plain|lab|||normal|normal,tiny||||mem=8192|10||6|"
ELSEWHERE = "other|lab|ann||tiny|tiny|00:01:00|cpu=1|||1|||"
CONFIG = """\
ClusterName = plain
AccountingStorageEnforce = associations,limits,qos
PreemptType = preempt/partition_prio
PreemptMode = REQUEUE
"""
PARTITIONS = """\
PartitionName=main Default=YES State=UP PreemptMode=OFF QoS=N/A MaxMemPerNode=UNLIMITED MaxNodes=UNLIMITED
PartitionName=spare Default=NO State=UP PreemptMode=REQUEUE QoS=tiny MaxMemPerNode=4000 MaxNodes=1
"""
NODES = [
    NodeKind("main", True, 3, 64, 64 * GIB, (), (), 86_400, "n[1-3]"),
    NodeKind("spare", False, 3, 64, 64 * GIB, (), (), 86_400, "n[1-3]"),
]


def qos(*lines: str) -> list[dict[str, str]]:
    return parse_rows("\n".join(lines), QOS)


def test_each_limit_is_read_with_its_name_and_of_two_on_one_thing_the_lesser() -> None:
    (row,) = qos(TINY)
    assert parse_caps(row, "QOS tiny") == {
        "time": Cap(300, "MaxWall of QOS tiny"),
        "cpus": Cap(4, "MaxTRES(cpu) of QOS tiny"),
        "mem": Cap(2000 << 20, "MaxTRES(mem) of QOS tiny"),
        "mem_on_node": Cap(1 << 30, "MaxTRESPerNode(mem) of QOS tiny"),
        "gpus": Cap(2, "GrpTRES(gres/gpu) of QOS tiny"),
        "queued": Cap(4, "MaxSubmitJobsPU of QOS tiny"),
        "running": Cap(3, "MaxJobsPU of QOS tiny"),
    }
    assert parse_caps(qos(PLAIN)[0], "QOS normal") == {}


def test_a_qos_overrides_the_association_but_the_least_number_in_the_queue_holds() -> None:
    own = [
        parse_caps(row, f"the association of {row['User'] or 'all'}")
        for row in parse_rows(f"{MINE}\n{ALL_OF_LAB}", ASSOCIATION)
    ]
    found = combined([parse_caps(qos(TINY)[0], "QOS tiny")], own)
    assert (found["time"].value, found["cpus"].value) == (300, 4)
    assert found["queued"] == Cap(2, "MaxSubmitJobs of the association of ann")
    alone = combined([], own)
    assert (alone["time"].value, alone["cpus"].value, alone["mem"].value) == (86_400, 2, 8192 << 20)
    assert alone["mem"].name == "GrpTRES(mem) of the association of all"


def test_a_row_or_a_limit_that_cannot_be_read_says_nothing() -> None:
    for text in ("tiny|broken", "", "a|b|c|d|e|f|g|h|i|j|k|l|m|n|o"):
        assert parse_rows(text, QOS) == []
    (row,) = qos("odd|soon|cpu=,mem=much,license/x=1,gres/gpu:a100=1||||||||||")
    assert parse_caps(row, "QOS odd") == {}


def associations_of(*where: str) -> tuple[str, ...]:
    return (*SACCTMGR, "assoc", "where", *where, f"format={','.join(ASSOCIATION)}")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Let the cluster answer with the texts above; return the commands that it was asked."""
    commands: list[Sequence[str]] = []
    texts = {
        ("scontrol", "show", "config"): CONFIG,
        ("scontrol", "show", "partition", "--oneliner"): PARTITIONS,
        associations_of("user=ann"): f"{MINE}\n{ELSEWHERE}",
        associations_of("account=lab", "user="): ALL_OF_LAB,
        EVERY_QOS: f"{TINY}\n{PLAIN}",
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
    executor.site.nodes = NODES
    return executor


def test_limits_of_a_partition_are_those_of_its_nodes_of_its_own_qos_and_of_mine(asked: list[Sequence[str]]) -> None:
    main, spare = (executor_of(partition=name).limits_of() for name in ("main", "spare"))
    assert (main.mem_bytes, main.time_s, main.queued_tasks, main.preempts) == (8 * GIB, 86_400, 2, False)
    assert (spare.mem_bytes, spare.time_s, spare.nodes, spare.preempts) == (1 * GIB, 300, 1, True)
    assert main.running_tasks == 6


def test_an_ask_beyond_a_limit_is_refused_by_the_limits_name_with_what_it_allows(asked: list[Sequence[str]]) -> None:
    job = job_of("scan", ("true",), range(1), "logs", mem_bytes=1 << 30, time_s=600)
    with pytest.raises(SubmissionRefused) as refused:
        executor_of(qos="tiny").script_for(job)
    assert "MaxWall of QOS tiny" in refused.value.what
    assert "cluster.scan.time=00:05:00" in refused.value.remedy
    with pytest.raises(SubmissionRefused, match=r"MaxTRES\(cpu\)"):
        executor_of().script_for(job_of("scan", ("true",), range(1), "logs", cpus=4, mem_bytes=1 << 30))
    assert executor_of().script_for(job)


def test_an_accounting_that_does_not_answer_is_asked_once_and_limits_nothing(
    asked: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = executor_of()
    monkeypatch.setattr(slurm_commands, "my_name", lambda: "nobody")
    assert executor.limits_of().time_s == 86_400
    assert [words[0] for words in asked].count("sacctmgr") == 1


MANY_CORES = NodeKind("main", True, 8, 64, 256 * GIB, (), (), 86_400, "n[1-8]")
MUCH_MEMORY = NodeKind("main", True, 2, 32, 1024 * GIB, (), (), 86_400, "m[1-2]")
SMALL = NodeKind("small", False, 3, 64, 64 * GIB, (), (), 3600, "s[1-3]")
SITE = SlurmSection(max_array_size=1001, max_submit=100)
RANKS = """\
data: {source: glob, path: data}
train: {task: "pipeline.tasks.interface:Interface"}
cluster: {executor: slurm, train: {ranks: 4, cpus: 16}}
"""


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> SlurmExecutor:
    """Return the executor of a cluster that says nothing but what nodes it has."""

    def fail(*_arguments: object, **_more: object) -> str:
        raise CommandFailed("Unable to contact slurm controller")

    monkeypatch.setattr(slurm_commands, "run_command", fail)
    monkeypatch.setattr(slurm_commands, "is_there", lambda: True)
    executor = SlurmExecutor(SITE)
    executor.site.nodes = [MANY_CORES, MUCH_MEMORY, SMALL]
    return executor


def test_a_job_is_refused_where_no_node_has_both_its_cores_and_its_memory(executor: SlurmExecutor) -> None:
    job = job_of("train", ("true",), range(1), "logs", cpus=16, ranks=4, mem_bytes=512 * GIB)
    with pytest.raises(SubmissionRefused) as refused:
        executor.script_for(job)
    assert "cluster.train.mem=256GiB" in refused.value.remedy
    assert executor.script_for(job.asking(mem_bytes=256 * GIB))
    assert executor.script_for(job.asking(cpus=8, mem_bytes=512 * GIB))
    with pytest.raises(SubmissionRefused, match=r"asks for 2-00:00:00; main gives at most 1-00:00:00"):
        executor.script_for(job.asking(mem_bytes=GIB, time_s=2 * 86_400))
    with pytest.raises(SubmissionRefused, match="has 8 large enough") as refused:
        executor.script_for(job.asking(mem_bytes=GIB, nodes=9))
    assert "cluster.train.nodes=8" in refused.value.remedy
    with pytest.raises(SubmissionRefused, match="128 cores"):
        executor.script_for(job_of("scan", ("true",), range(1), "logs", cpus=128))


@pytest.mark.nightly
def test_a_training_without_gpus_is_planned_for_nodes_that_hold_all_its_ranks(
    executor: SlurmExecutor, tmp_path: Path
) -> None:
    (tmp_path / "pipeline.yaml").write_text(RANKS)
    config = read_config(tmp_path / "pipeline.yaml").config
    (offer,) = offers_of(Question(config, Project.open(config), executor), on_cpu=True)
    assert offer.cards[0].budget_bytes <= 256 * GIB // 4
    assert limits_of(config, table.stage("train", config), executor).mem_bytes == 256 * GIB


def test_jobs_that_name_no_partition_are_judged_by_the_one_that_sbatch_takes_from_the_environment(
    executor: SlurmExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "small")
    assert executor.limits_of().mem_bytes == 64 * GIB
    assert executor.limits_of(Request(partition="main")).mem_bytes == 1024 * GIB


@pytest.mark.parametrize(
    ("limit", "kind"),
    [
        ("QOSMaxSubmitJobPerUserLimit", QueueFull),
        ("AssocGrpSubmitJobsLimit", QueueFull),
        ("", QueueFull),
        ("QOSMaxMemoryPerJob", SubmissionRefused),
        ("AssocMaxWallDurationPerJobLimit", SubmissionRefused),
        ("QOSMaxNodePerJobLimit", SubmissionRefused),
    ],
)
def test_only_a_limit_on_submitted_jobs_is_a_full_queue(limit: str, kind: type[SubmissionRefused]) -> None:
    policy = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    named = f"sbatch: error: {limit}\n" if limit else ""
    message = f"{named}sbatch: error: Batch job submission failed: {policy}"
    assert type(refusal_of(job_of("scan", ("true",), range(1), "logs"), message, ())) is kind
