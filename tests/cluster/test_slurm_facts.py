"""What a cluster of two kinds of nodes can give, asked by all who plan, submit and repair in the same way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cluster import slurm_commands
from pipeline.cluster.accounting import CommandFailed
from pipeline.cluster.job_spec import JobSpec
from pipeline.cluster.site_facts import SiteNodes
from pipeline.cluster.slurm import SlurmExecutor
from pipeline.config.load import read_config
from pipeline.config.schema_cluster import SlurmSection
from pipeline.errors import SubmissionRefused
from pipeline.planning.offers import Question, offers_of
from pipeline.project.project import Project
from pipeline.stages import table
from pipeline.stages.jobs import limits_of

GIB = 1 << 30
MANY_CORES = SiteNodes("main", True, 8, 64, 256 * GIB, (), (), 86_400, "n[1-8]")
MUCH_MEMORY = SiteNodes("main", True, 2, 32, 1024 * GIB, (), (), 86_400, "m[1-2]")
SMALL = SiteNodes("small", False, 3, 64, 64 * GIB, (), (), 3600, "s[1-3]")
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
    executor.facts.partitions = [MANY_CORES, MUCH_MEMORY, SMALL]
    return executor


def test_a_job_is_refused_where_no_node_has_both_its_cores_and_its_memory(executor: SlurmExecutor) -> None:
    job = JobSpec("train", ("true",), range(1), "logs", cpus=16, ranks=4, mem_bytes=512 * GIB)
    with pytest.raises(SubmissionRefused) as refused:
        executor.script_for(job)
    assert "cluster.train.mem=262144MiB" in refused.value.remedy
    assert executor.script_for(replace(job, mem_bytes=256 * GIB))
    assert executor.script_for(replace(job, cpus=8, mem_bytes=512 * GIB))
    with pytest.raises(SubmissionRefused, match="128 cores"):
        executor.script_for(JobSpec("scan", ("true",), range(1), "logs", cpus=128))


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
    assert executor.limits_of("main").mem_bytes == 1024 * GIB
